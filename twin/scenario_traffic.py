"""`traffic:` of a scenario file as data: streams, when their requests come, how long they are, who asks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from twin.scenario_clients import Disconnects, StreamRetries
from twin.scenario_distributions import (
    Count,
    Cv,
    Entries,
    Instant,
    Length,
    Name,
    Number,
    QuantileCount,
    Rate,
    RateCurve,
    Seconds,
    Section,
    Share,
    Time,
    Tokens,
    UniformCount,
    by_key,
    check_quantiles,
)

Shares = Annotated[dict[Name, Share], Field(min_length=1)]


# --- arrivals ---------------------------------------------------------------------------------


_PROCESSES = ("constant", "poisson", "gamma", "weibull", "gaps", "bursts", "batch", "closed")


def _known_process(name: Any) -> Any:
    """Raises ValueError for a process that none of the forms of arrivals has."""
    if isinstance(name, str) and name not in _PROCESSES:
        raise ValueError(f"{name!r} is not known; choose one of {', '.join(_PROCESSES)}")
    return name


class RenewalArrivals(Section):
    """Requests (or conversations) with independent gaps at a rate."""

    process: Annotated[
        Literal["constant", "poisson", "gamma", "weibull", "gaps"], BeforeValidator(_known_process)
    ]
    """How regular they are."""
    rate: RateCurve
    """Per second: a number, or how it changes with time."""
    cv: Cv | None = None
    """Burstiness of gamma and weibull: standard deviation of the gaps over their mean. 1 = like poisson."""
    gaps: Entries | None = None
    """Of the process gaps: [probability, gap] from 0 to 1 in any unit; the rate says how long they are."""
    tick: Seconds | None = None
    """Requests come on whole multiples of it, as in a log with coarse stamps; None = at any instant."""

    @model_validator(mode="after")
    def _complete(self) -> "RenewalArrivals":
        if (self.cv is not None) != (self.process in ("gamma", "weibull")):
            raise ValueError(
                f"process {self.process} has no cv; remove it"
                if self.cv is not None
                else f"process {self.process} needs cv, the standard deviation of the gaps over their mean"
            )
        if (self.gaps is not None) != (self.process == "gaps"):
            raise ValueError(
                f"process {self.process} has no table of gaps; remove it"
                if self.gaps is not None
                else "process gaps needs gaps, a table of [probability, gap]"
            )
        if self.gaps is not None:
            check_quantiles("gaps", self.gaps, 0)
            if not self.gaps[-1][1]:
                raise ValueError("all gaps are 0, so that time would stand still")
        return self


class BurstArrivals(Section):
    """A Poisson process whose rate jumps up for a while now and then."""

    process: Literal["bursts"]
    rate: Annotated[float, Field(ge=0, le=1e6)]
    """Per second between bursts; 0 = none."""
    burst_rate: Rate
    """Per second in a burst."""
    burst: Seconds
    """Length of a burst; the mean if random."""
    pause: Seconds
    """From one burst to the next; the mean if random. The first burst comes after a pause."""
    lengths: Literal["random", "fixed"] = "random"
    """Of bursts and pauses: exponential, or always the same."""

    @model_validator(mode="after")
    def _some_requests(self) -> "BurstArrivals":
        each = self.burst * self.burst_rate + self.pause * self.rate
        if each < 1e-3:
            raise ValueError(
                "these bursts and pauses have fewer than one request in 1,000; raise burst_rate or burst"
            )
        return self


class BatchArrivals(Section):
    """Jobs handed in all at once."""

    process: Literal["batch"]
    at: Annotated[list[Instant | Name], Field(min_length=1, max_length=10_000)]
    """Seconds from the start of the run, or "HH:MM" if the run starts at midnight."""
    size: Count
    """Requests at each of these instants."""
    every: Seconds | None = None
    """Repeat after so many seconds (86400 = daily); None = once."""

    @model_validator(mode="after")
    def _sound(self) -> "BatchArrivals":
        seconds = [clock_seconds(entry) for entry in self.at]
        if sorted(set(seconds)) != seconds:
            raise ValueError("the instants in at must ascend")
        if self.every is not None and self.every <= seconds[-1]:
            raise ValueError(
                f"every must be later than the last instant ({seconds[-1]:g}), got {self.every:g}"
            )
        return self


class ClosedArrivals(Section):
    """A closed loop: users who ask again only when they have been answered."""

    process: Literal["closed"]
    users: Annotated[int, Field(ge=1, le=1_000_000)]
    """At most so many requests are in flight."""
    think_time: Time = 0.0
    """Seconds from the end of a request (conversation) to the same user's next."""
    ramp: Instant = 0.0
    """Seconds over which the users appear, evenly; 0 = all at the start."""


def clock_seconds(at: float | str) -> float:
    """Seconds after midnight of "HH:MM" or "HH:MM:SS"; numbers stay. Raises ValueError for other text."""
    if not isinstance(at, str):
        return at
    parts = at.split(":")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f'{at!r} is no time of day; write "HH:MM" or a number of seconds')
    hour, minute, second = (*(int(part) for part in parts), 0)[:3]
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(f"{at!r} is no time of day; at most 23:59:59")
    return float(hour * 3600 + minute * 60 + second)


def _process(value: Any) -> str:
    written = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    process = written.get("process")
    return f"[{process}]" if process in ("bursts", "batch", "closed") else "[renewal]"


Arrivals = Annotated[
    Annotated[RenewalArrivals, Tag("[renewal]")]
    | Annotated[BurstArrivals, Tag("[bursts]")]
    | Annotated[BatchArrivals, Tag("[batch]")]
    | Annotated[ClosedArrivals, Tag("[closed]")],
    Discriminator(_process),
]


# --- conversations ----------------------------------------------------------------------------


class Tools(Section):
    """Tool calls of an agent between the user's words and the final answer."""

    calls: Number
    """Of each turn; c calls make c + 1 requests."""
    time: Time = 0.0
    """Seconds a tool takes, from the end of the reply that calls it to the request with its result."""
    result_tokens: Length
    """What a tool adds to the prompt."""
    output_tokens: Length
    """Of a reply that calls a tool; the last reply of the turn has the output_tokens of the stream."""


class Sessions(Section):
    """Conversations of several turns."""

    turns: Number
    """Of the user."""
    system_prompt_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Shared by all conversations of the stream."""
    think_time: Time = 0.0
    """Seconds from the end of a reply to the next turn of the user."""
    tools: Tools | None = None
    """None = the model answers at once."""

    @model_validator(mode="after")
    def _some_turns(self) -> "Sessions":
        match self.turns:
            case int(least):
                pass
            case UniformCount(uniform=[least, _]):
                pass
            case QuantileCount(quantiles=[[_, least], *_]):
                pass
        if least < 0.5:
            raise ValueError(f"turns must be >= 1, got {least:g}")
        return self


class Prefixes(Section):
    """Texts that many prompts begin with: documents asked about again and again, or long instructions."""

    groups: Annotated[int, Field(ge=1, le=100_000)]
    """How many texts there are."""
    tokens: Tokens
    """Length of each."""
    skew: Annotated[float, Field(ge=0, le=10)] = 0.0
    """The k-th is used with weight k ** -skew (Zipf); 0 = all equally often."""


class Reuse(Section):
    """Prompts that repeat the beginning of an earlier one."""

    share: Entries
    """[probability, share of the prompt that is repeated] from 0 to 1, straight lines between."""
    memory: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """It is one of so many last prompts of the stream."""

    @model_validator(mode="after")
    def _sound(self) -> "Reuse":
        check_quantiles("share", self.share, 0)
        if self.share[-1][1] > 1:
            raise ValueError(f"the values of share must be <= 1, got {self.share[-1][1]:g}")
        return self


# --- streams ----------------------------------------------------------------------------------


class Timeouts(Section):
    """When clients leave, in seconds after arrival; None = never."""

    ttft: Seconds | None = None
    """Without a first token."""
    total: Seconds | None = None
    """Without a complete reply."""


class Stream(Section):
    """What all streams have."""

    tier: Name | None = None
    tiers: Shares | None = None
    tenant: Name | None = None
    tenants: Shares | None = None
    max_tokens: Tokens | None = None
    timeouts: Timeouts = Timeouts()
    disconnects: Disconnects | None = None
    """None = clients leave for a time-out only."""
    retries: StreamRetries | None = None
    """None = those of cluster.retries."""
    requests: Count | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "Stream":
        for one, many in (("tier", "tiers"), ("tenant", "tenants")):
            shares = getattr(self, many)
            if shares is None:
                continue
            if getattr(self, one) is not None:
                raise ValueError(f"has both {one} and {many}; write one of them")
            total = sum(shares.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(f"the shares in {many} add up to {total:.6g}, must be 1")
        return self


class TraceStream(Stream):
    """Requests of a file."""

    trace: Name
    """Path, relative to the scenario file."""
    speedup: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Instants of the file are divided by it."""
    format: Name | None = None
    """Name of the format (`twin trace formats`); None = the file's beginning tells."""
    window: Annotated[list[Instant], Field(min_length=2, max_length=2)] | None = None
    """[from, to] in seconds of the file: only these rows, and the run starts at the first; None = all."""
    spread_ticks: Seconds | None = None
    """Rows of one stamp are spread over so many seconds, at random; None = they come at once."""
    assumed_prefix_share: Share | None = None
    """Share of each prompt that is the same text in all, for a trace that says nothing of prefixes."""

    @model_validator(mode="after")
    def _window_ordered(self) -> "TraceStream":
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError(f"window must be [from, to] with from < to, got {self.window}")
        return self


class SyntheticStream(Stream):
    """Requests of distributions; `requests` or `duration` ends them."""

    arrivals: Arrivals
    prompt_tokens: Length | None = None
    """With sessions: what the user adds in each turn."""
    output_tokens: Length | None = None
    length_correlation: Annotated[float, Field(ge=-0.99, le=0.99)] = 0.0
    """Of the normal variables behind prompt and output (Gaussian copula); 0 = independent."""
    lengths_from: Name | None = None
    """A trace, relative to the scenario file, whose (prompt, output) pairs are drawn in place of the two keys above."""
    duration: Seconds | None = None
    """Requests come before it; conversations begin before it."""
    sessions: Sessions | None = None
    """None = every request stands alone."""
    prefixes: Prefixes | None = None
    """None = only the system prompt of sessions is shared."""
    reuse: Reuse | None = None
    """None = no prompt repeats another."""

    @model_validator(mode="after")
    def _complete(self) -> "SyntheticStream":
        if self.requests is None and self.duration is None and not _ends(self.arrivals):
            raise ValueError("would never end; give requests (how many) or duration (seconds)")
        for key in ("prompt_tokens", "output_tokens"):
            written = getattr(self, key) is not None
            if self.lengths_from is None and not written:
                raise ValueError(f"{key} is missing; it has no default")
            if self.lengths_from is not None and written:
                raise ValueError(f"has both lengths_from and {key}; write one of them")
        if self.lengths_from is not None and self.length_correlation:
            raise ValueError("lengths_from has pairs as they are; remove length_correlation")
        if self.reuse is not None and (self.sessions is not None or self.prefixes is not None):
            raise ValueError(
                "reuse goes neither with sessions nor with prefixes; write one of them"
            )
        return self


def _ends(arrivals: Any) -> bool:
    return isinstance(arrivals, BatchArrivals) and arrivals.every is None


class PresetStream(Stream):
    """Requests like those of a published trace; `requests` or `duration` ends them."""

    preset: Name
    """`twin presets --traffic` lists them."""
    rate: Rate | None = None
    """Requests (conversations) per second; None = that of the trace."""
    duration: Seconds | None = None
    """Requests come before it; conversations begin before it."""
    steady: bool = False
    """True: without the changes of the rate over time that the trace has."""
    ticks: bool = True
    """False: at any instant, where the stamps of the trace are coarse and the preset's therefore too."""

    @model_validator(mode="after")
    def _ends(self) -> "PresetStream":
        if self.requests is None and self.duration is None:
            raise ValueError("would never end; give requests (how many) or duration (seconds)")
        return self


AnyStream = Annotated[
    Annotated[TraceStream, Tag("[trace]")]
    | Annotated[SyntheticStream, Tag("[arrivals]")]
    | Annotated[PresetStream, Tag("[preset]")],
    by_key("trace", "preset", "arrivals"),
]
