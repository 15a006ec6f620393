"""Tables: everything fits 80 columns, nothing is hidden, numbers read well."""

import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twin.metrics.estimated_wait import wait_errors
from twin.metrics.policy_statistics import COUNTS, MAXIMA, merge_policy_stats
from twin.metrics.records import LATENCIES
from twin.report.charts import _mark_limits, ticks_of
from twin.report.json_summary import objectives_missed
from twin.report.tables import WIDTH, render
from twin.report.texts import count, duration, limit, share


def statistics(p50):
    """Figures of one latency; None gives a tier without samples."""
    scale = {"mean": 1, "p50": 1, "p90": 2, "p95": 3, "p99": 4}
    return {stat: None if p50 is None else p50 * factor for stat, factor in scale.items()}


def tier(offered=100, latency=0.2, **changes):
    counts = {
        "offered": offered, "completed": offered - 20, "refused": 3, "timed_out": 12,
        "aborted": 0, "unfinished": 5,
    }  # fmt: skip
    latencies = {f"{name}_s": statistics(latency) for name in LATENCIES}
    samples = {"samples": dict.fromkeys(LATENCIES, 0 if latency is None else offered)}
    return counts | latencies | samples | {"goodput_rps": 3.21, "attainment": 0.93} | changes


def judged(limit_s, value_s, met, without=0):
    return {"limit_s": limit_s, "value_s": value_s, "met": met, "without": without}


SUMMARY = {
    "fleet": None,
    "cost": {"price_per_gpu_hour": None},
    "scenario": "chat-8b",
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "H100",
    "tensor_parallel_size": 1,
    "replicas": 2,
    "engine_version": "0.32.0",
    "policy": "tiered",
    "policy_fingerprint": "3f2ac1b09d",
    "seed": 1,
    "simulated_s": 3512.22,
    "warmup_s": 0.0,
    "percentiles": "exact",
    "interrupted": False,
    "oracle": False,
    "traffic": [{"stream": 0, "load": "open", "arrivals": "poisson, 6/s", "offered": 40, "offered_rps": 6.1}],
    "client_timeouts": [],
    "trace_prefixes": [],
    "totals": {
        "offered": 300, "completed": 240, "refused": 9, "timed_out": 36, "aborted": 0,
        "unfinished": 15,
    },
    "tiers": {"ONLINE": tier(), "BATCH": tier(attainment=1.0), "OFFLINE": tier(latency=None)},
    "objectives": {
        "ONLINE": {
            "ttft_p99": judged(1.0, 0.84, True, without=37),
            "tpot_p99": judged(0.05, 0.0523, False),
        },
        "BATCH": {"e2e_p99": judged(60.0, None, None)},
    },
    "refused": [
        {
            "index": 12 + i, "place": f"traffic.0, line {14 + i}", "tier": "ONLINE",
            "prompt_tokens": 9001, "reason": "too_long",
        }
        for i in range(9)
    ],
    "verdict": "Slots bound the run: in 70 % of the time requests waited.",
    "gpu_time": {"useful": 0.7, "recomputed": 0.01, "padded": 0.0, "wasted": 0.0, "idle": 0.29},
    "preemptions": {"preempted": 9, "requests": 291, "most": 2},
    "estimated_wait": {
        "ONLINE": {"samples": 91, "mean_abs_s": 0.012, "wait_mean_s": 0.21},
        "OFFLINE": dataclasses.asdict(wait_errors([])),
    },
    "throughput": {"requests_per_s": 0.068, "prompt_tokens_per_s": 80.1, "output_tokens_per_s": 1234.5},
    "batching_wait_s": {},
    "policy_stats": {},
    "step_time": {"engine": "vLLM 0.19.0", "source": "op tables", "date": "2026-01-01"},
    "gateway": None,
    "trust": {
        "validated": False, "nearest": None, "runs": 0, "distance": None, "limit": 1.0, "differs": [], "foreign": [],
        "errors": {}, "largest": {}, "calibration": {},
    },
    "engine": {
        "steps": 123456, "preemptions": 12, "recomputed_tokens": 345,
        "prefix_hit_tokens": 374, "prefix_query_tokens": 1000, "kv_usage_mean": 0.43,
        "kv_waste_mean": 0.0012, "busy_share": 0.71,
    },
    "warnings": [],
    "wall_s": 2.31,
    "requests_per_wall_s": 8383.2,
}  # fmt: skip


def changed(**changes):
    return copy.deepcopy(SUMMARY) | changes


def line_of(text, start):
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_every_line_fits_the_width_and_no_figure_is_cut():
    text = render(SUMMARY)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert line_of(text, "all ").split() == ["all", "300", "240", "9", "36", "0", "15"]
    assert line_of(text, "chat-8b") == (
        "chat-8b: meta-llama/Llama-3.1-8B on H100, 2 replicas, vLLM 0.32.0"
    )
    assert "policy tiered (3f2ac1b09d), seed 1, simulated 3,512 s" in text
    assert "9 requests refused" in text
    assert "request 12 (traffic.0, line 14): too_long, 9,001 prompt tokens" in text
    assert "and 4 more" in text
    assert "Took        2.31 s of wall time: 8,383 requests/s, 119 ms per 1,000" in text
    assert "Prefix      hits 37.4 % of 1,000 prompt tokens looked up" in text


@given(
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=60),
    st.integers(0, 10**9),
    st.floats(1e-12, 1e6),
    st.floats(0, 1e5),
)
def test_strange_names_and_large_figures_still_fit(name, offered, latency, goodput):
    odd = tier(offered + 20, latency, goodput_rps=goodput)
    summary = changed(scenario=name, tiers={name: odd, "ONLINE": odd}, objectives={})
    assert max(map(len, render(summary).splitlines())) <= WIDTH


def test_names_are_shown_as_written_not_as_markup():
    text = render(changed(scenario="[red]a[/red]", tiers={"[b]": tier(), ":smile:": tier()}))
    assert "[red]a[/red]" in text
    assert "[b] " in text
    assert ":smile:" in text


def test_objectives_say_what_was_judged_and_what_is_missing_from_it():
    text = render(SUMMARY)
    assert "ttft_p99 840 ms <= 1 s met (37 ended without one)" in text
    assert "tpot_p99 52.3 ms > 50 ms MISSED" in text
    assert "e2e_p99 - <= 60 s nothing to judge" in text
    assert "none: every completed one is good" in line_of(text.split("Goodput")[1], "OFFLINE")


def test_a_tier_without_samples_shows_dashes():
    latency = render(SUMMARY).split("Latency")[1]
    assert line_of(latency.split("Goodput")[0], "OFFLINE").split()[1:] == ["TTFT", "0", *"----"]


def test_latencies_give_the_percentiles_first_the_mean_last_and_the_samples():
    lines = render(SUMMARY).split("Latency")[1].split("Goodput")[0].splitlines()
    assert lines[0].split() == ["of", "samples", "p50", "p90", "p99", "mean"]
    assert [line.split("  ")[0].strip() or line.split()[0] for line in lines[2:7]] == [
        "ONLINE", "queue", "prefill", "TPOT", "E2E",
    ]  # fmt: skip
    assert lines[2].split()[1:3] == ["TTFT", "100"]
    assert " ".join(lines[2].split()[3:]) == "200 ms 400 ms 800 ms 200 ms"


def test_engine_lines_say_what_the_time_was_for_and_who_gave_way():
    text = " ".join(render(SUMMARY).split())
    assert "useful 70.0 %, recomputed 1.0 %, padded 0 %, wasted 0 %, idle 29.0 %" in text
    assert "9 of 291 requests, 12 times in all, at most 2 each; 345 tokens recomputed" in text
    assert "estimated at arrival: ONLINE +-12.0 ms of 210 ms" in text
    assert text.index("Slots bound the run") < text.index("Requests offered")


def test_warnings_stand_once_each():
    text = render(changed(warnings=["tiers have no effect", "other", "tiers have no effect"]))
    assert text.count("Warning: tiers have no effect") == 1
    assert text.count("Warning:") == 2


def test_what_is_special_about_a_run_is_said_at_its_head():
    text = render(
        changed(
            interrupted=True,
            warmup_s=60.0,
            client_timeouts=[{"stream": 0, "ttft_s": 5.0, "total_s": 30.0}],
        )
    )
    assert text.startswith("INTERRUPTED")
    assert "in the first 60 s are counted" in text
    assert "Clients of stream 0 wait 5 s for the first token and 30 s for the whole" in text
    plain = render(SUMMARY)
    assert "INTERRUPTED" not in plain
    assert "Clients" not in plain
    assert "not measured" not in plain


def test_the_batching_wait_is_named_where_a_policy_batches():
    text = " ".join(render(changed(batching_wait_s={"ONLINE": 0.01, "OFFLINE": 0.2})).split())
    assert "held for a batch until the first step after ONLINE 10 ms, OFFLINE 200 ms" in text
    assert "above vllm-fcfs by at most this wait plus one step" in text
    assert "held for a batch" not in render(SUMMARY)


def test_what_the_policy_did_is_shown_by_tier():
    did = {
        "releases": {"size": 40, "time": 2}, "batch_size_mean": 7.25,
        "batching_wait_mean_s": 0.0042, "promotions": 3, "planned_preemptions": 5,
        "reactive_preemptions": 1, "estimate_mae_tokens": 101.4,
    }  # fmt: skip
    unused = dict.fromkeys(did) | {
        "releases": {}, "promotions": 0, "planned_preemptions": 0, "reactive_preemptions": 0,
    }  # fmt: skip
    text = render(changed(policy_stats={"BATCH": did, "*": unused}))
    policy = text.split("Policy")[1]
    assert " ".join(line_of(policy, "BATCH").split()) == "BATCH 42 7.25 4.20 ms 3 5 1 +-101 tok"
    assert " ".join(line_of(policy, "all").split()) == "all 0 - - 0 0 0 -"
    assert "Policy" not in render(SUMMARY)


def stats_of(jobs, wait, estimates, error, releases):
    did = dict.fromkeys(COUNTS, 1) | dict.fromkeys(MAXIMA, jobs)
    batches = sum(releases.values())
    return did | {
        "ended": {"finished running": jobs}, "releases": releases, "estimates": estimates,
        "batch_size_mean": jobs / batches if batches else None,
        "batch_tokens_mean": 100.0 * jobs if batches else None,
        "batching_wait_mean_s": wait, "estimate_bias_tokens": error, "estimate_mae_tokens": error,
    }  # fmt: skip


def test_policies_of_several_replicas_are_one_in_the_report():
    first = stats_of(jobs=8, wait=0.01, estimates=3, error=10.0, releases={"size": 1, "time": 1})
    second = stats_of(jobs=2, wait=0.06, estimates=1, error=50.0, releases={"size": 2})
    idle = stats_of(jobs=0, wait=None, estimates=0, error=None, releases={})
    merged = merge_policy_stats([{"tiers": {"BATCH": did}} for did in (first, second, idle)])
    batch = merged["BATCH"]
    assert batch["promotions"] == 3
    assert batch["batch_size_max"] == 8
    assert batch["releases"] == {"size": 3, "time": 1}
    assert batch["ended"] == {"finished running": 10}
    assert batch["batch_size_mean"] == pytest.approx(10 / 4)
    assert batch["batch_tokens_mean"] == pytest.approx((2 * 800 + 2 * 200) / 4)
    assert batch["batching_wait_mean_s"] == pytest.approx((8 * 0.01 + 2 * 0.06) / 10)
    assert batch["estimate_mae_tokens"] == pytest.approx(20)
    nothing = merge_policy_stats([{"tiers": {"BATCH": idle}}])["BATCH"]
    assert nothing["batch_size_mean"] is None
    assert merge_policy_stats([]) == {}


@pytest.mark.parametrize(("met", "missed"), [(True, False), (False, True), (None, False)])
def test_what_could_not_be_judged_is_not_missed(met, missed):
    objectives = {"ONLINE": {"ttft_p99": judged(1.0, None, met)}}
    assert objectives_missed({"objectives": objectives}) is missed


def test_an_oracle_is_marked():
    assert "told the true output lengths" in render(changed(oracle=True))


def test_plain_text_has_no_escape_codes_and_colour_has():
    assert "\x1b" not in render(SUMMARY)
    assert "\x1b" in render(SUMMARY, color=True)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (1e-12, "0.00 ms"),
        (0.00421, "4.21 ms"),
        (0.0523, "52.3 ms"),
        (0.8127, "813 ms"),
        (0.9996, "1.00 s"),
        (1.25, "1.25 s"),
        (12.34, "12.3 s"),
        (99.96, "100 s"),
        (3512.2, "3,512 s"),
    ],
)
def test_durations_have_about_three_digits(seconds, shown):
    assert duration(seconds) == shown


@given(st.floats(0, 1e7))
def test_durations_are_within_their_last_digit(seconds):
    number, unit = duration(seconds).replace(",", "").split()
    value = float(number) * {"ms": 1e-3, "s": 1}[unit]
    assert value == pytest.approx(seconds, rel=0.0051, abs=0.0051e-3)


def test_limits_stand_in_full():
    assert [limit(x) for x in (0.01, 0.0125, 1.0, 1.2345, 3600.0)] == [
        "10 ms", "12.5 ms", "1 s", "1.2345 s", "3,600 s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (None, "-"), (0.0, "0 %"), (1.0, "100.0 %"), (0.9999, ">99.9 %"), (0.374, "37.4 %"),
        (0.0012, "0.12 %"), (1e-5, "<0.01 %"),
    ],
)  # fmt: skip
def test_shares_never_round_to_all_or_nothing(fraction, shown):
    assert share(fraction) == shown


def test_counts_have_separators():
    assert count(1234567) == "1,234,567"


@given(st.floats(1e-4, 1e3), st.floats(1.0, 1e4))
def test_every_axis_of_times_has_labels_in_its_range(low, times):
    """Two ticks at least, for however narrow a range, and no more than fit."""
    high = low * times
    ticks = ticks_of(low, high)
    seen = [tick for tick in ticks if low * 0.85 <= tick <= high * 1.15]
    assert 2 <= len(seen) <= 16
    assert ticks == sorted(set(ticks))


def test_the_name_of_a_limit_at_the_left_edge_lies_right_of_it():
    figure = {"data": [{"x": [0.1, 1.0, 10.0]}], "layout": {}}
    _mark_limits(figure, [(0.11, "A", "red"), (5.0, "B", "red")])
    assert [note["xanchor"] for note in figure["layout"]["annotations"]] == ["left", "right"]
