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
        if config.enable_prefix_caching:
            pool = RunPool(config.num_gpu_blocks, config.block_size)
            pool.before_other = self._before_publish
            return pool
        return CountPool(config.num_gpu_blocks)

    def _before_find(self, writer: EngineRequest) -> None:
        """Blocks of the reply of `writer` are looked for."""

    def _before_publish(self, writer: EngineRequest, other: EngineRequest) -> None:
        """`other`, in the plan that is being made, makes blocks of the reply of `writer` findable."""

    def keys_of(self, prompt: Sequence[tuple[int, int]], reply: int) -> Any:
        """Content of a new request, of which `_find_prefix` makes a path; None without a prefix cache."""
        return (prompt, reply) if self.pool.caching else None

    def _find_prefix(self, request: EngineRequest) -> Sequence[Any]:
        if not self.pool.caching:
            return ()
        path = request.keys
        if not isinstance(path, Path):
            path = request.keys = self.pool.path(*path, request)
        for line in path.lines:
            if line.writer is not None:
                self._before_find(line.writer)
        hit: Hit = self.pool.find(path, (request.num_tokens - 1) // self.config.block_size)
        return hit

    def _hold(self, request: EngineRequest, hit: Any) -> None:
        if self.pool.caching:
            self.pool.touch(request.keys, hit)
        request.num_blocks = len(hit)
        self.held_blocks += len(hit)

    def _take(self, request: EngineRequest, count: int) -> None:
        self.pool.take(count)
        request.num_blocks += count
        self.held_blocks += count

    def _publish(self, request: EngineRequest, num_tokens: int) -> None:
        if self.pool.caching:
            full = num_tokens // self.config.block_size
            if full > request.keys.published:
                self.pool.publish(request.keys, full)

    def _let_go(self, request: EngineRequest) -> None:
        held = request.num_blocks
        if self.pool.caching:
            if isinstance(request.keys, Path):
                self.pool.release(request.keys, held)
        else:
            self.pool.release(held)
        self.held_blocks -= held
        request.num_blocks = 0

    def _end(self, request: EngineRequest) -> None:
        super()._end(request)
        if isinstance(request.keys, Path):
            self.pool.forget(request.keys)
            request.keys = None

    def count_sole(self, request: EngineRequest) -> int:
        """Blocks that would become free if `request` let go of all it holds."""
        if self.pool.caching:
            sole: int = self.pool.count_sole(request.keys, request.num_blocks)
            return sole
        return request.num_blocks
