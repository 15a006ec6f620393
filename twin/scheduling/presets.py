"""Whole policies by name."""

from collections.abc import Mapping
from typing import Any

from twin.scheduling.config import ANY_TIER, PolicyConfig, TierConfig

# Batch sizes, tokens and waits of the three tiers and the four length groups are those of the article "Performance
# optimisation of cloud-native AI inference: from GPU utilisation to request scheduling" (in Chinese, 2026); ageing and
# due times are ours.
_LENGTH_GROUPS = ((256, 16), (1024, 8), (4096, 4), (8192, 2))

PRESETS: dict[str, PolicyConfig] = {
    "fcfs": PolicyConfig(tiers=(TierConfig(name=ANY_TIER),)),
    "priority": PolicyConfig(
        tiers=(
            TierConfig(name="ONLINE", preemptible=False),
            TierConfig(name="BATCH", promote_after=300.0),
            TierConfig(name="OFFLINE", promote_after=600.0),
        ),
        default_tier="ONLINE",
    ),
    "tiered": PolicyConfig(
        tiers=(
            TierConfig(
                name="ONLINE",
                batch_size=8,
                batch_tokens=4096,
                max_wait=0.010,
                adaptive="pressure",
                preemptible=False,
            ),
            TierConfig(
                name="BATCH",
                batch_size=32,
                batch_tokens=16384,
                max_wait=0.050,
                promote_after=300.0,
            ),
            TierConfig(
                name="OFFLINE",
                batch_size=64,
                batch_tokens=32768,
                max_wait=0.200,
                promote_after=600.0,
            ),
        ),
        default_tier="ONLINE",
    ),
    "tiered_length": PolicyConfig(
        tiers=(
            TierConfig(
                name="ONLINE",
                order="length",
                groups=_LENGTH_GROUPS,
                max_wait=0.010,
                adaptive="pressure",
                preemptible=False,
            ),
            TierConfig(
                name="BATCH",
                order="length",
                groups=_LENGTH_GROUPS,
                max_wait=0.050,
                promote_after=300.0,
                victims="largest",
            ),
            TierConfig(
                name="OFFLINE",
                order="length",
                groups=_LENGTH_GROUPS,
                max_wait=0.200,
                promote_after=600.0,
                victims="largest",
            ),
        ),
        default_tier="ONLINE",
    ),
    "slo": PolicyConfig(
        tiers=(
            TierConfig(name="ONLINE", order="edf", ttft_target=1.0, preemptible=False),
            TierConfig(name="BATCH", order="edf", ttft_target=30.0, rank=1, promote_after=300.0),
            TierConfig(name="OFFLINE", order="edf", ttft_target=300.0, rank=1, promote_after=600.0),
        ),
        default_tier="ONLINE",
    ),
    "fair": PolicyConfig(tiers=(TierConfig(name=ANY_TIER, order="fair"),)),
}


def policy_config(spec: str | Mapping[str, Any]) -> PolicyConfig:
    """The policy a scenario names (a preset) or spells out (plain data, see `PolicyConfig.from_dict`).

    `preset: NAME` beside other keys starts from that preset; `tiers` may then map tier names to what differs. Raises
    ValueError naming the field, the value and what is allowed.
    """
    if isinstance(spec, str):
        return _preset(spec)
    if not isinstance(spec, Mapping):
        raise ValueError(f"policy: must be the name of a preset or a mapping, got {spec!r}")
    values = dict(spec)
    if "preset" not in values:
        return PolicyConfig.from_dict(values)
    name = values.pop("preset")
    base = _preset(name).to_dict()
    changes = values.get("tiers")
    if isinstance(changes, Mapping):
        names = [tier["name"] for tier in base["tiers"]]
        for tier in changes:
            if tier not in names:
                raise ValueError(
                    f"policy: preset {name!r} has no tier {tier!r}, only {', '.join(names)}"
                )
            if not isinstance(changes[tier], Mapping | None):
                raise ValueError(
                    f"policy: tiers.{tier} must be a mapping of what differs, got {changes[tier]!r}"
                )
        values["tiers"] = [{**t, **(changes.get(t["name"]) or {})} for t in base["tiers"]]
    return PolicyConfig.from_dict({**base, **values})


def _preset(name: Any) -> PolicyConfig:
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"policy: {name!r} is not one of the presets {', '.join(PRESETS)}")
    return PRESETS[name]
