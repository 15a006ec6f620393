"""Several scenarios on one machine whose memory does not hold all their servers: who asks is sent to one that runs.

A small HTTP front that forwards nothing: a request to `/v1/...` is answered with a redirect (307) to the server of the
model it names, started or woken up first where needed, so that replies go from the server to the client directly.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from real.models import ModelCache, server_cache
from real.server import Say, Server, Stopped
from twin.scenario import Scenario

LARGEST_BODY = 64 << 20
"""Bytes of a request that is looked at for the name of its model."""


@dataclass(frozen=True)
class Offer:
    """A scenario that can be served."""

    name: str
    """What clients call its model."""
    scenario: Scenario
    folder: Path | None
    """Of its weights, where they are on this machine."""
    size_bytes: int
    """Memory of its server, all GPUs together."""


def memory_of(scenario: Scenario) -> int:
    """Bytes that a server of the scenario takes, all GPUs together.

    What vLLM reserves (`gpu_memory_utilization`), or, where the scenario sets the number of KV blocks, the sum of
    weights, activations, allowances and those blocks.
    """
    plan, blocks = scenario.hardware.memory, scenario.document["engine"]["num_gpu_blocks_override"]
    each = plan.budget_bytes
    if blocks is not None:
        each = plan.weights_bytes + plan.activation_bytes + plan.runtime_bytes + plan.graph_bytes
        each += blocks * plan.block_bytes
    return each * plan.tensor_parallel_size


class Models:
    """The scenarios offered and the servers that run for them."""

    def __init__(
        self,
        offers: Mapping[str, Offer],
        budget_bytes: int,
        start: Callable[[Offer], Server],
        drain_s: float,
        say: Say,
    ) -> None:
        self.offers = offers
        self.loads = 0
        """Servers started."""
        self._start, self._say = start, say
        sizes = {name: offer.size_bytes for name, offer in offers.items()}
        self.cache: ModelCache[Server] = server_cache(
            budget_bytes, sizes, self._load, drain_s, self._given_up
        )

    def _load(self, name: str) -> Server:
        self._say(f"{name}: starting")
        self.loads += 1
        return self._start(self.offers[name])

    def _given_up(self, message: str) -> None:
        self._say(f"evict: {message}")

    def url_of(self, name: str) -> str:
        """Where the model is served, once it is ready. Raises KeyError for a name that is not offered.

        Raises ValueError if it can never fit and Stopped if its server does not start.
        """
        if name not in self.offers:
            raise KeyError(name)
        return self.cache.get_or_load(name).url

    def evict(self, name: str) -> bool:
        """Give a model up; whether it was held. Raises KeyError for a name that is not offered."""
        if name not in self.offers:
            raise KeyError(name)
        return self.cache.evict(name)

    def status(self) -> dict[str, Any]:
        """The budget, what is used of it, and each model with its state; does not wait for a start in progress."""
        cache, held, asleep = self.cache, self.cache.held(), self.cache.asleep
        models = []
        for name, offer in self.offers.items():
            state = "held" if name in held else "asleep" if name in asleep else "out"
            url = held[name].model.url if name in held else None
            state = "loading" if name == cache.loading else state
            row = {"name": name, "state": state, "size_bytes": offer.size_bytes, "url": url}
            models.append(row)
        return {
            "budget_bytes": cache.budget_bytes,
            "used_bytes": sum(one.size_bytes for one in held.values()),
            "least_recently_used": list(held),
            "models": models,
        }


def front(models: Models, host: str, port: int) -> ThreadingHTTPServer:
    """The HTTP server, listening, not yet serving. Raises OSError where nobody can listen.

    `GET /models`; `POST /models/NAME/load` and `/evict`; `/v1/models`; any other `POST /v1/...` is redirected.
    """

    class Handler(_Handler):
        offered = models

    return ThreadingHTTPServer((host, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    offered: Models
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {})
        elif self.path == "/models":
            self._answer(200, self.offered.status())
        elif self.path == "/v1/models":
            data = [{"id": name, "object": "model"} for name in self.offered.offers]
            self._answer(200, {"object": "list", "data": data})
        else:
            self._answer(404, _error(f"no such path: {self.path}"))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_BODY:
            self.close_connection = True
            self._answer(413, _error(f"a body of {length:,} bytes; at most {LARGEST_BODY:,}"))
            return
        body = self.rfile.read(length)
        parts = self.path.strip("/").split("/")
        try:
            if self.path.startswith("/v1/"):
                url = self._seen_from_here(self.offered.url_of(_model_in(body)))
                self._answer(307, {"url": url}, {"Location": url + self.path})
            elif parts[0] == "models" and parts[-1] == "load" and len(parts) > 2:
                self._answer(200, {"url": self.offered.url_of("/".join(parts[1:-1]))})
            elif parts[0] == "models" and parts[-1] == "evict" and len(parts) > 2:
                self._answer(200, {"evicted": self.offered.evict("/".join(parts[1:-1]))})
            else:
                self._answer(404, _error(f"no such path: {self.path}"))
        except KeyError as error:
            offered = ", ".join(self.offered.offers)
            self._answer(404, _error(f"the model {error} is not offered; offered are {offered}"))
        except ValueError as error:
            self._answer(400, _error(str(error)))
        except Stopped as error:
            self._answer(503, _error(str(error)))

    def _seen_from_here(self, url: str) -> str:
        """The server under the name by which the client reached this front."""
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return f"http://{name}:{urlsplit(url).port}" if name else url

    def _answer(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what happens is told by `Models`."""


def _model_in(body: bytes) -> str:
    """The model a request names. Raises ValueError if it names none."""
    try:
        name = json.loads(body)["model"]
    except (ValueError, TypeError, KeyError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ValueError('the body must be a JSON object with the name of a model as "model"')
    return name


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def serve_front(server: ThreadingHTTPServer, stop: threading.Event) -> None:
    """Serve until told to stop."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stop.wait()
    server.shutdown()
    server.server_close()
