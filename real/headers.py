"""What a client tells a server beside the request itself: who it is."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from twin.errors import InputError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110."""
_SET_ELSEWHERE = {"content-length", "content-type", "host", "transfer-encoding"}

Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="'NAME: VALUE'",
        help="Send this header with every request; nothing of it is written down. May be repeated. Without an "
        "Authorization of yours, VLLM_API_KEY in the environment is sent as its bearer token.",
        show_default=False,
    ),
]


def headers_of(
    given: Sequence[str] | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Headers by name, from `NAME: VALUE` each. Raises InputError for one that cannot be sent; it repeats no value."""
    found: dict[str, str] = {}
    for text in given or ():
        name, colon, value = text.partition(":")
        value = value.strip()
        if not colon or not _NAME.fullmatch(name):
            place = f" {name!r}" if colon else ""
            raise InputError(
                f"--header{place}: must be 'NAME: VALUE', for instance 'X-Tenant: red'"
            )
        if name.lower() in _SET_ELSEWHERE:
            raise InputError(f"--header {name}: the client sets it from the request")
        if not value.isprintable() or not value.isascii():
            raise InputError(f"--header {name}: the value must be printable ASCII on one line")
        found[name] = value
    key = environment.get("VLLM_API_KEY", "").strip()
    if key and "authorization" not in map(str.lower, found):
        found["Authorization"] = f"Bearer {key}"
    return found
