"""Where is the server? One rule for every request of the client, and small pages fetched from there.

What such a page holds is data from outside: whatever comes, a fetch ends with bytes or with one error that says what
came, within its time.
"""

import http.client
import ipaddress
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from twin.errors import InputError

API = "/v1"
"""Where OpenAI's API begins, below the address of the server."""
MOST_BYTES = 1 << 26
"""Of a page."""


class FetchError(Exception):
    """What came instead of a page, in words; `status` is the HTTP status where there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def base_of(url: str) -> str:
    """The address below which /v1/... and /metrics are: `url` without a last slash and without /v1.

    So http://host:8000, http://host:8000/ and http://host:8000/v1, which clients of OpenAI's API are given, are the
    same, and http://gateway/models/one has its API at /models/one/v1. Raises InputError for what is no address, and
    for one with a user, a password or a query in it: addresses are written into files.
    """
    try:
        place = urlsplit(url)
        name, port = place.hostname, place.port
        known = place.scheme in ("http", "https") and name and _is_host(name) and port != 0
    except ValueError:
        known = False
    if "@" in url.partition("//")[2]:
        raise InputError(
            "--url: must have no user and password in it, as it is written into the results; send them with --header "
            "'Authorization: Basic ...'"
        )
    if "?" in url or "#" in url:
        raise InputError(
            "--url: must have no query (?) and no fragment (#); a key goes into VLLM_API_KEY or --header"
        )
    if not known or not url.isprintable() or any(c.isspace() or c == "\\" for c in url):
        raise InputError(
            f"--url {url!r}: must be like http://127.0.0.1:8000, with a port of 1 to 65535 if it has one"
            if not url.isprintable()
            else f"--url {url}: must be like http://127.0.0.1:8000, with a port of 1 to 65535 if it has one"
        )
    base = url.rstrip("/")
    if place.path.rstrip("/").endswith(API):
        base = base.removesuffix(API).rstrip("/")
    return base


def _is_host(name: str) -> bool:
    """Whether a name can be looked up: an address, or labels of 1 to 63 characters."""
    if ":" in name:
        ipaddress.ip_address(name.partition("%")[0])  # ValueError where it is none
        return True
    return 0 < len(name.encode("idna")) <= 253


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the headers of a user, keys among them, are for the server that was named."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


def fetch(url: str, headers: Mapping[str, str], timeout_s: float) -> bytes:
    """The page at `url`, asked for without a proxy. Redirects are not followed.

    Raises FetchError for everything else than a whole page of status 200 in time.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay())
    end = time.monotonic() + timeout_s
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        with opener.open(request, timeout=timeout_s) as answer:
            if answer.status != 200:
                raise FetchError(f"HTTP status {answer.status}", answer.status)
            return _read(answer, end)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(_status(error), error.code) from None
    except urllib.error.URLError as error:
        raise FetchError(str(error.reason) or "no connection") from None
    except http.client.HTTPException as error:
        raise FetchError(f"no whole HTTP reply ({type(error).__name__})") from None
    except (OSError, ValueError) as error:
        raise FetchError(str(error) or type(error).__name__) from None


def _read(answer: Any, end: float) -> bytes:
    parts, size = [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise FetchError(f"a page of more than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > end:
            raise FetchError("the page did not end in time")
    if answer.length:
        raise FetchError("the page was cut short")
    return b"".join(parts)


def _status(error: urllib.error.HTTPError) -> str:
    text = f"HTTP status {error.code}"
    if 300 <= error.code < 400:
        text += f", a redirect{place_of(error.headers.get('Location'))}, which is not followed"
    return text


def same_host(url: str, location: str | None) -> str | None:
    """Where a redirect leads, if that is the same host by the same scheme, on whatever port; else None."""
    try:
        target = urljoin(url, location or "")
        here, there = urlsplit(url), urlsplit(target)
        is_near = (here.scheme, here.hostname) == (there.scheme, there.hostname)
        has_user = there.username is not None or there.password is not None
        return target if location and is_near and not has_user and there.port != 0 else None
    except ValueError:
        return None


def place_of(location: str | None) -> str:
    """` to SCHEME://HOST` of a redirect, without what else may be in it; empty where that cannot be told."""
    try:
        place = urlsplit(location or "")
        if not place.hostname or not place.hostname.isprintable():
            return ""
        port = "" if place.port is None else f":{place.port}"
        return f" to {place.scheme}://{place.hostname}{port}"
    except ValueError:
        return ""
