"""Traffic as planned, with what each of its requests had at a server."""

from collections import defaultdict, deque
from collections.abc import Hashable

from real.compare import Table, has_plan
from twin.clock import PS
from twin.workload.request import Request

FRESH = 1 << 62
"""Content ids from here on are text that no other request has."""


class Given:
    """Tells the requests of the scenario's traffic, as they come, what their like had at the server.

    Requests are alike if they are the same turn of the same conversation or, alone, were planned with the same stream,
    tier, tenant and lengths; of several the first to come is the first to be given.
    """

    def __init__(self, told: Table, before: int = 0) -> None:
        """`told` are the measured requests, by index; the first `before` of the twin's are none of them."""
        self._told, self._before = told, before
        self._is_known = has_plan(told)
        self._left: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        self.row_of: dict[int, int] = {}
        """Index of the twin's request -> row of the measured one."""
        number = len(told["index"])
        columns = [
            told.get(name, [None] * number)
            for name in ("stream", "session", "tier", "tenant", "planned_prompt_tokens", "planned_output_tokens")
        ]  # fmt: skip
        for row, values in enumerate(zip(*columns, strict=True)):
            self._left[self._key(*values)].append(row)

    def _key(
        self, stream: int | None, session: str | None, tier: str, tenant: str, prompt: int, output: int
    ) -> Hashable:  # fmt: skip
        if not self._is_known:
            return ()
        return (stream, session) if session else (stream, tier, tenant, prompt, output)

    def give(self, request: Request) -> None:
        """Change the request to what was measured."""
        if request.index < self._before:
            return
        key = self._key(
            request.stream, request.session, request.tier, request.tenant, request.prompt_tokens,
            request.output_tokens,
        )  # fmt: skip
        rows = self._left.get(key)
        if not rows:
            return
        row = rows.popleft()
        self.row_of[request.index] = row
        if not self._is_known:
            return
        told = self._told
        prompt_tokens, output_tokens = told["prompt_tokens"][row], told["output_tokens"][row]
        if prompt_tokens:
            request.prompt = _with_length(request.prompt, prompt_tokens, FRESH + row)
            request.prompt_tokens = prompt_tokens
        if told["outcome"][row] == "completed" and output_tokens:
            request.output_tokens = output_tokens
            if request.max_tokens is not None:
                request.max_tokens = max(request.max_tokens, output_tokens)
        elif told["outcome"][row] != "unfinished" and told["finish_s"][row] is not None:
            # How long it would have gone on is not known: it ends when it ended.
            inside_ps = round((told["finish_s"][row] - told["arrival_s"][row]) * PS)
            request.total_timeout_ps = max(1, inside_ps)


def _with_length(
    prompt: tuple[tuple[int, int], ...], tokens: int, fresh: int
) -> tuple[tuple[int, int], ...]:
    """The first `tokens` tokens of a prompt; beyond its end, text that no other request has."""
    kept, left = [], tokens
    for content, length in prompt:
        if left:
            kept.append((content, min(length, left)))
            left -= kept[-1][1]
    return (*kept, (fresh, left)) if left else tuple(kept)
