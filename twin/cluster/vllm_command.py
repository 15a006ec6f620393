"""Which arguments does a container give to vLLM?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twin.cluster.vllm_arguments import ARGUMENTS, VERSIONS
from twin.cluster.vllm_values import FLAGS

SHORT = {
    "-asc": "api-server-count", "-q": "quantization", "-pp": "pipeline-parallel-size", "-tp": "tensor-parallel-size",
    "-dcp": "decode-context-parallel-size", "-pcp": "prefill-context-parallel-size", "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank", "-dpr": "data-parallel-start-rank", "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address", "-dpp": "data-parallel-rpc-port", "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb", "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb", "-ep": "enable-expert-parallel", "-sc": "speculative-config",
    "-dc": "diffusion-config", "-cc": "compilation-config", "-ac": "attention-config",
}  # fmt: skip
"""Short names; -h, -n and -r are left to the shells and programs that may stand before vLLM."""


def arguments_of(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of the arguments of vLLM; a flag has the value true."""
    words = words_of(container)
    for i, word in enumerate(words):
        if word == "serve" and i + 1 < len(words) and not words[i + 1].startswith("-"):
            yield "model", words[i + 1]
        name = name_in(word)
        if name is not None:
            yield name, value_at(words, i) or "true"


def words_of(container: Mapping[str, Any]) -> list[str]:
    """Command and arguments, those within one text of a shell apart."""
    words = [str(w) for w in (*(container.get("command") or []), *(container.get("args") or []))]
    return " ".join(words).split() if is_shell(words) else words


def is_shell(words: Sequence[str]) -> bool:
    """Whether the words are a command line in one text, as `sh -c` takes it."""
    return len(words) <= 3 and any(" " in w for w in words)


def name_in(word: str) -> str | None:
    """The argument that a word names, in full and with hyphens; None if it names none.

    As vLLM reads it: underscores, short names, and the beginning of a name that only one argument has.
    """
    key = word.partition("=")[0]
    if key in SHORT:
        return SHORT[key]
    if not key.startswith("--") or key == "--":
        return None
    first, dot, rest = key[2:].partition(".")
    name = first.replace("_", "-")
    known = ARGUMENTS[VERSIONS[0]]
    if name not in known:
        options = known | {f"no-{flag}" for flag in FLAGS}
        longer = [option for option in options if option.startswith(name)]
        name = longer[0] if len(longer) == 1 and longer[0] != name else name
    return name + dot + rest


def value_at(words: Sequence[str], i: int) -> str | None:
    """The value of the argument that the i-th word names; None where there is none. Flags only have true or false."""
    _, equals, value = words[i].partition("=")
    following = words[i + 1] if i + 1 < len(words) else None
    if equals:
        return value
    if following is None or following.startswith("--") or following in SHORT:
        return None
    name = (name_in(words[i]) or "").removeprefix("no-")
    if name in FLAGS and following.lower() not in ("true", "false"):
        return None
    return following
