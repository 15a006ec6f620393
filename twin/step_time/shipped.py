"""Which step-time profiles come with the twin? One file a GPU, many profiles in it that share their provenance.

This module reads no file: the caller hands over the parsed JSON.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from twin.errors import InputError
from twin.step_time.profiles import Profile, describe, parse_profile

SHARED = ("capture_sizes", "host_sync_ps", "host_async_ps", "gap_ps", "max_context")
"""Parts of a profile that all of a GPU's have in common."""

SHARED_ORIGIN = ("gpu", "engine", "source", "licence", "date", "script", "notes")
"""Parts of its provenance of which the same holds."""

NAMED = 6
"""Profiles that a complaint names."""

OWN_ORIGIN = ("model", "tensor_parallel_size", "dtype", "kv_cache_dtype", "fit_error")


class Subject(NamedTuple):
    """What a profile is of."""

    model: str
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str


def pack(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The data of one GPU's file. Raises ValueError for profiles that do not share what they must."""
    first = profiles[0].to_dict()
    shared = {name: first[name] for name in SHARED}
    origin = {name: first["provenance"][name] for name in SHARED_ORIGIN}
    packed = []
    for profile in profiles:
        data = profile.to_dict()
        theirs = data.pop("provenance")
        for name in SHARED:
            if data.pop(name) != shared[name]:
                raise ValueError(
                    f"{name} of {_name(theirs)} differs from that of the first profile"
                )
        for name in SHARED_ORIGIN:
            if theirs[name] != origin[name]:
                raise ValueError(
                    f"provenance.{name} of {_name(theirs)} differs from the first one's"
                )
        packed.append({name: theirs[name] for name in OWN_ORIGIN} | data)
    return {"provenance": origin, **shared, "profiles": packed}


def subjects(packed: Mapping[str, Any]) -> list[Subject]:
    """What a GPU's file has profiles of, in its order."""
    return [_subject(entry) for entry in packed["profiles"]]


def find(packed: Mapping[str, Any], wanted: Subject, source_name: str) -> Profile | None:
    """The profile of that subject; None if there is none. `source_name` (the file) is for messages."""
    for entry in packed["profiles"]:
        if _subject(entry) == wanted:
            own = {name: entry[name] for name in OWN_ORIGIN}
            data = {name: value for name, value in entry.items() if name not in OWN_ORIGIN}
            shared = {name: packed[name] for name in SHARED}
            return parse_profile(
                {"provenance": {**packed["provenance"], **own}, **shared, **data}, source_name
            )
    return None


def missing(packed: Iterable[Mapping[str, Any]], gpu: str, wanted: Subject) -> InputError:
    """The complaint that there is no such profile among those of some files, with the nearest ones."""
    subject = describe(wanted.model, gpu, wanted.tensor_parallel_size, wanted.dtype)
    subject += f", KV {wanted.kv_cache_dtype}"
    names = known(packed)
    nearest = sorted(
        names, key=lambda name: (-difflib.SequenceMatcher(None, subject, name).ratio(), name)
    )
    return InputError(
        f"hardware: there is no built-in step-time profile for {subject}. Available: {'; '.join(nearest[:NAMED])}, and "
        f"{max(0, len(names) - NAMED)} more (twin profile list). Choose one of these, let hardware.step_time point to "
        "a profile file of your own, or have the times computed from data sheets, not validated, with "
        "hardware.step_time: roofline."
    )


def known(packed: Iterable[Mapping[str, Any]]) -> list[str]:
    """All profiles of some files in words, one a line."""
    return [
        describe(entry["model"], file["provenance"]["gpu"], entry["tensor_parallel_size"], entry["dtype"])
        + f", KV {entry['kv_cache_dtype']}"
        for file in packed
        for entry in file["profiles"]
    ]  # fmt: skip


def stored_dtype(dtype: str) -> str:
    """Under which type of weights a profile is kept: both 16-bit types take the same time."""
    return "bfloat16" if dtype == "float16" else dtype


def stored_kv_dtype(kv_cache_dtype: str) -> str:
    """Under which type of the KV cache a profile is kept."""
    return "fp8" if kv_cache_dtype.startswith("fp8") else "bfloat16"


def _subject(entry: Mapping[str, Any]) -> Subject:
    return Subject(
        entry["model"], entry["tensor_parallel_size"], entry["dtype"], entry["kv_cache_dtype"]
    )


def _name(origin: Mapping[str, Any]) -> str:
    return describe(origin["model"], origin["gpu"], origin["tensor_parallel_size"], origin["dtype"])
