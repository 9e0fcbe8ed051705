"""KV block pool: free list, reference counts, eviction."""

# Generated from nbs/core/block_pool.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any

__all__ = ["BlockPool", "FreeBlockQueue", "KVCacheBlock"]


class KVCacheBlock:
    """One physical block.

    Attributes:
        block_id: position in the cache tensors.
        ref_cnt: how many block tables hold it.
        block_hash: hash of its content, or None while no request may hit it.
        num_hits: how often a request hit its content.
        last_used: the step in which a request last took or freed it.
        depth: how many blocks come before it in the prefix.
        group: the KV cache group whose layers filled it.
    """

    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev", "next", "num_hits", "last_used", "depth", "group")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None
        self.num_hits = 0
        self.last_used = -1
        self.depth = 0
        self.group = 0

    def __repr__(self) -> str:
        content = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={content})"


class FreeBlockQueue:
    """A doubly linked list of free blocks, threaded through the blocks. Every operation but iteration is O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._len = 0
        self.extend(list(blocks))

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not self._tail:
            assert block is not None
            yield block
            block = block.next

    def append(self, block: KVCacheBlock) -> None:
        """Put at the end: reused last."""
        self.extend([block])

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the end, in this order: the last one is reused last."""
        last = self._tail.prev
        for block in blocks:
            assert last is not None
            last.next, block.prev, last = block, last, block
        assert last is not None
        last.next, self._tail.prev = self._tail, last
        self._len += len(blocks)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put at the front: reused first."""
        after = self._head.next
        assert after is not None
        self._head.next = after.prev = block
        block.prev, block.next = self._head, after
        self._len += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Take out of the middle."""
        assert block.prev is not None and block.next is not None, "the block is not in the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._len -= 1

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the `n` blocks that are reused next."""
        if n > self._len:
            raise IndexError(f"no free block: {n} wanted, {self._len} there")
        taken = list(islice(self, n))
        after = taken[-1].next if taken else self._head.next
        assert after is not None
        self._head.next, after.prev = after, self._head
        for block in taken:
            block.prev = block.next = None
        self._len -= n
        return taken


class EvictionHeap:
    """Cached free blocks by a key, smallest first; of equals, the one that has been free for the longest time.

    Args:
        key: gives the sort key of a block, which is fixed while the block is free.
        run: calls a function without arguments that calls `key`. Whatever this raises, the heap stays in order.
        blocks: the blocks that are free and hold content now.
    """

    def __init__(
        self,
        key: Callable[[KVCacheBlock], Any],
        run: Callable[[Callable[[], None]], None],
        blocks: Iterable[KVCacheBlock],
    ) -> None:
        self._key, self._run, self._tickets = key, run, count()
        self._new = {block.block_id: block for block in blocks}
        self._heap: list[tuple[Any, int, KVCacheBlock]] = []
        self._entry: dict[int, int] = {}

    def add(self, block: KVCacheBlock) -> None:
        """A block with content has become free."""
        self._new[block.block_id] = block

    def discard(self, block: KVCacheBlock) -> None:
        """A block is in use again, or evicted. Its entry stays in the heap until it comes up."""
        if self._new.pop(block.block_id, None) is None:
            self._entry.pop(block.block_id, None)

    def first(self) -> KVCacheBlock:
        """The block to evict. Raises IndexError if there is none."""
        if self._new:
            self._run(self._rank)
        while (entry := self._heap[0])[2].ref_cnt or self._entry.get(entry[2].block_id) != entry[1]:
            heappop(self._heap)
        return entry[2]

    def _rank(self) -> None:
        """Put the new blocks into the heap. If that fails, all are new again."""
        live = self._entry
        if len(self._heap) > 2 * len(live) + 64:  # mostly entries of blocks that have been hit since
            self._heap = [entry for entry in self._heap if live.get(entry[2].block_id) == entry[1]]
            heapify(self._heap)
        try:
            for block_id, block in self._new.items():
                ticket = next(self._tickets)
                heappush(self._heap, (self._key(block), ticket, block))
                live[block_id] = ticket
        except BaseException:
            old = {entry[2].block_id: entry[2] for entry in self._heap if live.get(entry[2].block_id) == entry[1]}
            self._new, self._heap, self._entry = old | self._new, [], {}
            raise
        self._new = {}


class BlockPool:
    """A fixed number of physical blocks, reference counted, with reuse by content.

    Args:
        num_blocks: physical blocks, the null block 0 included; at least 2.
        on_evict: called with a block whose content is about to be dropped.

    Attributes:
        choose_victim: optional `free blocks -> block`, asked for a block to evict; None takes the least recently used.
        heap: optional: cached free blocks by a policy's key (see `evict_by`), asked if `choose_victim` is None.
        trace: None, or a function that takes an event tuple.
        step: the current step, for `KVCacheBlock.last_used`.
        num_cached_free: free blocks whose content could be reused.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[KVCacheBlock], None] = lambda block: None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.on_evict = on_evict
        self.choose_victim: Callable[[Iterator[KVCacheBlock]], KVCacheBlock] | None = None
        self.heap: EvictionHeap | None = None
        self.trace: Callable[[tuple[Any, ...]], None] | None = None
        self.step = 0
        self.num_cached_free = 0

    @property
    def num_blocks(self) -> int:
        """All physical blocks that can be handed out: the null block is not counted."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those with reusable content included."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self.free_queue) / self.num_blocks

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Take `n` blocks for new content, each with a count of one: uncached ones first, then evicted ones.

        Raises:
            ValueError: fewer than `n` blocks are free; nothing is taken then.
        """
        free = len(self.free_queue)
        if n > free:
            raise ValueError(f"{n} blocks wanted, {free} free")
        uncached = min(n, free - self.num_cached_free)
        if self.choose_victim is None and self.heap is None:
            self._drop(islice(self.free_queue, uncached, n))
            taken = self.free_queue.popleft_n(n)
        else:
            taken = self.free_queue.popleft_n(uncached)
            taken += self._evict(n - uncached, taken)
        step = self.step
        for block in taken:
            block.ref_cnt, block.num_hits, block.last_used = 1, 0, step
        return taken

    def cached_free_blocks(self) -> Iterator[KVCacheBlock]:
        """Free blocks with content, least recently used first. Blocks without content come before them in the list."""
        return (block for block in self.free_queue if block.block_hash is not None)

    def _evict(self, n: int, taken: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Evict and take `n` cached blocks that the policy chooses. If it fails, these blocks and those in `taken` go back."""
        choose, heap = self.choose_victim, self.heap
        evicted: list[KVCacheBlock] = []
        try:
            while len(evicted) < n:
                if choose is not None:
                    self.evict(choose(self.cached_free_blocks()))
                elif heap is not None:
                    self.evict(heap.first())
                evicted += self.free_queue.popleft_n(1)
        except BaseException:  # a policy may raise anything
            for block in (*reversed(taken), *evicted):
                self.free_queue.prepend(block)
            raise
        return evicted

    def evict_by(
        self, key: Callable[[KVCacheBlock], Any] | None, run: Callable[[Callable[[], None]], None] = lambda rank: rank()
    ) -> None:
        """Evict the cached free block with the smallest key from now on; None for the least recently used. For `run` see `EvictionHeap`."""
        self.heap = None if key is None else EvictionHeap(key, run, self.cached_free_blocks())

    def evict(self, block: KVCacheBlock) -> None:
        """Drop the content of a free block and move it to the front of the free list.

        Raises:
            ValueError: the block is in use, or holds nothing.
        """
        if block.ref_cnt or block.block_hash is None:
            raise ValueError(f"{block} cannot be evicted: only a free block with content can")
        self._drop([block])
        if self.heap is not None:
            self.heap.discard(block)
        self.free_queue.remove(block)
        self.free_queue.prepend(block)

    def _drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Forget the content of free blocks. They must still be in the list: `trace` may raise, and none may be lost."""
        trace, on_evict = self.trace, self.on_evict
        for block in blocks:
            if trace is not None:
                trace(("evict", block.block_id, block.block_hash))
            on_evict(block)
            block.block_hash = None
            self.num_cached_free -= 1

    def uncache(self, block: KVCacheBlock) -> None:
        """Forget the hash of a block, wherever the block is."""
        self.on_evict(block)
        block.block_hash = None

    def reset_prefix_cache(self) -> int:
        """Forget the hashes of all blocks, including those in use. Returns how many had one. The caller clears the index."""
        cached = [block for block in self.blocks if block.block_hash is not None]
        for block in cached:
            block.block_hash = None
            if self.heap is not None and block.ref_cnt == 0:
                self.heap.discard(block)
        self.num_cached_free = 0
        if self.trace is not None:
            self.trace(("reset",))
        return len(cached)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Share blocks that are held or free: one more count each. A free one leaves the free list."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
                self.num_cached_free -= block.block_hash is not None
                if self.heap is not None:
                    self.heap.discard(block)
            block.ref_cnt += 1
            block.num_hits += 1
            block.last_used = self.step

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back, in the order in which they should be reused: pass the last block of a request first.

        Blocks without content go to the front of the free list, those with content to its end, both in this order.
        """
        null, step, uncached, cached = self.null_block, self.step, list[KVCacheBlock](), list[KVCacheBlock]()
        for block in blocks:
            if block is null:
                continue
            block.ref_cnt -= 1
            block.last_used = step
            if block.ref_cnt == 0:
                (uncached if block.block_hash is None else cached).append(block)
            elif block.ref_cnt < 0:
                raise RuntimeError(f"block {block.block_id} was freed more often than it was taken")
        self.free_queue.extend(cached)
        self.num_cached_free += len(cached)
        if self.heap is not None:
            for block in cached:
                self.heap.add(block)
        for block in reversed(uncached):
            self.free_queue.prepend(block)
