"""What the examples and the documents show is what is printed.

A transcript is text in which lines that begin with `$` are commands, and what follows each is its output, errors
included. The commands of one transcript run one after another in an empty folder with the examples in it.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLISHED = {
    "AzureLLMInferenceTrace_conv.csv": "azure2023_conv.csv",
    "AzureLLMInferenceTrace_code.csv": "azure2023_code.csv",
    "conversation_trace.jsonl": "mooncake_conversation.jsonl.gz",
    "synthetic_trace.jsonl": "mooncake_synthetic.jsonl.gz",
}
"""Names under which traces are published -> files of the data folder."""


def transcripts():
    """(name, text) of all of them: files examples/*.out, and blocks marked `console` in docs."""
    for path in sorted((ROOT / "examples").glob("*.out")):
        yield path.name, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        for number, text in enumerate(blocks, 1):
            yield f"{path.name}-{number}", text


ALL = dict(transcripts())


def replay(text: str, folder: Path) -> str:
    """The transcript again, with what the commands print now."""
    shell = f'twin() {{ PYTHONPATH="{ROOT}" "{sys.executable}" -m twin "$@"; }}\n'
    commands = re.findall(r"^\$ (.*(?:\n> .*)*)", text, re.MULTILINE)
    again = ""
    for command in commands:
        script = shell + command.replace("\n> ", "\n")
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        again += f"$ {command}\n{done.stdout}"
    return again


@pytest.mark.parametrize("name", ALL)
def test_transcript(name, tmp_path, request):
    text = ALL[name]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for published, file in PUBLISHED.items():
        if published in text:
            data = request.getfixturevalue("twin_data")
            (tmp_path / published).symlink_to(data / "traces" / file)
    comments = re.compile(r"^#.*\n", re.MULTILINE)
    assert replay(text, tmp_path) == comments.sub("", text)


def test_there_are_transcripts():
    assert "01-trace.out" in ALL
    assert any(name.startswith("traces.md") for name in ALL)
