"""No command overwrites what it reads, under whatever name; and two results do not go into one file."""

import json
import os
import shutil
import sys

import pytest
import yaml

from tests.runs import document
from twin import cli

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,100,10\n2023-11-16 18:15:47,90,5\n"


@pytest.fixture
def twin(monkeypatch, capsys):
    """Runs the command in this process; gives (exit status, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["twin", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        return status, capsys.readouterr().err

    return call


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a scenario that reads a trace and a traffic file, where the command is called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(TRACE, encoding="utf-8")
    (tmp_path / "traffic.jsonl").write_text(json.dumps([{"trace": "t.csv"}]), encoding="utf-8")
    scenario = document(traffic="traffic.jsonl", cluster={"replicas": 1})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    os.link(tmp_path / "t.csv", tmp_path / "hard.csv")
    (tmp_path / "soft.csv").symlink_to("t.csv")
    (tmp_path / "soft.om").symlink_to("s.yaml")
    (tmp_path / "sub").mkdir()
    return tmp_path


def kept(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [
        "run s.yaml --records t.csv",
        "run s.yaml --records sub/../t.csv",
        "run s.yaml --records hard.csv",
        "run s.yaml --records soft.csv",
        "run s.yaml --records traffic.jsonl",
        "run s.yaml --openmetrics s.yaml",
        "run s.yaml --openmetrics soft.om",
        "run s.yaml --openmetrics traffic.jsonl",
        "run s.yaml --openmetrics t.csv",
        "trace convert t.csv t.csv --to azure",
        "trace convert t.csv ./hard.csv --to azure",
        "trace convert t.csv soft.csv --to azure",
        "trace convert soft.csv t.csv --to azure",
        "trace export s.yaml t.csv",
        "trace export s.yaml traffic.jsonl",
        "import . --out s.yaml",
        "import s.yaml --out ./s.yaml",
    ],
)
def test_a_file_that_is_read_is_not_written(twin, work, arguments):
    before = kept(work)
    status, err = twin(*arguments.split())
    assert status == 2
    assert "would be overwritten; name another file" in err
    assert kept(work) == before


def test_a_folder_of_results_does_not_swallow_the_scenario(twin, work):
    shutil.copy(work / "traffic.jsonl", work / "sub" / "events.jsonl")
    (work / "sub" / "t.csv").write_text(TRACE, encoding="utf-8")
    before = kept(work / "sub")
    status, err = twin(
        "run", "s.yaml", "--set", "traffic=sub/events.jsonl", "--out", "sub", "--force"
    )
    assert (status, "sub/events.jsonl: is read by this command" in err) == (2, True), err
    assert kept(work / "sub") == before


@pytest.mark.parametrize(
    "arguments",
    [
        "--records r.jsonl --openmetrics r.jsonl",
        "--records sub/events.jsonl --out sub",
        "--openmetrics sub/../sub/summary.json --out sub",
    ],
)
def test_two_results_do_not_go_into_one_file(twin, work, arguments):
    status, err = twin("run", "s.yaml", *arguments.split())
    assert (status, "writes the same file" in err) == (2, True), err


def test_other_files_beside_those_that_are_read_are_written(twin, work):
    assert twin("run", "s.yaml", "--records", "r.csv", "--openmetrics", "r.om")[0] == 0
    assert twin("trace", "convert", "t.csv", "u.csv")[0] == 0
    assert twin("trace", "export", "s.yaml", "v.csv")[0] == 0
    assert (work / "r.om").stat().st_size > 0
    assert twin("run", "s.yaml", "--records", "r.csv")[0] == 0
