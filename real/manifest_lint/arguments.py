"""Would vLLM start with these arguments? Names, values, what they are to each other and to the model."""

import re
from collections.abc import Iterator

from real.manifest_lint.finding import Finding
from real.manifest_lint.objects import Server, entries, texts
from twin.cluster.vllm_arguments import argument_problem
from twin.cluster.vllm_command import is_shell, name_in, value_at
from twin.cluster.vllm_values import value_problem
from twin.scenario_yaml import KeyPath
from twin.step_time.catalogue import MODELS, ModelSpec

VARIANTS = {
    "llama": r"(?:Meta-)?{}(?:-Instruct)?",
    "qwen": "{}",
}
"""Family -> the names of what has the same longest context as a model of the catalogue, but for how its weights are
stored."""

STORED = r"(?:[-_.](?:FP8|INT8|INT4|AWQ|GPTQ|NVFP4|W4A16|W8A8|quantized)\b.*)?"
"""What names add for weights of another type."""


def check(server: Server) -> Iterator[Finding]:
    """All findings about the arguments of one server."""
    yield from names(server)
    yield from values(server)
    yield from together(server)
    yield from of_the_model(server)


def version_of(server: Server) -> str | None:
    """vLLM's version out of the image's tag, as three numbers; None if it says none.

    Only images named vllm, vllm-openai and the like are tagged with it; others (llm-d, LMCache, ours) count their own.
    """
    image = str(server.container.get("image", "")).partition("@")[0]
    *owners, name = image.split("/")
    if not name.startswith("vllm") or name.startswith("vllm-twin") or "lmcache" in owners:
        return None
    found = re.search(r"(?:^|[^\d.])v?(\d+\.\d+\.\d+)", tag_of(server))
    return found[1] if found else None


def tag_of(server: Server) -> str:
    """Of the image; empty where there is none."""
    name = str(server.container.get("image", "")).rpartition("/")[2]
    return name.partition(":")[2]


def names(server: Server) -> Iterator[Finding]:
    """Arguments that vLLM does not have, and dashes that are none."""
    manifest, version = server.manifest, version_of(server)
    for name in server.arguments:
        problem = argument_problem(name, version)
        if problem is not None:
            fix = (
                "drop it: requests are not logged by default"
                if name == "disable-log-requests"
                else ""
            )
            yield manifest.fault("unknown-argument", server.argument_path(name), problem, fix)
    for key in ("command", "args"):
        for i, word in enumerate(texts(server.container.get(key))):
            if re.match(r"\s*[\u2012-\u2015]", str(word)):
                yield manifest.fault(
                    "dash",
                    server.sub(key, i),
                    f"{str(word)[:30]!r} begins with a typographic dash, which is no argument",
                    "write two hyphens (--)",
                )


def written(server: Server) -> Iterator[tuple[str, str | None, KeyPath]]:
    """(name, value, path) of the arguments; the value is None where there is none.

    Values that a shell or Kubernetes fills in, and texts in a shell's quotes, are left out.
    """
    pairs = [
        (text, server.sub(key, i))
        for key in ("command", "args")
        for i, text in enumerate(texts(server.container.get(key)))
    ]
    if is_shell([text for text, _ in pairs]):
        pairs = [(word, path) for text, path in pairs for word in text.split()]
    words = [text for text, _ in pairs]
    for i, (word, path) in enumerate(pairs):
        name = name_in(word)
        if name is None:
            continue
        value = value_at(words, i)
        if value is None or not re.search("[$\"']" if is_shell(words) else r"\$", value):
            yield name, value, path


def values(server: Server) -> Iterator[Finding]:
    """Values that vLLM's parser or its configuration refuses."""
    version = version_of(server)
    for name, value, path in written(server):
        problem = value_problem(name, value, version)
        if problem is not None:
            message, _, hint = problem.partition("; ")
            yield server.manifest.fault(
                "argument-value", path, f"--{name} {message}: vLLM would not start", hint
            )


def refused(server: Server) -> bool:
    """Whether a value is one that vLLM refuses, so that nothing can be computed with it."""
    return any(value_problem(name, value) for name, value, _ in written(server))


LIMITED = (
    ("max-num-seqs", "max-num-batched-tokens", ""),
    ("max-num-active-seqs", "max-num-seqs", ""),
    ("long-prefill-token-threshold", "max-model-len", ""),
    ("max-model-len", "max-num-batched-tokens", "no-enable-chunked-prefill"),
)
"""(argument, another that it must not be above, the flag without which it may be)."""


def together(server: Server) -> Iterator[Finding]:
    """Pairs of arguments that vLLM refuses."""
    if refused(server):
        return
    for small, large, flag in LIMITED:
        if small not in server.arguments or large not in server.arguments:
            continue
        least, most = server.number(small, 0), server.number(large, 0)
        if least > most > 0 and (not flag or flag in server.arguments):
            because = f" with --{flag}" if flag else ""
            yield server.manifest.fault(
                "argument-value",
                server.argument_path(small),
                f"--{small} ({least:g}) is above --{large} ({most:g}){because}: vLLM would not start",
                f"--{small} of {most:g} or less",
            )


def exact_model(server: Server) -> ModelSpec | None:
    """The model of the catalogue whose longest context the server's model has, by its name; None if it is like none."""
    base = server.arguments.get("model", "").rstrip("/").rpartition("/")[2]
    for model in MODELS.values():
        name = model.name.rpartition("/")[2]
        family = next(pattern for key, pattern in VARIANTS.items() if key in name.lower())
        if re.fullmatch(family.format(re.escape(name)) + STORED, base, re.IGNORECASE):
            return model
    return None


def of_the_model(server: Server) -> Iterator[Finding]:
    """Contexts longer than the model's own, and heads that do not divide."""
    manifest, model = server.manifest, exact_model(server)
    if model is None or refused(server):
        return
    env = {str(e.get("name")): str(e.get("value")) for e in entries(server.container.get("env"))}
    is_stretched = "hf-overrides" in {name.partition(".")[0] for name in server.arguments}
    longest = int(server.number("max-model-len", 0))
    if (
        longest > model.max_position
        and not is_stretched
        and env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "0"
    ):
        yield manifest.fault(
            "argument-value",
            server.argument_path("max-model-len"),
            f"--max-model-len ({longest}) is above what {model.name} was trained for ({model.max_position}): "
            "vLLM would not start",
            f"--max-model-len of {model.max_position} or less; stretched positions are written into --hf-overrides",
        )
    tp = int(server.number("tensor-parallel-size", 1))
    if tp > 0 and model.heads % tp:
        fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0 and n <= tp]
        yield manifest.fault(
            "argument-value",
            server.argument_path("tensor-parallel-size"),
            f"--tensor-parallel-size ({tp}) does not divide the {model.heads} heads of {model.name}: vLLM would not "
            "start",
            f"--tensor-parallel-size of {fits[-1]}",
        )
