"""Which single change helps most? Each candidate is run again with the same seed and traffic; nothing is guessed."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any

from twin.cluster.routers import ROUTERS
from twin.errors import InputError
from twin.interrupt import end_with_parent, from_a_thread
from twin.report.json_summary import summarize
from twin.report.texts import duration, plural, share
from twin.scenario import Scenario, load_scenario
from twin.scenario_build import STOCK_POLICIES
from twin.scheduling import PRESETS
from twin.simulation import simulate

SHOWN = 3
LEAST_GAIN = 0.01
"""A change must be better by this share of the figure to be called a help."""

Progress = Callable[[int, int], None]
"""(candidates run, candidates in all)"""


@dataclass(frozen=True, slots=True)
class Change:
    """One candidate."""

    text: str
    override: str
    """As `--set` takes it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate."""

    change: Change
    value: float | None
    """Of the yardstick; None if it was not run, or gave nothing to measure."""
    goodput: float | None = None
    """Good requests per second."""
    why_not: str = ""
    """Why it was not run."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The one figure by which changes are compared, chosen from the run they start from."""

    name: str
    read: Callable[[Mapping[str, Any]], float | None]
    """The figure of a run, from its summary."""
    tell: Callable[[float | None], str]
    """The figure for people."""
    more_is_better: bool = False

    def gain(self, before: float | None, after: float | None) -> float:
        """By what share of `before` it is better; below 0 if it is worse."""
        if before is None or after is None:
            return 0.0
        change = after - before if self.more_is_better else before - after
        return change / before if before else float(change > 0)


def choose_yardstick(summary: Mapping[str, Any]) -> Yardstick:
    """Attainment while some request is not good; then the objective nearest to its limit; without any, TTFT p99."""
    attained = _attainment(summary)
    if attained is not None and attained < 1:
        return Yardstick("requests that are good (attainment)", _attainment, share, True)
    nearest = _nearest_name(summary)
    if nearest is not None:
        name = f"the objective nearest to its limit (in this run {nearest})"
        return Yardstick(name, _nearest, _of_limit)
    return Yardstick("TTFT p99 of the slowest tier", _slowest, duration)


def _attainment(summary: Mapping[str, Any]) -> float | None:
    tiers = summary["tiers"].values()
    measured = sum(tier["measured"] for tier in tiers)
    return sum(tier["good"] for tier in tiers) / measured if measured else None


def _nearest(summary: Mapping[str, Any]) -> float | None:
    return max(_shares_of_limits(summary).values(), default=None)


def _nearest_name(summary: Mapping[str, Any]) -> str | None:
    shares = _shares_of_limits(summary)
    return max(shares, key=lambda name: shares[name], default=None)


def _shares_of_limits(summary: Mapping[str, Any]) -> dict[str, float]:
    """Tier and objective -> what the run has of its limit."""
    return {
        f"{tier} {name}": found["value_s"] / found["limit_s"]
        for tier, judged in summary["objectives"].items()
        for name, found in judged.items()
        if found["value_s"] is not None
    }


def _of_limit(value: float | None) -> str:
    return f"at {share(value)} of its limit"


def _goodput(summary: Mapping[str, Any]) -> float | None:
    """Good requests per second of all tiers."""
    rates = [tier["goodput_rps"] for tier in summary["tiers"].values()]
    return None if None in rates else sum(rates)


def _slowest(summary: Mapping[str, Any]) -> float | None:
    """Nobody is to pay for the others."""
    values = (tier["ttft_s"]["p99"] for tier in summary["tiers"].values())
    return max((value for value in values if value is not None), default=None)


def candidates(scenario: Scenario) -> Iterator[Change]:
    """Single changes that make sense for a scenario; whether they are possible shows when they are loaded."""
    engine, cluster = scenario.engine, scenario.cluster
    written = scenario.document["engine"]
    for name in (*STOCK_POLICIES, *PRESETS):
        if name != scenario.policy_name:
            yield Change(f"policy {name}", f"policy={name}")
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(engine, key)
        more = 2 * value
        if key == "max_num_seqs":
            # Twice as many may be beyond what the profile knows, or more than a step has tokens.
            most = min(scenario.hardware.profile.max_num_seqs, engine.max_num_batched_tokens)
            more = min(more, most)
        if more > value:
            yield Change(f"{key} {more} (from {value})", f"engine.{key}={more}")
        if value > 1:
            yield Change(f"{key} {value // 2} (from {value})", f"engine.{key}={value // 2}")
    if engine.enable_chunked_prefill and not engine.long_prefill_token_threshold:
        threshold = max(1, min(engine.token_budget // 4, engine.max_model_len))
        yield Change(
            f"long_prefill_token_threshold {threshold} (from none)",
            f"engine.long_prefill_token_threshold={threshold}",
        )
    if not engine.enable_prefix_caching:
        yield Change("prefix caching on", "engine.enable_prefix_caching=true")
    if not engine.async_scheduling:
        yield Change("async scheduling on", "engine.async_scheduling=true")
    if written["enforce_eager"]:
        yield Change("CUDA graphs on", "engine.enforce_eager=false")
    if written["num_gpu_blocks_override"] is None and written["gpu_memory_utilization"] < 0.95:
        yield Change(
            f"gpu_memory_utilization 0.95 (from {written['gpu_memory_utilization']:g})",
            "engine.gpu_memory_utilization=0.95",
        )
    if not engine.watermark:
        yield Change("watermark 0.02 (from 0)", "engine.watermark=0.02")
    more = cluster.replicas + 1
    gpus = plural(scenario.hardware.tensor_parallel_size, "more GPU")
    yield Change(f"replicas {more} ({gpus})", f"cluster.replicas={more}")
    for name in ROUTERS:
        if cluster.replicas > 1 and name != cluster.routing.router:
            yield Change(f"router {name}", f"cluster.router={name}")


LOST_WORKER = (
    "A worker process was ended from outside, as systems do that run out of memory (fewer --jobs need "
    "less)"
)


def advise(
    scenario: Scenario,
    summary: Mapping[str, Any],
    jobs: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run every candidate, `jobs` at a time, and tell which helped most beside the run of `summary`.

    Ctrl-C ends it early, and so does a worker process that is ended from outside; what was run by then is told.
    """
    changes = list(candidates(scenario))
    yardstick = choose_yardstick(summary)
    document = scenario.to_dict()
    outcomes: list[Outcome] = []
    ended_by = "Interrupted"
    try:
        for outcome in _run_all(document, changes, yardstick, jobs, progress):
            outcomes.append(outcome)
    except BrokenProcessPool:
        ended_by = LOST_WORKER
    return _tell(changes, outcomes, yardstick, yardstick.read(summary), _goodput(summary), ended_by)


def _run_all(
    document: dict[str, Any],
    changes: list[Change],
    yardstick: Yardstick,
    jobs: int,
    progress: Progress | None,
) -> Iterator[Outcome]:
    def told(outcome: Outcome, done: int) -> Outcome:
        if progress is not None:
            progress(done, len(changes))
        return outcome

    if jobs == 1:
        for done, change in enumerate(changes, 1):
            outcome = _run_one(document, change, yardstick)
            if outcome is None:
                return
            yield told(outcome, done)
        return
    # Not forked: the bar that shows progress has a thread.
    others = active_children()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent)

    def made() -> Iterator[Outcome | None]:
        left: set[Future[Outcome | None]] = {
            pool.submit(_run_one, document, change, yardstick) for change in changes
        }
        while left:
            ready, left = wait(left, return_when=FIRST_COMPLETED)
            for future in ready:
                yield future.result()

    try:
        for done, outcome in enumerate(from_a_thread(made()), 1):
            if outcome is None:
                return
            yield told(outcome, done)
    except KeyboardInterrupt:
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # After Ctrl-C, workers are in the middle of runs that nobody waits for.
        for worker in active_children():
            if worker not in others:
                worker.kill()


def _run_one(document: dict[str, Any], change: Change, yardstick: Yardstick) -> Outcome | None:
    """None if it was interrupted."""
    try:
        changed = load_scenario(document, [change.override])
        result = simulate(changed)
    except InputError as error:
        return Outcome(change, None, why_not=str(error).splitlines()[0])
    except MemoryError:
        return Outcome(change, None, why_not="not enough memory for this run")
    except KeyboardInterrupt:
        return None
    if result.interrupted:
        return None
    summary = summarize(result)
    return Outcome(change, yardstick.read(summary), _goodput(summary))


def _tell(
    changes: list[Change],
    outcomes: list[Outcome],
    yardstick: Yardstick,
    before: float | None,
    goodput: float | None,
    ended_by: str,
) -> dict[str, Any]:
    place = {change.override: i for i, change in enumerate(changes)}
    outcomes = sorted(outcomes, key=lambda outcome: place[outcome.change.override])
    ran = [outcome for outcome in outcomes if not outcome.why_not]
    ranked = sorted(ran, key=lambda outcome: -yardstick.gain(before, outcome.value))
    best = [o for o in ranked if yardstick.gain(before, o.value) >= LEAST_GAIN][:SHOWN]
    left = len(changes) - len(outcomes)
    how_many = plural(len(ran), "single change")
    text = f"{how_many} {'was' if len(ran) == 1 else 'were'} run with the same seed, judged by {yardstick.name}: "
    if not outcomes:
        text = "No single change was run."
    elif best:
        text += "these helped most."
    else:
        text += f"none was better by {LEAST_GAIN:.0%} or more than this run."
    if left:
        text += f" {ended_by}: {left} of {len(changes)} were not run."
    return {
        "text": text,
        "interrupted": left > 0,
        "ended_by": ended_by if left else None,
        "figure": yardstick.name,
        "before": before,
        "goodput_rps": goodput,
        "best": [
            {
                "change": outcome.change.text,
                "set": outcome.change.override,
                "figure": yardstick.name,
                "before": yardstick.tell(before),
                "after": yardstick.tell(outcome.value),
                "goodput": f"{_rate(goodput)} to {_rate(outcome.goodput)}",
            }
            for outcome in best
        ],
        "runs": [
            {
                "change": outcome.change.text,
                "set": outcome.change.override,
                "value": outcome.value,
                "goodput_rps": outcome.goodput,
                "not_run": outcome.why_not or None,
            }
            for outcome in outcomes
        ],
    }


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
