"""Change one parameter, run, look at throughput and latency, adopt or not: five changes, into docs/what-if.md.

python -m benchmarks.what_if_pipeline [--write] [--seeds 10] [--jobs 2]
"""

import argparse
import time
from typing import Any, NamedTuple

from benchmarks.speed_measure import ROOT
from benchmarks.speed_page import machine, write_section
from twin.scenario import load_scenario
from twin.whatif.compare import Variant, compare
from twin.whatif.runs import Backend
from twin.whatif.tables import difference_of
from twin.whatif.verdict import change_text, value_text
from twin.whatif.waits import wait_overrides

PAGE = ROOT / "docs" / "what-if.md"
CHAT, TALK = "examples/chat-8b.yaml", "examples/multi-turn.yaml"
LESS = ("traffic.0.requests=1500",)
"""Runs of half a minute of traffic, so that ten seeds take seconds."""


class Step(NamedTuple):
    """One change."""

    title: str
    scenario: str
    common: tuple[str, ...]
    """What both sides have."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    """Changes on top of `common`; () with a tier in `waits` = a batching wait."""
    note: str


STEPS = (
    Step(
        "max_num_seqs 32 to 64",
        CHAT,
        (*LESS, "traffic.0.arrivals.rate=32"),
        ("engine.max_num_seqs=32",),
        ("engine.max_num_seqs=64",),
        "Two H100 at 32 requests/s: 32 slots each are too few, so that requests wait for a slot.",
    ),
    Step(
        "Prefix caching on",
        TALK,
        ("traffic.0.requests=1000",),
        ("engine.enable_prefix_caching=false",),
        ("engine.enable_prefix_caching=true",),
        "Conversations of five turns that share a system prompt of 2,500 tokens.",
    ),
    Step(
        "Batching wait 0 to 50 ms",
        CHAT,
        (*LESS, "traffic.0.arrivals.rate=30"),
        ("wait ONLINE 0",),
        ("wait ONLINE 0.05",),
        "The wait of tier ONLINE under policy tiered, at 30 requests/s, below saturation.",
    ),
    Step(
        "Weights in INT8",
        CHAT,
        (*LESS, "hardware.gpu=A100", "hardware.step_time=roofline", "traffic.0.arrivals.rate=12"),
        ("hardware.dtype=bfloat16",),
        ("hardware.dtype=int8",),
        "Two A100 at 12 requests/s; step times by roofline, which nobody has validated. INT8 costs quality, which is "
        "not simulated.",
    ),
    Step(
        "tiered instead of stock",
        CHAT,
        LESS,
        ("policy=vllm-fcfs",),
        ("policy=tiered",),
        "Two H100 at 48 requests/s, where they are just short.",
    ),
)


def _scenario(step: Step, changes: tuple[str, ...]) -> Any:
    loaded = load_scenario(ROOT / step.scenario, step.common)
    if changes[0].startswith("wait "):
        _, tier, wait_s = changes[0].split()
        changes = tuple(wait_overrides(loaded, tier, float(wait_s)))
    return load_scenario(ROOT / step.scenario, [*step.common, *changes])


def evaluate(step: Step, seeds: int, jobs: int) -> str:
    """The step as a part of the page."""
    variants = [
        Variant("before", _scenario(step, step.before)), Variant(step.title, _scenario(step, step.after)),
    ]  # fmt: skip
    figures = ("requests_per_s", "output_tokens_per_s")
    found = compare(variants, seeds, Backend(jobs), figures=figures)
    (variant,) = found["variants"]
    lines = [
        f"### {step.title}",
        "",
        step.note,
        "",
        "| figure | before | after | difference | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in variant["judged"]:
        if "change" not in row:
            continue
        difference = difference_of(row)
        same = difference.change == difference.low == difference.high == 0
        cells = (
            row["label"],
            value_text(row["before"], row["unit"]),
            value_text(row["after"], row["unit"]),
            "equal" if same else change_text(difference, row["unit"]),
            {"open": "within the noise"}.get(row["verdict"], row["verdict"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"**{variant['text']}**"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    head, start, parts = machine(), time.perf_counter(), []
    for step in STEPS:
        parts.append(evaluate(step, options.seeds, options.jobs))
        print(parts[-1] + "\n", flush=True)
    told = f"{head}; {options.seeds} seeds, {time.perf_counter() - start:.0f} s in all; `make what-if-page`."
    if options.write:
        write_section("pipeline", "\n\n".join([told, *parts]), PAGE)


if __name__ == "__main__":
    main()
