"""What does an HTTP request say of itself, in headers and body, and is that refused?"""

import json
from typing import Any

from real.exchange import Exchange
from real.hints import (
    DEFAULT_POLICY,
    FIELDS,
    HEADERS,
    PRIORITY,
    carried,
    read_hints,
    read_settings,
)
from twin.scheduling import PolicyConfig, fingerprint, policy_config

PRIORITY_HEADER = b"x-vllm-priority"
"""vLLM's own, which beside it is an integer or nothing."""
_LOOKED_FOR = (b'"vllm_xargs"', b'"priority"')
"""A body without these is left unread."""

Headers = list[tuple[bytes, bytes]]


class Settings:
    """What is done with the hints of a request; from vLLM's additional_config.

    Raises ValueError for settings that make no sense.
    """

    def __init__(self, additional_config: Any) -> None:
        settings = read_settings(additional_config)
        policy = settings.get("policy", DEFAULT_POLICY)
        self._config: PolicyConfig | None = None if policy is None else policy_config(policy)
        self._rejects = settings.get("bad_hints") == "reject"
        named = settings.get("headers", HEADERS)
        self._headers = {name.lower().encode("ascii"): field for name, field in named.items()}

    @property
    def reads_hints(self) -> bool:
        """Whether there is a policy that they are for."""
        return self._config is not None

    @property
    def fingerprint(self) -> str | None:
        """Of the policy; None where vLLM's own order rules."""
        return None if self._config is None else fingerprint(self._config)

    def read(self, headers: Headers, body: bytes) -> tuple[Exchange, bytes, tuple[str, str] | None]:
        """(what the request says, the body for vLLM, (field or header, message) if it is to be answered 400).

        A header wins over the body: a gateway sets the one, a client the other. A body that is not understood is left
        to vLLM to refuse. Hints that vLLM would refuse in words of its own (an object) or take for others (true) are
        taken out of the body; null says nothing.
        """
        given = {
            self._headers[name]: (name.decode("ascii").title(), _text(value))
            for name, value in headers
            if name in self._headers
        }
        request = _object_in(body) if given or any(key in body for key in _LOOKED_FOR) else {}
        extra = request.get("vllm_xargs")
        extra = extra if isinstance(extra, dict) else {}
        hints = {name: extra[name] for name in FIELDS if extra.get(name) is not None}
        hints |= {field: value for field, (_, value) in given.items()}
        number, source = _priority_of(headers, request)
        if not isinstance(number, int | None):
            hints[PRIORITY], number = number, None
        if problem := self._problem({**extra, **hints}, number or 0, given, source):
            return Exchange({}, None, None), body, problem
        refused = [name for name in FIELDS if name in extra and carried(extra[name]) == ""]
        if refused:
            kept = {name: value for name, value in extra.items() if name not in refused}
            body = json.dumps({**request, "vllm_xargs": kept}).encode()
        model = request.get("model")
        return Exchange(hints, number, model if isinstance(model, str) else None), body, None

    def _problem(
        self, asked: dict[str, Any], number: int, given: dict[str, tuple[str, str]], source: str
    ) -> tuple[str, str] | None:
        if not self._rejects or self._config is None:
            return None
        for field, problem in read_hints(asked, number, self._config)[1].items():
            if field in given:
                name = given[field][0]
                return name, f"header {name} {problem}"
            name = source if field == PRIORITY else f"vllm_xargs.{field}"
            return name, f"{name} {problem}"
        return None


def _object_in(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _priority_of(headers: Headers, request: dict[str, Any]) -> tuple[int | str | None, str]:
    """(the priority that vLLM would take, or what is there in its place and is none, where it was)."""
    for name, value in headers:
        if name == PRIORITY_HEADER:
            text = _text(value)
            try:
                number: int | str = int(text)
            except ValueError:
                number = text
            return (text if carried(number) == "" else number), "X-Vllm-Priority"
    asked = request.get("priority")
    if isinstance(asked, bool) or not isinstance(asked, int):  # vLLM's to refuse
        return None, "priority"
    return (str(asked) if carried(asked) == "" else asked), "priority"
