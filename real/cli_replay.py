"""`twin-real replay`: a scenario's traffic against a server."""

import asyncio
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from real.address import base_of
from real.cli_serve import Overrides, ScenarioFile
from real.headers import Headers, headers_of
from real.tiny import VOCABULARY
from twin.errors import InputError
from twin.terminal import INTERRUPTED, complain, errors, write

POLL_S = 1.0
"""Between two readings of the server's metrics."""


def replay(
    scenario: ScenarioFile,
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Server, e.g. http://127.0.0.1:8000 or https://gateway/models/one, with or without /v1 at the end.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Replaces run.seed.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option(help="What the server calls the model.", show_default="the first it lists"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write requests.parquet, trace.jsonl, replay.json, summary.json, timeseries.parquet and report.html.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --out write into a folder that is not empty.")
    ] = False,
    endpoint: Annotated[
        str, typer.Option(help="completions (token ids, exact lengths) or chat (words).")
    ] = "completions",
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Ask for whole replies: no TTFT, no ITL.")
    ] = False,
    own_lengths: Annotated[
        bool,
        typer.Option(
            "--own-lengths",
            help="Let the model end its replies, up to the declared max_tokens, instead of forcing the lengths of "
            "the traffic.",
        ),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Send nothing along that only vLLM knows: tiers, deadlines, priorities, counts with each piece. The "
            "lengths are still forced (ignore_eos); with --own-lengths, too, any server takes the requests.",
        ),
    ] = False,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Have at most N requests open; others wait in the client."
        ),
    ] = None,
    until: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Send nothing after this.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Give up a request that has no end so long after it was sent.",
        ),
    ] = 600.0,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=64,
            metavar="N",
            help="Token ids of the served model.",
            show_default="as the scenario's",
        ),
    ] = None,
    content_seed: Annotated[
        int, typer.Option(help="Seed of the text that stands for content ids.")
    ] = 0,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="The server is `twin-real serve --tiny`: use its token ids."),
    ] = False,
    client_limit: Annotated[
        bool,
        typer.Option(
            "--client-limit",
            help="Find out beforehand up to which rate this client sends in time, against a server of its own.",
        ),
    ] = False,
    header: Headers = None,
) -> None:
    """Play the traffic of a scenario against an OpenAI-compatible server, each request when it is due.

    Exit status 0 however requests ended, 2 for bad input, 130 after Ctrl-C, which gives up what is open.
    """
    with errors():
        from real.prompts import Prompts
        from twin.scenario import load_scenario

        _needs("aiohttp", "twin-real replay")
        from real.measured import write_measured
        from real.measured_report import render, write_report
        from real.replay import PRIORITIES, Manner

        loaded = load_scenario(scenario, overrides or [], seed)
        if endpoint not in ("completions", "chat"):
            raise InputError(f"--endpoint {endpoint}: must be completions or chat")
        if not timeout < math.inf:
            raise InputError(f"--timeout {timeout:g}: must be a finite number of seconds")
        url = base_of(url)
        headers = headers_of(header)
        if out is not None:
            from twin.report.folder import check_folder

            check_folder(out, force)
        manner = Manner(
            endpoint=endpoint,
            stream=not no_stream,
            exact_lengths=not own_lengths,
            extensions=not plain,
            hints=not plain,
            server_aborts=loaded.policy is not None,
            max_in_flight=max_in_flight,
            until_s=until,
            clients=loaded.cluster.clients,
            timeout_s=timeout,
        )
        prompts = Prompts(vocabulary or (VOCABULARY if tiny else loaded.model.vocab), content_seed)
        if not plain:
            told = ", ".join(f"{tier} {number}" for tier, number in PRIORITIES.items())
            complain(f"priorities (smaller is more urgent, as in vLLM): {told}")
        facts: dict[str, Any] = {}
        if client_limit:
            facts["client_limit"] = _limit(loaded, manner.stream, prompts)
        run = _play(loaded, url, model, prompts, manner, headers)
        facts |= run.facts
        write(render(run.summary, run.measured, facts["client"]))
        if out is not None:
            write_measured(out, run.measured, facts)
            write_report(out, run.result, run.summary)
        if run.result.interrupted:
            raise typer.Exit(INTERRUPTED)


def _needs(package: str, command: str) -> None:
    from importlib.util import find_spec

    try:
        found = find_spec(package)
    except ValueError:  # blocked
        found = None
    if found is None:
        raise InputError(f"{command} needs {package}: pip install 'vllm-twin[real]'")


def _limit(loaded: Any, stream: bool, prompts: Any) -> dict[str, Any]:
    from real.lateness import LIMIT_S, highest_rate
    from twin.workload.streams import Traffic, open_streams

    traffic = Traffic(open_streams(loaded.traffic, loaded.run.seed))
    lengths: list[tuple[int, int]] = []
    while traffic.next_ps() is not None and len(lengths) < 200:
        request = traffic.pop().request
        lengths.append((request.prompt_tokens, request.output_tokens))
    prompt, output = (round(sum(column) / len(lengths)) for column in zip(*lengths, strict=True))
    rate, share = highest_rate(prompt, output, stream, prompts.low + prompts.size)
    complain(
        f"this client sends up to {rate:g} requests/s of {prompt} and {output} tokens within {1e3 * LIMIT_S:g} ms of "
        f"their due time, at {100 * share:.0f} % of a processor"
    )
    return {"rate": rate, "cpu_share": share, "prompt_tokens": prompt, "output_tokens": output}


class _Run:
    def __init__(self, measured: Any, result: Any, summary: Any, facts: dict[str, Any]) -> None:
        self.measured, self.result, self.summary, self.facts = measured, result, summary, facts


def _play(
    loaded: Any,
    url: str,
    model: str | None,
    prompts: Any,
    manner: Any,
    headers: Mapping[str, str],
) -> _Run:
    from dataclasses import replace

    from real.lateness import client_facts, warnings_of
    from real.measured_report import (
        length_mismatch,
        lengths_told,
        result_of,
        span_s,
        summary_of,
    )
    from real.server_metrics import Reading, read, series_of
    from real.told import error_line, first_model, without_prompts, words_line
    from twin.workload.streams import Traffic, open_streams

    name = model or first_model(url, headers)
    before = read(url, headers=headers)
    readings: list[tuple[float, Reading]] = []

    async def session() -> Any:
        from real.replay import replay as play

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        begun = loop.time()

        async def poll() -> None:
            while before is not None:
                found = await asyncio.to_thread(read, url, headers=headers)
                if found is not None:
                    readings.append((loop.time() - begun, found))
                await asyncio.sleep(POLL_S)

        polling = asyncio.create_task(poll())
        try:
            traffic = Traffic(open_streams(loaded.traffic, loaded.run.seed))
            return await play(url, name, traffic, prompts, manner, stop, headers)
        finally:
            polling.cancel()

    done = asyncio.run(session())
    after = read(url, headers=headers)
    changes = after.since(before) if before is not None and after is not None else {}
    if after is not None:
        readings.append((max(done.wall_s, readings[-1][0] if readings else 0.0), after))
    series = series_of(readings, span_s(done.measured))
    result = result_of(loaded, done.measured, series, changes, done.wall_s, done.interrupted)
    result = replace(result, followed=done.followed)
    in_words = manner.endpoint == "chat"
    of_lengths = without_prompts(done.measured) if in_words else done.measured
    mismatch = length_mismatch(of_lengths)
    words = words_line(done.measured) if in_words else None
    lines = (lengths_told(of_lengths), *warnings_of(done, manner.max_in_flight),
             error_line(done.measured), words)  # fmt: skip
    told = [line for line in lines if line is not None]
    queried = 0.0 if before is None else before.values.get("prefix_query_tokens", 0.0)
    facts = {
        "url": url,
        "model": name,
        "scenario": loaded.to_dict(),
        "client": client_facts(done),
        "length_mismatch": mismatch,
        "exact_lengths": manner.exact_lengths,
        "max_in_flight": manner.max_in_flight,
        "server": {
            "cache_at_start": "unknown" if before is None else "warm" if queried else "cold",
            "prompt_tokens_before": queried,
            "changes": changes,
        },
        "wall_s": done.wall_s,
    }
    return _Run(done.measured, result, summary_of(result, url, told), facts)
