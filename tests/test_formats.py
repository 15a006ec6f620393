"""Trace files: every format read exactly, written without loss, and each malformed line found by its number."""

import gzip
import json
import sys
import zlib
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import azure_csv
from twin.clock import PS
from twin.errors import InputError
from twin.workload.check import Selection
from twin.workload.convert import convert
from twin.workload.formats import azure, burstgpt, hashed, own, parquet
from twin.workload.formats.choose import (
    FORMATS,
    count_rows,
    format_for,
    format_of,
    place,
    read_trace,
)
from twin.workload.formats.rows import HELD, Fault, MalformedError, TraceRow
from twin.workload.formats.values import Clock, duration_ps, instant_ps, seconds_text

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.68,374,44\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(folder, text, name="trace.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def jsonl(folder, *rows, name="trace.jsonl"):
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows), name)


def read(path, name=None):
    """All rows; a malformed line raises."""
    return list(read_trace(path, format_of(path, name).format))


def plain(path):
    return [(row.at_ps, row.prompt_tokens, row.output_tokens) for row in read(path)]


def faults(path, name=None):
    """(line, kind) of what is wrong, the rows left out."""
    made = format_of(path, name).format
    return [(item.line, item.kind) for item in made.read(path) if isinstance(item, Fault)]


# --- Azure --------------------------------------------------------------------------------


def test_stamps_are_read_from_their_digits(tmp_path):
    path = azure_csv(
        tmp_path,
        [
            ("2023-11-16 23:59:59.1000001", 374, 44),
            ("2023-11-17 00:00:00.000000000001", 396, 109),
            ("2024-02-29T00:00:00", 1, 1),
            ("2024-03-01 00:00:00.1", 2, 3),
        ],
    )
    day = 86_400 * PS
    start = day - PS + 100_000_100_000  # 23:59:59.1000001
    assert plain(path) == [
        (0, 374, 44),
        (day + 1 - start, 396, 109),
        (105 * day - start, 1, 1),
        (106 * day + PS // 10 - start, 2, 3),
    ]


def test_zones_are_minded(tmp_path):
    path = azure_csv(
        tmp_path,
        [
            ("2024-05-10 12:00:00+02:00", 1, 1),
            ("2024-05-10 10:00:01Z", 1, 1),
            ("2024-05-10 05:30:02-04:30", 1, 1),
            ("2024-05-10 10:00:03.009930+00:00", 1, 1),
        ],
    )
    assert [at for at, *_ in plain(path)] == [0, PS, 2 * PS, 3 * PS + 9_930_000_000]


FORMS = {
    "plain": HEADER + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.68,5,6\n",
    "no last line end": HEADER + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.68,5,6",
    "CRLF": (HEADER + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.68,5,6").replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + HEADER + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47.68,5,6\n\n",
    "quoted": HEADER + '"2023-11-16 18:15:46.68","374","44"\n2023-11-16 18:15:47.68, 5, 6\n',
    "reordered": "Extra,GeneratedTokens,ContextTokens,TIMESTAMP\n"
    '"x, y",44,374,2023-11-16 18:15:46.68\ny,6,5,2023-11-16 18:15:47.68\n',
    "blank lines": "\n" + HEADER + "\n2023-11-16 18:15:46.68,374,44\n  \n2023-11-16 18:15:47.68,5,6\n",
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_forms_of_the_same_trace(tmp_path, text):
    assert plain(write(tmp_path, text)) == [(0, 374, 44), (PS, 5, 6)]
    packed = gzip.compress(text.encode())
    for name in ("trace.csv.gz", "packed.csv"):
        assert plain(write(tmp_path, packed, name)) == [(0, 374, 44), (PS, 5, 6)]
    assert plain(write(tmp_path, text, "plain.csv.gz")) == [(0, 374, 44), (PS, 5, 6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; a trace is CSV with a header, JSON lines or Parquet"),
        (HEADER, "there is no request in it"),
        ("a,b,c\n" + ROW, r"line 1: no header of a known format \('a', 'b', 'c'\); the columns are azure: TIME"),
        (ROW, r"line 1: no header of a known format \('2023-11-16 18:15:46.68', '374', '44'\)"),
        ("TIMESTAMP,ContextToken,GeneratedTokens\n" + ROW, "line 1: no column 'ContextTokens'.*by 'ContextToken'"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n" + ROW, "line 1: column .* is there twice"),
        (HEADER + ROW + "2023-11-16 18:15:47.68,5\n", "line 3: 2 fields where the header has 3"),
        (HEADER + ROW + "2023-11-16 18:15:45.68,5,6\n", "line 3: TIMESTAMP: .*45.68' is before .*46.68' of line 2"),
        (HEADER + ROW + "2023-11-16 18:15:47,0,6\n", "line 3: ContextTokens: '0' must be a whole number"),
        (HEADER + ROW + "2023-11-16 18:15:47,5,-6\n", "line 3: GeneratedTokens: '-6' must be"),
        (HEADER + ROW + "2023-11-16 18:15:47,5,nan\n", "line 3: GeneratedTokens: 'nan' must be"),
        (HEADER + ROW + "2023-11-16 18:15:47,5.0,6\n", "line 3: ContextTokens: '5.0' must be"),
        (HEADER + ROW + "2023-11-16 18:15:47,5,\n", "line 3: GeneratedTokens: '' must be"),
        (HEADER + ROW + "2023-11-16 18:15:47,1000000001,1\n", "line 3: ContextTokens: .* at most 1,000,000,000"),
        (HEADER + ROW + "2023-11-16 18:15:47," + "9" * 5000 + ",6\n", "line 3: ContextTokens: '999"),
        (HEADER + "1700158546.68,5,6\n", "line 2: TIMESTAMP: '1700158546.68' is no instant; write YYYY-MM-DD"),
        (HEADER + ROW + "12.5,5,6\n", "line 3: TIMESTAMP: '12.5' is no instant"),
        (HEADER + "2023-02-30 18:15:47,5,6\n", "line 2: TIMESTAMP: '2023-02-30 18:15:47': day is out of range"),
        (HEADER + "2023-02-03 24:15:47,5,6\n", "line 2: TIMESTAMP: .* has no such time of day"),
        (HEADER + "2023-02-03 23:15:47.0000000000001,5,6\n", "line 2: TIMESTAMP: .* is no instant"),
        (HEADER + ROW + "2023-11-16 18:15:47Z,5,6\n", "line 3: TIMESTAMP: .* has a time zone, the stamp .* of line 2"),
        (HEADER + "2023-11-16 18:15:47Z,5,6\n" + ROW, "line 3: TIMESTAMP: .* has no time zone, the stamp"),
        (HEADER.encode() + b"\xff\xfe\x80\n", r"line 2: not text in UTF-8 \(byte 0xff\)"),
        (b"\x89PNG\r\n\x1a\n\x00", r"line 1: not text in UTF-8 \(byte 0x89\)"),
        (b"\x00\x01\x02", "line 1: the file is binary"),
        ((HEADER + ROW).replace("\n", "\r"), "line 1: lines end in CR alone"),
        ("\ufeff".encode("utf-16") + HEADER.encode("utf-16"), "line 1: the file is in UTF-16"),
        (b"x" * (1 << 24), "line 1: the line is longer than"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_a_malformed_line_hides_no_later_one(tmp_path):
    lines = [
        HEADER.strip(),
        "2023-11-16 18:15:46,1,1",
        "2023-11-16 18:15:47,0,1",
        "2023-11-16 18:15:48,1",
        "2023-11-16 18:15:49,1,1",
        "2023-11-16 18:15:40,1,1",
        "yesterday,1,1",
        '2023-11-16 18:15:50,"1,1',
        "2023-11-16 18:15:51,1,1",
        "2023-11-16 18:15:52,1",
    ]
    path = write(tmp_path, "\n".join(lines))
    assert faults(path) == [
        (3, "tokens"), (4, "fields"), (6, "order"), (7, "stamp"), (8, "fields"), (10, "fields"),
    ]  # fmt: skip
    good = [item for item in azure.read(path) if isinstance(item, TraceRow)]
    assert [(row.line, row.at_ps // PS) for row in good] == [(2, 0), (5, 3), (9, 5)]


def test_files_that_cannot_be_read(tmp_path):
    whole = gzip.compress((HEADER + ROW * 50).encode())
    for path, message in [
        (str(tmp_path / "none.csv"), "none.csv: cannot be read: No such file"),
        (str(tmp_path), "cannot be read: Is a directory"),
        ("nul\0.csv", r"'nul\\x00.csv': cannot be read"),
        (write(tmp_path, whole[:-20], "cut.csv.gz"), "not a whole gzip file"),
    ]:
        with pytest.raises(InputError, match=message):
            read(path)


def test_rows_before_the_cut_of_a_gzip_file_are_read(tmp_path):
    text = HEADER + "".join(
        f"2023-11-16 18:15:46.{i:07d},{i % 997 + 1},44\n" for i in range(60_000)
    )
    path = write(tmp_path, gzip.compress(text.encode())[:-100_000], "cut.csv.gz")
    items = list(azure.read(path))
    assert isinstance(items[-1], Fault)
    assert items[-1].kind == "file"
    assert items[-1].line == len(items) + 1
    assert len(items) > 10_000


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    path = write(tmp_path, HEADER + ROW + "broken\n")
    assert next(azure.read(path)).line == 2


# --- BurstGPT -----------------------------------------------------------------------------


def test_burstgpt(tmp_path):
    path = write(
        tmp_path,
        BURST + "5,ChatGPT,472,18,490,Conversation log\n45.25,GPT-4,417,276,693,API log\n",
    )
    assert [(*row[1:4], row.tenant) for row in read(path)] == [
        (5 * PS, 472, 18, "ChatGPT"),
        (45 * PS + PS // 4, 417, 276, "GPT-4"),
    ]


def test_burstgpt_with_sessions(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = write(
        tmp_path, header + "5,a,1.5,ChatGPT,4,1,5,Conversation log\n6,,1,GPT-4,4,1,5,API log\n"
    )
    assert [row.session for row in read(path)] == ["a", None]


def test_failed_requests_of_burstgpt_are_told_apart_from_typing_errors(tmp_path):
    path = write(
        tmp_path,
        BURST + "5,ChatGPT,472,18,490,API log\n6,ChatGPT,472,0,472,API log\n7,ChatGPT,472,9,482,API log\n",
    )  # fmt: skip
    assert faults(path) == [(3, "failed"), (4, "tokens")]


# --- clocks of numbers --------------------------------------------------------------------


def at(*stamps):
    return [{"timestamp": t, "input_length": 9, "output_length": 1} for t in stamps]


def test_relative_clocks_keep_their_zero_and_epochs_count_from_the_first_row(tmp_path):
    path = jsonl(tmp_path, *at(250, 1000.5))
    assert [row.at_ps for row in read(path)] == [PS // 4, PS + PS // 2000]
    path = jsonl(tmp_path, *at(1_700_000_000_250, 1_700_000_001_250))
    assert [row.at_ps for row in read(path)] == [0, PS]


@pytest.mark.parametrize(
    ("stamps", "kind"),
    [
        ((250, 1_700_000_000_000), "clock"),
        ((1_700_000_000_000, 250), "clock"),
        ((1_700_000_000_000, 1_600_000_000_000), "order"),
        ((250, 249), "order"),
        ((250, -1), "stamp"),
        ((250, "a"), "stamp"),
        ((250, True), "stamp"),
        ((250, None), "stamp"),
        ((250, 1e300), "stamp"),
        ((250, 10**19), "stamp"),
        ((250, "2023-11-16 18:15:46"), "stamp"),
    ],
)
def test_mixed_clocks_are_found_with_their_line(tmp_path, stamps, kind):
    assert faults(jsonl(tmp_path, *at(*stamps))) == [(2, kind)]


@given(st.integers(0, 10**22), st.sampled_from([PS, PS // 1000]))
def test_instants_survive_writing(ps, unit_ps):
    assert duration_ps("x", seconds_text(ps, unit_ps), unit_ps) == ps


# --- hashed prompts -----------------------------------------------------------------------


def mooncake(t, length, ids, output=5):
    return {"timestamp": t, "input_length": length, "output_length": output, "hash_ids": ids}


def test_mooncake_blocks_are_segments(tmp_path):
    path = jsonl(tmp_path, mooncake(0, 1300, [0, 1, 2]), mooncake(3000, 1024, [0, 7]))
    assert format_of(path).format is hashed.MOONCAKE
    first, second = read(path)
    assert first.prompt == ((0, 512), (1, 512), (2, 276))
    assert second.prompt == ((0, 512), (7, 512))
    assert second.at_ps == 3 * PS


def test_whole_blocks_of_16_leave_a_rest_of_its_own(tmp_path):
    path = jsonl(tmp_path, mooncake(46.927, 40, [4, 5]), mooncake(50, 48, [4, 5, 6]))
    assert format_of(path).format is hashed.SHAREGPT
    first, second = read(path)
    assert (first.at_ps, first.prompt, first.prompt_tokens) == (
        46_927_000_000,
        ((4, 16), (5, 16)),
        40,
    )
    assert second.prompt == ((4, 16), (5, 16), (6, 16))


def test_alibaba_sessions_are_chains_of_chats(tmp_path):
    def chat(number, parent, t):
        row = mooncake(t, 32, [number, number + 1])
        return {"chat_id": number, "parent_chat_id": parent, "type": "text", "turn": 1} | row

    path = jsonl(tmp_path, chat(5, -1, 0.5), chat(7, 5, 61.114), chat(9, -1, 62), chat(8, 7, 63))
    assert format_of(path).format is hashed.ALIBABA
    rows = read(path)
    assert [row.session for row in rows] == ["5", "5", "9", "5"]
    assert rows[1].at_ps == 61_114_000_000_000


def test_rows_without_hashes_say_nothing_of_prefixes(tmp_path):
    rows = read(jsonl(tmp_path, *at(0, 1)))
    assert [row.prompt for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (mooncake(9, 512, [1, 2]), "content"),
        (mooncake(9, 1300, [1, -2, 3]), "content"),
        (mooncake(9, 1300, [1, "x", 3]), "content"),
        (mooncake(9, 1300, [1, 2**64, 3]), "content"),
        (mooncake(9, 1300, "123"), "content"),
        (mooncake(9, 0, []), "tokens"),
        (mooncake(9, True, []), "tokens"),
        (mooncake(9, 1.5, []), "tokens"),
        ({"timestamp": 9, "input_length": 5}, "fields"),
        ([9, 5, 5], "json"),
    ],
)
def test_malformed_rows_of_hashes(tmp_path, row, kind):
    path = jsonl(tmp_path, mooncake(0, 1300, [0, 1, 2]), row, mooncake(10, 1300, [0, 1, 2]))
    assert faults(path, "mooncake") == [(2, kind)]


def test_json_that_is_none(tmp_path):
    good = json.dumps(mooncake(0, 1300, [0, 1, 2]))
    deep = '{"timestamp": ' + "[" * 100_000
    nan = good.replace("1300", "NaN")
    path = write(tmp_path, "\n".join([good, "{", deep, nan, good[:-20]]))
    assert faults(path, "mooncake") == [(2, "json"), (3, "json"), (4, "value"), (5, "json")]
    cut = next(f for f in hashed.MOONCAKE.read(path) if isinstance(f, Fault) and f.line == 5)
    assert "a file cut short ends like this" in cut.problem


def test_the_others_settings_are_noticed(tmp_path):
    """A file in blocks of 16 read as Mooncake has too many ids; one in blocks of 512 read as 16 has too few."""
    small = jsonl(tmp_path, mooncake(0, 521, list(range(33))))
    with pytest.raises(
        InputError, match=r"33 blocks of 512 tokens do not fit .* is the format another\?"
    ):
        read(small, "mooncake")
    large = jsonl(tmp_path, mooncake(0, 6758, list(range(14))))
    (row,) = read(large, "sharegpt")
    assert sum(tokens for _, tokens in row.prompt) == 14 * 16


# --- our own formats ----------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=20)
contents = st.integers(0, 2**64 - 1)


@st.composite
def traces(draw):
    """Rows with everything a format of ours holds."""
    at_ps, rows = 0, []
    for line in range(1, draw(st.integers(1, 6)) + 1):
        at_ps += draw(st.integers(0, 10**15))
        prompt = draw(st.none() | st.lists(st.tuples(contents, st.integers(1, 9999)), max_size=4))
        known = sum(tokens for _, tokens in prompt or ())
        rows.append(
            TraceRow(
                line,
                at_ps,
                known + draw(st.integers(0 if known else 1, 500)),
                draw(st.integers(1, 10**9)),
                None if prompt is None else tuple(prompt),
                draw(st.none() | contents),
                draw(st.none() | st.integers(1, 10**9)),
                *(draw(st.none() | names) for _ in range(3)),
                *(draw(st.none() | st.integers(1, 10**16)) for _ in range(2)),
                draw(st.none() | names),
            )
        )
    return rows


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.jsonl.gz", "t.parquet"])
@settings(max_examples=20)
@given(rows=traces())
def test_our_own_formats_come_back_as_they_were(tmp_path_factory, name, rows):
    path = str(tmp_path_factory.mktemp("own") / name)
    made = format_for(path, None)
    made.write(path, rows)
    assert format_of(path).format is made
    back = read(path)
    assert [row._replace(line=0) for row in back] == [row._replace(line=0) for row in rows]
    assert count_rows(path, made) == len(rows)
    assert made.holds == set(HELD)


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows = [TraceRow(1, 5, 10, 2, ((1, 10),), 2)]
    written = []
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        own.JSONL.write(str(tmp_path / name), rows)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        ("arrival_s,prompt_tokens,output_tokens,colour\n0,1,1,red\n", 1, "fields"),
        ("arrival_s,prompt_tokens,output_tokens,prompt\n0,10,1,5:11\n", 2, "content"),
        ("arrival_s,prompt_tokens,output_tokens,prompt\n0,10,1,5\n", 2, "content"),
        ("arrival_s,prompt_tokens,output_tokens,prompt\n0,10,1,5:x\n", 2, "tokens"),
        ("arrival_s,prompt_tokens,output_tokens,prompt\n0,10,1,x:5\n", 2, "content"),
        ("arrival_s,prompt_tokens,output_tokens,max_tokens\n0,10,1,0\n", 2, "tokens"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_timeout_s\n0,10,1,0\n", 2, "value"),
        ("arrival_s,prompt_tokens,output_tokens,total_timeout_s\n0,10,1,soon\n", 2, "stamp"),
        (f"arrival_s,prompt_tokens,output_tokens,tier\n0,10,1,{'x' * 201}\n", 2, "value"),
        ('{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 1, "colour": 1}\n', 1, "fields"),
        ('{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 1, "prompt": [1]}\n', 1, "content"),
        ('{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 1, "tier": [1]}\n', 1, "value"),
        ('{"arrival_s": 0, "prompt_tokens": 10}\n', 1, "fields"),
    ],
)  # fmt: skip
def test_malformed_lines_of_our_own(tmp_path, text, line, kind):
    assert faults(write(tmp_path, text)) == [(line, kind)]


def test_numbers_in_quotes_are_numbers(tmp_path):
    line = '{"arrival_s": "1.5", "prompt_tokens": "10", "output_tokens": 1, "prompt": [["3", "4"]]}'
    assert read(write(tmp_path, line))[0][1:5] == (3 * PS // 2, 10, 1, ((3, 4),))
    for prompt in (
        "[[3, 0]]",
        "[[3, 1e3]]",
        "[[-3, 1]]",
        '["ab"]',
        '[{"a": 1, "b": 2}]',
        "[[1, 2, 3]]",
        "7",
    ):
        bad = write(tmp_path, line.replace('[["3", "4"]]', prompt))
        assert [line for line, _ in faults(bad)] == [1]


def test_a_name_over_two_lines_is_refused_by_csv(tmp_path):
    rows = [TraceRow(1, 0, 1, 1, tenant="a\nb")]
    with pytest.raises(InputError, match=r"tenant: .* line end.*; write twin-jsonl"):
        own.CSV.write(str(tmp_path / "t.csv"), rows)
    assert not list(tmp_path.iterdir())


def test_parquet_that_is_none(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write(tmp_path, b"PAR1 and nothing behind", "t.parquet")
    assert faults(path) == [(1, "file")]
    pq.write_table(pa.table({"arrival_ps": [0]}), path)
    assert faults(path) == [(1, "fields")]
    table = {
        "arrival_ps": [5, 4, 6, None],
        "prompt_tokens": [1, 1, -1, 1],
        "output_tokens": [1] * 4,
    }
    pq.write_table(pa.table(table), path)
    assert faults(path) == [(2, "order"), (3, "tokens"), (4, "stamp")]
    with pytest.raises(InputError, match=r"t.parquet row 2: arrival_ps"):
        read(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'vllm-twin\[report\]'"):
        parquet.FORMAT.write(str(tmp_path / "t.parquet"), [])


# --- from one to another ------------------------------------------------------------------


def test_prefix_structure_survives_a_round_trip(tmp_path):
    """Seven groups, each with a prefix of its own of 16,384 tokens."""
    rows = [
        TraceRow(i + 1, i * PS, 16_484, 9, ((i % 7, 16_384), (100 + i, 100))) for i in range(40)
    ]
    start = str(tmp_path / "start.jsonl")
    own.JSONL.write(start, rows)
    ways = ["a.csv", "b.parquet", "c.jsonl.gz"]
    source = start
    for name in ways:
        convert(source, str(tmp_path / name))
        source = str(tmp_path / name)
    assert [row._replace(line=0) for row in read(source)] == [row._replace(line=0) for row in rows]
    convert(start, str(tmp_path / "m.jsonl"), target_format="mooncake")
    first, *others = [row.prompt or () for row in read(str(tmp_path / "m.jsonl"))]
    shared = [
        sum(tokens for (c, tokens), (d, _) in zip(first, p, strict=True) if c == d) for p in others
    ]
    assert shared == [16_384 if i % 7 == 0 else 0 for i in range(1, 40)]
    (tmp_path / "m.jsonl").unlink()
    own.JSONL.write(start, [rows[0]._replace(prompt=((0, 16_000), (100, 484)))])
    for target, lost in [
        ("azure", "prefix"),
        ("burstgpt", "prefix"),
        ("mooncake", "prefixes within"),
    ]:
        with pytest.raises(InputError, match=f"line 1: format {target} cannot hold .*{lost}"):
            convert(start, str(tmp_path / "out"), target_format=target)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["start.jsonl", *ways])


def test_what_is_lost_is_counted_if_it_may_be(tmp_path):
    source = str(tmp_path / "in.jsonl")
    rows = [
        TraceRow(1, PS, 20, 3, ((1, 20),), 2, 9, "BATCH", "acme", "s", 5, None, "r1"),
        TraceRow(2, PS, 20, 3, ((1, 17), (2, 3))),
    ]
    own.JSONL.write(source, rows)
    target = str(tmp_path / "out.csv")
    done = convert(source, target, target_format="azure", lossy=True)
    assert done.lost == dict.fromkeys(HELD, 1) | {"prefixes": 2}
    assert plain(target) == [(0, 20, 3), (0, 20, 3)]


def test_hashed_formats_keep_what_lies_on_their_blocks(tmp_path):
    source = jsonl(
        tmp_path, mooncake(0, 1300, [0, 1, 2]), mooncake(1, 1300, [0, 1, 3]), mooncake(2, 40, [4])
    )
    table, back = str(tmp_path / "t.csv"), str(tmp_path / "back.jsonl")
    convert(source, table)
    convert(table, back, target_format="mooncake")
    with open(source, "rb") as before, open(back, "rb") as after:
        assert before.read() == after.read()


def test_content_ids_become_ids_of_prefixes(tmp_path):
    """The same content after another beginning is another block there."""
    rows = [
        TraceRow(1, 0, 1024, 1, ((5, 512), (6, 512))),
        TraceRow(2, 0, 1024, 1, ((7, 512), (6, 512))),
        TraceRow(3, 0, 600, 1, ((5, 512),)),
    ]
    path = str(tmp_path / "t.jsonl")
    hashed.MOONCAKE.write(path, rows)
    lines = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [json.loads(line)["hash_ids"] for line in lines]
    assert ids == [[0, 1], [2, 3], [0, 4]]


def test_a_part_at_another_speed(tmp_path):
    path = azure_csv(tmp_path, [(f"2023-11-16 18:15:0{i}.7", 5, 6) for i in range(9)])
    target = str(tmp_path / "part.csv")
    done = convert(path, target, selection=Selection((2 * PS, 7 * PS), 3), speedup=Fraction(4))
    assert done.requests == 3
    assert [at for at, *_ in plain(target)] == [0, PS // 4, PS // 2]


def test_malformed_lines_stop_a_conversion_or_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, HEADER + ROW + "broken\n" + ROW)
    target = str(tmp_path / "out.csv")
    with pytest.raises(InputError, match="line 3: 1 fields"):
        convert(path, target)
    done = convert(path, target, skip_malformed=True)
    assert (done.requests, done.skipped) == (2, 1)
    assert len(plain(target)) == 2


def test_targets_that_cannot_be_written(tmp_path):
    path = azure_csv(tmp_path, [("2023-11-16 18:15:46", 5, 6)])
    for target, name, message in [
        ("out.txt", None, "end the name in .csv, .jsonl or .parquet"),
        ("out.parquet.gz", None, "end the name in"),
        ("out.jsonl", "alibaba", "is read, but not written"),
        ("out.jsonl", "zip", "format 'zip' is not known; known: azure, burstgpt"),
        ("none/out.jsonl", None, "out.jsonl: cannot be written: No such file"),
    ]:
        with pytest.raises(InputError, match=message):
            convert(path, str(tmp_path / target), target_format=name)
    with pytest.raises(InputError, match="there is no request in it"):
        convert(write(tmp_path, HEADER), str(tmp_path / "out.jsonl"))


def test_a_trace_may_be_replaced_by_what_is_made_of_it(tmp_path):
    path = azure_csv(tmp_path, [("2023-11-16 18:15:46", 5, 6)])
    convert(path, path)
    assert plain(path) == [(0, 5, 6)]
    assert format_of(path).format.name == "twin-csv"


@pytest.mark.parametrize("name", FORMATS)
def test_formats_written_are_recognised(tmp_path, name):
    made = FORMATS[name]
    if made.write is None:
        return
    path = str(tmp_path / "trace")
    made.write(path, [TraceRow(1, 0, 600, 3), TraceRow(2, PS, 600, 3)])
    found = format_of(path).format
    assert found is made or {found.name, name} == {"mooncake", "sharegpt"}
    assert plain(path) == [(0, 600, 3), (PS, 600, 3)]


def test_places_name_the_row_of_a_table():
    fault = Fault(3, "tokens", "problem")
    assert place("t", burstgpt.FORMAT, fault) == "t line 3: problem"
    assert place("t", parquet.FORMAT, fault) == "t row 3: problem"


LINE_OF = '{"arrival_s": %d, "prompt_tokens": 100, "output_tokens": 5}\n'


@pytest.mark.parametrize("rows", [3, 50, 60_000])
def test_a_packed_file_that_is_cut_is_read_up_to_the_cut(tmp_path, rows):
    packed = gzip.compress("".join(LINE_OF % i for i in range(rows)).encode())
    path = tmp_path / "cut.jsonl.gz"
    for share in (0.6, 0.9, 1.0):
        kept = packed[: int(len(packed) * share) - 1]
        path.write_bytes(kept)
        whole = zlib.decompressobj(31).decompress(kept).count(b"\n")
        *found, fault = own.JSONL.read(str(path))
        assert [row.at_ps for row in found] == [i * PS for i in range(whole)]
        assert (fault.kind, fault.fatal) == ("file", True)
        assert "not a whole gzip file" in fault.problem


def test_what_follows_a_packed_file_is_reported_after_its_rows(tmp_path):
    parts = [gzip.compress((LINE_OF % i).encode()) for i in range(3)]
    path = tmp_path / "t.jsonl.gz"
    for tail in (b"", b"\0" * 700, b"\0"):
        path.write_bytes(b"".join(parts) + tail)
        assert [row.at_ps for row in own.JSONL.read(str(path))] == [0, PS, 2 * PS]
    for tail in (b"junk", b"\0\0x", b"\x1f"):
        path.write_bytes(b"".join(parts) + tail)
        *found, fault = own.JSONL.read(str(path))
        assert len(found) == 3
        assert "something else follows the packed data" in fault.problem


@given(
    rest=st.from_regex(
        r"[0-9:.+Z ]{0,6}|[0-5][0-9]\.[0-9]{1,13}|[0-9]{2}(\.[0-9]{1,3})?Z?", fullmatch=True
    )
)
def test_a_stamp_of_the_same_minute_is_read_as_any_other(rest):
    """The short way through the minute of the row before gives what the whole stamp gives, its refusals included."""
    minute = "2023-11-16 18:17:"
    clock = Clock("TIMESTAMP")
    assert clock.date(1, minute + "00.0") == 0

    def told(read):
        try:
            return read()
        except MalformedError as error:
            return error.kind, str(error)

    expected = told(lambda: instant_ps("TIMESTAMP", minute + rest))
    found = told(lambda: clock.date(2, minute + rest))
    if expected[0] == "stamp":
        assert found == expected
    elif expected[1]:
        assert found[0] == "clock"
    else:
        assert found == expected[0] - instant_ps("TIMESTAMP", minute + "00")[0]
