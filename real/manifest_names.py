"""Which texts does Kubernetes take as names of objects and images?"""

import re

_WORD = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9](?:[-A-Za-z0-9.]*[A-Za-z0-9])?(?::\d+)?"

_IMAGE = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


def label_problem(text: str) -> str | None:
    """What keeps a text from being a label of DNS (RFC 1123), as namespaces are named; None if it is one."""
    if len(text) > 63:
        return f"must be at most 63 characters long, got {len(text)}"
    if not re.fullmatch(_WORD, text):
        return f"must be of lower-case letters, digits and hyphens between them, got {text!r}"
    return None


def name_problem(text: str) -> str | None:
    """What keeps a text from being a name of an object (labels with dots between them); None if it is one."""
    if len(text) > 253:
        return f"must be at most 253 characters long, got {len(text)}"
    if not re.fullmatch(rf"{_WORD}(?:\.{_WORD})*", text):
        return f"must be of lower-case letters, digits, and hyphens and dots between them, got {text!r}"
    return None


def service_problem(text: str) -> str | None:
    """What keeps a text from being the name of a Service (a label that begins with a letter); None if it is one."""
    problem = label_problem(text)
    if problem is None and not text[0].isalpha():
        return f"must begin with a letter, got {text!r}"
    return problem


def label_pair(text: str) -> tuple[str, str] | None:
    """(key, value) of a label written KEY=VALUE; None if Kubernetes does not take it."""
    key, equals, value = text.partition("=")
    prefix, slash, name = key.rpartition("/")
    word = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    is_key = re.fullmatch(word, name, re.ASCII) and (not slash or name_problem(prefix) is None)
    is_value = re.fullmatch(f"(?:{word})?", value, re.ASCII)
    return (key, value) if equals and is_key and is_value else None


def image_parts(image: str) -> tuple[str, str, str] | None:
    """(name, tag, digest) of an image, tag and digest empty where there is none; None if it is no image's name."""
    found = _IMAGE.fullmatch(image)
    return None if found is None else (found["name"], found["tag"] or "", found["digest"] or "")
