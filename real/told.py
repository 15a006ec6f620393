"""What a replay has to say of its requests before any figure of theirs is believed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from real.address import FetchError, fetch
from real.headers import Hidden
from real.measured import Measured
from real.pieces import text_of
from twin.cluster.clients import CLIENT_DISCONNECT
from twin.errors import InputError

LONGEST = 200
"""Characters that are shown of what a server said."""


def without_prompts(measured: Sequence[Measured]) -> list[Measured]:
    """The same, planned with the prompts they had: those of words have as many tokens as the server's tokenizer makes
    of them, so that only the lengths of the replies say anything.
    """
    return [
        one
        if one.planned is None
        else replace(one, planned=(one.record.prompt_tokens, one.planned[1]))
        for one in measured
    ]


def words_line(measured: Sequence[Measured]) -> str | None:
    """How many tokens prompts of words had, on average, beside what was planned; None where none completed."""
    done = [
        (one.record.prompt_tokens, one.planned[0])
        for one in measured
        if one.planned and one.record.outcome == "completed"
    ]
    if not done:
        return None
    got, planned = (sum(column) / len(done) for column in zip(*done, strict=True))
    return f"prompts of words had {got:,.1f} tokens on average, {planned:,.1f} were planned"


def error_line(measured: Sequence[Measured]) -> str | None:
    """What was said most often of requests that failed by the server's doing; None where nothing was."""
    own = ("timed_out", "unfinished")
    said = [
        one.error[:LONGEST]
        for one in measured
        if one.error
        and one.record.outcome not in own
        and one.record.reason != CLIENT_DISCONNECT
        and one.record.outcome != "completed"
    ]
    if not said:
        return None
    text, number = Counter(said).most_common(1)[0]
    return f"{number:,} of {len(said):,} requests that failed were told: {text}"


def first_model(url: str, headers: Mapping[str, str]) -> str:
    """What the server at `url` (real.address.base_of) calls its first model. Raises InputError where it lists none."""
    import json

    try:
        page = fetch(f"{url}/v1/models", headers, 10.0)
        name = json.loads(page.decode("utf-8", "replace"))["data"][0]["id"]
        if not isinstance(name, str) or not name:
            raise ValueError
        return text_of(name)
    except FetchError as error:
        said, status = Hidden(headers).hide(text_of(str(error))), error.status
    except (ValueError, LookupError, TypeError, RecursionError):
        said, status = "what is there is no list of models", 200
    hint = "is the server up? name the model with --model"
    if status in (401, 403):
        hint = "give its key with VLLM_API_KEY in the environment, or with --header"
    elif status is not None and 300 <= status < 400:
        hint = "give the address of the server itself"
    raise InputError(f"--url {url}: no list of models at /v1/models: {said}; {hint}") from None
