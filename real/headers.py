"""What a client tells a server beside the request itself: who it is."""

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from twin.errors import InputError

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110."""
_SECRET = re.compile(r"auth|key|token|secret|password|cookie|credential|session", re.IGNORECASE)
"""Headers whose values are hidden however short they are."""
_LONG = 8
"""Characters from which on the value of any header is hidden."""
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
        if not key.isprintable() or not key.isascii():
            raise InputError("VLLM_API_KEY: must be printable ASCII on one line")
        found["Authorization"] = f"Bearer {key}"
    return found


class Hidden:
    """Takes a user's keys out of what a server says: many repeat the key that they refuse."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        found: set[str] = set()
        for name, value in headers.items():
            scheme, _, rest = value.partition(" ")
            parts = {value, rest, *(_basic(rest) if scheme.lower() == "basic" else ())}
            least = 1 if _SECRET.search(name) else _LONG
            found |= {part for part in parts if len(part) >= least}
        found |= {json.dumps(secret)[1:-1] for secret in found}
        self._secrets = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text without them."""
        for secret in self._secrets:
            text = text.replace(secret, "[hidden]")
        return text


def _basic(coded: str) -> tuple[str, ...]:
    """User and password, and the password, of RFC 7617."""
    try:
        pair = base64.b64decode(coded, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ()
    return pair, pair.partition(":")[2]
