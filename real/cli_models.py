"""`twin-real models`: several scenarios under one memory budget."""

import re
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from real.cli_serve import FAILED, Echo, Overrides, Python, server_environment, tiny_scenario
from real.command import Serving, serve_command
from real.model_server import Models, Offer, front, memory_of, serve_front
from real.models import prefetch_in_background
from real.preflight import check_model, check_port, check_vllm, free_port
from real.server import Server, Stopped, on_ending_signals, say_to_stderr
from real.tiny import CONFIG, write_tiny_model
from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.step_time.catalogue import parse_model
from twin.step_time.memory import kv_blocks
from twin.terminal import complain, errors

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}  # fmt: skip


def models(
    scenarios: Annotated[
        list[Path],
        typer.Argument(metavar="SCENARIO...", help="Scenario files.", show_default=False),
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="BYTES", help="Memory for all servers together, e.g. 80GiB.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    load: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Start this one at once. May be repeated."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Serve a built-in model with random weights for each.")
    ] = False,
    sleep: Annotated[
        bool,
        typer.Option(
            "--sleep",
            help="Let servers sleep instead of ending them (vLLM's sleep mode, GPUs only).",
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long accepted requests may take before a server is given up.",
        ),
    ] = 600.0,
    python: Python = sys.executable,
    log: Echo = False,
) -> None:
    """Serve several scenarios under one memory budget: the one least recently asked for makes room.

    A request is redirected (307) to the server of the scenario it names as its model, which is started first where it
    does not run. Exit status 0 after a signal, 2 for bad input.
    """
    with errors(), ExitStack() as stack:
        budget_bytes = bytes_of(budget)
        folder = None
        if tiny:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twin-tiny-")))
            write_tiny_model(folder)
        offers = _offers(scenarios, overrides or [], folder)
        for name in load or ():
            if name not in offers:
                raise InputError(f"--load {name}: offered are {', '.join(offers)}")
        for offer in offers.values():
            check_vllm(python, offer.scenario.engine.version)
            check_model(folder or offer.scenario.model.name)
            if offer.size_bytes > budget_bytes:
                raise InputError(
                    f"--budget {budget}: {offer.name} takes {offer.size_bytes:,} bytes; raise the budget, or lower its "
                    "gpu_memory_utilization or num_gpu_blocks_override"
                )
        check_port(host, port)
        starter = _Starter(python, host, folder, sleep, log)
        offered = Models(offers, budget_bytes, starter.start, drain, say_to_stderr)
        stack.callback(offered.cache.close)
        listening = front(offered, host, port)
        stop = threading.Event()
        stack.enter_context(on_ending_signals(lambda number, frame: stop.set()))
        say_to_stderr(
            f"ready: http://{host}:{port}, {', '.join(offers)} within {budget_bytes:,} bytes"
        )
        try:
            threading.Thread(target=_load_first, args=(offered, load or ()), daemon=True).start()
            serve_front(listening, stop)
        except Stopped as error:
            complain(f"error: {error}")
            raise typer.Exit(FAILED) from None
        for name in offered.cache.names:
            offered.cache.evict(name)


def bytes_of(text: str) -> int:
    """A number of bytes, with or without a unit. Raises InputError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise InputError(f"--budget {text}: must be a number of bytes above 0, such as 80GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _offers(paths: list[Path], overrides: list[str], tiny: Path | None) -> dict[str, Offer]:
    offers: dict[str, Offer] = {}
    for path in paths:
        scenario = load_scenario(path, overrides)
        if scenario.name in offers:
            raise InputError(f"{path}: a scenario {scenario.name} is there already; rename one")
        size, folder = memory_of(scenario), Path(scenario.model.name)
        if tiny is not None:
            scenario, folder = tiny_scenario(scenario), tiny
            size = _tiny_memory(scenario)
        weights = folder if folder.is_dir() else None
        offers[scenario.name] = Offer(scenario.name, scenario, weights, size)
    return offers


def _tiny_memory(scenario: Scenario) -> int:
    engine, hardware = scenario.engine, scenario.hardware
    plan = kv_blocks(
        parse_model(CONFIG, "tiny"), hardware.gpu, 1, "float32", "float32",
        hardware.memory.gpu_memory_utilization, engine.max_num_batched_tokens, engine.max_num_seqs,
        engine.block_size, eager=True,
    )  # fmt: skip
    return memory_of(replace(scenario, hardware=replace(hardware, memory=plan)))


def _load_first(offered: Models, names: Any) -> None:
    for name in names:
        try:
            offered.url_of(name)
        except (Stopped, ValueError) as error:
            say_to_stderr(f"{name}: {error}")


class _Starter:
    """Starts servers, each on a port of its own."""

    def __init__(self, python: str, host: str, tiny: Path | None, sleep: bool, log: bool) -> None:
        self._python, self._host, self._tiny, self._sleep = python, host, tiny, sleep
        self._echo = sys.stderr.write if log else None

    def start(self, offer: Offer) -> Server:
        """A server that is ready. Raises Stopped if it does not start."""
        serving = Serving(
            python=self._python,
            model=self._tiny or offer.scenario.model.name,
            name=offer.name,
            host=self._host,
            port=free_port(),
            dummy=self._tiny is not None,
            more=["--enable-sleep-mode"] if self._sleep else [],
        )
        server = Server(
            serve_command(offer.scenario, serving), serving.host, serving.port, self._echo
        )
        if offer.folder is not None and not serving.dummy:
            prefetch_in_background(offer.folder, say_to_stderr)
        extra = {"VLLM_SERVER_DEV_MODE": "1"} if self._sleep else {}
        try:
            server.start(server_environment(serving) | extra)
            server.wait_until_up(say_to_stderr)
            server.warm_up(offer.name, offer.scenario.engine.max_model_len, say_to_stderr)
            server.announce_ready()
        except BaseException:
            server.stop()
            raise
        say_to_stderr(f"{offer.name}: ready at {server.url}")
        return server
