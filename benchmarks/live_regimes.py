"""A live server at several loads beside the twin: how far off is it, and how far are runs from one another?

    python -m benchmarks.live_regimes --url URL --out DIR calibrate      about two minutes each; a step-time profile
    python -m benchmarks.live_regimes --url URL --out DIR closed         closed-loop saturation: the capacity
    python -m benchmarks.live_regimes --url URL --out DIR open           30, 60 and 85 % of it, in turn
    python -m benchmarks.live_regimes --url URL --out DIR overload       half of it, and twice: hundreds come to wait
    python -m benchmarks.live_regimes --out DIR report                   the twin beside all of it
    python -m benchmarks.live_regimes --out DIR all --python PROGRAM     a server of its own, and all of these

The server is `twin-real serve examples/compare-demo.yaml --tiny`, or one like it. A part that is repeated adds runs.
With `all` vLLM's engine and worker, which wait for one another without sleeping, are put behind the front end and the
client (nice 10): on two cores nothing else would get its turn in time, and that is what one would measure.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real.preflight import free_port

SCENARIO = "examples/compare-demo.yaml"
SHARES = (0.3, 0.6, 0.85)
OVERLOAD = (0.5, 2.0)
PARTS = ("calibrate", "closed", "open", "overload")
USERS = 24
REQUESTS = {"closed": 200, 0.3: 60, 0.6: 100, 0.85: 140, 0.5: 100, 2.0: 700}


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


def below(pid: int) -> Iterator[Path]:
    """What /proc has of the processes that a process started, and of theirs."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield Path(f"/proc/{child}")
            yield from below(child)


@contextmanager
def served(python: str, log: Path) -> Iterator[str]:
    """Address of a tiny server, its engine behind its front end."""
    port = free_port()
    command = [
        sys.executable, "-m", "real", "serve", SCENARIO, "--tiny", "--port", str(port), "--python", python,
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                out.write(line)
                if line.startswith("twin-real: ready"):
                    break
            else:
                sys.exit(f"the server did not start: {log}")
            for folder in below(process.pid):
                if (folder / "cmdline").read_bytes().startswith(b"VLLM::"):
                    for thread in (folder / "task").iterdir():
                        os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "report", "all"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3], help="of all")
    parser.add_argument("--url")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", default="1.5")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "all":
        with served(args.python, args.out / "server.log") as args.url:
            for part in args.parts:
                play(part, args)
        play("report", args)
    else:
        play(args.part, args)


def play(part: str, args: argparse.Namespace) -> None:
    """One of the parts."""
    steps = args.out / "steps.json"
    if part == "calibrate":
        real(
            "calibrate", SCENARIO, "--tiny", "--model", "tiny", "--url", args.url, "--out", str(steps),
            "--minutes", args.minutes, "--late", "0.05", "--load", "1.0",
        )  # fmt: skip
    elif part == "closed":
        for _ in range(args.runs):
            users = f"traffic.0.arrivals={{process: closed, users: {USERS}}}"
            requests = f"traffic.0.requests={REQUESTS['closed']}"
            replayed(args.url, args.out, "closed", free_seed(args.out, "closed"), users, requests)
    elif part in ("open", "overload"):
        most = capacity(args.out)
        for _ in range(args.runs):
            for share in SHARES if part == "open" else OVERLOAD:
                rate = f"traffic.0.arrivals.rate={share * most:.3f}"
                requests = f"traffic.0.requests={REQUESTS[share]}"
                name = f"open{round(100 * share)}"
                replayed(args.url, args.out, name, free_seed(args.out, name), rate, requests)
    else:
        for name in ["closed", *(f"open{round(100 * share)}" for share in (*SHARES, *OVERLOAD))]:
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
                "--force",
            ]
            real("compare", str(written), *folders, *options)


if __name__ == "__main__":
    main()
