"""Our engine behind the calls of the lockstep driver."""

from typing import Any

from tests.parity.workload import Ask
from twin.engine.blocks import BlockKeys
from twin.engine.config import EngineConfig
from twin.engine.core import EngineCore, Step
from twin.engine.request import EngineRequest


class TwinHost:
    """`EngineCore` with virtual time handed in."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self.core = core
        self._config = config

    def has_requests(self) -> bool:
        return self.core.has_requests()

    def add(self, ask: Ask, now: float, job: Any = None) -> None:
        keys = (
            BlockKeys(ask.prompt, ask.reply, self._config.block_size)
            if self._config.enable_prefix_caching
            else None
        )
        self.core.add(
            EngineRequest(
                ask.rid,
                ask.seq,
                ask.arrival,
                ask.prompt_tokens,
                ask.max_tokens,
                ask.output_tokens,
                keys,
                ask.priority,
                job,
            ),
            now,
        )

    def abort(self, ask: Ask, now: float) -> None:
        request = self.core.requests.get(ask.rid)
        if request is not None:
            self.core.abort(request, now, "client")

    def schedule(self, now: float) -> Step:
        return self.core.schedule(now)

    def update(self, step: Step, now: float) -> list[tuple[Any, int, str | None]]:
        return [(o.request.rid, 1, o.finish_reason) for o in self.core.update(step, now)]

    def state(self) -> dict[str, Any]:
        """Everything that must be equal after each call."""
        core = self.core
        running = {r.rid for r in core.running_requests}
        return {
            "running": [r.rid for r in core.running_requests],
            "waiting": sorted(rid for rid in core.requests if rid not in running),
            "free": core.pool.free_order(),
            "requests": {
                rid: (
                    r.num_computed_tokens,
                    r.num_tokens,
                    r.num_output_placeholders,
                    r.num_in_flight_tokens,
                    r.num_stale_output_tokens,
                    r.num_preemptions,
                    list(r.blocks),
                )
                for rid, r in core.requests.items()
            },
        }
