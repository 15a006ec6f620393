"""How long do the operations of a model take on this machine? Micro-benchmarks with torch, on cuda or cpu.

    python -m real.profile JOB.json OUT.json

For an interpreter that has torch; `real.profile_tables` writes the job and makes a step-time profile of what comes out.
Measured are, with the model's own shapes as one of `tp` devices holds them: the matrix products of a layer and of the
output layer over tokens, what lies between them, attention of prompts over (new, cached) tokens and of decodes over
(batch, context), copies, and, where there are several devices, an all-reduce over tokens. Every number is the median of
repeats; weights are cycled through so that no cache holds them.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
          12288, 16384)  # fmt: skip
CHUNKS = (
    (128, 0),
    (512, 0),
    (2048, 0),
    (8192, 0),
    (256, 2048),
    (1024, 4096),
    (64, 8192),
    (2048, 6144),
    (512, 16384),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = (128, 512, 2048, 8192)
CYCLED_BYTES = 200_000_000
"""Weights of one product that are cycled through at least: more than any cache holds."""
COPIES = (1 << 20, 1 << 24, 1 << 27)


class Bench:
    """A device, and how to time work on it."""

    def __init__(self, device: str, dtype: str, budget_s: float) -> None:
        import torch

        self.torch, self.device, self.dtype = torch, device, getattr(torch, dtype)
        self.is_cuda = device == "cuda"
        self._until = time.monotonic() + budget_s
        self.skipped: list[str] = []
        """What there was no time, or no memory, to measure."""

    def tensor(self, *shape: int) -> Any:
        """Random numbers."""
        return self.torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.02

    def seconds(self, name: str, work: Callable[[int], Any]) -> float | None:
        """Median seconds of `work(i)`, i counting the calls; None if it was left out, which `skipped` then names."""
        torch = self.torch
        if time.monotonic() > self._until:
            self.skipped.append(name)
            return None
        try:
            work(0)
            self._wait()
            begun = time.perf_counter()
            work(1)
            self._wait()
            once = max(time.perf_counter() - begun, 1e-7)
            calls = int(min(50, max(1, 2e-3 / once)))
            repeats = 3 if once > 0.2 else 7
            found = []
            for repeat in range(repeats):
                if self.is_cuda:
                    start = torch.cuda.Event(enable_timing=True)
                    end = torch.cuda.Event(enable_timing=True)
                    start.record()
                    for i in range(calls):
                        work(2 + repeat * calls + i)
                    end.record()
                    self._wait()
                    found.append(start.elapsed_time(end) / 1e3 / calls)
                else:
                    begun = time.perf_counter()
                    for i in range(calls):
                        work(2 + repeat * calls + i)
                    found.append((time.perf_counter() - begun) / calls)
        except torch.cuda.OutOfMemoryError:
            self.skipped.append(name)
            return None
        return statistics.median(found)

    def _wait(self) -> None:
        if self.is_cuda:
            self.torch.cuda.synchronize()


def products(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the matrix products on one device."""
    tp, hidden, head = shape["tp"], shape["hidden"], shape["head_dim"]
    heads, kv = shape["heads"] // tp, max(1, shape["kv_heads"] // tp)
    return {
        "qkv": (hidden, (heads + 2 * kv) * head),
        "o": (heads * head, hidden),
        "gate_up": (hidden, 2 * shape["intermediate"] // tp),
        "down": (shape["intermediate"] // tp, hidden),
        "lm_head": (hidden, shape["vocab"] // tp),
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """All tables. Seconds; a point is [counts..., seconds]."""
    bench = Bench(job["device"], job["dtype"], job["budget_s"])
    torch, shape = bench.torch, job["shape"]
    torch.manual_seed(0)
    with torch.inference_mode():
        found: dict[str, Any] = {
            "device": _name(bench),
            "torch": torch.__version__,
            "copy": list(_copies(bench)),
            "products": {},
        }
        found["prefill"] = list(_prefill(bench, shape, job["max_tokens"], job["max_context"]))
        found["decode"] = list(_decode(bench, shape, job["max_seqs"], job["max_context"]))
        tokens = [n for n in TOKENS if n < job["max_tokens"]] + [job["max_tokens"]]
        seqs = [n for n in BATCHES if n < job["max_seqs"]] + [job["max_seqs"]]
        for name, (inputs, outputs) in products(shape).items():
            counts = seqs if name == "lm_head" else tokens
            found["products"][name] = list(_product(bench, name, inputs, outputs, counts))
        found["between"] = list(_between(bench, shape, tokens))
        found["all_reduce"] = list(_all_reduce(bench, shape, tokens)) if shape["tp"] > 1 else []
    return found | {"skipped": bench.skipped}


def _name(bench: Bench) -> str:
    return str(bench.torch.cuda.get_device_name()) if bench.is_cuda else "cpu"


def _product(
    bench: Bench, name: str, inputs: int, outputs: int, counts: list[int]
) -> Iterator[list[float]]:
    each = inputs * outputs * bench.tensor(1).element_size()
    weights = [bench.tensor(outputs, inputs) for _ in range(max(2, -(-CYCLED_BYTES // each)))]
    weights = weights[:8] if len(weights) > 8 else weights
    for n in counts:
        x = bench.tensor(n, inputs)

        def work(i: int, x: Any = x) -> Any:
            return bench.torch.nn.functional.linear(x, weights[i % len(weights)])

        if (seconds := bench.seconds(f"{name} of {n} tokens", work)) is not None:
            yield [n, seconds]


def _between(bench: Bench, shape: dict[str, int], tokens: list[int]) -> Iterator[list[float]]:
    """Norms, rotation, activation and the writing of keys and values of one layer."""
    torch, tp = bench.torch, shape["tp"]
    hidden, inner, head = shape["hidden"], shape["intermediate"] // tp, shape["head_dim"]
    heads, kv = shape["heads"] // tp, max(1, shape["kv_heads"] // tp)
    for n in tokens:
        x, weight = bench.tensor(n, hidden), bench.tensor(hidden)
        gate_up, qk = bench.tensor(n, 2 * inner), bench.tensor(n, heads + kv, head)
        cos, cache = bench.tensor(n, 1, head), bench.tensor(2, n, kv, head)
        new = bench.tensor(2, n, kv, head)

        def work(
            i: int,
            x: Any = x,
            w: Any = weight,
            g: Any = gate_up,
            qk: Any = qk,
            cos: Any = cos,
            cache: Any = cache,
            new: Any = new,
            inner: int = inner,
        ) -> Any:
            for _ in range(2):
                x = torch.nn.functional.rms_norm(x + x, (hidden,), w)
            rotated = qk * cos + qk.flip(-1) * cos
            cache.copy_(new)
            return x, rotated, torch.nn.functional.silu(g[:, :inner]) * g[:, inner:]

        if (seconds := bench.seconds(f"between of {n} tokens", work)) is not None:
            yield [n, seconds]


def _attention(bench: Bench, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    return bench.torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def _prefill(
    bench: Bench, shape: dict[str, int], max_tokens: int, max_context: int
) -> Iterator[list[float]]:
    """[new, cached, seconds] of one layer."""
    torch, tp, head = bench.torch, shape["tp"], shape["head_dim"]
    heads, kv = shape["heads"] // tp, max(1, shape["kv_heads"] // tp)
    most = min(max_tokens, max_context)
    ends = {(most, 0), (most, max_context - most)}
    fitting = {(n, c) for n, c in CHUNKS if n <= max_tokens and n + c <= max_context}
    for n, c in sorted(fitting | ends):
        q = bench.tensor(1, heads, n, head)
        k, v = bench.tensor(1, kv, n + c, head), bench.tensor(1, kv, n + c, head)
        mask = None
        if c:
            # Lower right corner: each query sees the cached tokens and those before it.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(n, n + c)

        def work(i: int, q: Any = q, k: Any = k, v: Any = v, mask: Any = mask) -> Any:
            return _attention(bench, q, k, v, mask, mask is None)

        if (seconds := bench.seconds(f"prefill of {n} on {c}", work)) is not None:
            yield [n, c, seconds]
    del torch


def _decode(
    bench: Bench, shape: dict[str, int], max_seqs: int, max_context: int
) -> Iterator[list[float]]:
    """[decodes, context of each, seconds] of one layer."""
    tp, head = shape["tp"], shape["head_dim"]
    heads, kv = shape["heads"] // tp, max(1, shape["kv_heads"] // tp)
    for batch in BATCHES:
        for context in DECODE_CONTEXTS:
            if batch > max_seqs or context > max_context or batch * context > 1 << 19:
                continue
            q = bench.tensor(batch, heads, 1, head)
            k, v = bench.tensor(batch, kv, context, head), bench.tensor(batch, kv, context, head)

            def work(i: int, q: Any = q, k: Any = k, v: Any = v) -> Any:
                return _attention(bench, q, k, v, None, False)

            name = f"{batch} decodes on {context}"
            if (seconds := bench.seconds(name, work)) is not None:
                yield [batch, context, seconds]


def _copies(bench: Bench) -> Iterator[list[Any]]:
    """[kind, bytes, seconds]: within the device, and from the host to it."""
    torch = bench.torch
    for size in COPIES:
        here = torch.empty(size, dtype=torch.uint8, device=bench.device)
        there = torch.empty_like(here)
        kinds = [("device", here)]
        if bench.is_cuda:
            kinds.append(("host", torch.empty(size, dtype=torch.uint8, pin_memory=True)))
        for kind, source in kinds:

            def work(i: int, source: Any = source, there: Any = there) -> Any:
                return there.copy_(source, non_blocking=True)

            if (seconds := bench.seconds(f"copy of {size} bytes", work)) is not None:
                yield [kind, size, seconds]


def _all_reduce(bench: Bench, shape: dict[str, int], tokens: list[int]) -> Iterator[list[float]]:
    """[tokens, seconds], a process for each device."""
    torch, size = bench.torch, shape["tp"]
    if bench.is_cuda and torch.cuda.device_count() < size:
        bench.skipped.append(
            f"all-reduce over {size} devices: {torch.cuda.device_count()} are here"
        )
        return
    import torch.multiprocessing as mp

    with mp.get_context("spawn").Manager() as manager:
        found = manager.list()
        dtype = str(bench.dtype).removeprefix("torch.")
        arguments = (size, bench.device, dtype, shape["hidden"], tokens, _port(), found)
        mp.spawn(_reduce, arguments, nprocs=size)
        yield from [list(point) for point in found]


def _reduce(
    rank: int, size: int, device: str, dtype: str, hidden: int, tokens: list[int], port: int, found: Any
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    bench = Bench(device, dtype, 120.0)
    for n in tokens:
        x = torch.zeros(n, hidden, device=device, dtype=bench.dtype)
        for _ in range(3):
            dist.all_reduce(x)
        times = []
        for _ in range(7):
            dist.barrier()
            bench._wait()
            begun = time.perf_counter()
            for _ in range(5):
                dist.all_reduce(x)
            bench._wait()
            times.append((time.perf_counter() - begun) / 5)
        if rank == 0:
            found.append((n, statistics.median(times)))
    dist.destroy_process_group()


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(job_path: str, out_path: str) -> None:
    """Run a job."""
    begun = time.monotonic()
    found = measure(json.loads(Path(job_path).read_text(encoding="utf-8")))
    found["wall_s"] = time.monotonic() - begun
    Path(out_path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
