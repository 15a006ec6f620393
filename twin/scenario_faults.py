"""What is wrong with a scenario document, in terms of its keys: for each fault the place, the value and the bound.

Names that people know from vLLM or Kubernetes but that the simulation leaves out are refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel, ValidationError

from twin.errors import InputError
from twin.scenario_schema import Document
from twin.scenario_yaml import KeyPath, dotted

NOT_MODELLED: dict[str, str] = {
    "pipeline_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism",
    "data_parallel_rank": "data parallelism",
    "enable_expert_parallel": "expert parallelism",
    "decode_context_parallel_size": "context parallelism",
    "prefill_context_parallel_size": "context parallelism",
    "speculative_config": "speculative decoding",
    "speculative_model": "speculative decoding",
    "num_speculative_tokens": "speculative decoding",
    "enable_lora": "LoRA",
    "lora_modules": "LoRA",
    "max_loras": "LoRA",
    "max_lora_rank": "LoRA",
    "kv_transfer_config": "KV connectors",
    "kv_connector": "KV connectors",
    "kv_offloading_size": "KV offloading",
    "kv_offloading_backend": "KV offloading",
    "cpu_offload_gb": "weights in CPU memory",
    "swap_space": "swapping (vLLM V1 recomputes instead)",
    "sliding_window": "sliding-window attention",
    "disable_hybrid_kv_cache_manager": "hybrid KV caches",
    "mamba_block_size": "Mamba layers",
    "mamba_cache_dtype": "Mamba layers",
    "limit_mm_per_prompt": "multi-modal input",
    "disable_chunked_mm_input": "multi-modal input",
    "quantization": "quantised weights as an engine argument (hardware.dtype says the type of the weights)",
    "prefill_schedule_interval": "spaced prefill",
    "max_num_queued_reqs": "vLLM's own admission limits",
    "max_num_queued_tokens": "vLLM's own admission limits",
    "stream_interval": "streaming in bundles of tokens",
    "guided_decoding_backend": "structured output",
    "structured_outputs_config": "structured output",
}
"""Keys people may know from vLLM or Kubernetes -> what of it the simulation leaves out."""

ELSEWHERE: dict[str, str] = {
    "scheduling_policy": "write it as the top-level key policy (vllm-fcfs or vllm-priority)",
    "scheduler_cls": "write it as the top-level key policy",
    "tensor_parallel_size": "it belongs under hardware",
    "dtype": "it belongs under hardware",
    "gpu": "it belongs under hardware",
    "seed": "it belongs under run",
    "replicas": "it belongs under cluster",
    "admission": "it belongs under cluster",
    "retries": "it belongs under cluster",
    "faults": "it belongs under cluster",
    "warm_pool": "it belongs under cluster",
    "prediction": "it belongs under cluster",
    "schedules": "it belongs under cluster",
}
"""Keys in a wrong section -> what to do."""

_FROM_FILE = (
    "a stream with a trace takes instants and lengths from the file; make it a stream of its own"
)
_FROM_PRESET = "a preset has its own; make it a stream with arrivals"
_ARRIVALS_ONLY = "only streams with arrivals have it"
_TRACE_ONLY = "only streams with a trace have it"

OTHER_STREAM: dict[str, dict[str, str]] = {
    "[trace]": {
        "arrivals": _FROM_FILE,
        "prompt_tokens": _FROM_FILE,
        "output_tokens": _FROM_FILE,
        "lengths_from": _FROM_FILE,
        "duration": "a trace is limited by window or requests, or the run by run.until",
        "rate": "a trace has its own; set speedup",
        "sessions": _ARRIVALS_ONLY,
        "prefixes": f"{_ARRIVALS_ONLY}; for a trace there is assumed_prefix_share",
    },
    "[preset]": {
        "arrivals": f"{_FROM_PRESET}, or set rate",
        "prompt_tokens": _FROM_PRESET,
        "output_tokens": _FROM_PRESET,
        "lengths_from": _FROM_PRESET,
        "sessions": _FROM_PRESET,
        "prefixes": _FROM_PRESET,
        "speedup": f"{_TRACE_ONLY}; set rate",
    },
    "[arrivals]": {
        "speedup": f"{_TRACE_ONLY}; set arrivals.rate",
        "rate": "it belongs under arrivals",
        "cv": "it belongs under arrivals",
        "window": f"{_TRACE_ONLY}; set duration",
        "spread_ticks": _TRACE_ONLY,
        "assumed_prefix_share": f"{_TRACE_ONLY}; set prefixes",
        "format": _TRACE_ONLY,
    },
}
"""Form of stream -> key that another form has -> what to do."""


@dataclass(frozen=True)
class Origin:
    """Where each value of a document was written, to say so in messages."""

    name: str
    """The file."""
    folder: Path
    """What paths in it are relative to."""
    lines: dict[KeyPath, int]
    overrides: dict[KeyPath, str]
    """Path -> the option on the command line that set it."""
    files: list[Path] = field(default_factory=list)
    """Files and folders that were named, as seen from the working directory."""

    def override(self, path: KeyPath, text: str) -> None:
        """An option has replaced what stood at `path`."""
        self.overrides[path] = text
        for below in [key for key in self.lines if key[: len(path)] == path and key != path]:
            del self.lines[below]

    def place(self, path: KeyPath) -> str:
        """The file and line, or the options, that set what is at `path`, or else the section around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.overrides:
                return self.overrides[path[:end]]
            below = [text for key, text in self.overrides.items() if key[:end] == path[:end]]
            line = self.lines.get(path[:end]) if end else None
            if end == len(path) and below:
                written = [] if line is None else [f"{self.name} line {line}"]
                return " with ".join([*written, *below])
            if line is not None:
                return f"{self.name} line {line}"
        return self.name

    def tell(self, path: KeyPath, problem: str) -> str:
        """What is wrong at `path`, as one line."""
        return f"{self.place(path)}: {dotted(path) or 'the whole'}: {problem}"

    def fail(self, path: KeyPath, problem: str) -> NoReturn:
        """Refuse the scenario."""
        raise InputError(self.tell(path, problem))

    @contextmanager
    def placed(self, *path: str | int, named: bool = False) -> Iterator[None]:
        """Errors from inside get their place: that of `path`, or of the key they begin with; `named` adds the keys."""
        try:
            yield
        except ValueError as error:
            problem = str(error)
            if named:
                self.fail(path, problem)
            key = tuple(problem.partition(":")[0].split("."))
            place = self.place(key if key[: len(path)] == path else path)
            raise InputError(f"{place}: {problem}") from None

    def resolve(self, written: str, *path: str | int) -> Path:
        """A file or folder named at `path`, as seen from the working directory.

        Names in the file are relative to the file; those in an option are relative to the working directory.
        """
        optional = any(path[:end] in self.overrides for end in range(1, len(path) + 1))
        found = (Path() if optional else self.folder) / Path(written).expanduser()
        self.files.append(found)
        return found


class Fault(NamedTuple):
    """One thing wrong with a document."""

    path: KeyPath
    """Keys and list positions down to the place."""
    problem: str
    """What is wrong, with value and bound; reads on after the name of the field."""


def unknown(value: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """The sentence for a name that does not exist, with the nearest that do."""
    return f"{value!r} is not known; {_suggestion(value, list(known))}known: {', '.join(known)}"


def check(document: Any) -> Document | list[Fault]:
    """The document as models, or everything that is wrong with it."""
    try:
        return Document.model_validate(document)
    except ValidationError as error:
        return [_fault(entry) for entry in error.errors(include_url=False)]


def keys_at(path: KeyPath) -> list[str]:
    """The keys known under the section at `path`; empty if it is none or takes any key."""
    sections: tuple[Any, ...] = (Document,)
    takes_names = False
    for step in path:
        if isinstance(step, int):
            continue
        if takes_names and not any(step in section.model_fields for section in sections):
            takes_names = False  # a name of the user's, of which the sections are the values
            continue
        fields = [
            section.model_fields[step].annotation
            for section in sections
            if step in section.model_fields
        ]
        takes_names = any(map(_is_mapping, fields))
        sections = tuple(model for field in fields for model in _models_in(field))
    return sorted({key for section in sections for key in section.model_fields})


def _is_mapping(annotation: Any) -> bool:
    parts = getattr(annotation, "__args__", ())
    return getattr(annotation, "__origin__", None) is dict or any(map(_is_mapping, parts))


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
    "list_type": "must be a list",
    "finite_number": "must be a finite number",
    "int_parsing_size": "is too large",
}


def _fault(entry: Any) -> Fault:
    path, kind, given, context = (
        _written(entry["loc"]),
        entry["type"],
        entry["input"],
        entry.get("ctx", {}),
    )
    if kind == "extra_forbidden":
        return Fault(path, _unknown_key(path, entry["loc"]))
    if kind == "missing":
        return Fault(path, "is missing; it has no default")
    if kind == "value_error":
        return Fault(path, str(context["error"]))
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {
            "greater_than_equal": ">=",
            "greater_than": ">",
            "less_than_equal": "<=",
            "less_than": "<",
        }[kind]
        bound = next(context[key] for key in ("ge", "gt", "le", "lt") if key in context)
        shown = bound if isinstance(bound, int) else f"{bound:.15g}"
        return Fault(path, f"must be {sign} {shown}, got {_shown(given)}")
    if kind == "literal_error":
        return Fault(path, f"must be one of {context['expected']}, got {_shown(given)}")
    if kind == "string_too_short":
        return Fault(path, "must not be empty")
    if kind in ("too_short", "too_long"):
        key, more = ("min_length", "more") if kind == "too_short" else ("max_length", "fewer")
        return Fault(path, f"must have {context[key]} or {more} entries, got {_shown(given)}")
    if kind in _TYPES:
        hint = ""
        if isinstance(given, str) and kind in ("int_type", "float_type", "bool_type"):
            hint = "; numbers, true and false are written without quotes"
        if kind == "string_type":
            hint = '; put it in quotes: "..."'
        if path[-1:] in (("prompt_tokens",), ("output_tokens",)) and isinstance(given, int):
            hint = f"; write {{fixed: {given}}}"
        return Fault(path, f"{_TYPES[kind]}, got {_shown(given)}{hint}")
    return Fault(path, f"{entry['msg'][0].lower()}{entry['msg'][1:]}, got {_shown(given)}")


def _written(location: KeyPath) -> KeyPath:
    """The location without the marks in brackets that the models put between keys."""
    return tuple(step for step in location if not str(step).startswith("["))


def _unknown_key(path: KeyPath, location: KeyPath) -> str:
    key = str(path[-1])
    if key in NOT_MODELLED:
        return f"not modelled: {NOT_MODELLED[key]}; remove the key"
    known = keys_at(path[:-1])
    if key in ELSEWHERE:
        return f"unknown key here: {ELSEWHERE[key]}"
    if path[0] == "traffic" and len(path) == 3:
        elsewhere = OTHER_STREAM.get(str(location[2]), {})
        if key in elsewhere:
            return f"unknown key here: {elsewhere[key]}"
    if key in known:
        section = next(step for step in reversed(path[:-1]) if isinstance(step, str))
        return f"unknown key here: other forms of {section} have it, this one does not; remove it"
    return f"unknown key; {_suggestion(key, known) or 'known: ' + ', '.join(known)}".rstrip()


def _suggestion(value: str, known: Sequence[str]) -> str:
    near = get_close_matches(value, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
