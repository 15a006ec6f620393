"""One request to a server, and what came of it."""

from dataclasses import dataclass, field
from typing import Any

from twin.cluster.clients import CLIENT_DISCONNECT

LEFT = "left"
END_OF_RUN = "end_of_run"
TTFT, TOTAL = "timeout:ttft", "timeout:total"
DISCONNECTED = "disconnected"


@dataclass(frozen=True)
class Call:
    """One request to make."""

    due_s: float
    """Seconds after the start."""
    prompt: Any
    """Text, or token ids."""
    max_tokens: int
    tier: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """More of vllm_xargs."""
    stream: bool = True
    """Token by token, or the whole reply at once."""
    leave_after_s: float | None = None
    """The client hangs up so many seconds after it has sent the request."""
    body: dict[str, Any] = field(default_factory=dict)
    """More of the request."""
    endpoint: str = "completions"
    """completions or chat."""
    ttft_by_s: float | None = None
    """The client hangs up without a first token, so many seconds after the start."""
    total_by_s: float | None = None
    """The client hangs up without a whole reply, so many seconds after the start."""
    leave_by_s: float | None = None
    """The client hangs up by itself, so many seconds after the start."""
    forced: bool = True
    """The reply is as long as max_tokens, whatever the model says (vLLM's ignore_eos)."""
    counted: bool = True
    """The server is asked to count tokens with each piece (vLLM's continuous_usage_stats)."""


@dataclass
class Reply:
    """What came of it. Seconds after the start."""

    call: Call
    sent_s: float = 0.0
    """When the head of the request was written to the connection."""
    status: int = 0
    """Of HTTP; 0 = no answer."""
    error: str = ""
    """What the server, the connection or the client said of a request that did not end well. What a server says is
    its own affair: only `hung_up` and `fault` tell what became of the request."""
    hung_up: str = ""
    """How the client itself ended it: `left` as told, `timeout:ttft` or `timeout:total` at a deadline, `end_of_run`."""
    fault: str = ""
    """In a few words, what came instead of a whole reply of the API; empty where that is the status, or nothing was
    wrong."""
    token_s: list[float] = field(default_factory=list)
    """When each token came, as seen here; several at once if the server sends them so, all if it does not stream."""
    token_ids: list[int] = field(default_factory=list)
    """Where the server tells them."""
    end_s: float | None = None
    """When the reply was complete, the refusal was read, or the connection ended."""
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_tokens: int | None = None
    """As the server counted them."""
    cached_tokens: int | None = None
    """Of these, found in the prefix cache, where the server tells."""
    retry_after_s: float | None = None
    """What a refusal asked for."""
    is_counted: bool = False
    """Whether the server told how many tokens each piece brought; else a piece counts as one."""

    @property
    def ttft_s(self) -> float | None:
        """From the due time to the first token."""
        return self.token_s[0] - self.call.due_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        """From the due time to the end of the reply."""
        return None if self.end_s is None else self.end_s - self.call.due_s


def body_of(model: str, call: Call) -> dict[str, Any]:
    """The request as JSON."""
    extra = call.extra | ({"tier": call.tier} if call.tier is not None else {})
    body: dict[str, Any] = {"model": model, "max_tokens": call.max_tokens, "temperature": 0.0}
    if call.forced:
        body["ignore_eos"] = True
    if call.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": call.prompt}]
    else:
        body["prompt"] = call.prompt
    if call.stream:
        options = {"include_usage": True}
        if call.counted:
            options["continuous_usage_stats"] = True
        body |= {"stream": True, "stream_options": options}
    if extra:
        body["vllm_xargs"] = extra
    return body | call.body


def outcome_of(reply: Reply) -> tuple[str, str]:
    """(outcome, reason) as records have them.

    A whole reply is completed; one that a deadline ended, on either side, timed out; 429, 503 and other 4xx are
    refusals; what broke off, and what is no reply of the API, is aborted, with what was heard of it. Nothing that a
    server says in words decides.
    """
    if reply.hung_up == END_OF_RUN:
        return "unfinished", END_OF_RUN
    if reply.hung_up in (TTFT, TOTAL):
        return "timed_out", reply.hung_up
    if reply.hung_up == LEFT:
        return "aborted", CLIENT_DISCONNECT
    if reply.finish_reason == "abort":
        is_deadline = reply.stop_reason in (TTFT, TOTAL)
        return ("timed_out", reply.stop_reason) if is_deadline else ("aborted", "abort")
    if reply.status == 200 and reply.finish_reason is not None and not reply.error:
        return "completed", reply.finish_reason
    if reply.status in (0, 200):
        return "aborted", reply.fault or DISCONNECTED
    is_refusal = 400 <= reply.status < 500 or reply.status == 503
    return "refused" if is_refusal else "aborted", f"http {reply.status}"
