"""Small scenarios for tests, and what must hold after every run."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twin.metrics.records import OUTCOMES
from twin.simulation import Result, load_scenario, simulate

MODEL = "meta-llama/Llama-3.1-8B"


def document(**sections: Any) -> dict[str, Any]:
    """A scenario that runs in a moment; keyword arguments replace sections or, given as mappings, their keys."""
    base: dict[str, Any] = {
        "name": "small",
        "model": MODEL,
        "hardware": {"gpu": "H100"},
        "engine": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 400,
        },
        "policy": "vllm-fcfs",
        "traffic": [stream()],
        "cluster": {"replicas": 1},
        "run": {"seed": 1},
    }
    for name, value in sections.items():
        merge = isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        base[name] = {**base[name], **value} if merge else value
    return base


def stream(prompt: int = 100, output: int = 20, **keys: Any) -> dict[str, Any]:
    """A synthetic stream of equal requests, 40 of them at 20 a second unless said otherwise."""
    return {
        "arrivals": {"process": "poisson", "rate": 20},
        "prompt_tokens": {"fixed": prompt},
        "output_tokens": {"fixed": output},
        "requests": 40,
    } | keys


def at_once(prompt: int, output: int, **keys: Any) -> dict[str, Any]:
    """A single request at the start of the run."""
    arrivals = {"process": "constant", "rate": 1}
    return stream(prompt, output, arrivals=arrivals, requests=1, **keys)


def flat_profile(folder: Path, step_ps: int, name: str = "flat.json") -> str:
    """A profile file under which every step takes `step_ps`, whatever is in it."""
    by_request = [[0, 0], [1024, 0]]
    profile = {
        "provenance": {
            "model": MODEL, "gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16", "engine": "none", "source": "made up", "licence": "none",
            "date": "2026-01-01", "script": "none", "fit_error": {}, "notes": [],
        },
        "max_context": 131072,
        "capture_sizes": [],
        "dense_ps": [[0, step_ps], [16384, step_ps]],
        "comm_ps": [],
        "sample_ps": by_request,
        "prefill_pair_ps": 0,
        "decode_base_ps": by_request,
        "decode_context_ps": by_request,
        "host_sync_ps": by_request,
        "host_async_ps": by_request,
        "gap_ps": 0,
        "prefill_base_ps": 0,
        "mixed_context_ps": [],
        "gap_seq_ps": 0,
    }  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(profile), encoding="utf-8")
    return str(path)


def azure_csv(folder: Path, rows: list[tuple[str, int, int]], name: str = "trace.csv") -> str:
    """An Azure trace with these rows of (stamp, prompt tokens, output tokens)."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{t},{p},{o}" for t, p, o in rows)]
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(source: Any, *overrides: str, **options: Any) -> Result:
    """The run of a scenario, with the books checked."""
    result = simulate(load_scenario(source, overrides), **options)
    check_books(result)
    return result


def check_books(result: Result) -> None:
    """Nothing vanishes, causes come before effects, and Little's law holds.

    Little: requests in the system integrated over time equal the sum of the times they spent there. The left side is
    counted while the run goes on, the right side comes from the records. A client that left is gone at its deadline, or
    when its connection broke, its request when the engine notices, so that then the left side may be larger.
    """
    if result.kept is None:
        assert sum(result.tally().streams.values()) == result.tally().requests
        return
    records = result.records
    assert [r.index for r in records] == list(range(len(records)))
    assert set(Counter(r.outcome for r in records)) <= set(OUTCOMES)
    end_ps = result.simulated_ps
    in_system_ps = 0
    for r in records:
        instants = [r.arrival_ps, r.first_scheduled_ps, r.first_token_ps, r.finish_ps]
        known = [t for t in instants if t is not None]
        if r.outcome != "timed_out":
            assert known == sorted(known), r
        assert (r.finish_ps is None) == (r.outcome == "unfinished"), r
        assert len(r.itl_ps) == max(0, r.output_tokens - 1), r
        if r.outcome == "completed":
            assert r.first_token_ps is not None
            assert r.finish_ps == r.first_token_ps + sum(r.itl_ps), r
        in_system_ps += (end_ps if r.finish_ps is None else r.finish_ps) - r.arrival_ps
    late = ("partition", "client_disconnect")
    if any(r.outcome == "timed_out" or r.reason in late for r in records):
        assert result.inflight_request_ps >= in_system_ps
    else:
        assert result.inflight_request_ps == in_system_ps
