"""What `twin trace check` found, for people: at most 80 columns wide."""

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from twin.report.tables import WIDTH, paragraph, table, to_text
from twin.report.texts import count, plural, share
from twin.workload.formats.choose import FORMATS
from twin.workload.formats.rows import FAULT_KINDS, HELD

BAR = 30
"""Columns of the longest bar of the rate profile."""
STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "max")


def render_check(found: Mapping[str, Any], color: bool = False) -> str:
    """The report as text that ends in a newline; `found` is what twin.workload.check gives."""
    blocks: list[list[RenderableType]] = [_header(found)]
    if found["requests"]:
        blocks += [[_facts(found)], [_profile(found["time"])], [_lengths(found)]]
    blocks += [list(_malformed(found["malformed"])), list(_warnings(found))]
    return "\n".join(to_text(block, color) for block in blocks if block)


def formats_as_data() -> dict[str, dict[str, Any]]:
    """The known formats by name."""
    return {
        made.name: {
            "title": made.title,
            "kind": made.kind,
            "recognised_by": list(made.columns),
            "holds": [key for key in HELD if key in made.holds],
            "block_tokens": made.block_tokens,
            "written": made.write is not None,
        }
        for made in FORMATS.values()
    }


def render_formats(color: bool = False) -> str:
    """The known formats as text that ends in a newline."""
    parts: list[RenderableType] = []
    for name, made in formats_as_data().items():
        held = ", ".join(made["holds"])
        everything = len(made["holds"]) == len(HELD)
        parts += [
            Text.assemble((name, "bold"), f": {made['title']}"),
            paragraph(f"  recognised by {', '.join(made['recognised_by'])}"),
            paragraph(
                "  instants and lengths"
                + (", and all that a request has" if everything else f", {held}" if held else "")
                + ("" if made["written"] else "; read only")
            ),
        ]
    return to_text(parts, color)


def _header(found: Mapping[str, Any]) -> list[RenderableType]:
    malformed = found["malformed"]["total"]
    header: list[RenderableType] = [
        Text.assemble((found["file"], "bold"), overflow="fold"),
        paragraph(
            f"{found['format_title']} (format {found['format']}, {found['detected']}): "
            f"{plural(found['requests'], 'request')}, {plural(malformed, 'malformed line')}"
        ),
    ]
    if found["interrupted"]:
        header.append(paragraph("Interrupted: the rest of the file was not looked at", "red"))
    return header


def _facts(found: Mapping[str, Any]) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in _lines(found):
        made.add_row(name, value)
    return made


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    time = found["time"]
    rate, busiest, cv = time["mean_rate"], time["busiest"], time["gap_cv"]
    yield "Time", f"{_seconds(time['first_s'])} to {_seconds(time['first_s'] + time['span_s'])}"
    if rate is not None:
        yield "Rate", f"{_number(rate)} requests/s on average"
        yield (
            "Busiest",
            f"{_number(busiest['rate'])} requests/s in the {count(busiest['window_s'])} s from "
            f"{_seconds(busiest['from_s'])}, {busiest['times_mean']:.1f} times the mean",
        )
    if cv is not None:
        yield "Gaps", f"CV {cv:.2f} (Poisson: 1)"
    windows = {name: value for name, value in time["dispersion"].items() if value is not None}
    if windows:
        told = ", ".join(
            f"{value:.2f} in {name.removesuffix('_s')} s" for name, value in windows.items()
        )
        yield "Counts", f"variance/mean {told} (Poisson: 1)"
    yield "Prefixes", _prefixes(found["prefixes"])
    sessions = found["sessions"]
    if sessions["count"]:
        yield (
            "Sessions",
            f"{count(sessions['count'])} with {sessions['turns_mean']:.1f} requests on average, at most "
            f"{count(sessions['turns_max'])}",
        )
    for name, values, distinct in (
        ("Tiers", found["tiers"], len(found["tiers"])),
        ("Tenants", found["tenants"], found["tenants_count"]),
    ):
        if values:
            told = ", ".join(f"{who} {count(requests)}" for who, requests in values.items())
            more = f" and {count(distinct - len(values))} more" if distinct > len(values) else ""
            yield name, f"{told}{more}"
    if "capacity" in found:
        capacity = found["capacity"]
        yield (
            "Capacity",
            f"one replica of {capacity['scenario']} takes about "
            f"{_number(capacity['replica_rate'])} such requests/s without prefix hits; the "
            f"busiest {count(capacity['window_s'])} s ask for {share(capacity['busiest_share'])} of that",
        )


def _prefixes(prefixes: Mapping[str, Any]) -> str:
    if prefixes["known"] == "no":
        return "unknown in this trace; a run finds none, unless assumed_prefix_share says how much is shared"
    told = f"{share(prefixes['attainable_share'])} of prompt tokens are hits for an infinite cache"
    if prefixes["known"] == "partly":
        told += f"; known of {plural(prefixes['requests'], 'request')} only"
    return told


def _profile(time: Mapping[str, Any]) -> Table:
    made = table("From", "requests/s")
    made.add_column("")
    most = max(part["rate"] for part in time["profile"])
    for part in time["profile"]:
        made.add_row(
            _seconds(part["from_s"]),
            _number(part["rate"]),
            "#" * max(round(BAR * part["rate"] / most), 1 if part["requests"] else 0),
        )
    return made


def _lengths(found: Mapping[str, Any]) -> Table:
    made = table("Tokens", *STATISTICS)
    for name, key in (("prompt", "prompt_tokens"), ("reply", "output_tokens")):
        made.add_row(name, *(_tokens(found[key][statistic]) for statistic in STATISTICS))
    return made


def _malformed(malformed: Mapping[str, Any]) -> Iterator[RenderableType]:
    if not malformed["total"]:
        return
    kinds = ", ".join(
        f"{count(times)} {FAULT_KINDS[kind]}" for kind, times in malformed["kinds"].items()
    )
    yield paragraph(f"Malformed: {kinds}", "red")
    for fault in malformed["listed"]:
        told = f"line {fault['line']}: {fault['problem']}"
        yield Text(fill(told, WIDTH, initial_indent="  ", subsequent_indent="    "))
    rest = malformed["total"] - len(malformed["listed"])
    if rest:
        yield Text(f"  and {count(rest)} more")


def _warnings(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    for text in found["warnings"]:
        yield paragraph(f"Warning: {text}", "yellow")


def _tokens(tokens: float) -> str:
    """Short enough for a column, also where a number in the trace is absurd."""
    return count(tokens) if tokens < 100_000_000 else f"{tokens:.1e}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 or seconds == int(seconds) else f"{seconds:.3g} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
