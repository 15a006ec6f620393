"""What does a request say of itself? Its tier, tenant and deadlines, as the scheduler and the API server read them.

The carriers are `vllm_xargs` of the request, headers that real.middleware copies there, and vLLM's own `priority`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twin.scheduling import PolicyConfig

CONFIG_KEY = "twin"
"""Our key in vLLM's additional_config."""
DEFAULT_POLICY = "tiered"
"""Preset where additional_config names no policy."""
ANY_TIER = "*"
FIELDS = ("tier", "tenant", "ttft_s", "total_s")
"""Keys of vllm_xargs: names, and seconds from arrival to first and last token."""
LONGEST_NAME = 200
"""Characters of a tier or tenant."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What was asked for, with the default for what was not, or makes no sense."""

    tier: str
    tenant: str
    ttft_s: float | None
    """Seconds from arrival to the first token; None = no limit."""
    total_s: float | None
    """Seconds from arrival to the last token; None = no limit."""


def read_hints(
    extra: Mapping[str, Any], priority: int, config: PolicyConfig
) -> tuple[Hints, dict[str, str]]:
    """The hints in `extra` (vllm_xargs) and `priority`, and by field what is wrong with them.

    A tier that is named wins over the priority; priorities 1, 2, ... mean the second, third, ... tier of the policy, or
    the last, below 0 the first. Priority 0, vLLM's default, says nothing.
    """
    wrong: dict[str, str] = {}
    hints = Hints(
        _tier(extra.get("tier"), priority, config, wrong),
        _tenant(extra.get("tenant"), wrong),
        _seconds(extra, "ttft_s", wrong),
        _seconds(extra, "total_s", wrong),
    )
    return hints, wrong


def default_tier(config: PolicyConfig) -> str:
    """The tier of a request that names none."""
    names = [tier.name for tier in config.tiers]
    return "ONLINE" if names == [ANY_TIER] else config.default_tier or names[0]


def _tier(asked: Any, priority: int, config: PolicyConfig, wrong: dict[str, str]) -> str:
    names = [tier.name for tier in config.tiers]
    takes_any = names == [ANY_TIER]
    if asked is None:
        if priority == 0 or takes_any:
            return default_tier(config)
        return names[min(max(priority, 0), len(names) - 1)]
    if isinstance(asked, str) and 0 < len(asked) <= LONGEST_NAME and (takes_any or asked in names):
        return asked
    known = f"a name of 1 to {LONGEST_NAME} characters" if takes_any else ", ".join(names)
    wrong["tier"] = f"must be {known}, got {_shown(asked)}"
    return default_tier(config)


def _tenant(asked: Any, wrong: dict[str, str]) -> str:
    if asked is None:
        return "default"
    if isinstance(asked, str | int | float) and 0 < len(str(asked)) <= LONGEST_NAME:
        return str(asked)
    wrong["tenant"] = f"must be a name of 1 to {LONGEST_NAME} characters, got {_shown(asked)}"
    return "default"


def _seconds(extra: Mapping[str, Any], name: str, wrong: dict[str, str]) -> float | None:
    value = extra.get(name)
    if value is None:
        return None
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        wrong[name] = f"must be a finite number of seconds above 0, got {_shown(value)}"
        return None
    return seconds


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
