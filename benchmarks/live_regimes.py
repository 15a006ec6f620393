"""A live server at several loads beside the twin: how far off is it, and how far are runs from one another?

    python -m benchmarks.live_regimes --url URL --out DIR calibrate      about two minutes each; a step-time profile
    python -m benchmarks.live_regimes --url URL --out DIR closed         closed-loop saturation: the capacity
    python -m benchmarks.live_regimes --url URL --out DIR open           30, 60 and 85 % of it, in turn
    python -m benchmarks.live_regimes --out DIR report                   the twin beside all of it

The server is `twin-real serve examples/compare-demo.yaml --tiny`, or one like it. A part that is repeated adds runs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

SCENARIO = "examples/compare-demo.yaml"
SHARES = (0.3, 0.6, 0.85)
USERS = 24
REQUESTS = {"closed": 200, 0.3: 60, 0.6: 100, 0.85: 140}


def real(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "real", *arguments], capture_output=True, text=True
    )
    sys.stderr.write(done.stderr)
    print(done.stdout, flush=True)
    assert done.returncode == 0


def replayed(url: str, out: Path, name: str, seed: int, *changes: str) -> None:
    folder = out / f"{name}-{seed}"
    options = [item for change in changes for item in ("--set", change)]
    real(
        "replay", SCENARIO, "--tiny", "--model", "tiny", "--url", url, "--out", str(folder), "--force",
        "--seed", str(seed), "--content-seed", str(1000 * seed + sum(map(ord, name))), *options,
    )  # fmt: skip


def capacity(out: Path) -> float:
    rates = []
    for folder in sorted(out.glob("closed-*")):
        summary = json.loads((folder / "summary.json").read_text())
        rates.append(summary["throughput"]["requests_per_s"])
    return sum(rates) / len(rates)


def free_seed(out: Path, name: str) -> int:
    return 1 + len(list(out.glob(f"{name}-*")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["calibrate", "closed", "open", "report"])
    parser.add_argument("--url")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", default="1.5")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    steps = args.out / "steps.json"
    if args.part == "calibrate":
        real(
            "calibrate", SCENARIO, "--tiny", "--model", "tiny", "--url", args.url, "--out", str(steps),
            "--minutes", args.minutes, "--late", "0.05", "--load", "1.0",
        )  # fmt: skip
    elif args.part == "closed":
        for _ in range(args.runs):
            users = f"traffic.0.arrivals={{process: closed, users: {USERS}}}"
            requests = f"traffic.0.requests={REQUESTS['closed']}"
            replayed(args.url, args.out, "closed", free_seed(args.out, "closed"), users, requests)
    elif args.part == "open":
        most = capacity(args.out)
        for _ in range(args.runs):
            for share in SHARES:
                rate = f"traffic.0.arrivals.rate={share * most:.3f}"
                requests = f"traffic.0.requests={REQUESTS[share]}"
                name = f"open{round(100 * share)}"
                replayed(args.url, args.out, name, free_seed(args.out, name), rate, requests)
    else:
        for name in ["closed", *(f"open{round(100 * share)}" for share in SHARES)]:
            folders = [str(folder) for folder in sorted(args.out.glob(f"{name}-*"))]
            if not folders:
                continue
            facts = json.loads((Path(folders[0]) / "replay.json").read_text())
            written = args.out / f"{name}.yaml"
            written.write_text(json.dumps(facts["scenario"]))
            print(f"--- {name}")
            options = [
                "--tiny",
                "--step-time",
                str(steps),
                "--out",
                str(args.out / f"{name}-compared"),
            ]
            real("compare", str(written), *folders, *options)


if __name__ == "__main__":
    main()
