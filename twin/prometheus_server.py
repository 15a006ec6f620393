"""Asking a Prometheus over its HTTP API what traffic its vLLM servers had."""

import json
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

from twin.errors import InputError
from twin.workload import prometheus as pure


class Server:
    """A Prometheus, asked over its HTTP API."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r} is no address; write http://HOST:PORT")
        self._url = url_without_password(url).rstrip("/")
        self._headers = dict(headers)
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
        self._timeout_s = timeout_s

    def now(self) -> float:
        """The server's clock, Unix seconds."""
        data = self._ask("query", query="time()")
        try:
            return float(data["result"][1])
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._strange() from None

    def at(self, query: str, time_s: float) -> list[Any]:
        """The vector that a query has at an instant."""
        return self._vector(self._ask("query", query=query, time=repr(time_s)))

    def over(self, query: str, start_s: float, end_s: float, step_s: int) -> list[Any]:
        """The series that a query has from start to end."""
        return self._vector(
            self._ask(
                "query_range", query=query, start=repr(start_s), end=repr(end_s), step=str(step_s)
            )
        )

    def _vector(self, data: Any) -> list[Any]:
        """The series of an answer: each with labels and with one value or several."""
        try:
            for series in data["result"]:
                dict(series["metric"])
                for _, value in series["values"] if "values" in series else [series["value"]]:
                    float(value)
        except (KeyError, TypeError, ValueError):
            raise self._strange() from None
        return list(data["result"])

    def _strange(self) -> InputError:
        return InputError(f"{self._url}: the answer to a query is not as Prometheus gives it")

    def _ask(self, path: str, **parameters: str) -> Any:
        address = f"{self._url}/api/v1/{path}"
        body = urlencode(parameters).encode()
        request = urllib.request.Request(address, data=body, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            problem = _told(error.read()) or f"{error.code} {error.reason}"
            hint = "; is it a Prometheus?" if error.code in (404, 405, 501) else ""
            raise InputError(f"{address}: {problem}{hint}") from None
        except TimeoutError:
            raise self._late(address) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._late(address) from None
            raise InputError(f"{self._url}: cannot be reached: {error.reason}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise InputError(f"{self._url}: the connection broke: {error!r}") from None
        try:
            read = json.loads(text)
            if read["status"] == "success":
                return read["data"]
        except (ValueError, KeyError, TypeError):
            read = None
        if read is None:
            shown = text[:60].decode("utf-8", "replace").strip()
            raise InputError(f"{address}: the answer is not that of a Prometheus: {shown!r}")
        raise InputError(f"{address}: {_told(text)}")

    def _late(self, address: str) -> InputError:
        return InputError(
            f"{address}: no answer within {self._timeout_s:g} s; raise --timeout or shorten --window"
        )


def observe(
    server: Server, labels: Mapping[str, str], end_s: float, step_s: int, steps: int
) -> Any:
    """Ask for rates and lengths of `steps` steps up to `end_s`. Raises InputError and UnusableError."""
    length_s = step_s * steps
    start_s = end_s - length_s
    _check_there(server, labels, end_s, length_s)
    rates = server.over(
        pure.increase(pure.REQUESTS, labels, step_s), start_s + step_s, end_s, step_s
    )
    counts = pure.step_counts(rates, start_s, step_s, steps)
    if all(count is None for count in counts):
        raise InputError(
            f"vllm:{pure.REQUESTS} has no two samples within any step of {step_s} s; make --step longer than two "
            "scrapes"
        )
    if not sum(count or 0.0 for count in counts) > 0:
        raise pure.UnusableError(
            f"no request ended in the {length_s:,} s before {end_s:.0f}; choose a longer --window or another --end"
        )
    found = [
        pure.histogram(
            metric,
            server.at(pure.increase(f"{metric}_bucket", labels, length_s, "le"), end_s),
            server.at(pure.increase(f"{metric}_sum", labels, length_s), end_s),
        )
        for metric in (pure.PROMPT, pure.OUTPUT)
    ]
    return pure.Observed(start_s, step_s, counts, *found)


def _check_there(server: Server, labels: Mapping[str, str], end_s: float, length_s: int) -> None:
    """Raises UnusableError if there are no such series in the window, or those of several models."""

    def present(metric: str, labels: Mapping[str, str], by: str) -> list[str]:
        query = f"count by ({by}) (last_over_time({pure.selector(metric, labels)}[{length_s}s]))"
        return sorted(series["metric"].get(by, "") for series in server.at(query, end_s))

    models = present(pure.REQUESTS, labels, "model_name")
    if len(models) > 1:
        named = ", ".join(models)
        raise pure.UnusableError(
            f"requests of several models: {named}; choose one with --match model_name={models[0]}"
        )
    if models:
        return
    if labels and (others := present(pure.REQUESTS, {}, "model_name")):
        said = ", ".join(f"{name}={value}" for name, value in labels.items())
        raise pure.UnusableError(
            f"no series vllm:{pure.REQUESTS} with {said}; there are some of model {', '.join(others)}"
        )
    names = present(".+", {}, "__name__")
    shown = f"; of vLLM there are {', '.join(names[:5])}" if names else " and none of vLLM at all"
    raise pure.UnusableError(
        f"no series vllm:{pure.REQUESTS} in the {length_s:,} s before {end_s:.0f}{shown}"
    )


def _told(body: bytes) -> str:
    """The error in an answer of Prometheus; empty if there is none."""
    try:
        read = json.loads(body)
        return f"{read['errorType']}: {read['error']}"
    except (ValueError, KeyError, TypeError):
        return ""


def url_without_password(url: str) -> str:
    """The address as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
