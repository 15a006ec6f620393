"""Which KV blocks are free, held and findable: vLLM's block pool, block id by block id.

The free queue is also the eviction order. A block keeps its key after it was freed and stays findable until it is
handed out again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Key = tuple[bytes, int]
"""Identity of a full block's content: (digest of all segments up to the one its last token is in, end position)."""


class BlockKeys:
    """The keys of one request's full blocks, from its content given as (content id, tokens) segments.

    Equal keys mean equal content from the first token on: the digest covers the ids of all segments up to the one in
    which the block ends and the lengths of those before it. The last segment (the reply) is open-ended.
    """

    __slots__ = ("_block_size", "_chain", "_end", "_keys", "_next", "_reply", "_segments")

    def __init__(self, prompt: Sequence[tuple[int, int]], reply: int, block_size: int) -> None:
        self._segments = prompt
        self._reply = reply
        self._block_size = block_size
        self._keys: list[Key] = []
        self._next = 0  # the segment that follows the current one
        self._end = 0  # position at which the current segment ends
        self._chain = b""

    def upto(self, num_blocks: int) -> list[Key]:
        """Keys of at least the first `num_blocks` full blocks (the list is shared: do not change it)."""
        keys, size = self._keys, self._block_size
        while len(keys) < num_blocks:
            end = (len(keys) + 1) * size
            while end > self._end >= 0:
                self._advance()
            keys.append((self._chain, end))
        return keys

    def _advance(self) -> None:
        if self._next < len(self._segments):
            content, tokens = self._segments[self._next]
            if tokens:
                self._chain = _link(self._chain, self._end, content)
                self._end += tokens
            self._next += 1
        else:
            self._chain = _link(self._chain, self._end, self._reply)
            self._end = -1  # open-ended


def _link(chain: bytes, start: int, content: int) -> bytes:
    return blake2b(b"%b/%d/%d" % (chain, start, content), digest_size=16).digest()


class BlockPool:
    """Blocks 1..num_blocks-1 (block 0 is vLLM's null block) with reference counts, keys and the free queue."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.num_usable = num_blocks - 1
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._blank = num_blocks - 1  # free blocks without a key
        self._refs = [0] * num_blocks
        self._key: list[Key | None] = [None] * num_blocks
        # Several blocks may carry one key: they are kept oldest first, and the oldest is what a look-up finds.
        self._cached: dict[Key, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that are findable by key: what the prefix cache holds beside the running requests."""
        return len(self._free) - self._blank

    @property
    def num_cached(self) -> int:
        """Blocks findable by key, in use or free."""
        return sum(map(len, self._cached.values()))

    def free_order(self) -> list[int]:
        """Block ids in the order in which they would be handed out."""
        return list(self._free)

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Ids of the longest run of `keys`, from the first on, that is present."""
        found = []
        for key in keys:
            blocks = self._cached.get(key)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` lie in the free queue."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def count_sole(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would become free if their one holder let go."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 1)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the free queue; their old content is no longer findable."""
        assert count <= len(self._free), "take() beyond the free blocks"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            key = self._key[block]
            if key is None:
                self._blank -= 1
            else:
                self._forget(block, key)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`; those that were free leave the free queue."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def publish(self, block: int, key: Key) -> None:
        """Make the full block `block` findable under `key`."""
        self._key[block] = key
        self._cached.setdefault(key, {})[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's `blocks`.

        They are let go last block first. Those that nothing refers to any more go to the head of the free queue if
        they have no key, else to its tail, so that a prefix loses its end first.
        """
        front, free = [], self._free
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key[block] is None:
                    front.append(block)
                else:
                    free[block] = None
        self._blank += len(front)
        for block in reversed(front):
            free[block] = None
            free.move_to_end(block, last=False)

    def _forget(self, block: int, key: Key) -> None:
        self._key[block] = None
        blocks = self._cached[key]
        del blocks[block]
        if not blocks:
            del self._cached[key]
