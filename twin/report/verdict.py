"""What bound a run, in one plain sentence."""

from collections.abc import Mapping
from typing import Any

from twin.report.texts import count, share

WORTH_TELLING = 0.05
"""A limit that acted during a smaller share of the time is not called the one that bound the run."""


def verdict(limits: Mapping[str, float], engine: Mapping[str, Any]) -> str:
    """The sentence, from shares of time by limit and the limits of the engine. docs/metrics.md defines the shares."""
    if not limits:
        return "Nothing was simulated: the run has no time."
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
        held = ", or was held by the policy for a moment" if told else ""
        if limits["idle"] > limits["compute"]:
            return (
                f"Nothing bound the run: the GPUs had no work in {share(limits['idle'])} of the time, and hardly "
                f"anybody waited{held}. Latency is the time of the steps."
            )
        return (
            f"Compute bound the run: hardly anybody waited for a slot, for tokens or for KV blocks{held}. Latency is "
            f"the time of the steps, which ran in {share(1 - limits['idle'])} of the time."
        )
    first, *others = told
    text = f"{named[first]} bound the run: in {share(limits[first])} of the time {waited[first]}."
    if others:
        also = ", ".join(f"{named[name].lower()} in {share(limits[name])}" for name in others)
        text += f" Also {also}."
    return text
