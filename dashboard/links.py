"""A configuration in the address of a page, so that a link restores it."""

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dashboard.limits import Limits
from dashboard.safety import Refused, check_shape
from twin.scenario_faults import Origin

KEY = "s"
"""The query parameter."""


def encode(document: Mapping[str, Any]) -> str:
    """The document as text for an address: JSON, deflated, base64 without characters that addresses escape."""
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.urlsafe_b64encode(zlib.compress(data, 9)).decode().rstrip("=")


def decode(text: str, limits: Limits) -> dict[str, Any]:
    """The document in a link. Raises Refused for anything else, and for what cannot be shown.

    Nothing larger than the limit is unpacked.
    """
    broken = Refused("this link holds no configuration, or only a part of one; ask for it again")
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, limits.yaml_bytes)
        if unpacker.unconsumed_tail:
            raise Refused(
                f"this link holds more than {limits.yaml_bytes:,} bytes; a scenario is a small file"
            )
        document = json.loads(data)
    except (binascii.Error, ValueError, zlib.error, RecursionError) as error:
        raise error if isinstance(error, Refused) else broken from None
    if not isinstance(document, dict):
        raise broken
    check_shape(document, Origin("link", Path(), {}, {}))
    return document
