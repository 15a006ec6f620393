"""Does a request cost the same in a long run, and with many replicas? How much memory does it take?

    python -m benchmarks.speed_scale [--parts requests replicas week] [--requests 1000000] [--replicas 1 16]
                                     [--days 7] [--write]

The load of a replica stays 6 requests a second (W1). Every run is a process of its own. The week is a day's curve
around 20 requests a second on four replicas, without records. `--write` puts the tables that were measured into
docs/performance.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.speed_measure import measure
from benchmarks.speed_page import machine, write_section
from benchmarks.speed_workloads import poisson, scenario

PARTS = ("requests", "replicas", "week")
DAY_S = 86_400.0


def _megabytes(amount: float | None) -> str:
    return "?" if amount is None else f"{amount:.0f}"


def _row(cache: str, policy: str, requests: int, replicas: int, records: bool) -> str:
    document = poisson(requests, replicas, run={"records": records}) | {"policy": policy}
    found = measure(cache, "once", document)
    us = 1e6 * found["cpu_s"] / found["requests"]
    print(f"{requests:,} x {replicas}, records {records}: {us:.1f} us", file=sys.stderr, flush=True)
    return (
        f"| {requests:,} | {replicas} | {'kept' if records else 'not kept'} | {us:.1f} | {found['wall_s']:.1f} "
        f"| {_megabytes(found['peak_mb'])} |"
    )


def _table(rows: list[str]) -> str:
    head = [
        "| Requests | Replicas | Records | CPU time a request, us | wall, s | peak memory, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def by_requests(cache: str, policy: str, most: int, fleets: Sequence[int]) -> str:
    """From 10,000 requests to `most`, on so many replicas."""
    sizes = [n for n in (10_000, 100_000, 1_000_000) if n < most] + [most]
    return _table(
        [
            _row(cache, policy, requests, replicas, records)
            for replicas in fleets
            for requests in sizes
            for records in (True, False)
        ]
    )


def by_replicas(cache: str, policy: str, most: int) -> str:
    """From 1 replica to 64, with a tenth of `most` requests in all."""
    return _table([_row(cache, policy, most // 10, n, True) for n in (1, 4, 16, 64)])


def week(days: float) -> dict[str, Any]:
    """The scenario of the week, or of its first `days`."""
    traffic = {
        "arrivals": {"process": "poisson", "rate": {"sine": {"mean": 20, "amplitude": 0.6}}},
        "prompt_tokens": {"fixed": 512},
        "output_tokens": {"fixed": 128},
        "duration": days * DAY_S,
    }
    return scenario(traffic, replicas=4, run={"until": days * DAY_S, "records": False})


def by_time(cache: str, policy: str, days: float) -> str:
    """Memory after a tenth of the time and at its end."""
    found = measure(cache, "watch", week(days) | {"policy": policy})
    us = 1e6 * found["cpu_s"] / found["requests"]
    return (
        f"{days:g} days of the week, {found['requests']:,} requests: {found['wall_s']:.0f} s of wall time, "
        f"{us:.1f} us of CPU time a request; {_megabytes(found['tenth_mb'])} MB resident after a tenth of them, "
        f"{_megabytes(found['end_mb'])} MB at the end, peak {_megabytes(found['peak_mb'])} MB."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the longest run")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=(1, 16), help="of the runs of growing length"
    )
    parser.add_argument("--days", type=float, default=7, help="of the week")
    parser.add_argument("--policy", default="tiered")
    parser.add_argument("--write", action="store_true", help="put tables into docs/performance.md")
    options = parser.parse_args()
    doers = {
        "requests": lambda cache: by_requests(
            cache, options.policy, options.requests, options.replicas
        ),
        "replicas": lambda cache: by_replicas(cache, options.policy, options.requests),
        "week": lambda cache: by_time(cache, options.policy, options.days),
    }
    with tempfile.TemporaryDirectory() as cache:
        for part in options.parts:
            where = f"{machine()}; policy {options.policy}; `make bench-scale`."
            text = f"{where}\n\n{doers[part](cache)}"
            print(f"\n## {part}\n\n{text}", flush=True)
            if options.write:
                write_section(f"scale by {part}", text)


if __name__ == "__main__":
    main()
