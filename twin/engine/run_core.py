"""An engine core whose blocks have no numbers: the prefix cache in runs, and without one nothing but counts."""

from collections.abc import Sequence
from typing import Any

from twin.engine.core import EngineCore
from twin.engine.request import EngineRequest
from twin.engine.runs import CountPool, Hit, Path, RunPool


class RunCore(EngineCore):
    """`EngineCore` on a `RunPool` or a `CountPool`.

    What a request has computed may be made findable later than it was computed; the two hooks say when somebody else
    would notice.
    """

    def _make_pool(self) -> Any:
        config = self.config
        self.cache: RunPool | None = None
        """The pool, if it has a prefix cache."""
        self.blocks: CountPool
        """The pool, whichever it is."""
        if config.enable_prefix_caching:
            self.cache = RunPool(config.num_gpu_blocks, config.block_size)
            self.cache.before_other = self._before_publish
            self.blocks = self.cache
        else:
            self.blocks = CountPool(config.num_gpu_blocks)
        return self.blocks

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out."""
        return self.blocks.num_free

    def _before_find(self, writer: EngineRequest) -> None:
        """Blocks of the reply of `writer` are looked for."""

    def _before_publish(self, writer: EngineRequest, other: EngineRequest) -> None:
        """`other`, in the plan that is being made, makes blocks of the reply of `writer` findable."""

    def keys_of(self, prompt: Sequence[tuple[int, int]], reply: int) -> Any:
        """Content of a new request, of which `_find_prefix` makes a path; None without a prefix cache."""
        return None if self.cache is None else (prompt, reply)

    def _find_prefix(self, request: EngineRequest) -> Sequence[Any]:
        if self.cache is None:
            return ()
        path = request.keys
        if not isinstance(path, Path):
            prompt, reply = request.keys
            path = request.keys = self.cache.path(prompt, reply, request)
        for line in path.lines:
            if line.writer is not None:
                self._before_find(line.writer)
        return self.cache.find(path, (request.num_tokens - 1) // self.config.block_size)

    def _count_free(self, hit: Hit) -> int:
        assert self.cache is not None
        return self.cache.count_unreferenced(hit)

    def _hold(self, request: EngineRequest, hit: Any) -> None:
        if self.cache is not None:
            self.cache.touch(request.keys, hit)
        request.num_blocks = len(hit)
        self.held_blocks += request.num_blocks

    def _take(self, request: EngineRequest, count: int) -> None:
        self.blocks.take(count)
        request.num_blocks += count
        self.held_blocks += count

    def _publish(self, request: EngineRequest, num_tokens: int) -> None:
        if self.cache is not None:
            full = num_tokens // self.config.block_size
            path: Path = request.keys
            if full > path.published:
                self.cache.publish(path, full)

    def _let_go(self, request: EngineRequest) -> None:
        held = request.num_blocks
        if self.cache is None:
            self.blocks.give(held)
        elif isinstance(request.keys, Path):
            self.cache.release(request.keys, held)
        self.held_blocks -= held
        request.num_blocks = 0

    def _end(self, request: EngineRequest) -> None:
        super()._end(request)
        if self.cache is not None and isinstance(request.keys, Path):
            self.cache.forget(request.keys)
            request.keys = None

    def count_sole(self, request: EngineRequest) -> int:
        """Blocks that would become free if `request` let go of all it holds."""
        if self.cache is None:
            return request.num_blocks
        return self.cache.count_sole(request.keys, request.num_blocks)
