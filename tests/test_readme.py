"""The commands and the figures of the README."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^twin (run examples/chat-8b.*?)(?: +>.*)?$", README, re.MULTILINE)
RESULTS = re.findall(r"^\| (vllm-\w+|priority|tiered) \| (.*) \|$", README, re.MULTILINE)


def twin(*arguments: str) -> str:
    command = [sys.executable, "-m", "twin", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work(command, tmp_path):
    words = shlex.split(command, comments=True)
    words = [str(tmp_path / word) if word in ("result", "h.om") else word for word in words]
    assert twin(*words, "--set", "traffic.0.requests=100")


@pytest.mark.parametrize(("policy", "cells"), RESULTS)
def test_results(policy, cells):
    options = ("--set", f"policy={policy}", "--json")
    tiers = json.loads(twin("run", "examples/chat-8b.yaml", *options))["tiers"]
    figures = (
        tiers["ONLINE"]["ttft_s"]["p99"],
        tiers["ONLINE"]["goodput_rps"],
        tiers["BATCH"]["e2e_s"]["p99"],
        tiers["OFFLINE"]["ttft_s"]["p99"],
    )
    assert cells == " | ".join(f"{figure:#.3g}".rstrip(".") for figure in figures)


def test_the_azure_trace(twin_data):
    (command,) = re.findall(r"^twin (run examples/azure.*)$", README, re.MULTILINE)
    published = "AzureLLMInferenceTrace_conv.csv"
    assert published in command
    trace = str(twin_data / "traces/azure2023_conv.csv")
    totals = json.loads(twin(*command.replace(published, trace).split(), "--json"))["totals"]
    assert totals["offered"] == totals["completed"] == 19_366


def test_there_are_commands_and_results():
    assert len(COMMANDS) >= 3
    assert [policy for policy, _ in RESULTS] == ["vllm-fcfs", "priority", "tiered"]
