"""The block pool against a naive model of it, and block keys against explicit lists of tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twin.engine.blocks import BlockKeys, BlockPool

NUM_BLOCKS = 9
KEYS = [(bytes([chain]), position) for chain in (1, 2) for position in (4, 8, 12)]


class Naive:
    """Reference counts, keys and the free queue, in lists and dicts and without thought for speed."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.published = []  # (key, block), oldest first

    def key_of(self, block):
        return next((key for key, other in self.published if other == block), None)

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.refs[block] = 1
        self.published = [(key, block) for key, block in self.published if block not in taken]
        return taken

    def find(self, keys):
        found = []
        for key in keys:
            holders = [block for other, block in self.published if other == key]
            if not holders:
                break
            found.append(holders[0])
        return found

    def touch(self, blocks):
        for block in blocks:
            self.refs[block] += 1
        self.free = [block for block in self.free if block not in blocks]

    def release(self, blocks):
        gone = []
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                gone.insert(0, block)  # the last block of a request is let go first
        without = [block for block in gone if self.key_of(block) is None]
        with_key = [block for block in gone if self.key_of(block) is not None]
        self.free = without + self.free + with_key


class PoolMachine(RuleBasedStateMachine):
    """Requests come, share, publish and go; pool and model must tell the same."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, caching=True)
        self.naive = Naive(NUM_BLOCKS)
        self.holders = []  # lists of blocks, one per request

    def held(self):
        return sorted({block for blocks in self.holders for block in blocks})

    def unkeyed(self):
        return [block for block in self.held() if self.naive.key_of(block) is None]

    @precondition(lambda self: self.naive.free)
    @rule(data=st.data())
    def take(self, data):
        """A request gets blocks, a new one or one that holds some."""
        blocks = self.pool.take(count := data.draw(st.integers(1, len(self.naive.free))))
        assert blocks == self.naive.take(count)
        if self.holders and data.draw(st.booleans()):
            data.draw(st.sampled_from(self.holders)).extend(blocks)
        else:
            self.holders.append(blocks)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def find_and_touch(self, keys):
        """A request finds what it shares with others and holds it, too."""
        found = self.pool.find(keys)
        assert found == self.naive.find(keys)
        free = [block for block in found if self.naive.refs[block] == 0]
        assert self.pool.count_unreferenced(found) == len(free)
        self.pool.touch(found)
        self.naive.touch(found)
        if found:
            self.holders.append(found)

    @precondition(lambda self: self.unkeyed())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data, key):
        """A block has filled. Others may have the same content already."""
        block = data.draw(st.sampled_from(self.unkeyed()))
        self.pool.publish(block, key)
        self.naive.published.append((key, block))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        """A request goes."""
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        sole = [block for block in blocks if self.naive.refs[block] == 1]
        assert self.pool.count_sole(blocks) == len(sole)
        self.pool.release(blocks)
        self.naive.release(blocks)

    @invariant()
    def same(self):
        pool, naive = self.pool, self.naive
        assert pool.free_order() == naive.free
        assert pool.num_free == len(naive.free)
        assert pool.num_cached == len(naive.published)
        free_with_key = [block for block in naive.free if naive.key_of(block) is not None]
        assert pool.num_cached_free == len(free_with_key)
        for key in KEYS:
            assert pool.find([key]) == naive.find([key])
        for block in self.held():
            holders = sum(blocks.count(block) for blocks in self.holders)
            assert naive.refs[block] == holders
            assert pool.count_sole([block]) == (holders == 1)

    @invariant()
    def blocks_add_up(self):
        """Every block but the null block is free or held, never both."""
        free, held = self.pool.free_order(), self.held()
        assert sorted(free + held) == list(range(1, NUM_BLOCKS))
        assert self.pool.count_unreferenced(free) == len(free)
        assert self.pool.count_unreferenced(held) == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=30)


def pool_with(*keys):
    """A pool of `NUM_BLOCKS` in which blocks 1, 2, ... were published under `keys`, and all are free."""
    pool = BlockPool(NUM_BLOCKS, caching=True)
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return pool


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(NUM_BLOCKS, caching=False)
    assert pool.num_usable == NUM_BLOCKS - 1
    assert pool.take(pool.num_free) == list(range(1, NUM_BLOCKS))


def test_without_keys_the_last_released_is_handed_out_first():
    pool = BlockPool(NUM_BLOCKS, caching=False)
    first, second = pool.take(2), pool.take(3)
    pool.release(first)
    pool.release(second)
    assert pool.free_order() == [5, 4, 3, 2, 1, 6, 7, 8]


def test_blocks_with_a_key_are_evicted_last_and_a_prefix_loses_its_end_first():
    pool = pool_with(*KEYS[:3])
    assert pool.free_order() == [4, 5, 6, 7, 8, 3, 2, 1]
    assert pool.find(KEYS[:3]) == [1, 2, 3]
    pool.take(6)
    assert pool.find(KEYS[:3]) == [1, 2]


def test_content_stays_findable_until_its_block_is_handed_out_again():
    pool = pool_with(KEYS[0])
    pool.take(NUM_BLOCKS - 2)
    assert pool.find(KEYS[:1]) == [1]
    pool.take(1)
    assert pool.find(KEYS[:1]) == []
    assert pool.num_cached == 0


def test_a_hole_ends_the_prefix():
    """Blocks 1, 2, 3 are cached, 1 is evicted, 1, 2, 3 are asked for: no hit (llm-d-inference-sim#701)."""
    pool = BlockPool(NUM_BLOCKS, caching=True)
    blocks = pool.take(3)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.publish(block, key)
    pool.release(blocks[:1])
    pool.take(pool.num_free)  # evicts block 1 while 2 and 3 are in use
    assert pool.find(KEYS[1:3]) == [2, 3]
    assert pool.find(KEYS[:3]) == []


def test_of_equal_blocks_the_oldest_that_survives_is_found():
    pool = BlockPool(NUM_BLOCKS, caching=True)
    first, second = pool.take(1), pool.take(1)
    pool.publish(second[0], KEYS[0])
    pool.publish(first[0], KEYS[0])
    assert pool.find(KEYS[:1]) == second
    pool.release(second)
    pool.take(pool.num_free)
    assert pool.find(KEYS[:1]) == first


# --- keys ---------------------------------------------------------------------------------

segments = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=5)


def tokens_of(prompt, reply, length):
    """The content as explicit tokens: (content id, position in that content)."""
    tokens = [(content, i) for content, count in prompt for i in range(count)]
    return tokens + [(reply, i) for i in range(length - len(tokens))]


def check(one, other, size, blocks=8):
    """Two requests' keys are equal exactly where their tokens are equal from the first one on."""
    keys = [BlockKeys(*request, size).upto(blocks)[:blocks] for request in (one, other)]
    tokens = [tokens_of(*request, blocks * size) for request in (one, other)]
    for i in range(blocks):
        for j in range(blocks):
            same = tokens[0][: (i + 1) * size] == tokens[1][: (j + 1) * size]
            assert (keys[0][i] == keys[1][j]) == same, (i, j)


@given(segments, st.integers(1, 4), segments, st.integers(1, 4), st.integers(1, 5))
def test_keys_are_equal_exactly_when_all_tokens_so_far_are(one, reply, other, answer, size):
    check((one, reply), (other, answer), size)


@given(segments, segments, st.integers(0, 30), st.integers(1, 5))
def test_a_later_turn_shares_the_prompt_and_the_reply_it_contains(first, more, replied, size):
    later = [*first, (7, replied), *more]
    check((first, 7), (later, 8), size)
    shared = (sum(count for _, count in first) + replied) // size
    keys = BlockKeys(first, 7, size).upto(shared)[:shared]
    assert BlockKeys(later, 8, size).upto(shared)[:shared] == keys


@given(segments, st.integers(1, 5), st.lists(st.integers(0, 8), min_size=1))
def test_keys_do_not_depend_on_how_they_are_asked_for(prompt, size, asked):
    keys = BlockKeys(prompt, 9, size)
    for count in asked:
        assert len(keys.upto(count)) >= count
    whole = BlockKeys(prompt, 9, size).upto(8)
    assert keys.upto(8) == whole
    assert len(set(whole)) == len(whole)


@given(segments, st.integers(1, 5), st.data())
def test_empty_segments_change_nothing(prompt, size, data):
    padded = list(prompt)
    for content in data.draw(st.lists(st.integers(1, 3))):
        padded.insert(data.draw(st.integers(0, len(padded))), (content, 0))
    assert BlockKeys(padded, 9, size).upto(8) == BlockKeys(prompt, 9, size).upto(8)
