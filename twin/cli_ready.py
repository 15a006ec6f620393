"""`twin what-if`: questions that everybody asks, as commands with a table for an answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from twin.terminal import errors, wants_color, write

app = typer.Typer(
    name="what-if",
    no_args_is_help=True,
    help="Ready questions: quantisation, prefix caching, token budget, GPUs together or apart.",
)

Model = Annotated[str, typer.Option(help="Name in the catalogue, or a folder with a config.json.")]
Gpu = Annotated[str, typer.Option(help="Name in the catalogue.")]
Tp = Annotated[int, typer.Option(help="GPUs of a replica.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of every prompt.")]
Output = Annotated[int, typer.Option(min=1, help="Tokens of every reply.")]
Users = Annotated[int, typer.Option(min=1, help="Users of a closed loop, each with one request.")]
ERRORS = "Median errors of similar measured runs: "

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def quantisation(
    model: Model = "meta-llama/Llama-3.1-8B",
    gpu: Gpu = "H100",
    tp: Tp = 1,
    prompt: Prompt = 1024,
    output: Output = 256,
    users: Users = 128,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Type of weights; fp8+kv = of the KV cache as well. May be repeated; the first is compared with."
        ),
    ] = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=LOSS",
            help="What a type costs in quality, as you know it; shown beside it. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Weights (and KV cache) of fewer bits: memory, room for requests, latency and throughput."""
    with errors():
        from twin.errors import InputError
        from twin.whatif.ready import Setup, explain
        from twin.whatif.ready import quantisation as ask

        names = dtype or ["bfloat16", "fp8", "fp8+kv", "int8", "int4"]
        losses = dict(text.partition("=")[::2] for text in quality or ())
        for name, loss in losses.items():
            if not loss:
                raise InputError(f"--quality {name}: write {name}=LOSS, as in int8='0.3 points'")
            if name not in names:
                raise InputError(f"--quality {name}: is none of the types {', '.join(names)}")
        rows = ask(Setup(model, gpu, tp, prompt, output, users), names)
        _tell(rows, explain(rows) if len(rows) > 1 else "", as_json, losses)


@app.command()
def budget(
    model: Model = "meta-llama/Llama-3.1-8B",
    gpu: Gpu = "H100",
    tp: Tp = 1,
    prompt: Prompt = 4096,
    output: Output = 256,
    users: Users = 64,
    tokens: Annotated[
        list[int] | None, typer.Option(help="max_num_batched_tokens; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Larger steps: what prompts gain, and what room for requests it costs."""
    with errors():
        from twin.whatif.ready import Setup, token_budget

        rows = token_budget(
            Setup(model, gpu, tp, prompt, output, users), tokens or [2048, 4096, 8192, 16384]
        )
        _tell(rows, "", as_json, {})


@app.command()
def prefix(
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 5,
    prompt: Prompt = 3000,
    shared: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 2500,
    as_json: AsJson = False,
) -> None:
    """A common system prompt with and without the prefix cache: TTFT and KV, 8B and 70B on A100 and H100."""
    with errors():
        from twin.errors import InputError
        from twin.report.tables import paragraph, table, to_text
        from twin.report.texts import duration
        from twin.whatif.ready import prefix_cache

        if shared >= prompt:
            raise InputError(f"--shared {shared}: must be less than --prompt ({prompt})")
        small, large = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
        cases = [(small, "A100", 1), (small, "H100", 1), (large, "A100", 4), (large, "H100", 4)]
        rows = prefix_cache(cases, turns, prompt, shared)
        if as_json:
            write(json.dumps(rows, indent=2) + "\n")
            return
        made = table(
            "Later turns", "GPUs", "TTFT without", "with", "hits", "KV saved", "error of TTFT"
        )
        for row in rows:
            if "impossible" in row:
                made.add_row(_short(row["model"]), row["gpu"], "-", "-", "-", "-", "does not fit")
                continue
            made.add_row(
                _short(row["model"]), row["gpu"], duration(row["without_s"]),
                duration(row["with_s"]), f"{row['hit_tokens']:,}",
                f"{row['saved_bytes'] / 1e9:.2f} GB", row["validated"].removeprefix("TTFT "),
            )  # fmt: skip
        text = (
            f"{turns} turns of {prompt:,} tokens that begin with the same {shared:,}, one after another on an idle "
            "server. Hits are whole blocks, over all turns. The error is the median of similar measured runs."
        )
        write(to_text([made, paragraph(text)], wants_color()))


@app.command()
def split(
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, Poisson.")],
    model: Model = "meta-llama/Llama-3.1-8B",
    gpu: Gpu = "H100",
    gpus: Annotated[int, typer.Option(help="GPUs in all, a power of 2.")] = 4,
    prompt: Prompt = 1024,
    output: Output = 256,
    as_json: AsJson = False,
) -> None:
    """The same GPUs as one tensor-parallel replica, as many replicas, and between, under the same traffic."""
    with errors():
        from twin.report.tables import paragraph, table, to_text
        from twin.report.texts import duration
        from twin.whatif.ready import Setup, split_or_copy

        rows = split_or_copy(Setup(model, gpu, 1, prompt, output, 256), gpus, rate)
        if as_json:
            write(json.dumps(rows, indent=2) + "\n")
            return
        made = table("Replicas", "TTFT p50", "p99", "TPOT", "E2E", "KV tokens")
        notes = []
        for row in rows:
            if "impossible" in row:
                made.add_row(row["split"], "-", "-", "-", "-", "-")
                notes.append(f"{row['split']}: does not fit")
                continue
            notes.append(f"{row['split']}: {row['validated']}")
            made.add_row(
                row["split"], duration(row["ttft_p50_s"]), duration(row["ttft_p99_s"]),
                duration(row["tpot_mean_s"]), duration(row["e2e_mean_s"]), f"{row['kv_tokens']:,}",
            )  # fmt: skip
        write(to_text([made, paragraph(f"{ERRORS}{'; '.join(notes)}.")], wants_color()))


def _short(model: str) -> str:
    return model.rsplit("/", 1)[-1]


def _tell(rows: Sequence[Any], text: str, as_json: bool, losses: Mapping[str, str]) -> None:
    from twin.report.tables import paragraph, table, to_text
    from twin.report.texts import duration

    if as_json:
        found = {"rows": [row.to_dict() | {"quality_loss": losses.get(row.name)} for row in rows]}
        write(json.dumps(found | {"text": text}, indent=2) + "\n")
        return
    first = rows[0].output_tokens_per_s
    made = table("", "weights", "KV tokens", "fit", "TTFT", "TPOT", "tok/s", "times")
    notes = []
    for row in rows:
        made.add_row(
            row.name, f"{row.weights_gb:.1f} GB", f"{row.kv_tokens:,}", f"{row.concurrency:,}",
            duration(row.ttft_s), duration(row.tpot_s), f"{row.output_tokens_per_s:,.0f}",
            f"{row.output_tokens_per_s / first:.2f}",
        )  # fmt: skip
        said = [part for part in (row.note, row.validated) if part]
        if row.name in losses:
            said.append(f"quality loss {losses[row.name]}")
        notes.append(f"{row.name}: {', '.join(said)}")
    parts: list[Any] = [made, paragraph(f"{ERRORS}{'; '.join(notes)}.")]
    if text:
        parts.append(paragraph(text))
    write(to_text(parts, wants_color()))
