"""What bound a run, in one plain sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

from twin.report.texts import count, share

WORTH_TELLING = 0.05
"""A limit that acted during a smaller share of the time is not called the one that bound the run."""


def verdict(
    limits: Mapping[str, float],
    engine: Mapping[str, Any],
    used: float | None = None,
    missed: Sequence[str] = (),
    outside: str | None = None,
) -> str:
    """The sentence, from shares of time by limit and the limits of the engine. docs/metrics.md defines the shares.

    `used` is what the run took of the most that its replicas can take, `missed` names the objectives that were not met.
    `outside` is what bound the run before its requests came to an engine, or took them away (twin.report.outside).
    """
    if not limits and outside:
        return outside
    if not limits:
        return "There is no time in the run at which a replica was there, so that nothing bound it."
    slots = count(engine["max_num_seqs"])
    tokens = count(engine["max_num_batched_tokens"])
    waited = {
        "slots": f"requests waited because all {slots} slots (max_num_seqs) of their replica were taken",
        "tokens": f"steps were full: {tokens} tokens (max_num_batched_tokens)",
        "kv": "requests waited, or lost their place, because KV blocks had run out",
        "policy": "nobody waited but those whom the policy held for a batch or stopped at a cap",
    }
    named = {
        "slots": "Slots",
        "tokens": "Tokens per step",
        "kv": "KV blocks",
        "policy": "The policy",
    }
    found = sorted(waited, key=lambda name: -limits[name])
    told = [name for name in found if limits[name] >= WORTH_TELLING]
    if not told or (told == ["policy"] and limits["compute"] + limits["idle"] >= limits["policy"]):
        if outside:
            return f"{outside} Steps ran in {share(1 - limits['idle'])} of the replicas' time."
        held = ", or was held by the policy for a moment" if told else ""
        room = (
            "" if used is None else f" The run used {_about(used)} of the most its replicas take."
        )
        if limits["idle"] > limits["compute"]:
            text = (
                f"Nothing bound the run: the GPUs had no work in {share(limits['idle'])} of the time, and hardly "
                f"anybody waited{held}."
            )
        elif missed:
            text = f"Steps were too slow: hardly anybody waited for a slot, for tokens or for KV blocks{held}."
        else:
            text = (
                "Nothing kept requests waiting: hardly anybody waited for a slot, for tokens or for KV blocks"
                f"{held}."
            )
        text += (
            f"{room} Latency is the time of the steps; at least one ran in {share(1 - limits['idle'])} of the time "
            "(busy)"
        )
        if missed:
            text += f", and they took too long for {_listed(missed)}"
        return text + "."
    first, *others = told
    head = named[first]
    if outside:
        name = head if first == "kv" else head.lower()
        head = f"{outside} Within the replicas: {name}"
    text = f"{head} bound the run: in {share(limits[first])} of the time {waited[first]}."
    if others:
        also = ", ".join(f"{named[name].lower()} in {share(limits[name])}" for name in others)
        text += f" Also {also}."
    return text


def _about(used: float) -> str:
    return "less than 1 %" if used < 0.01 else f"about {100 * used:.0f} %"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
