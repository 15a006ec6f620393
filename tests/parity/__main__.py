"""`python -m tests.parity --workloads 8000 --seed 0`: a long campaign, half as many workloads under the shared policy.

Prints what happened how often; exits 1 if anything differed or something that must happen never did.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context

from real.vllm_names import check_version

CHUNK = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--workloads", type=int, default=300, help="workloads on stock vLLM")
    parser.add_argument(
        "--policy", type=int, help="workloads under the policy, all presets together"
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()

    try:
        check_version()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    from tests.parity import campaign

    policy = args.workloads // 2 if args.policy is None else args.policy
    presets = campaign.kinds()[1:]
    wanted = {campaign.STOCK: args.workloads, **dict.fromkeys(presets, -(-policy // len(presets)))}
    outcomes = {kind: campaign.Outcome(kind) for kind in wanted}
    started = time.monotonic()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(campaign.run, kind, range(first, min(first + CHUNK, args.seed + number)))
            for kind, number in wanted.items()
            for first in range(args.seed, args.seed + number, CHUNK)
        ]
        for done, future in enumerate(as_completed(futures), 1):
            outcome = future.result()
            outcomes[outcome.kind].add(outcome)
            print(
                f"\r{done}/{len(futures)} chunks, {time.monotonic() - started:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    return report(outcomes)


def report(outcomes: dict) -> int:
    """Print the table; the exit status."""
    events = sorted(
        {event for o in outcomes.values() for event in o.counts} - {"steps", "requests"}
    )
    failed = False
    for kind, o in outcomes.items():
        print(
            f"\n{kind}: {o.workloads} workloads, {o.counts['requests']} requests, "
            f"{o.counts['steps']} steps, {len(o.differences)} differences"
        )
        for event in events:
            if o.counts[event] or event in o.missing():
                print(f"  {event:<32}{o.counts[event]:>12,}")
        for difference in o.differences[:3]:
            print(f"  DIFFERENCE {difference}")
        if o.missing():
            print(f"  NEVER HAPPENED: {', '.join(o.missing())}")
        failed |= bool(o.differences or o.missing() or o.counts["fall-backs"])
    total = sum(o.counts["steps"] for o in outcomes.values())
    number = sum(o.workloads for o in outcomes.values())
    differences = sum(len(o.differences) for o in outcomes.values())
    fallbacks = sum(o.counts["fall-backs"] for o in outcomes.values())
    version = import_module("vllm").__version__
    print(
        f"\nvLLM {version}: {number} workloads, {total} steps, {differences} differences, "
        f"{fallbacks} fall-backs"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
