"""One request as the traffic makes it, before any server has seen it."""

from dataclasses import dataclass

from twin.compiled import mypyc_attr


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Request:
    """What a client asks for and when.

    `prompt` is content, not text: segments of (content id, tokens). Two prompts that begin with the same ids share
    that prefix, and a later turn of a conversation contains the `reply` id of the earlier one.
    """

    index: int
    """Position in the merged arrival order; unique within a run."""
    arrival_ps: int
    """The instant the request is due, in picoseconds from the start of the run."""
    prompt: tuple[tuple[int, int], ...]
    """Content as (content id, tokens) from the first token on."""
    prompt_tokens: int
    """Sum of the segments' tokens."""
    output_tokens: int
    """Tokens the model will produce before end of sequence: the truth, which only the engine sees."""
    max_tokens: int | None
    """The limit the client declared; None = not declared (vLLM fills in max_model_len - prompt_tokens)."""
    reply: int
    """Content id of the text generated for this request."""
    tier: str = "ONLINE"
    tenant: str = "default"
    session: str | None = None
    stream: int = 0
    """Which entry of the scenario's traffic list it comes from."""
    ttft_timeout_ps: int | None = None
    """The client leaves if it has no token this long after arrival; None = never."""
    total_timeout_ps: int | None = None
    """The client leaves if the reply is not complete this long after arrival; None = never."""
    may_leave: bool = False
    """The connection may break at any time, so that the engine must know what the request had of each step."""

    # Written out: what a dataclass makes would be the one part of it that is not compiled.
    def __init__(
        self,
        index: int,
        arrival_ps: int,
        prompt: tuple[tuple[int, int], ...],
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int | None,
        reply: int,
        tier: str = "ONLINE",
        tenant: str = "default",
        session: str | None = None,
        stream: int = 0,
        ttft_timeout_ps: int | None = None,
        total_timeout_ps: int | None = None,
        may_leave: bool = False,
    ) -> None:
        self.index = index
        self.arrival_ps = arrival_ps
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.reply = reply
        self.tier = tier
        self.tenant = tenant
        self.session = session
        self.stream = stream
        self.ttft_timeout_ps = ttft_timeout_ps
        self.total_timeout_ps = total_timeout_ps
        self.may_leave = may_leave
