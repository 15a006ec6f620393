"""Blocks in runs and as mere numbers answer what the pool of single blocks answers."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from twin.engine.blocks import BlockKeys, BlockPool, _link
from twin.engine.runs import CountPool, Line, RunPool

SIZE = 4
REPLIES = 1000


def chain_of(line: Line | None, end: float = inf) -> bytes:
    """What `BlockKeys` calls the segments up to the one of a line in which the token before `end` is."""
    if line is None:
        return b""
    chain = chain_of(line.parent)
    for start, content in zip(line.starts, line.contents, strict=True):
        if start < end:
            chain = _link(chain, start, content)
    return chain


class Pair:
    """A request in both pools."""

    def __init__(self, blocks, runs, prompt, reply):
        self.blocks, self.runs = blocks, runs
        self.tokens = sum(tokens for _, tokens in prompt)
        self.keys = BlockKeys(prompt, reply, SIZE)
        self.path = runs.path(prompt, reply, None)
        self.held: list[int] = []
        self.full = 0

    def admit(self) -> None:
        most = (self.tokens - 1) // SIZE
        found = self.blocks.find(self.keys.upto(most)[:most])
        hit = self.runs.find(self.path, most)
        assert len(hit) == len(found)
        assert self.runs.count_unreferenced(hit) == self.blocks.count_unreferenced(found)
        self.blocks.touch(found)
        self.runs.touch(self.path, hit)
        self.held, self.full = found, len(found)

    def take(self, count: int) -> None:
        count = min(count, self.blocks.num_free)
        self.held += self.blocks.take(count)
        self.runs.take(count)

    def publish(self, count: int) -> None:
        full = min(len(self.held), self.full + count)
        if full > self.full:
            keys = self.keys.upto(full)
            for i in range(self.full, full):
                self.blocks.publish(self.held[i], keys[i])
            self.runs.publish(self.path, full)
            self.full = full

    def release(self) -> None:
        assert self.runs.count_sole(self.path, len(self.held)) == self.blocks.count_sole(self.held)
        self.blocks.release(self.held)
        self.runs.release(self.path, len(self.held))
        self.held, self.full = [], 0


def findable(pool: BlockPool) -> list[tuple[bytes, int]]:
    keys = (pool._key[block] for block in pool.free_order())
    return [key for key in keys if key is not None]


def in_runs(pool: RunPool, size: int = SIZE) -> list[tuple[bytes, int]]:
    return [
        (chain_of(run.line, (block + 1) * size), (block + 1) * size)
        for run in pool.free_runs()
        for block in reversed(range(run.start, run.stop))
    ]


prompts = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from((0, 1, 4, 8, 13, 30))), min_size=1, max_size=4
).filter(lambda prompt: sum(tokens for _, tokens in prompt))
steps = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from("apptrn"), st.integers(1, 6), prompts, st.integers(0, 3)
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(steps, st.integers(6, 40))
def test_runs_are_blocks(script, num_blocks):
    blocks, runs = BlockPool(num_blocks, caching=True), RunPool(num_blocks, SIZE)
    pairs: dict[int, Pair] = {}
    for who, what, count, prompt, reply in script:
        pair = pairs.get(who)
        if pair is None:
            pairs[who] = pair = Pair(blocks, runs, prompt, REPLIES + reply)
            pair.admit()
        elif what == "p":
            pair.take(count)
            pair.publish(count)
        elif what == "t":
            pair.take(count)
        elif what == "a":
            pair.publish(count)
        elif what == "r":  # preempted, and back
            pair.release()
            pair.admit()
        else:
            pair.release()
            runs.forget(pairs.pop(who).path)
        assert runs.num_free == blocks.num_free
        assert runs.num_cached_free == blocks.num_cached_free
        assert in_runs(runs) == findable(blocks)
    for pair in pairs.values():
        pair.release()
        runs.forget(pair.path)
    assert runs.num_free == num_blocks - 1
    runs.take(num_blocks - 1)
    assert not runs._lines, "content that nobody has is not remembered"


def test_without_content():
    pool = CountPool(10)
    pool.take(4)
    pool.give(1)
    assert (pool.num_usable, pool.num_free, pool.num_cached_free) == (9, 6, 0)
