"""The same traffic, more of it: every stream's load times a factor."""

from collections.abc import Callable, Mapping
from typing import Any

from twin.errors import InputError
from twin.scenario_yaml import plain_copy


def scaled(
    document: Mapping[str, Any], factor: float, rate_of: Callable[[str], float | None]
) -> dict[str, Any]:
    """The document of a scenario with `factor` times the traffic.

    Rates and bursts are multiplied, batches and users too (rounded, at least one), traces are played faster; `requests`
    grows with them, so that a run lasts as long as before (a trace has no more requests than it has, so it is over
    sooner). `rate_of` tells the rate of a traffic preset. Raises InputError for a preset without one.
    """
    copy: dict[str, Any] = plain_copy(document)
    for number, stream in enumerate(copy["traffic"]):
        if stream.get("trace") is not None:
            stream["speedup"] = stream.get("speedup", 1.0) * factor
            continue
        if stream.get("preset") is not None:
            rate = stream.get("rate") or rate_of(stream["preset"])
            if rate is None:
                raise InputError(
                    f"traffic.{number}: preset {stream['preset']} has no rate of its own; give rate, to have it scaled"
                )
            stream["rate"] = rate * factor
        else:
            _scale_arrivals(stream["arrivals"], factor)
        if stream.get("requests") is not None:
            stream["requests"] = max(1, round(stream["requests"] * factor))
    return copy


def _scale_arrivals(arrivals: dict[str, Any], factor: float) -> None:
    match arrivals["process"]:
        case "closed":
            arrivals["users"] = max(1, round(arrivals["users"] * factor))
        case "batch":
            arrivals["size"] = max(1, round(arrivals["size"] * factor))
        case "bursts":
            arrivals["rate"] *= factor
            arrivals["burst_rate"] *= factor
        case _:
            arrivals["rate"] = _curve(arrivals["rate"], factor)


def _curve(rate: Any, factor: float) -> Any:
    """A rate, or a curve of rates, times the factor."""
    if not isinstance(rate, Mapping):
        return rate * factor
    if "sine" in rate:
        return {"sine": {**rate["sine"], "mean": rate["sine"]["mean"] * factor}}
    return {
        key: [[at, per_second * factor] for at, per_second in value]
        if isinstance(value, list)
        else value
        for key, value in rate.items()
    }
