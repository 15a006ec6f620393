"""Prompts with the content that the traffic names: the same id is always the same tokens, another id others."""

import random
from collections.abc import Iterable, Mapping

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power",
)  # fmt: skip
"""Mostly one token each in the vocabularies of today."""


class Prompts:
    """Makes token ids out of (content id, tokens).

    The first tokens of a piece spell its content id in the digits of the vocabulary, as many as it has room for; the
    rest is drawn with the id and `seed` as the seed. So different ids differ in their first tokens, unless both pieces
    are too short to spell them.
    """

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        """`vocabulary` is the number of token ids of the model; ids at both ends, which may be special, are not used.

        Raises ValueError for fewer than 64.
        """
        if vocabulary < 64:
            raise ValueError(f"vocabulary ({vocabulary}) must be >= 64")
        self.low = min(256, vocabulary // 8)
        self.size = vocabulary - max(vocabulary // 20, 8) - self.low
        self._seed = seed

    def piece(self, content: int, tokens: int) -> list[int]:
        """`tokens` token ids of a content id."""
        digits: list[int] = []
        rest = content
        while rest or not digits:
            rest, digit = divmod(rest, self.size)
            digits.append(self.low + digit)
        digits.append(self.low + len(digits) % self.size)  # 1 and 1 followed by 0 differ
        if tokens > len(digits):
            rng = random.Random(f"{self._seed}/{content}")
            digits += rng.choices(range(self.low, self.low + self.size), k=tokens - len(digits))
        return digits[:tokens]

    def tokens(
        self,
        prompt: Iterable[tuple[int, int]],
        total: int,
        replies: Mapping[int, list[int]],
        own: int,
    ) -> list[int]:
        """The token ids of a prompt, `total` of them.

        `replies` are the tokens that the server gave for the content ids of replies; a reply that turned out shorter
        than planned is filled up. Where the pieces add up to less than `total` the rest is text that only the request
        number `own` has.
        """
        ids: list[int] = []
        for content, length in prompt:
            known = replies.get(content, [])[:length]
            ids += known
            if length > len(known):
                ids += self.piece(2 * content, length)[len(known) :]
        if total > len(ids):
            ids += self.piece(2 * own + 1, total - len(ids))
        return ids[:total]


def as_words(ids: Iterable[int]) -> str:
    """Token ids as text, a word for each, for servers that take no token ids; equal ids are equal words."""
    return " ".join(WORDS[number % len(WORDS)] for number in ids)
