"""`twin-real serve` and `twin-real demo`: a scenario on a real server."""

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from real.command import Serving, check_more, serve_command
from real.hints import HEADERS, check_headers
from real.models import prefetch_in_background
from real.preflight import check_model, check_port, check_vllm, free_port, source_path
from real.server import START_LIMIT_S, Server, Stopped, on_ending_signals, run_server, say_to_stderr
from real.tiny import BLOCK_SIZE, MAX_MODEL_LEN, NAME, write_tiny_model
from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.terminal import complain, errors, write

FAILED = 1
"""Exit status of a server that ended by itself."""
NO_KEY = {"VLLM_API_KEY": ""}
"""The demo's own client has none."""

ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="Scenario file (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the scenario. May be repeated."
    ),
]
Python = Annotated[str, typer.Option(metavar="PROGRAM", help="Python interpreter that has vLLM.")]
Echo = Annotated[bool, typer.Option("--log", help="Show vLLM's own log on stderr.")]


def serve(
    scenario: ScenarioFile,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_ARGUMENTS]", help="Handed to `vllm serve` as they are."),
    ] = None,
    overrides: Overrides = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the `vllm serve` command and do nothing else.")
    ] = False,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Serve a built-in model with random weights instead, so that this runs on a laptop's CPU.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model, where it is not what the scenario names."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="as the scenario"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FIELD",
            help="A request header that carries tier, tenant, ttft_s or total_s; replaces the built-in ones: "
            "X-Tier, X-Tenant, X-Ttft-S, X-Total-S. May be repeated.",
        ),
    ] = None,
    reject: Annotated[
        bool,
        typer.Option(
            "--reject-bad-hints",
            help="Answer 400 to a request whose tier, tenant or deadlines make no sense, instead of "
            "taking the default.",
        ),
    ] = False,
    drain: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long accepted requests may take after a signal."
        ),
    ] = 600.0,
    start_limit: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long vLLM may take until it listens."),
    ] = START_LIMIT_S,
    python: Python = sys.executable,
    log: Echo = False,
) -> None:
    """Serve a scenario with vLLM: build the command, start it, warm up, say when it is ready, drain on SIGTERM.

    Exit status 0 after a drain, 1 if the server ended by itself or lost a request, 2 for bad input.
    """
    with errors(), on_ending_signals(_interrupt):
        loaded = load_scenario(scenario, overrides or [])
        if loaded.policy is None and (reject or header):
            option = "--reject-bad-hints" if reject else "--header"
            raise InputError(
                f"{option}: policy {loaded.policy_name} reads no hints; leave it out, or name another policy"
            )
        serving = Serving(
            python=python,
            model=model or loaded.model.name,
            name=name or (NAME if tiny else loaded.model.name),
            host=host,
            port=port,
            headers=_headers(header),
            bad_hints="reject" if reject else "default",
            more=more or (),
        )
        with prepared(loaded, serving, tiny) as (loaded, serving):
            command = serve_command(loaded, serving)
            check_more(command, serving.more)
            if show:
                write(_printed(command, serving, tiny))
                return
            check_vllm(python, loaded.engine.version)
            check_model(serving.model)
            check_port(host, port)
            server = Server(command, host, port, sys.stderr.write if log else None)
            if Path(serving.model).is_dir() and not serving.dummy:
                prefetch_in_background(Path(serving.model), say_to_stderr)
            _guarded(server, loaded, serving, drain, None, start_limit)


def demo(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 200,
    python: Python = sys.executable,
    log: Echo = False,
) -> None:
    """Start the tiny model under a scenario's policy, send mixed requests, show each tier's latency, stop."""
    with errors(), on_ending_signals(_interrupt):
        try:
            from real.demo import play_demo  # the one command that is a client, too
        except ImportError as error:
            package = str(error.name).partition(".")[0]
            raise InputError(
                f"twin-real demo needs {package}: pip install 'vllm-twin[real]'"
            ) from None
        loaded = load_scenario(scenario, overrides or [])
        serving = Serving(python=python, model="", name=NAME, port=free_port())
        with prepared(loaded, serving, tiny=True) as (loaded, serving):
            command = serve_command(loaded, serving)
            check_vllm(python, loaded.engine.version)
            server = Server(command, serving.host, serving.port, sys.stderr.write if log else None)
            told: list[str] = []

            def play() -> None:
                told.append(play_demo(server.url, NAME, loaded, requests))

            try:
                _guarded(server, loaded, serving, 60.0, play, more=NO_KEY)
            finally:
                if told:
                    write(told[0])


def _interrupt(number: int, frame: Any) -> None:
    """Before a server runs, whatever ends the command ends it as Ctrl-C does: temporary folders go."""
    raise KeyboardInterrupt


def _printed(command: list[str], serving: Serving, tiny: bool) -> str:
    """The command as a shell takes it, with the environment it needs."""
    shown = ['PROMETHEUS_MULTIPROC_DIR="$(mktemp -d)"']
    if (source := source_path()) is not None:
        shown.append(f"PYTHONPATH={shlex.quote(source)}")
    shown += [f"{name}={value}" for name, value in server_environment(serving).items()]
    if tiny:
        complain("FOLDER: --tiny makes its model when it serves, in a folder that goes with it")
        command = ["FOLDER" if word == str(serving.model) else word for word in command]
    return " ".join([*shown, shlex.join(command)]) + "\n"


def _guarded(
    server: Server,
    loaded: Scenario,
    serving: Serving,
    drain: float,
    on_ready: Callable[[], None] | None,
    start_limit: float = START_LIMIT_S,
    more: dict[str, str] | None = None,
) -> None:
    extra = server_environment(serving) | (more or {})
    longest = loaded.engine.max_model_len
    try:
        run_server(
            server, extra, serving.name, longest, drain, say_to_stderr, on_ready, start_limit
        )
    except Stopped as error:
        complain(f"error: {error}")
        raise typer.Exit(FAILED) from None


def server_environment(serving: Serving) -> dict[str, str]:
    """Variables that this server needs: a model in a folder needs no network, the tiny one little memory."""
    extra: dict[str, str] = {}
    if Path(serving.model).is_dir():
        extra |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if serving.dummy:
        extra["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return extra


def _headers(named: list[str] | None) -> dict[str, str]:
    if named is None:
        return HEADERS
    pairs = []
    for pair in named:
        name, is_pair, field = pair.partition("=")
        if not is_pair:
            raise InputError(f"--header {pair}: must be NAME=FIELD, such as X-Class=tier")
        pairs.append((name, field))
    try:
        check_headers(pairs)
    except ValueError as error:
        raise InputError(f"--header: {error}") from None
    return {name.lower(): field for name, field in pairs}


@contextmanager
def prepared(
    loaded: Scenario, serving: Serving, tiny: bool, small: bool = False
) -> Iterator[tuple[Scenario, Serving]]:
    """The scenario and what is served; with a built-in model, in a folder that is there as long as this lasts."""
    if not tiny:
        yield loaded, serving
        return
    with tempfile.TemporaryDirectory(prefix="twin-tiny-") as folder:
        write_tiny_model(Path(folder), small)
        yield tiny_scenario(loaded), replace(serving, model=folder, dummy=True)


def tiny_document(scenario: Scenario, folder: Path, step_time: str) -> dict[str, Any]:
    """The data of a scenario of the simulator for what `tiny_scenario` serves, with step times from that file."""
    served = tiny_scenario(scenario)
    document = served.to_dict()
    document["model"] = str(folder)
    document["hardware"] |= {"dtype": "float32", "tensor_parallel_size": 1, "step_time": step_time}
    document["engine"] |= {
        "max_model_len": served.engine.max_model_len,
        "block_size": served.engine.block_size,
        "async_scheduling": False,
    }
    return document


def tiny_scenario(scenario: Scenario) -> Scenario:
    """The scenario with what the tiny model on a CPU needs: shorter contexts, larger blocks, float32, no graphs.

    A number of KV blocks that the scenario gives is kept in tokens.
    """
    engine, document = scenario.engine, scenario.to_dict()
    blocks = document["engine"]["num_gpu_blocks_override"]
    if blocks is not None:
        tokens = (blocks - 1) * engine.block_size
        blocks = 1 + max(tokens, MAX_MODEL_LEN) // BLOCK_SIZE
    document["engine"] |= {
        "num_gpu_blocks_override": blocks,
        "kv_cache_dtype": "auto",
        "enforce_eager": True,
    }
    return replace(
        scenario,
        document=document,
        hardware=replace(scenario.hardware, dtype="float32", tensor_parallel_size=1),
        engine=replace(
            engine,
            max_model_len=min(engine.max_model_len, MAX_MODEL_LEN),
            block_size=BLOCK_SIZE,
            async_scheduling=False,
        ),
    )
