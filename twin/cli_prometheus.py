"""The command `twin trace from-prometheus`: the traffic of a live server as a stream of a scenario."""

import re
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from twin.errors import InputError
from twin.terminal import complain, errors, write

DEFAULT_STEPS = 72
MOST_STEPS = 10_000
"""Prometheus answers with 11,000 points at most."""
LEAST_STEP_S = 15


def from_prometheus(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Address of a Prometheus, e.g. http://prometheus:9090.",
            show_default=False,
        ),
    ],
    window: Annotated[
        str, typer.Option(metavar="TIME", help="How far back to look: 90m, 6h, 2d, 1h30m.")
    ] = "6h",
    end: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="End of the window: 2026-01-31T12:00:00Z or Unix seconds; now."
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Length of a step of the rate; a 72nd of the window."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=VALUE",
            help="Only series with this label, e.g. model_name=llama. May be repeated.",
        ),
    ] = None,
    cv: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=30,
            help="Burstiness of the arrivals, which the metrics do not tell; Poisson.",
        ),
    ] = None,
    tier: Annotated[str | None, typer.Option(help="Tier of the requests.")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:VALUE", help="Header of the requests, e.g. for a token. May be repeated."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 30.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to write; `--set traffic=FILE` runs a scenario with it."
        ),
    ] = None,
) -> None:
    """Make a stream of the request rates and lengths that a Prometheus has of vLLM servers."""
    with errors():
        import yaml

        from twin.prometheus_server import Server, observe, url_without_password
        from twin.workload import prometheus as pure

        labels = dict(_pair(text, "=", "--match", "LABEL=VALUE") for text in match or ())
        headers = dict(_pair(text, ":", "--header", "NAME:VALUE") for text in header or ())
        for label in labels:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label):
                raise InputError(f"--match {label}=...: {label!r} is no name of a label")
        length_s = seconds(window, "--window")
        step_s = _step(step, length_s)
        server = Server(url, headers, timeout)
        end_s = server.now() if end is None else _instant(end)
        try:
            observed = observe(server, labels, end_s, step_s, -(-length_s // step_s))
            stream = pure.stream_of(observed, cv)
        except pure.UnusableError as error:
            raise InputError(f"{url}: {error}") from None
        if tier is not None:
            stream["tier"] = tier
        for doubt in pure.doubts(observed):
            complain(f"warning: {doubt}")
        told = (
            f"{observed.requests:,.0f} requests in {observed.seconds:,} s to "
            f"{datetime.fromtimestamp(end_s, UTC).isoformat(timespec='seconds')}, mean "
            f"{observed.requests / observed.seconds:.3g}/s, {observed.prompt.mean:,.0f} prompt and "
            f"{observed.output.mean:,.0f} generated tokens each"
        )
        text = (
            f"# Traffic of the vLLM servers that {url_without_password(url)} scrapes"
            f"{''.join(f', {name}={value}' for name, value in labels.items())}:\n# {told}.\n"
            "# Requests are counted when they end. Arrivals within a step are Poisson unless --cv said otherwise, and\n"
            "# prompt and reply lengths are independent: the metrics say neither. No prompt shares a prefix.\n"
        ) + yaml.safe_dump(
            {"traffic": [stream]}, sort_keys=False, width=100, default_flow_style=None
        )
        if out is None:
            write(text)
            return
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
        write(f"{out}: {told}\n")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds(text: str, option: str) -> int:
    """Whole seconds of 90s, 5m, 6h, 2d, 1w or several of them in a row. Raises InputError."""
    parts = re.findall(r"(\d{1,9})([smhdw])", text)
    if not parts or "".join(n + unit for n, unit in parts) != text:
        raise InputError(f"{option} {text}: write a length of time such as 90m, 6h or 2d")
    total = sum(int(n) * _UNITS[unit] for n, unit in parts)
    if not 0 < total <= 10**9:
        raise InputError(f"{option} {text}: must be above 0 and at most 10**9 s, got {total}")
    return total


def _step(text: str | None, window_s: int) -> int:
    if text is None:
        nice = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 86_400)
        wanted = window_s / DEFAULT_STEPS
        return next((step for step in nice if step >= wanted), -(-window_s // DEFAULT_STEPS))
    step_s = seconds(text, "--step")
    if step_s < LEAST_STEP_S:
        raise InputError(f"--step {text}: must be at least {LEAST_STEP_S}s, got {step_s}s")
    if step_s > window_s:
        raise InputError(f"--step {text}: must be at most --window ({window_s} s), got {step_s} s")
    if window_s / step_s > MOST_STEPS:
        raise InputError(
            f"--step {text}: makes {window_s // step_s:,} steps, Prometheus answers with {MOST_STEPS:,} at most; "
            "make it longer"
        )
    return step_s


def _instant(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None and isfinite(number):
        return number
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"--end {text}: write 2026-01-31T12:00:00Z or Unix seconds") from None
    if read.tzinfo is None:
        raise InputError(f"--end {text}: has no time zone; add Z or an offset such as +01:00")
    return read.timestamp()


def _pair(text: str, sign: str, option: str, form: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name.strip():
        raise InputError(f"{option} {text}: write {form}")
    return name.strip(), value.strip()
