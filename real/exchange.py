"""What an HTTP request says of itself reaches every call it makes of the engine, and what became of them is known.

Not every route of vLLM hands `vllm_xargs` and `priority` on to the engine (beam search, scoring), and not every reply
can say why it ended (a stream without a token). Both pass through `generate` of vLLM's engine client.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any

from real.hints import PRIORITY, carried

_BEFORE_NOW_S = 1e-9
"""Seconds that are left of a time that is over."""


class Exchange:
    """One HTTP request between its body and the end of its reply."""

    def __init__(self, hints: dict[str, Any], priority: int | None, model: str | None) -> None:
        self.hints = hints
        """Fields of vllm_xargs, from body and headers."""
        self.priority = priority
        """Of vLLM; None: as the route says."""
        self.model = model
        """What it calls the model."""
        self.request_id: str | None = None
        """Of its first call of the engine."""
        self.timed_out: dict[int, str] = {}
        """Choices of the reply that the scheduler aborted: timeout:ttft or timeout:total."""
        self._calls = 0
        self._is_answered = False  # whether one of its calls has ended
        self._began = time.monotonic()

    @property
    def has_deadline(self) -> bool:
        """Whether it may be aborted."""
        return "ttft_s" in self.hints or "total_s" in self.hints

    def next_call(self, request_id: str) -> int:
        """How many calls it has made before this one."""
        if self.request_id is None:
            self.request_id = request_id
        self._calls += 1
        return self._calls - 1

    def hints_now(self) -> dict[str, Any]:
        """The fields for a call of the engine, as the engine's process can be told.

        A request that needs one call after the other (beam search, tools) has one deadline for all of them: later calls
        get what is left of it, and only the first ones that of the first token.
        """
        hints = {field: carried(value) for field, value in self.hints.items()}
        if self._is_answered:
            hints.pop("ttft_s", None)
            with suppress(KeyError, ValueError):  # no limit, or one that makes no sense
                limit = float(hints["total_s"])
                left = max(limit - (time.monotonic() - self._began), _BEFORE_NOW_S)
                hints["total_s"] = left if limit > 0 else ""
        return hints

    def note(self, choice: int, finish_reason: Any, stop_reason: Any) -> None:
        """One choice of a call has ended."""
        self._is_answered = True
        if finish_reason == "abort" and str(stop_reason).startswith("timeout:"):
            self.timed_out[choice] = stop_reason


CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""Of the task that serves the request, and of those that it starts."""


def watch(client: Any) -> None:
    """Let `client.generate` take hints from, and tell endings to, the request on whose behalf it is called; once."""
    if not getattr(client.generate, "is_watched", False):
        client.generate = _watched(client.generate)


def _watched(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    def watched(
        prompt: Any, sampling_params: Any, request_id: str, *args: Any, **more: Any
    ) -> AsyncIterator[Any]:
        exchange = CURRENT.get()
        if exchange is None:
            return generate(prompt, sampling_params, request_id, *args, **more)
        call = exchange.next_call(request_id)
        own = exchange.hints_now()
        if exchange.priority is not None:
            more["priority"] = exchange.priority
        elif carried(more.get("priority", 0)) == "":
            own[PRIORITY], more["priority"] = "", 0
        if own:
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), **own}
        outputs = generate(prompt, sampling_params, request_id, *args, **more)
        if not exchange.has_deadline:
            return outputs
        return _noted(outputs, exchange, call * (getattr(sampling_params, "n", None) or 1))

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


async def _noted(outputs: Any, exchange: Exchange, first_choice: int) -> AsyncIterator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            for one in getattr(output, "outputs", ()):
                if one.finish_reason is not None:
                    exchange.note(first_choice + one.index, one.finish_reason, one.stop_reason)
            yield output
