"""The workloads whose speed is measured: scenarios as data, each with the share of the floor it should reach."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLICIES = ("tiered", "vllm-fcfs")
TIERS = {"ONLINE": 0.7, "BATCH": 0.2, "OFFLINE": 0.1}


@dataclass(frozen=True)
class Workload:
    """One row of the table."""

    title: str
    document: dict[str, Any]
    """The scenario but for its policy."""
    aim: float | None = None
    """Share of the floor."""


def scenario(
    traffic: dict[str, Any], replicas: int = 1, run: dict[str, Any] | None = None, **engine: Any
) -> dict[str, Any]:
    """Llama-3.1-8B on one H100 a replica, 128 slots and no prefix cache unless `engine` says otherwise."""
    limits = {
        "version": "0.32.0",
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "enable_prefix_caching": False,
    }
    return {
        "name": "speed",
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"gpu": "H100", "tensor_parallel_size": 1, "dtype": "bfloat16"},
        "engine": limits | engine,
        "traffic": [traffic],
        "cluster": {"replicas": replicas, "router": "least_connections"},
        "run": {"seed": 1} | (run or {}),
    }


def poisson(requests: int, replicas: int = 1, rate: Any = None, **keys: Any) -> dict[str, Any]:
    """W1: 6 requests a second and replica unless `rate` says otherwise, 512 tokens in and 128 out."""
    traffic = {
        "arrivals": {"process": "poisson", "rate": 6 * replicas if rate is None else rate},
        "prompt_tokens": {"fixed": 512},
        "output_tokens": {"fixed": 128},
        "requests": requests,
    }
    return scenario(traffic, replicas, **keys)


def at_once(requests: int, **engine: Any) -> dict[str, Any]:
    """W3: 256 slots, everybody there from the start."""
    traffic = {
        "arrivals": {"process": "batch", "at": [0], "size": requests},
        "prompt_tokens": {"uniform": [200, 1000]},
        "output_tokens": {"uniform": [100, 300]},
        "requests": requests,
    }
    return scenario(traffic, max_num_seqs=256, **engine)


def trace(name: str, replicas: int, speedup: float = 1, **engine: Any) -> dict[str, Any]:
    """A published trace from the folder that TWIN_DATA names."""
    path = Path(os.environ.get("TWIN_DATA", ""), "traces", name)
    return scenario(
        {"trace": str(path.absolute()), "speedup": speedup, "tiers": TIERS}, replicas, **engine
    )


AZURE = "azure2023_conv.csv"
WORKLOADS = {
    "w1": Workload("W1 Poisson, 10k x 1", poisson(10_000), 0.12),
    "w1-cache": Workload(
        "W1 with prefix caching, 10k x 1", poisson(10_000, enable_prefix_caching=True)
    ),
    "w1-4": Workload("W1 Poisson, 10k x 4", poisson(10_000, 4), 0.12),
    "w1-100k": Workload("W1 Poisson, 100k x 4", poisson(100_000, 4), 0.12),
    "azure": Workload("W2 Azure conversation, x 2", trace(AZURE, 2), 0.12),
    "azure-12": Workload("W2 compressed 12 times, x 2", trace(AZURE, 2, 12), 0.21),
    "w3": Workload("W3 all at once, 256 slots", at_once(5_000), 0.26),
    "w3-short": Workload(
        "W3 short of KV, 4,000 blocks", at_once(5_000, num_gpu_blocks_override=4000), 0.20
    ),
    "mooncake": Workload(
        "Mooncake with prefix caching, x 4",
        trace(
            "mooncake_conversation.jsonl.gz", 4, max_model_len=131072, enable_prefix_caching=True
        ),
        0.095,
    ),
}


def missing(workload: Workload) -> str | None:
    """Why it cannot run here: its trace is not there."""
    path = workload.document["traffic"][0].get("trace")
    if path is None or Path(path).is_file():
        return None
    return f"no trace {Path(path).name}: set TWIN_DATA to the folder that has it under traces/"
