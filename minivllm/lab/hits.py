"""Prefix cache hit rates: real, infinite cache, clairvoyant eviction."""

# Generated from nbs/lab/hits.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from itertools import count

from minivllm.core.config import CacheConfig
from minivllm.core.kv_cache import KVCacheManager
from minivllm.core.policy import LRU, Policy, PolicyGuard, SchedulerView
from minivllm.core.request import Request
from minivllm.lab.workload import Workload


class BlockSequence:
    """The prompt blocks of a workload, in order of arrival, follow-ups included.

    Attributes:
        blocks: a small number for each block; equal numbers, equal prefixes. [num_blocks] int64
        ends: where each request's blocks end. [num_requests] int64
        num_different: different blocks.
    """

    def __init__(self, workload: Workload, block_size: int) -> None:
        numbers: dict[bytes, int] = {}
        self.blocks, self.ends = array("q"), array("q")
        for request in workload.unrolled():
            self.blocks.extend(numbers.setdefault(name, len(numbers)) for name in request.block_names(block_size))
            self.ends.append(len(self.blocks))
        self.num_different = len(numbers)

    def __iter__(self) -> Iterator[Sequence[int]]:
        start = 0
        for end in self.ends:
            yield self.blocks[start:end]
            start = end


def infinite_hits(sequence: BlockSequence) -> int:
    """Blocks that a cache of unlimited size would have found."""
    return len(sequence.blocks) - sequence.num_different


def clairvoyant_hits(sequence: BlockSequence, num_blocks: int) -> int:
    """Blocks that a cache of `num_blocks` blocks would have found if it knew what comes.

    Raises:
        ValueError: a prompt alone needs more blocks.
    """
    next_use = _next_uses(sequence)
    cached: dict[int, float] = {}
    furthest: list[tuple[float, int, int]] = []
    hits = start = 0
    for blocks in sequence:
        _check_fits(len(blocks), num_blocks)
        for block in blocks:
            if cached.pop(block, None) is None:
                break
            hits += 1
        while len(cached) + len(blocks) > num_blocks:
            use, _, block = heapq.heappop(furthest)
            if cached.get(block) == -use:
                del cached[block]
        for i, block in enumerate(blocks, start):
            if next_use[i] < len(next_use):  # one that never comes again is not worth a place
                cached[block] = next_use[i]
                heapq.heappush(furthest, (-next_use[i], start - i, block))
        start += len(blocks)
    return hits


def _next_uses(sequence: BlockSequence) -> array[int]:
    """For each block, the position in the sequence at which it comes again; the length of the sequence for never."""
    length = len(sequence.blocks)
    next_use, seen = array("q", bytes(8 * length)), array("q", [length]) * sequence.num_different
    for i in range(length - 1, -1, -1):
        block = sequence.blocks[i]
        next_use[i], seen[block] = seen[block], i
    return next_use


def _check_fits(needed: int, num_blocks: int) -> None:
    if needed > num_blocks:
        raise ValueError(f"a prompt of {needed} blocks does not fit into num_blocks={num_blocks}")


def real_hits(workload: Workload, block_size: int, num_blocks: int, policy: Policy | None = None) -> int:
    """Blocks that the KV cache manager finds with `num_blocks` blocks, prompts going by one after the other.

    Args:
        policy: whose `evict` or `evict_key` chooses the block to evict; it may listen to what happens to blocks; None for the least recently used.

    Raises:
        ValueError: a prompt alone needs more blocks.
    """
    cache = CacheConfig(block_size=block_size, num_gpu_blocks=num_blocks + 1)  # one more: the null block
    kv, moment = KVCacheManager(cache, max_step_tokens=1 << 40), count()
    requests: dict[str, Request] = {}
    guard = PolicyGuard(policy or LRU())
    guard.start(requests, kv.block_pool, block_size)
    guard.choose_victims(kv.block_pool, lambda: SchedulerView(kv, step=kv.block_pool.step, now=float(next(moment))))
    note = kv.block_pool.trace = guard.listener.note if guard.listener is not None else None
    for i, asked in enumerate(workload.unrolled()):
        request = asked.to_request()
        _check_fits(-(-request.num_tokens // block_size), num_blocks)
        kv.block_pool.step, requests[request.request_id] = i, request
        if note is not None:
            note(("add", request.request_id))
        hit = kv.get_computed_blocks(request)
        kv.count_lookup(request, hit)
        kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
        request.num_computed_tokens = request.num_tokens
        kv.free(request)
        if note is not None:
            note(("finish", request.request_id))
            guard.tell()
        del requests[request.request_id]
    return kv.stats.hit_tokens // block_size


def hit_rates(
    workload: Workload, block_size: int = 512, num_blocks: int | None = None, policy: Policy | None = None
) -> dict[str, float]:
    """What share of the prompt blocks the cache finds, and could find at best.

    Args:
        workload: its prompts go by one after the other, as if each answer were complete at once. Answers are not cached.
        block_size: tokens per block.
        num_blocks: blocks of the cache; None for as many as there are different ones.
        policy: whose `evict` or `evict_key` the real manager asks; None for the least recently used.

    Returns:
        `real`: the KV cache manager. `infinite`: a cache that never forgets, and shares blocks that are not full. `clairvoyant`: one of
        `num_blocks` blocks that knows the future. Each as hits over prompt blocks, last ones included; nan for no requests.

    Raises:
        ValueError: a prompt alone needs more than `num_blocks` blocks.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
    sequence = BlockSequence(workload, block_size)
    total = len(sequence.blocks)
    if not total:
        return {"real": float("nan"), "infinite": float("nan"), "clairvoyant": float("nan")}
    size = num_blocks if num_blocks is not None else sequence.num_different + max(map(len, sequence))
    return {
        "real": real_hits(workload, block_size, size, policy) / total,
        "infinite": infinite_hits(sequence) / total,
        "clairvoyant": clairvoyant_hits(sequence, size) / total,
    }
