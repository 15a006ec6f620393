"""What a scenario comes to before it is run: memory, the time of a step, and which limit is met first.

Everything here is arithmetic with means. It says where to look; only a run says how requests fare.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from twin.capacity import Limit, Means, limits_of, steady_step_s
from twin.clock import PS, to_seconds
from twin.errors import InputError
from twin.report.tables import paragraph, table, to_text
from twin.report.texts import count, duration, share
from twin.report.traffic import CLOSED, configured_rate, load_of
from twin.scenario import Scenario
from twin.step_time.model import StepTime
from twin.workload.formats.rows import TraceRow
from twin.workload.prefixes import InfiniteCache
from twin.workload.streams import Traffic, open_streams

DRAWN = 2000
"""Requests of the scenario's own traffic that the means are taken from."""

LIMITS = {
    "slots": "slots (max_num_seqs)",
    "tokens": "tokens (max_num_batched_tokens)",
    "kv": "KV blocks",
}


def explain(scenario: Scenario) -> dict[str, Any]:
    """The arithmetic as plain data. Times are seconds, rates requests/s. Raises InputError if no request comes."""
    traffic = _traffic(scenario)
    return {
        "scenario": scenario.name,
        "memory": _memory(scenario),
        "traffic": traffic,
        "steps": _steps(scenario, traffic),
        "measured_context": scenario.hardware.profile.max_context,
        "step_times": _step_times(scenario),
        "max_model_len": scenario.engine.max_model_len,
        "load": _load(scenario, traffic),
    }


def render_explain(found: Mapping[str, Any], color: bool = False) -> str:
    """The same for people, at most 80 columns wide."""
    blocks = [_memory_text(found), _steps_text(found), _load_text(found)]
    return "\n".join(to_text(block, color) for block in blocks)


@dataclass(slots=True)
class _Ended:
    """What the traffic is told of a request."""

    stream: int
    session: str | None
    outcome: str
    finish_ps: int | None
    output_tokens: int


# --- figures ----------------------------------------------------------------------------------


def _memory(scenario: Scenario) -> dict[str, Any]:
    memory, engine = scenario.hardware.memory, scenario.engine
    return {
        "gpu_bytes": memory.memory_bytes,
        "budget_bytes": memory.budget_bytes,
        "weights_bytes": memory.weights_bytes,
        "activation_bytes": memory.activation_bytes,
        "runtime_bytes": memory.runtime_bytes,
        "graph_bytes": memory.graph_bytes,
        "kv_bytes": memory.kv_bytes,
        "block_bytes": memory.block_bytes,
        "estimated_blocks": memory.num_gpu_blocks,
        "num_gpu_blocks": engine.num_gpu_blocks,
        "kv_tokens": (engine.num_gpu_blocks - 1) * engine.block_size,
        "text": memory.explain(),
    }


def _traffic(scenario: Scenario) -> dict[str, Any]:
    """Means over the first requests. Replies take no time here, so users of a closed loop ask sooner than in a run."""
    traffic = Traffic(open_streams(scenario.traffic, scenario.run.seed))
    drawn = []
    cache = InfiniteCache(scenario.engine.block_size)
    for due_ps in islice(iter(traffic.next_ps, None), DRAWN):
        request = traffic.pop().request
        drawn.append(request)
        cache.add(
            TraceRow(
                len(drawn),
                due_ps,
                request.prompt_tokens,
                request.output_tokens,
                request.prompt,
                request.reply,
            )
        )
        traffic.on_finish(
            _Ended(request.stream, request.session, "completed", due_ps, request.output_tokens)
        )
    if not drawn:
        raise InputError(
            f"{scenario.name}: no request comes, so there is nothing to take means of; give traffic more time"
        )
    closed = any(load_of(stream) == CLOSED for stream in scenario.traffic)
    first_ps, last_ps = drawn[0].arrival_ps, drawn[-1].arrival_ps
    number = len(drawn)
    configured = configured_rate(scenario.traffic)
    drawn_rate = None if last_ps == first_ps else (number - 1) * PS / (last_ps - first_ps)
    hits = cache.hit_tokens() if scenario.engine.enable_prefix_caching else 0
    return {
        "drawn": number,
        "prompt_tokens": sum(request.prompt_tokens for request in drawn) / number,
        "cached_tokens": hits / number,
        "output_tokens": sum(request.output_tokens for request in drawn) / number,
        "rate": None if closed else configured or drawn_rate,
        "rate_is": None if closed else "configured" if configured else "drawn",
    }


def _steps(scenario: Scenario, traffic: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One step of each kind with its parts."""
    engine, times = scenario.engine, scenario.step_time
    prompt = max(1, min(round(traffic["prompt_tokens"]), engine.max_model_len - 1))
    context = min(prompt + round(traffic["output_tokens"] / 2), engine.max_model_len)
    slots, budget = engine.active_limit, engine.token_budget
    one = min(prompt, budget)
    prompts = min(max(1, budget // one), slots)
    half = max(1, slots // 2)
    beside = min(one, budget - half)
    kinds = {
        "1 decode": (1, 0, 0),
        f"{slots} decodes": (slots, 0, 0),
        f"1 prompt of {one:,}": (0, 1, one),
        f"{prompts:,} prompts of {one:,}": (0, prompts, one),
    }
    if beside > 0:
        kinds[f"{half} decodes, 1 prompt"] = (half, 1, beside)
    return [
        {"kind": kind, **_parts(times, decodes, prompts, tokens, context)}
        for kind, (decodes, prompts, tokens) in kinds.items()
    ]


def _parts(
    times: StepTime, decodes: int, prompts: int, tokens_each: int, context: int
) -> dict[str, Any]:
    """A step of `decodes` at `context` tokens each and `prompts` of `tokens_each` new tokens."""
    tokens, requests = decodes + prompts * tokens_each, decodes + prompts
    pairs = prompts * tokens_each * (tokens_each + 1) // 2
    parts = {
        "dense_s": times.tokens_ps[tokens],
        "prefill_attention_s": pairs * times.pair_num // times.pair_den + times.prefill_base_ps
        if pairs
        else 0,
        "decode_attention_s": times.decode_base_ps[decodes]
        + (
            times.decode_context_ps[decodes]
            + (times.mixed_context_ps[decodes] if pairs and times.mixed_context_ps else 0)
        )
        * decodes
        * context,
        "sample_s": times.sample_ps[requests],
        "host_s": times.host_ps[requests],
        "gap_s": times.gap_ps + times.gap_seq_ps * requests,
    }
    whole = times.step_ps(tokens, requests, requests, pairs, decodes, decodes * context)
    return {
        "tokens": tokens,
        "padded_tokens": times.padded_tokens(tokens),
        **{name: to_seconds(ps) for name, ps in parts.items()},
        "step_s": to_seconds(whole),
    }


def _step_times(scenario: Scenario) -> dict[str, Any]:
    """Where they come from, and how far they are from that."""
    origin = scenario.hardware.profile.provenance
    return {
        "engine": origin.engine,
        "source": origin.source,
        "fit_error": dict(origin.fit_error),
        "notes": list(origin.notes),
    }


def _load(scenario: Scenario, traffic: Mapping[str, Any]) -> dict[str, Any]:
    """Each limit, and where the traffic of the scenario lies below the first of them (`used`)."""
    means = Means(*(traffic[f"{name}_tokens"] for name in ("prompt", "cached", "output")))
    limits = limits_of(scenario, means)
    rate, most = traffic["rate"], limits[0].rate
    each = None if rate is None else rate / scenario.cluster.replicas
    return {
        "limits": [
            {"limit": row.name, "running": row.running, "rate": row.rate, "tpot_s": row.step_s}
            for row in limits
        ],
        "rate_per_replica": each,
        "running": None if each is None else _running_at(scenario, each, means, limits[0]),
        "used": None if each is None or not most else each / most,
    }


def _running_at(scenario: Scenario, rate: float, means: Means, first: Limit) -> int | None:
    """The fewest running requests at which as many leave as come; None if that is beyond the first limit."""
    for running in range(1, first.running + 1):
        if running / (means.output_tokens * steady_step_s(scenario, running, means)) >= rate:
            return running
    return None


# --- text -------------------------------------------------------------------------------------


def _memory_text(found: Mapping[str, Any]) -> list[RenderableType]:
    memory = found["memory"]
    title = Text(f"{found['scenario']}: memory of one GPU", "bold")
    gb = 1e9
    made = table("", "GB")
    for name, size in (
        ("may be used", memory["budget_bytes"]),
        ("weights", -memory["weights_bytes"]),
        ("activations", -memory["activation_bytes"]),
        ("libraries", -memory["runtime_bytes"]),
        ("CUDA graphs", -memory["graph_bytes"]),
        ("KV cache", memory["kv_bytes"]),
    ):
        made.add_row(name, f"{size / gb:,.2f}")
    text = (
        f"{count(memory['estimated_blocks'])} blocks of {count(memory['block_bytes'])} bytes fit; "
        f"the engine has {count(memory['num_gpu_blocks'])}, for {count(memory['kv_tokens'])} tokens of all requests."
    )
    return [title, made, paragraph(text)]


def _steps_text(found: Mapping[str, Any]) -> list[RenderableType]:
    made = table("One step", "tokens", "dense", "prefill", "decode", "sample", "host", "in all")
    made.columns[0].max_width = 24
    for step in found["steps"]:
        made.add_row(
            step["kind"],
            count(step["padded_tokens"]),
            *(
                duration(step[f"{part}_s"])
                for part in (
                    "dense",
                    "prefill_attention",
                    "decode_attention",
                    "sample",
                    "host",
                    "step",
                )
            ),
        )
    traffic = found["traffic"]
    text = (
        f"Of the means of the first {count(traffic['drawn'])} requests: {traffic['prompt_tokens']:,.0f} prompt and "
        f"{traffic['output_tokens']:,.0f} output tokens. Tokens with padding; prefill and decode are attention; dense "
        "has the matrices and communication. With async scheduling host work hides behind the GPU's, but for "
        f"{duration(found['steps'][0]['gap_s'])} in the first of these steps and "
        f"{duration(found['steps'][1]['gap_s'])} in the second. Step times: {found['step_times']['source']}"
        f"{_fit_errors(found['step_times']['fit_error'])}."
    )
    known, longest = found["measured_context"], found["max_model_len"]
    if longest > known:
        text += (
            f" The step times were measured up to {count(known)} tokens of context; those of longer requests, which "
            f"max_model_len allows up to {count(longest)}, would be extrapolated."
        )
    return [made, paragraph(text)]


def _fit_errors(errors: Mapping[str, float]) -> str:
    """The mean errors of a profile against its source, in brackets."""
    said = [
        f"{name.removesuffix('_mean').replace('_', ' ')} {share(error)}"
        for name, error in errors.items()
        if not name.endswith("_max")
    ]
    return f" ({', '.join(said)})" if said else ""


def _load_text(found: Mapping[str, Any]) -> list[RenderableType]:
    load = found["load"]
    made = table("Limit of a replica", "running", "requests/s", "TPOT")
    made.columns[0].max_width = 32
    for row in load["limits"]:
        made.add_row(
            LIMITS[row["limit"]],
            count(row["running"]),
            "-" if row["rate"] is None else f"{row['rate']:.3g}",
            duration(row["tpot_s"]),
        )
    first, rate = load["limits"][0], load["rate_per_replica"]
    text = f"As load grows, {LIMITS[first['limit']]} are the first to be used up"
    text += (
        "." if first["rate"] is None else f", at {first['rate']:.3g} requests/s a replica at most."
    )
    if rate is not None:
        about = "" if found["traffic"]["rate_is"] == "configured" else "about "
        text += f" The scenario asks for {about}{rate:.3g}"
        text += "" if load["used"] is None else f", {load['used'] * 100:.0f} % of capacity"
        if load["running"] is None:
            text += ": more than that, so the queue grows."
        else:
            used = share(load["running"] / first["running"])
            text += f", about {count(load['running'])} running at once ({used} of them)."
    text += (
        " Capacity is an upper bound, and queues grow before it is reached: prompts lengthen the steps in which others "
        "decode, and traffic is uneven."
    )
    cached = share(found["traffic"]["cached_tokens"] / found["traffic"]["prompt_tokens"])
    text += (
        f" This is arithmetic with means, {cached} of prompt tokens taken from an endless prefix cache, no policy; "
        "twin run tells how requests fare."
    )
    return [made, paragraph(text)]
