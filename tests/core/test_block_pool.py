"""The block pool against a list that does the same thing slowly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock


class SlowPool:
    """Brute force: a Python list as the free list, a dict of counts."""

    def __init__(self, n):
        self.free, self.count, self.name = list(range(1, n)), dict.fromkeys(range(1, n), 0), dict.fromkeys(range(1, n))
        self.evicted = []

    def get_new_blocks(self, n):
        taken, self.free = self.free[:n], self.free[n:]
        for b in taken:
            if self.name[b] is not None:
                self.evicted.append(b)
                self.name[b] = None
            self.count[b] = 1
        return taken

    def touch(self, b):
        if self.count[b] == 0:
            self.free.remove(b)
        self.count[b] += 1

    def release(self, blocks):
        for b in blocks:
            self.count[b] -= 1
        gone = [b for b in dict.fromkeys(blocks) if self.count[b] == 0]
        first = [b for b in gone if self.name[b] is None]
        self.free = first + self.free + [b for b in gone if self.name[b] is not None]


@settings(max_examples=150)
@given(st.data())
def test_equals_brute_force(data):
    n = data.draw(st.integers(2, 12))
    evicted = []
    pool, slow = BlockPool(n, lambda block: evicted.append(block.block_id)), SlowPool(n)
    for i in range(30):
        action = data.draw(st.sampled_from(["allocate", "touch", "free", "name"]))
        held = [b for b, c in slow.count.items() if c]
        if action == "allocate" and slow.free:
            k = data.draw(st.integers(1, len(slow.free)))
            assert [b.block_id for b in pool.get_new_blocks(k)] == slow.get_new_blocks(k)
        elif action == "touch":
            named = [b for b in slow.name if slow.name[b]]
            if named:
                b = data.draw(st.sampled_from(named))
                pool.touch([pool.blocks[b]])
                slow.touch(b)
        elif action == "free" and held:
            some = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
            pool.free([pool.blocks[b] for b in some])
            slow.release(some)
        elif action == "name" and held:
            b = data.draw(st.sampled_from(held))
            pool.blocks[b].block_hash = slow.name[b] = slow.name[b] or bytes([i + 1])
        assert [block.block_id for block in pool.free_queue] == slow.free
        assert [pool.blocks[b].ref_cnt for b in slow.count] == list(slow.count.values())
        assert evicted == slow.evicted
        assert pool.num_cached_free == sum(slow.name[b] is not None for b in slow.free)


def test_allocates_all_or_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.get_new_blocks(4)
    assert pool.num_free == 3
    assert pool.usage == 0.0


def test_null_block_is_never_handed_out_nor_counted():
    pool = BlockPool(4)
    assert [b.block_id for b in pool.get_new_blocks(3)] == [1, 2, 3]
    pool.touch([pool.null_block])
    pool.free([pool.null_block])
    assert pool.null_block.ref_cnt == 0
    assert pool.num_free == 0


def test_double_free_is_an_error():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.free([block])
    with pytest.raises(RuntimeError, match="freed more often"):
        pool.free([block])


def test_only_free_blocks_with_content_can_be_evicted():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    block.block_hash = b"x"
    with pytest.raises(ValueError, match="cannot be evicted"):
        pool.evict(block)


def test_a_failing_eviction_policy_loses_no_block():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    for i, block in enumerate(blocks):
        block.block_hash = bytes([i])
    pool.free(blocks)
    answers = iter([blocks[2]])
    pool.choose_victim = lambda free: next(answers)
    with pytest.raises(StopIteration):
        pool.get_new_blocks(2)
    assert [b.block_id for b in pool.free_queue] == [3, 1, 2, 4]
    assert all(block.ref_cnt == 0 for block in blocks)


@pytest.mark.parametrize("name", ["trace", "on_evict"])
def test_an_observer_that_raises_loses_no_block(name):
    pool, calls = BlockPool(5), iter([None, None])
    blocks = pool.get_new_blocks(4)
    for i, block in enumerate(blocks[1:]):
        block.block_hash = bytes([i])
    pool.free(blocks)
    setattr(pool, name, lambda _: next(calls))
    with pytest.raises(StopIteration):
        pool.get_new_blocks(4)
    assert [b.block_id for b in pool.free_queue] == [1, 2, 3, 4]
    assert [block.block_hash for block in blocks] == [None, None, None, bytes([2])] and pool.num_cached_free == 1


@pytest.mark.parametrize("n", [1, 0, -3])
def test_too_small_a_pool_is_refused(n):
    with pytest.raises(ValueError, match=f"at least 2 .*got {n}"):
        BlockPool(n)


def test_first_of_an_empty_queue():
    with pytest.raises(IndexError, match="no free block: 1 wanted, 0 there"):
        FreeBlockQueue().popleft_n(1)


def test_queue_keeps_order():
    a, b, c = (KVCacheBlock(i) for i in range(3))
    queue = FreeBlockQueue([a, b])
    queue.prepend(c)
    queue.remove(a)
    assert list(queue) == [c, b]
    assert len(queue) == 2
    queue.extend([a])
    assert queue.popleft_n(2) == [c, b] and list(queue) == [a]
    queue.extend([b, c])
    assert queue.popleft_n(0) == [] and list(queue) == [a, b, c]
