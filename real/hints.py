"""What does a request say of itself? Its tier, tenant and deadlines, as the scheduler and the API server read them.

The carriers are `vllm_xargs` of the request, headers that real.middleware adds to it, and vLLM's own `priority`. Beside
that, this module reads what `--additional-config` says of all of it.
"""

import math
import re
from collections.abc import Iterable, Mapping
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
PRIORITY = "priority"
"""Key of vllm_xargs that real.middleware uses for a priority which vLLM could not hand on."""
LONGEST_NAME = 200
"""Characters of a tier or tenant."""
HEADERS = {"x-tier": "tier", "x-tenant": "tenant", "x-ttft-s": "ttft_s", "x-total-s": "total_s"}
"""Header -> field of vllm_xargs, where the settings name none."""
SETTINGS = {"policy", "policy_name", "bad_hints", "headers", "record"}
"""Keys of our part of additional_config; `record` is real.record's."""
BAD_HINTS = ("default", "reject")
"""What becomes of a hint that makes no sense: the default, or an answer of 400."""


def _letters(name: str) -> str:
    return "".join(sorted(letter for letter in name.lower() if letter.isalpha()))


_BEYOND_64_BITS = 2**63
_MEANT = {_letters(name): field for field in FIELDS for name in (field, field.removesuffix("_s"))}


@dataclass(frozen=True, slots=True)
class Hints:
    """What was asked for, with the default for what was not, or makes no sense."""

    tier: str
    tenant: str
    ttft_s: float | None
    """Seconds from arrival to the first token; None = no limit."""
    total_s: float | None
    """Seconds from arrival to the last token; None = no limit."""


def read_settings(additional_config: Any) -> dict[str, Any]:
    """Our part of vLLM's additional_config, empty where there is none.

    Raises ValueError naming the key that makes no sense; the policy itself is checked by `policy_config`.
    """
    config = additional_config if isinstance(additional_config, Mapping) else {}
    settings = config.get(CONFIG_KEY, {})
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"additional_config.{CONFIG_KEY} must be an object with some of {_listed(SETTINGS)}, got {_shown(settings)}"
        )
    for key in settings:
        if key not in SETTINGS:
            raise ValueError(
                f"additional_config.{CONFIG_KEY}.{key} is not known; known are {_listed(SETTINGS)}"
            )
    if settings.get("bad_hints", BAD_HINTS[0]) not in BAD_HINTS:
        raise ValueError(
            f"additional_config.{CONFIG_KEY}.bad_hints must be one of {', '.join(BAD_HINTS)}, "
            f"got {_shown(settings['bad_hints'])}"
        )
    headers = settings.get("headers", HEADERS)
    if not isinstance(headers, Mapping):
        raise ValueError(
            f"additional_config.{CONFIG_KEY}.headers must map names of headers to fields, got {_shown(headers)}"
        )
    try:
        check_headers(headers.items())
    except ValueError as error:
        raise ValueError(f"additional_config.{CONFIG_KEY}.headers: {error}") from None
    return dict(settings)


def check_headers(pairs: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError for a name that no header can have, one named twice, and a field that no hint has."""
    seen: set[str] = set()
    for name, field in pairs:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError(
                f"{name!r} cannot be the name of a header; take letters, digits and hyphens"
            )
        if field not in FIELDS:
            raise ValueError(f"header {name}: {field!r} is none of {', '.join(FIELDS)}")
        if name.lower() in seen:
            raise ValueError(f"header {name} is there twice; name each header once")
        seen.add(name.lower())


def read_hints(
    extra: Mapping[str, Any], priority: Any, config: PolicyConfig
) -> tuple[Hints, dict[str, str]]:
    """The hints in `extra` (vllm_xargs) and `priority`, and by field what is wrong with them.

    A tier that is named wins over the priority; priorities 1, 2, ... mean the second, third, ... tier of the policy, or
    the last, below 0 the first. Priority 0, vLLM's default, says nothing.
    """
    wrong: dict[str, str] = {}
    number = _priority(extra.get(PRIORITY, priority), wrong)
    hints = Hints(
        _tier(extra.get("tier"), number, config, wrong),
        _tenant(extra.get("tenant"), wrong),
        _seconds(extra, "ttft_s", wrong),
        _seconds(extra, "total_s", wrong),
    )
    for key in extra:
        field = None if key in FIELDS else _MEANT.get(_letters(key))
        if field is not None and field not in extra:
            wrong[field] = f"must be spelt so, got {_shown(key)}"
    return hints, wrong


def carried(value: Any) -> Any:
    """A hint as vLLM's processes can hand it to each other; what makes no sense becomes "", which makes none either.

    JSON and headers hold what their messages cannot: null, objects, halves of surrogate pairs.
    """
    if isinstance(value, str):
        return value if _is_text(value) and len(value) <= LONGEST_NAME else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return value if abs(value) < _BEYOND_64_BITS else ""


def default_tier(config: PolicyConfig) -> str:
    """The tier of a request that names none."""
    names = [tier.name for tier in config.tiers]
    return "ONLINE" if names == [ANY_TIER] else config.default_tier or names[0]


def _priority(asked: Any, wrong: dict[str, str]) -> int:
    number = asked
    if isinstance(asked, str):
        try:
            number = int(asked)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int) or abs(number) >= _BEYOND_64_BITS:
        wrong[PRIORITY] = f"must be a whole number of at most 64 bits, got {_shown(asked)}"
        return 0
    return number


def _tier(asked: Any, priority: int, config: PolicyConfig, wrong: dict[str, str]) -> str:
    names = [tier.name for tier in config.tiers]
    takes_any = names == [ANY_TIER]
    if asked is None:
        if priority == 0 or takes_any:
            return default_tier(config)
        return names[min(max(priority, 0), len(names) - 1)]
    if isinstance(asked, str) and (_is_name(asked) if takes_any else asked in names):
        return asked
    known = f"a name of 1 to {LONGEST_NAME} characters" if takes_any else ", ".join(names)
    wrong["tier"] = f"must be {known}, got {_shown(asked)}"
    return default_tier(config)


def _tenant(asked: Any, wrong: dict[str, str]) -> str:
    if asked is None:
        return "default"
    if isinstance(asked, str | int | float) and not isinstance(asked, bool):
        if _is_name(str(asked)):
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


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and _is_text(text)


def _is_text(text: str) -> bool:
    """Whether it is Unicode: JSON can hold half a character, one of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
