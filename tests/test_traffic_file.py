"""`traffic:` may name a file with the streams."""

import pytest

from tests.runs import azure_csv, document, stream
from twin.errors import InputError
from twin.scenario import load_scenario

STREAM = "- {arrivals: {process: constant, rate: 4}, prompt_tokens: {fixed: 9}, output_tokens: {fixed: 2}, requests: 3}"


@pytest.mark.parametrize("text", [STREAM, "traffic:\n" + STREAM])
def test_streams_of_a_file(tmp_path, text):
    (tmp_path / "live.yaml").write_text(text)
    written = document(traffic=str(tmp_path / "live.yaml"))
    spelled = document(
        traffic=[stream(9, 2, arrivals={"process": "constant", "rate": 4}, requests=3)]
    )
    assert load_scenario(written).traffic == load_scenario(spelled).traffic
    again = load_scenario(load_scenario(written).to_dict())
    assert again.traffic == load_scenario(written).traffic


def test_a_file_in_an_option_can_be_changed_by_later_options(tmp_path):
    (tmp_path / "live.yaml").write_text(STREAM)
    options = [f"traffic={tmp_path / 'live.yaml'}", "traffic.0.requests=7"]
    [loaded] = load_scenario(document(), options).traffic
    assert loaded.requests == 7


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "there").mkdir()
    azure_csv(tmp_path / "there", [("2024-01-01 00:00:00", 5, 6)])
    (tmp_path / "there/live.yaml").write_text("[{trace: trace.csv}]")
    [loaded] = load_scenario(document(traffic=str(tmp_path / "there/live.yaml"))).traffic
    assert loaded.path == str(tmp_path / "there/trace.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "traffic: .*none.yaml: cannot be read"),
        ("name: x", "none.yaml holds no list of streams, nor a key traffic with one"),
        ("a: [", "none.yaml line 1: not readable as YAML"),
        (STREAM.replace("fixed: 9", "fixed: 0"), "none.yaml: traffic.0.prompt_tokens.fixed: must be >= 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_said(tmp_path, text, message):
    path = tmp_path / "none.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_scenario(document(traffic=str(path)))
