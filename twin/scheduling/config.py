"""What a policy is made of, as plain data: tiers, their holds, caps and orders.

Constructing a config checks it and does nothing else. Misuse raises ValueError naming the field, its bound and value.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

RULES = 1
"""Goes up when the same configuration decides differently than before; part of the fingerprint."""

ADAPTIVE = ("none", "pressure", "fill")
VICTIMS = ("newest", "largest")
ESTIMATORS = ("declared", "quantile", "oracle")
ANY_TIER = "*"
MAX_TIERS = 100
MAX_SECONDS = 1_000_000.0
"""Longest wait or target a tier may have: 11 days."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One class of service. Tiers are listed from the most to the least urgent. Times are seconds."""

    name: str
    """What requests call it; a policy whose only tier is "*" takes every request."""
    order: str = "fcfs"
    """Order of its ready queue: a name in ORDERS or the dotted path of a function."""
    batch_size: int = 1
    """Jobs that a hold releases together at most; 1 = no hold by number."""
    batch_tokens: int | None = None
    """Prompt plus expected output tokens that a hold releases together at most; None = no such limit."""
    max_wait: float | None = None
    """A held job is released this long after its arrival at the latest; needed wherever something is held."""
    adaptive: str = "none"
    """pressure: the wait shrinks by up to half while the first tier queues; fill: do not wait for a batch that, at
    the present rate of arrivals, cannot fill in time."""
    max_running: int | None = None
    """Jobs of the tier that run at once; None = no limit."""
    max_running_tokens: int | None = None
    """Sum of the sizes (prompt plus expected output) that run at once; a larger job runs alone. None = no limit."""
    preemptible: bool = True
    """Whether a job ranked above may take its place before blocks run out."""
    promote_after: float | None = None
    """A job moves up one rank each time it has waited this long; None = never."""
    victims: str = "newest"
    """Within a rank the one to give way: the newest or the largest."""
    groups: tuple[tuple[int, int], ...] = ()
    """Length groups (sizes below this many tokens, jobs released together), shortest first; sizes beyond the last
    bound count as the last group. They replace batch_size and batch_tokens."""
    mix: int = 12
    """Jobs released together from the two shortest groups when neither has filled in time."""
    rank: int | None = None
    """Place in the order of urgency, 0 first; None = position in the list. Tiers of one rank share one order."""
    ttft_target: float | None = None
    """Time to first token the tier aims at: the due time of order `edf` for jobs without a deadline of their own."""

    def __post_init__(self) -> None:
        where = f"tier {self.name!r}"
        _check_type(where, self)
        if not self.name:
            raise ValueError("tier: name must not be empty")
        for name in ("batch_size", "batch_tokens", "max_running", "max_running_tokens"):
            _at_least(where, name, getattr(self, name), 1)
        for name in ("max_wait", "promote_after", "ttft_target"):
            _positive(where, name, getattr(self, name))
        _at_least(where, "mix", self.mix, 2)
        _at_least(where, "rank", self.rank, 0)
        _one_of(where, "adaptive", self.adaptive, ADAPTIVE)
        _one_of(where, "victims", self.victims, VICTIMS)
        self._check_hold(where)

    def _check_hold(self, where: str) -> None:
        for group in self.groups:
            if len(group) != 2 or any(type(number) is not int for number in group):
                raise ValueError(
                    f"{where}: groups must be pairs of whole numbers (tokens, jobs), "
                    f"got {self.groups}"
                )
        bounds = [bound for bound, _ in self.groups]
        if bounds != sorted(set(bounds)) or any(b < 1 or n < 1 for b, n in self.groups):
            raise ValueError(
                f"{where}: groups must be (tokens, jobs) with rising tokens, all at least 1, "
                f"got {self.groups}"
            )
        if self.groups and (self.batch_size > 1 or self.batch_tokens is not None):
            raise ValueError(
                f"{where}: groups replace batch_size ({self.batch_size}) and batch_tokens "
                f"({self.batch_tokens}); leave those out or leave groups out"
            )
        if self.holds and self.max_wait is None:
            raise ValueError(
                f"{where}: max_wait must be set (seconds) because jobs are held for a batch; "
                f"without it a job could wait for ever"
            )
        if not self.holds and (self.max_wait is not None or self.adaptive != "none"):
            raise ValueError(
                f"{where}: max_wait ({self.max_wait}) and adaptive ({self.adaptive}) do nothing "
                f"without a hold; set batch_size above 1, batch_tokens or groups"
            )
        if self.promote_after is not None and self.promote_after < (self.max_wait or 0.0):
            raise ValueError(
                f"{where}: promote_after ({self.promote_after}) must be at least "
                f"max_wait ({self.max_wait})"
            )

    @property
    def holds(self) -> bool:
        """Whether jobs wait for others before they are ready."""
        return self.batch_size > 1 or self.batch_tokens is not None or bool(self.groups)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A whole policy."""

    tiers: tuple[TierConfig, ...]
    """From the most to the least urgent."""
    estimator: str = "quantile"
    """Expected output: declared (the client's max_tokens), quantile (learned from finished jobs of the tier, a declared
    max_tokens being an upper bound) or oracle (the truth, in simulation only)."""
    quantile: float = 0.5
    """Which quantile of the learned outputs."""
    window: int = 512
    """Finished jobs of a tier that are remembered."""
    initial: int = 256
    """Expected output tokens before the first job of a tier has finished."""
    weights: tuple[tuple[str, int], ...] = ()
    """(tenant, weight) for order `fair`; others weigh 1."""
    default_tier: str | None = None
    """Tier of requests that name none, or one that does not exist; None = such requests are refused."""

    def __post_init__(self) -> None:
        _check_type("policy", self)
        names = [tier.name for tier in self.tiers]
        if not names:
            raise ValueError("policy: tiers must list at least one tier")
        if len(names) > MAX_TIERS:
            raise ValueError(f"policy: tiers must be at most {MAX_TIERS}, got {len(names)}")
        if len(set(names)) < len(names):
            raise ValueError(f"policy: tier names must differ, got {names}")
        if ANY_TIER in names and len(names) > 1:
            raise ValueError(f'policy: the tier "*" must be the only one, got {names}')
        if self.default_tier is not None and self.default_tier not in names:
            raise ValueError(f"policy: default_tier {self.default_tier!r} is not one of {names}")
        _one_of("policy", "estimator", self.estimator, ESTIMATORS)
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"policy: quantile must lie between 0 and 1, got {self.quantile}")
        _at_least("policy", "window", self.window, 1)
        _at_least("policy", "initial", self.initial, 1)
        for tenant, weight in self.weights:
            if not isinstance(tenant, str):
                raise ValueError(f"policy: weights must map names of tenants, got {tenant!r}")
            _at_least("policy", f"weight of {tenant!r}", weight, 1)
        self._check_ranks()

    def _check_ranks(self) -> None:
        ranks = self.ranks
        if sorted(set(ranks)) != list(range(max(ranks) + 1)):
            raise ValueError(f"policy: ranks must count up from 0 without gaps, got {ranks}")
        if list(ranks) != sorted(ranks):
            raise ValueError(f"policy: tiers must be listed by rank, got {ranks}")
        first: dict[int, TierConfig] = {}
        for rank, tier in zip(ranks, self.tiers, strict=True):
            other = first.setdefault(rank, tier)
            if (other.order, other.victims) != (tier.order, tier.victims):
                raise ValueError(
                    f"policy: tiers {other.name!r} and {tier.name!r} share rank {rank} "
                    f"and must have the same order and victims"
                )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each tier."""
        return tuple(i if t.rank is None else t.rank for i, t in enumerate(self.tiers))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` gives the same configuration back."""
        data = dataclasses.asdict(self)
        data["tiers"] = [dataclasses.asdict(tier) for tier in self.tiers]
        for tier in data["tiers"]:
            tier["groups"] = [list(group) for group in tier["groups"]]
        data["weights"] = dict(self.weights)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PolicyConfig":
        """Read a mapping of plain data. Keys left out have their defaults; unknown ones are errors."""
        values = dict(data)
        _check_keys("policy", values, cls)
        tiers = values.get("tiers")
        if not isinstance(tiers, list | tuple):
            raise ValueError(f"policy: tiers must be a list of tiers, got {tiers!r}")
        values["tiers"] = tuple(_tier_from_dict(i, tier) for i, tier in enumerate(tiers))
        weights = values.get("weights", {})
        if not isinstance(weights, Mapping):
            raise ValueError(f"policy: weights must map tenants to numbers, got {weights!r}")
        values["weights"] = tuple(sorted(weights.items(), key=lambda pair: str(pair[0])))
        return cls(**values)


def fingerprint(config: PolicyConfig) -> str:
    """Twelve hex digits that are equal exactly when two hosts run the same policy."""
    data = config.to_dict()
    for tier, rank in zip(data["tiers"], config.ranks, strict=True):
        tier["rank"] = rank
    text = json.dumps([RULES, data], sort_keys=True)
    # 1 and 1.0 seconds are the same.
    text = json.dumps(json.loads(text, parse_int=float))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _tier_from_dict(index: int, data: Any) -> TierConfig:
    where = f"tiers[{index}]"
    if not isinstance(data, Mapping):
        raise ValueError(f"policy: {where} must be a mapping, got {data!r}")
    _check_keys(where, data, TierConfig)
    if "name" not in data:
        raise ValueError(f"policy: {where} has no name")
    values = dict(data)
    groups = values.get("groups", ())
    if not isinstance(groups, list | tuple) or any(
        not isinstance(g, list | tuple) or len(g) != 2 for g in groups
    ):
        raise ValueError(f"policy: {where}.groups must be a list of [tokens, jobs], got {groups!r}")
    values["groups"] = tuple((bound, jobs) for bound, jobs in groups)
    return TierConfig(**values)


def _check_keys(where: str, data: Mapping[str, Any], cls: type) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ValueError(f"policy: unknown key {key!r} in {where}{hint}")


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
    "tuple": (tuple,),
}


def _check_type(where: str, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names = [part.strip().split("[")[0] for part in str(_type_name(field)).split("|")]
        kinds = tuple(kind for name in names for kind in _KINDS.get(name, (object,)))
        is_bool = isinstance(value, bool)
        if not isinstance(value, kinds) or (is_bool and bool not in kinds):
            raise ValueError(
                f"{where}: {field.name} must be {_type_name(field)}, got {value!r} "
                f"({type(value).__name__})"
            )


def _type_name(field: "dataclasses.Field[Any]") -> str:
    return getattr(field.type, "__name__", None) or str(field.type)


def _at_least(where: str, name: str, value: int | None, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError(f"{where}: {name} must be a whole number, got {value!r}")
    if value is not None and value < least:
        raise ValueError(f"{where}: {name} must be at least {least}, got {value}")


def _positive(where: str, name: str, value: float | None) -> None:
    if value is not None and not (0.0 < value < math.inf):
        raise ValueError(f"{where}: {name} must be above 0 and finite (seconds), got {value}")
    if value is not None and value > MAX_SECONDS:
        raise ValueError(f"{where}: {name} must be at most {MAX_SECONDS:,.0f} seconds, got {value}")


def _one_of(where: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{where}: {name} must be one of {', '.join(allowed)}, got {value!r}")
