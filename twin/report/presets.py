"""The policy presets for people and for programs."""

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from twin.report.tables import table, to_text
from twin.report.texts import count, limit
from twin.scheduling import PRESETS, PolicyConfig, fingerprint


def presets_as_data() -> dict[str, Any]:
    """Name -> configuration, as a scenario could spell it out under `policy:`."""
    return {name: config.to_dict() for name, config in PRESETS.items()}


def render_presets(color: bool = False) -> str:
    """All presets as text, one table each."""
    blocks: list[list[RenderableType]] = [_preset(name, config) for name, config in PRESETS.items()]
    blocks.append(
        [
            Text(
                "batch, tokens: how much a hold releases together, by length group where there are "
                "several (16 < 256: 16 requests of fewer than 256 tokens). gives way: which one is "
                "preempted when a higher tier needs its place (never: only when KV blocks run out). "
                "promoted: after how long a waiting one moves up."
            ),
            Text("vllm-fcfs and vllm-priority are vLLM's own two policies, without any of this."),
        ]
    )
    return "\n".join(to_text(block, color) for block in blocks)


def _preset(name: str, config: PolicyConfig) -> list[RenderableType]:
    made = table(
        "tier", "order", "batch", "tokens", "held up to", "adaptive", "gives way", "promoted"
    )
    for tier in config.tiers:
        groups = [f"{jobs} < {tokens}" for tokens, jobs in tier.groups]
        batch = "\n".join(groups) or (count(tier.batch_size) if tier.holds else "-")
        made.add_row(
            "all" if tier.name == "*" else tier.name,
            tier.order if tier.ttft_target is None else f"{tier.order} {limit(tier.ttft_target)}",
            batch,
            "-" if tier.batch_tokens is None else count(tier.batch_tokens),
            "-" if tier.max_wait is None else limit(tier.max_wait),
            "-" if tier.adaptive == "none" else tier.adaptive,
            tier.victims if tier.preemptible else "never",
            "-" if tier.promote_after is None else f"each {limit(tier.promote_after)}",
        )
    return [Text.assemble((name, "bold"), f" ({fingerprint(config)})"), made]
