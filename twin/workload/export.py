"""The requests of a run as rows of a trace."""

from collections.abc import Iterator, Sequence
from itertools import count

from twin.workload.formats.rows import TraceRow
from twin.workload.request import Request
from twin.workload.streams import Stream
from twin.workload.trace import TraceStream


def as_rows(requests: Sequence[Request], streams: Sequence[Stream]) -> Iterator[TraceRow]:
    """One row a request, in their order; content ids are numbered anew, by first appearance.

    Of streams that are traces without prefixes, sharing stays unknown; replies have an id where a prompt contains them.
    """
    unknown = {
        number
        for number, stream in enumerate(streams)
        if isinstance(stream, TraceStream)
        and not stream.tells_prefixes
        and stream.assumed_prefix_share is None
    }
    asked = {written for request in requests for written, _ in request.prompt}
    numbers: dict[int, int] = {}
    fresh = count()

    def content(written: int) -> int:
        if written not in numbers:
            numbers[written] = next(fresh)
        return numbers[written]

    for line, request in enumerate(requests, 1):
        known = request.stream not in unknown
        yield TraceRow(
            line,
            request.arrival_ps,
            request.prompt_tokens,
            request.output_tokens,
            tuple([(content(c), tokens) for c, tokens in request.prompt]) if known else None,
            content(request.reply) if known and request.reply in asked else None,
            request.max_tokens,
            request.tier,
            request.tenant,
            request.session,
            request.ttft_timeout_ps,
            request.total_timeout_ps,
        )
