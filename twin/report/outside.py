"""What bound a run outside of its engines: limits of the gateway, missing pods, what broke."""

from collections.abc import Sequence

from twin.clock import to_seconds
from twin.cluster.faults import ClusterFault
from twin.metrics.tally import Tally
from twin.report.stress import MEANINGS, limits_of
from twin.report.texts import count, limit, plural, share
from twin.report.verdict import WORTH_TELLING
from twin.simulation import Result

NOT_THE_CLUSTER = ("too_long", "client_disconnect")
"""Reasons for which neither the gateway nor a pod is to blame."""

REASONS_NAMED = 3
"""Reasons, and faults, told one by one at most."""


def outside(result: Result, tally: Tally, missed: bool) -> str | None:
    """Sentences on what kept requests from the replicas or took them away; None where that was little.

    `missed` says whether an objective was not met.
    """
    told = []
    waits, spent_ps = result.gateway_waits, result.simulated_ps
    offered = tally.requests
    limits = limits_of(result.scenario.cluster.admission)
    if limits and spent_ps and waits.limited_ps >= WORTH_TELLING * spent_ps:
        told.append(
            f"The gateway's limits ({', '.join(limits)}) bound the run: in {share(waits.limited_ps / spent_ps)} of "
            "the time requests waited there although a pod was Ready."
        )
    if spent_ps and waits.without_pod_ps >= WORTH_TELLING * spent_ps:
        told.append(
            f"In {share(waits.without_pod_ps / spent_ps)} of the time requests waited at the gateway because no pod "
            "was Ready."
        )
    if told and waits.unfinished:
        told[-1] = f"{told[-1][:-1]}; {_of(waits.unfinished, offered)} were there at the end."
    lost = {
        (outcome, reason): number
        for (outcome, reason), number in tally.ends.items()
        if outcome in ("refused", "aborted") and reason not in NOT_THE_CLUSTER
    }
    number = sum(lost.values())
    if offered and number >= WORTH_TELLING * offered:
        told.append(_losses(lost, number, offered))
    unfinished = sum(tier.ended["unfinished"] for tier in tally.tiers.values())
    timed_out = sum(tier.ended["timed_out"] for tier in tally.tiers.values())
    harmed = number + unfinished + timed_out
    if missed or (offered and harmed >= WORTH_TELLING * offered):
        faults = _struck(result)
        if faults:
            more = len(faults) - REASONS_NAMED
            named = "; ".join(faults[:REASONS_NAMED])
            told.append(f"Faults had struck: {named}{f'; and {more} more' if more > 0 else ''}.")
            if unfinished and not waits.unfinished:
                told[-1] = f"{told[-1][:-1]}; {_of(unfinished, offered)} were unfinished."
    return " ".join(told) or None


def _losses(lost: dict[tuple[str, str], int], number: int, offered: int) -> str:
    outcomes = " or ".join(o for o in ("refused", "aborted") if any(of == o for of, _ in lost))
    found = sorted(lost.items(), key=lambda entry: (-entry[1], entry[0]))
    reasons = ", ".join(
        f"{reason} {count(n)} ({MEANINGS.get(reason, reason)})"
        for (_, reason), n in found[:REASONS_NAMED]
    )
    more = len(found) - REASONS_NAMED
    return f"{_of(number, offered)} were {outcomes}: {reasons}{f', and {more} more reasons' if more > 0 else ''}."


def _of(number: int, offered: int) -> str:
    return f"{count(number)} of {plural(offered, 'request')}"


def _struck(result: Result) -> list[str]:
    """Faults that struck a pod, in the order of time."""
    if result.fleet is None or result.scenario.cluster.fleet is None:
        return []
    plan: Sequence[ClusterFault] = result.scenario.cluster.fleet.faults
    told = []
    for strike in result.fleet.log.strikes:
        if strike.pods:
            fault = plan[strike.fault]
            whom = (
                f"{'pod' if len(strike.pods) == 1 else 'pods'} {', '.join(map(str, strike.pods))}"
            )
            told.append(f"{fault.kind} at {limit(to_seconds(fault.at_ps))} ({whom})")
    return told
