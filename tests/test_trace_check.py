"""What `twin trace check` finds: rates, lengths, prefixes, names, and every malformed line."""

import json
import math
import os
import signal
from collections import defaultdict
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import azure_csv
from twin.clock import PS
from twin.engine.blocks import BlockKeys
from twin.errors import InputError
from twin.report.tables import WIDTH
from twin.report.trace_check import formats_as_data, render_check, render_formats
from twin.workload import load as load_module
from twin.workload import prefixes as prefix_module
from twin.workload.check import Selection, check_trace, lengths, profile_width
from twin.workload.formats import hashed, own
from twin.workload.formats.rows import TraceRow
from twin.workload.load import Gaps, Load
from twin.workload.prefixes import InfiniteCache, KeyTable

TRACES = {
    "azure2023_code.csv": ("azure", 8819, None),
    "azure2023_conv.csv": ("azure", 19_366, None),
    "mooncake_conversation.jsonl.gz": ("mooncake", 12_031, 0.374),
    "mooncake_synthetic.jsonl.gz": ("mooncake", 3993, 0.651),
    "sharegpt300_llama31_hashed.jsonl": ("sharegpt", 300, 0.076),
    "sharegpt300_qwen3_hashed.jsonl": ("sharegpt", 300, 0.079),
}
"""File -> format, requests, attainable share of prompt tokens."""


def checked(path, **options):
    return check_trace(str(path), **options)[0]


def written(folder, *rows, name="trace.jsonl"):
    path = str(folder / name)
    own.JSONL.write(path, rows)
    return path


def row(at_s, tokens=100, output=5, **known):
    return TraceRow(0, round(at_s * PS), tokens, output, **known)


# --- the traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_published_traces(twin_data, name):
    found = checked(twin_data / "traces" / name)
    made, requests, share = TRACES[name]
    assert (found["format"], found["requests"]) == (made, requests)
    assert found["malformed"]["total"] == 0
    attainable = found["prefixes"]["attainable_share"]
    assert (attainable is None) == (share is None)
    if share is not None:
        assert round(attainable, 3) == share
        assert found["prefixes"]["known"] == "yes"
    assert max(map(len, render_check(found).splitlines())) <= WIDTH


def test_the_ticks_of_the_conversations_are_noticed(twin_data):
    conversation = checked(twin_data / "traces" / "mooncake_conversation.jsonl.gz")
    assert conversation["time"]["tick_s"] == 3.0
    assert any("spread_ticks: 3 " in text for text in conversation["warnings"])
    synthetic = checked(twin_data / "traces" / "mooncake_synthetic.jsonl.gz")
    assert synthetic["time"]["tick_s"] is None
    assert synthetic["warnings"] == []


def test_the_same_by_another_way(twin_data):
    """Figures of the Azure conversations against plain numpy."""
    path = twin_data / "traces" / "azure2023_conv.csv"
    found = checked(path)
    lines = path.read_text().splitlines()[1:]
    seconds = [
        (int(d[8:]) * 86400 + int(t[:2]) * 3600 + int(t[3:5]) * 60 + float(t[6:]))
        for d, t in (line.split(",")[0].split() for line in lines)
    ]
    gaps = np.diff(seconds)
    assert found["time"]["gap_cv"] == pytest.approx(gaps.std() / gaps.mean(), rel=1e-6)
    assert found["time"]["span_s"] == pytest.approx(seconds[-1] - seconds[0], abs=1e-6)
    counts = np.bincount((np.array(seconds) - seconds[0]).astype(int))
    whole = counts[: int(seconds[-1] - seconds[0])]
    assert found["time"]["dispersion"]["1_s"] == pytest.approx(whole.var() / whole.mean())
    prompts = np.array([int(line.split(",")[1]) for line in lines])
    assert found["prompt_tokens"]["p95"] == np.quantile(prompts, 0.95, method="inverted_cdf")
    assert found["prompt_tokens"]["mean"] == prompts.mean()
    assert sum(part["requests"] for part in found["time"]["profile"]) == len(lines)


# --- prefixes -----------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=30),
        max_size=8,
    )
)
def test_a_table_of_keys_against_a_dict(batches):
    table, known = KeyTable(), defaultdict(int)
    for batch in batches:
        keys, values = (np.array(column, dtype=np.int64) for column in zip(*batch, strict=True))
        expected = []
        for key, value in batch:
            expected.append(known[key])
            known[key] = max(known[key], value)
        assert table.add(keys, values).tolist() == expected


def test_a_table_of_keys_stays_small():
    table, rng = KeyTable(), Random(1)
    for _ in range(200):
        keys = np.array([rng.randrange(-(2**63), 2**63) for _ in range(50)], dtype=np.int64)
        table.add(keys, np.ones_like(keys))
    assert len(table) == 10_000
    assert len(table._runs) <= math.log2(10_000)


@st.composite
def prompts(draw):
    """Requests whose prompts are made of few pieces, earlier replies among them."""
    rows = []
    for i in range(draw(st.integers(1, 12))):
        pieces = [(c, 7 + 13 * c) for c in range(4)]
        pieces += [(100 + j, rows[j].output_tokens) for j in range(i)]
        prompt = tuple(draw(st.lists(st.sampled_from(pieces), max_size=4)))
        cut = draw(st.integers(0, 5))
        if prompt and prompt[-1][1] > cut:
            prompt = (*prompt[:-1], (prompt[-1][0], prompt[-1][1] - cut))
        rest = draw(st.integers(0 if prompt else 1, 40))
        total = sum(tokens for _, tokens in prompt) + rest
        rows.append(TraceRow(i, i, total, draw(st.integers(1, 60)), prompt, 100 + i))
    return rows


@given(prompts(), st.sampled_from([1, 4, 16]))
def test_attainable_hits_are_those_of_a_block_pool_without_end(rows, size):
    cache, pool, hits, fresh = InfiniteCache(size), set(), 0, -1
    for request in rows:
        cache.add(request)
        rest = request.prompt_tokens - sum(tokens for _, tokens in request.prompt)
        prompt = (*request.prompt, (fresh, rest)) if rest else request.prompt
        fresh -= 1
        keys = BlockKeys(prompt, request.reply, size)
        for key in keys.upto((request.prompt_tokens - 1) // size)[
            : (request.prompt_tokens - 1) // size
        ]:
            if key not in pool:
                break
            hits += size
        computed = request.prompt_tokens + request.output_tokens - 1
        pool.update(keys.upto(computed // size)[: computed // size])
    assert cache.hit_tokens() == hits


def test_attainable_hits_do_not_depend_on_batches(twin_data, monkeypatch):
    path = twin_data / "traces" / "sharegpt300_llama31_hashed.jsonl"
    whole = checked(path)["prefixes"]
    monkeypatch.setattr(prefix_module, "BATCH", 500)
    assert checked(path)["prefixes"] == whole


def test_seven_groups_keep_their_hits_in_every_format_that_holds_them(tmp_path):
    rows = [row(i, 16_484, prompt=((i % 7, 16_384), (100 + i, 100))) for i in range(70)]
    shares = []
    for made, name in [(own.CSV, "a.csv"), (own.JSONL, "a.jsonl"), (hashed.MOONCAKE, "b.jsonl")]:
        made.write(str(tmp_path / name), rows)
        shares.append(checked(tmp_path / name)["prefixes"]["attainable_share"])
    assert shares == [pytest.approx(63 * 16_384 / (70 * 16_484))] * 3


def test_prefixes_that_only_some_rows_tell(tmp_path):
    path = written(tmp_path, row(0), row(1, prompt=((1, 64),)), row(2, prompt=((1, 64),)))
    found = checked(path)["prefixes"]
    assert (found["known"], found["requests"], found["hit_tokens"]) == ("partly", 2, 64)
    assert found["attainable_share"] == 64 / 200


# --- time ---------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=60).map(sorted),
    st.sampled_from([1, 2, 7, 60]),
    st.sampled_from([8, 1 << 20]),
)
def test_load_loses_nothing(instants, width, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "MOST_BINS", most)
        load = Load()
        for at in instants:
            load.add(at * PS // 3, 2, 3)
        parts = load.slices(width * PS)
    assert sum(part.requests for part in parts) == load.requests == len(instants)
    assert sum(part.prompt_tokens for part in parts) == load.prompt_tokens == 2 * len(instants)
    assert sum(part.output_tokens for part in parts) == load.output_tokens == 3 * len(instants)
    assert all(a.to_s == b.from_s for a, b in pairwise(parts))
    assert parts[0].from_s <= instants[0] / 3 < parts[0].to_s
    assert parts[-1].from_s <= instants[-1] / 3 < parts[-1].to_s


def test_spread_of_gaps_and_of_counts():
    poisson, even, rng = (Gaps(), Load()), (Gaps(), Load()), Random(1)
    at = 0.0
    for i in range(20_000):
        at += rng.expovariate(5)
        for (gaps, load), now_ps in ((poisson, round(at * PS)), (even, i * PS // 5)):
            gaps.add(now_ps)
            load.add(now_ps, 1, 1)
    assert poisson[0].cv == pytest.approx(1, rel=0.03)
    assert poisson[1].dispersion(10 * PS) == pytest.approx(1, rel=0.15)
    assert even[0].cv == 0
    assert even[1].dispersion(PS) == 0
    assert even[1].dispersion(1000 * PS) is None


@pytest.mark.parametrize("span_s", [0, 0.5, 15.9, 16, 100, 3502, 86_400, 1_036_800, 10**8])
def test_profiles_are_short(span_s):
    width = profile_width(span_s)
    assert span_s / width < 16 or width == -(-span_s // (86_400 * 16)) * 86_400


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_quantiles_of_lengths(values):
    found = lengths({value: values.count(value) for value in set(values)})
    for q in (5, 25, 50, 75, 90, 95, 99):
        assert found[f"p{q}"] == np.percentile(values, q, method="inverted_cdf")
    assert (found["min"], found["max"]) == (min(values), max(values))
    assert found["std"] == pytest.approx(np.std(values))


def test_a_nearly_idle_beginning_is_told(tmp_path):
    head = [row(i / 0.034) for i in range(800)]
    middle = [row(24_000 + i / 3.17) for i in range(20_000)]
    path = written(tmp_path, *head, *middle)
    (warning,) = checked(path)["warnings"]
    assert warning.startswith("the beginning is nearly idle: 0.0343 requests/s in the first 3,03")
    assert checked(path, selection=Selection((24_000 * PS, 26_000 * PS)))["warnings"] == []
    assert checked(path, selection=Selection(None, 500))["requests"] == 500


@pytest.mark.parametrize(
    ("at", "told"),
    [
        ([0, 0.00001], "the mean rate is 2e+05 requests/s, outside 0.001 to 10,000"),
        ([0, 10**6], "the mean rate is 2e-06 requests/s, outside"),
        ([2 * 10**6, 2 * 10**6 + 1], "the first request comes after 23.1 days"),
        ([5, 5], "all requests come at one instant"),
    ],
)
def test_stamps_of_another_unit_are_suspected(tmp_path, at, told):
    warnings = checked(written(tmp_path, *map(row, at)))["warnings"]
    assert any(text.startswith(told) for text in warnings)


def test_the_others_settings_warn(tmp_path):
    """A Mooncake file, milliseconds and blocks of 512, with the settings of the other."""
    lines = [
        {"timestamp": i, "input_length": 6758, "output_length": 5, "hash_ids": [*range(14)]}
        for i in range(0, 600_000, 300)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = checked(path, name="sharegpt")
    assert (
        "blocks have 16 tokens in format sharegpt; is the format another?" in found["warnings"][0]
    )
    assert checked(path)["warnings"] == []
    path.write_text(
        "".join(json.dumps({"chat_id": i} | line) + "\n" for i, line in enumerate(lines))
    )
    assert checked(path)["time"]["mean_rate"] == pytest.approx(1 / 300, rel=0.01)


# --- names and malformed lines ------------------------------------------------------------


def test_names_are_counted_and_doubled_ids_kept_apart(tmp_path):
    path = written(
        tmp_path,
        row(0, tier="A", tenant="x", session="s", id="1", prompt=((1, 64),)),
        row(1, tier="B", tenant="x", session="t", id="2"),
        row(2, 150, tier="A", tenant="y", session="s", id="1", prompt=((1, 64), (2, 36))),
        row(3, tier="A", tenant="x", session="s", id="3", prompt=((9, 64),)),
    )
    found = checked(path)
    assert found["requests"] == 4
    assert found["tiers"] == {"A": 3, "B": 1}
    assert found["tenants"] == {"x": 3, "y": 1}
    assert found["sessions"] == {
        "count": 2, "requests": 4, "turns_mean": 2.0, "turns_max": 3, "restarts": 1,
    }  # fmt: skip
    assert found["repeated_ids"] == 1
    ids, sessions = found["warnings"]
    assert ids.startswith("1 request ids were there before, the first in line 3")
    assert sessions.startswith("1 requests do not continue their session, the first in line 4 ('s'")


def test_lines_that_are_there_twice_are_counted_and_kept(tmp_path):
    path = written(
        tmp_path, row(0), row(1, 7), row(1, 8), row(1, 7), row(1, 7), row(2, 7), row(3, 20_000_000)
    )
    found = checked(path)
    assert (found["requests"], found["repeated_lines"]) == (7, 2)
    twice, long = found["warnings"][:2]
    assert twice.startswith(
        "lines that say the same as another of their instant: 2, the first is line 4"
    )
    assert long.startswith("the longest prompt has 20,000,000 tokens")


def test_malformed_lines_are_named_and_the_rest_counted(tmp_path):
    rows = [(f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}", i % 3, 1) for i in range(300)]
    found = checked(azure_csv(tmp_path, rows), listed=7)
    assert found["requests"] == 200
    assert found["malformed"]["total"] == 100
    assert found["malformed"]["kinds"] == {"tokens": 100}
    assert [fault["line"] for fault in found["malformed"]["listed"]] == [2, 5, 8, 11, 14, 17, 20]
    text = render_check(found)
    assert "Malformed: 100 tokens that are no whole number from 1 on" in text
    assert "and 93 more" in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "there is no request in it"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n", "TIMESTAMP: 'x' is no instant"),
    ],
)
def test_traces_without_a_request(tmp_path, content, problem):
    path = tmp_path / "t.csv"
    path.write_text(content)
    found = checked(path)
    assert found["requests"] == 0
    assert found["malformed"]["listed"][0]["problem"].startswith(problem)
    assert problem in render_check(found)


def test_a_file_of_only_a_header_is_a_kind_of_its_own(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert checked(path)["malformed"]["kinds"] == {"empty": 1}


def test_ctrl_c_tells_what_was_read(tmp_path):
    path = written(tmp_path, *(row(i) for i in range(100)))

    def press(done, total):
        if done == 0:
            os.kill(os.getpid(), signal.SIGINT)

    found, _load = check_trace(str(path), progress=press)
    assert found["interrupted"]
    assert 0 < found["requests"] < 100
    assert "the rest of the file was not looked at" in render_check(found)


def test_replies_beyond_their_declared_length_are_told(tmp_path):
    path = written(tmp_path, row(0, output=5, max_tokens=5), row(1, output=6, max_tokens=5))
    (warning,) = (text for text in checked(path)["warnings"] if text.startswith("output_tokens"))
    assert "max_tokens: 1, the first in line 2;" in warning


def test_absurd_lengths_do_not_widen_the_table(tmp_path):
    path = written(tmp_path, row(0, tokens=10**15), row(1, tokens=10**15))
    assert max(map(len, render_check(checked(path)).splitlines())) <= 80


def test_a_last_line_without_an_end_is_mentioned(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1")
    assert checked(path)["warnings"][0].startswith("the last line has no line end")


def test_files_like_no_trace_are_refused(tmp_path):
    for content, message in [("", "the file is empty"), ("a,b\n", "no header of a known format")]:
        path = tmp_path / "t.csv"
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            checked(path)


def test_formats_are_listed_with_what_they_hold():
    data = formats_as_data()
    assert data["azure"]["holds"] == []
    assert set(data["alibaba"]["holds"]) == {"prefixes", "start", "sessions", "ids"}
    assert not data["alibaba"]["written"]
    text = render_formats()
    assert all(name in text for name in data)
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("header", "missing", "hint"),
    [
        ("TIMESTAMP,ContextTokens,generatedtokens", "GeneratedTokens", "by 'generatedtokens'?"),
        ("TIMESTAMP,ContextTokens", "GeneratedTokens", None),
        ("timestamp,ContextTokens,GeneratedTokens", "TIMESTAMP", "by 'timestamp'?"),
        ("TIMESTAMP,ContextTokens,GeneratedToken", "GeneratedTokens", "by 'GeneratedToken'?"),
    ],
)
def test_a_hint_never_proposes_a_column_that_is_needed_itself(tmp_path, header, missing, hint):
    path = tmp_path / "t.csv"
    path.write_text(header + "\n1,2,3\n", encoding="utf-8")
    found, _ = check_trace(str(path), "azure")
    told = json.dumps(found["malformed"])
    assert f"no column '{missing}'" in told
    assert ("did you mean it" in told) == (hint is not None)
    assert hint is None or hint in told
