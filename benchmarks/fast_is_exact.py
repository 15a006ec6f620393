"""Whether the fast engine gives the bytes of the stepped one on whole scenarios, for instance real traces.

    python benchmarks/fast_is_exact.py examples/azure-2023.yaml --set traffic.0.trace=conv.csv --policies tiered,slo

Each policy is run in both modes; records, engine counters, policy statistics, series and events must be equal. Prints
one line for each, with the time both took; exits with 1 if anything differs.
"""

import argparse
import sys
import time
from dataclasses import asdict

from twin.metrics.records import RequestRecord
from twin.simulation import Result, load_scenario, simulate

POLICIES = "vllm-fcfs,vllm-priority,fcfs,priority,tiered,tiered_length,slo,fair"


def first_difference(stepped: Result, fast: Result) -> str | None:
    """What differs, None if nothing does."""
    for one, other in zip(stepped.records, fast.records, strict=True):
        if plain(one) != plain(other):
            return f"request {one.index}"
    for what in ("engines", "policies", "places", "simulated_ps", "inflight_request_ps", "log"):
        if getattr(stepped, what) != getattr(fast, what):
            return what
    if stepped.series != fast.series:
        return "time series"
    return None


def plain(record: RequestRecord) -> dict[str, object]:
    return asdict(record) | {"itl_ps": list(record.itl_ps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--policies", default=POLICIES)
    arguments = parser.parse_args()
    differs = False
    for policy in arguments.policies.split(","):
        results, seconds = [], []
        for mode in ("stepped", "fast"):
            sets = [*arguments.sets, f"policy={policy}", f"run.engine_mode={mode}"]
            scenario = load_scenario(arguments.scenario, sets)
            start = time.process_time()
            results.append(simulate(scenario, observe=True))
            seconds.append(time.process_time() - start)
        difference = first_difference(*results)
        differs |= difference is not None
        print(
            f"{policy}: {len(results[0].records)} requests, {sum(e.steps for e in results[0].engines)} steps: "
            f"{'equal' if difference is None else 'DIFFERS in ' + difference}; "
            f"stepped {seconds[0]:.1f} s, fast {seconds[1]:.1f} s",
            flush=True,
        )
    sys.exit(differs)


if __name__ == "__main__":
    main()
