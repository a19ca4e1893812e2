from __future__ import annotations

import random
from array import array

import pytest

from hybrid.inference.blocks import BlockPool


class Holder:
    """A sequence as the pool sees one."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.blocks = array("q")
        self.num_computed = self.num_indexed = 0
        self.content = None

    def compute(self, pool, stop):
        """Write up to ``stop``, as a step would; the copy that it needs first."""
        copy = pool.extend(self.blocks, self.num_computed, stop)
        self.num_computed = stop
        size = pool.block_size
        for number in range(self.num_indexed, stop // size):
            tokens = tuple(self.tokens[number * size : (number + 1) * size])
            self.content = pool.index(self.blocks[number], self.content, tokens)
            self.num_indexed += 1
        return copy

    def fork(self, pool):
        other = Holder(list(self.tokens))
        pool.share(self.blocks)
        other.blocks.extend(self.blocks)
        other.num_computed, other.num_indexed, other.content = self.num_computed, self.num_indexed, self.content
        return other


def computed(pool, tokens):
    holder = Holder(tokens)
    holder.compute(pool, len(tokens))
    return holder


def test_a_shared_tail_is_copied_by_the_first_who_writes_and_kept_by_the_last():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(6)))
    second, third = first.fork(pool), first.fork(pool)
    full, tail = first.blocks
    assert pool.num_new_blocks(second.blocks, 6, 7) == 1
    assert second.compute(pool, 7) == (tail, second.blocks[1])
    assert first.compute(pool, 7) == (tail, first.blocks[1])
    assert pool.num_new_blocks(third.blocks, 6, 7) == 0
    assert third.compute(pool, 7) is None
    assert third.blocks[1] == tail and {holder.blocks[0] for holder in (first, second, third)} == {full}
    pool.check(holder.blocks for holder in (first, second, third))


def test_a_shared_full_block_needs_no_copy():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(8)))
    second = first.fork(pool)
    assert second.compute(pool, 9) is None
    assert second.blocks[:2] == first.blocks and len(second.blocks) == 3


def test_a_prefix_is_found_in_whole_blocks_while_held_and_after():
    pool = BlockPool(8, 4)
    holder = computed(pool, list(range(10)))
    first, second, _ = holder.blocks
    for _ in range(2):
        assert pool.match([*range(8), 99], 8) == [first, second]
        assert pool.match(list(range(8)), 7) == [first]
        assert pool.match([0, 1, 2, 99, 4, 5, 6, 7], 8) == []
        assert pool.match([*range(4), 99, 5, 6, 7], 8) == [first]
        pool.release(holder.blocks)
        holder.blocks = array("q")
    pool.check([])


def test_equal_tokens_after_another_prefix_are_another_content():
    pool = BlockPool(8, 2)
    computed(pool, [1, 1, 2, 2])
    other = computed(pool, [3, 3])
    assert pool.match([3, 3, 2, 2], 4) == [other.blocks[0]]


def test_tokens_whose_hashes_collide_are_told_apart():
    pool = BlockPool(8, 1)
    assert hash(-1) == hash(-2)
    computed(pool, [-1])
    assert pool.match([-2], 1) == []


def test_content_of_other_weights_is_never_found():
    pool = BlockPool(8, 4, weights_version=3)
    holder = computed(pool, list(range(8)))
    pool.weights_version = 4
    assert pool.match(list(range(8)), 8) == []
    again = computed(pool, list(range(8)))
    assert pool.match(list(range(8)), 8) == list(again.blocks) != list(holder.blocks)


def test_keys_that_are_rotated_otherwise_are_another_content():
    pool = BlockPool(8, 2)
    blocks = [array("q"), array("q")]
    for rotation in (0, 1):
        pool.extend(blocks[rotation], 0, 4)
        content = pool.index(blocks[rotation][0], None, (1, 1), rotation)
        pool.index(blocks[rotation][1], content, (2, 2), rotation)
    for rotation in (0, 1):
        assert pool.match([1, 1, 2, 2], 4, rotation) == list(blocks[rotation])
    assert pool.match([1, 1, 2, 2], 4, 2) == []


def test_what_follows_a_block_that_is_gone_is_not_found_under_its_like():
    """A prefix computed again is another content, so that nothing hangs on it that came after the first one."""
    pool = BlockPool(4, 2)
    first = computed(pool, [1, 1, 2, 2])
    end = first.blocks[1]
    pool.share([end])
    pool.release(first.blocks)
    others = computed(pool, [5, 5, 6, 6, 7, 7])
    assert pool.match([1, 1, 2, 2], 4) == []
    pool.release(others.blocks)
    again = computed(pool, [1, 1])
    assert pool.match([1, 1, 2, 2], 4) == list(again.blocks)
    pool.check([again.blocks, [end]])


def test_the_least_recently_freed_is_evicted_and_of_a_prefix_the_end_first():
    pool = BlockPool(4, 2)
    old, new = computed(pool, [1, 1, 2, 2]), computed(pool, [3, 3, 4, 4])
    pool.release(old.blocks)
    pool.release(new.blocks)
    taken = array("q")
    pool.extend(taken, 0, 2)
    assert taken[0] == old.blocks[1]
    assert pool.match([1, 1, 2, 2], 4) == [old.blocks[0]]
    assert pool.match([3, 3, 4, 4], 4) == list(new.blocks)


def test_check_finds_what_is_wrong():
    pool = BlockPool(4, 2)
    holder = computed(pool, [1, 2, 3])
    with pytest.raises(RuntimeError, match="held 0 times and counted 1"):
        pool.check([])
    with pytest.raises(RuntimeError, match="held 2 times and counted 1"):
        pool.check([holder.blocks, holder.blocks])
    with pytest.raises(RuntimeError, match="num_free first"):
        pool.extend(array("q"), 0, 8)


def test_no_pool_without_blocks():
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0, 16)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_lose_nothing(seed):
    """Against a model that keeps what every block holds: a reader must find its own tokens in its blocks."""
    chance = random.Random(seed)
    pool = BlockPool(chance.randint(6, 20), chance.choice([1, 3, 4]), weights_version=0)
    size = pool.block_size
    memory: list[list] = [[None] * size for _ in range(pool.num_blocks)]
    live: list[Holder] = []

    def verify(holder):
        for position in range(holder.num_computed):
            found = memory[holder.blocks[position // size]][position % size]
            assert found == (versions[id(holder)], tuple(holder.tokens[: position + 1]))

    versions = {}
    for _ in range(3000):
        operation = chance.choice(["add", "grow", "grow", "fork", "free", "version"])
        if operation == "add":
            tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 3 * size))]
            cached = pool.match(tokens, len(tokens) - 1)
            holder = Holder(tokens)
            versions[id(holder)] = pool.weights_version
            pool.share(cached)
            holder.blocks.extend(cached)
            holder.num_computed, holder.num_indexed = len(cached) * size, len(cached)
            holder.content = pool.content_of(cached[-1]) if cached else None
            live.append(holder)
        elif operation == "version":
            if chance.random() < 0.05:
                for holder in live:
                    pool.release(holder.blocks)
                live.clear()
                pool.weights_version += 1
        elif live:
            holder = chance.choice(live)
            if operation == "grow":
                stop = holder.num_computed + chance.randint(1, size)
                while len(holder.tokens) < stop:
                    holder.tokens.append(chance.randint(0, 1))
                if pool.num_new_blocks(holder.blocks, holder.num_computed, stop) <= pool.num_free:
                    start = holder.num_computed
                    copy = holder.compute(pool, stop)
                    if copy is not None:
                        memory[copy[1]] = list(memory[copy[0]])
                    for position in range(start, stop):
                        content = (versions[id(holder)], tuple(holder.tokens[: position + 1]))
                        memory[holder.blocks[position // size]][position % size] = content
            elif operation == "fork":
                other = holder.fork(pool)
                versions[id(other)] = versions[id(holder)]
                live.append(other)
            else:
                live.remove(holder)
                pool.release(holder.blocks)
        pool.check(holder.blocks for holder in live)
        for holder in live:
            verify(holder)
