"""KV cache manager: block tables per cache group, prefix hits, allocation of slots."""

# Generated from nbs/core/kv_cache.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import sys
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.config import CacheConfig, KVCacheConfig, KVCacheRules, KVCacheSpec
from minivllm.core.prefix import PREFIX_INDEXES, extend_block_hashes
from minivllm.core.request import Request

__all__ = ["CacheHit", "KVCacheManager", "SingleTypeKVCacheManager"]


class SingleTypeKVCacheManager:
    """Block tables of one KV cache group, and the index of its cached blocks."""

    def __init__(self, group: int, spec: KVCacheSpec, pool: BlockPool, index: str) -> None:
        self.group, self.spec, self.block_pool = group, spec, pool
        self.block_size = spec.block_size
        self.index = PREFIX_INDEXES[index](spec.block_size)
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_cached: dict[str, int] = {}
        self.num_skipped: dict[str, int] = {}
        self.rules = spec.rules
        self.num_blocks, self.first_kept = partial(spec.rules.num_blocks, spec), partial(spec.rules.first_kept, spec)
        self.skips = type(spec.rules).skipped is not KVCacheRules.skipped

    def skipped_blocks(self, num_computed_tokens: int) -> tuple[int, int]:
        """First and last + 1 of the blocks that no later token attends to."""
        start, end = self.rules.skipped(self.spec, num_computed_tokens)
        start, end = -(-start // self.block_size), end // self.block_size
        return (start, end) if start < end else (0, 0)

    def find_longest_cache_hit(self, request: Request, max_blocks: int) -> list[KVCacheBlock]:
        """The longest prefix of at most `max_blocks` blocks that need not be computed, as a table with null blocks."""
        if not self.rules.prefix_cacheable:
            return []
        if not self.skips:
            return list(takewhile(bool, self.index.walk(request, max_blocks)))  # type: ignore[arg-type]
        found = list(self.index.walk(request, max_blocks))
        first_missing = next((i for i, block in enumerate(found) if block is None), len(found))
        best, run_start, gap = 0, 0, (0, 0)
        for n, block in enumerate(found, 1):
            if block is None:
                run_start = n
            start, end = self.skipped_blocks(n * self.block_size)
            if run_start <= end and start <= first_missing:
                best, gap = n, (start, end)
        null = self.block_pool.null_block
        return [null if block is None or gap[0] <= i < gap[1] else block for i, block in enumerate(found[:best])]

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the blocks of the first `num_tokens` tokens, as far as they are full and their tokens known."""
        request_id, known = request.request_id, min(num_tokens, request.num_tokens)
        start, end = self.num_cached[request_id], known // self.block_size
        if end <= start:
            return
        table, hashes = self.tables[request_id], extend_block_hashes(request, self.block_size)
        null, cached = self.block_pool.null_block, []
        for i in range(start, end):
            block = table[i]
            if block is not null:
                self.index.insert(request, i, block)
                block.block_hash, block.depth, block.group = hashes[i], i, self.group
                cached.append(i)
        self.num_cached[request_id] = end
        if cached and self.block_pool.trace is not None:
            ids, names = [table[i].block_id for i in cached], [hashes[i] for i in cached]
            self.block_pool.trace(("cache", request_id, self.group, tuple(cached), tuple(ids), tuple(names)))

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        """Take back what was registered beyond the first `num_tokens` tokens."""
        start, end = num_tokens // self.block_size, self.num_cached[request_id]
        if not start < end < sys.maxsize:
            return
        self.num_cached[request_id] = start
        blocks = [block for block in self.tables[request_id][start:end] if block.block_hash is not None]
        for block in blocks:
            self.block_pool.uncache(block)
        if blocks and self.block_pool.trace is not None:
            self.block_pool.trace(("uncache", request_id, self.group, tuple(block.block_id for block in blocks)))

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no later token attends to."""
        start, end = self.skipped_blocks(num_computed_tokens)
        start, end = max(start, self.num_skipped[request_id]), min(end, len(self.tables[request_id]))
        if start < end:
            self.num_skipped[request_id] = end
            self.drop(request_id, start, end)

    def drop(self, request_id: str, start: int, end: int) -> int:
        """Free the blocks `start` to `end` - 1 of a table; null blocks take their place. Returns how many were freed."""
        table, pool = self.tables[request_id], self.block_pool
        dropped = [block for block in reversed(table[start:end]) if block is not pool.null_block]
        table[start:end] = [pool.null_block] * (end - start)
        if dropped and pool.trace is not None:
            pool.trace(("skip", request_id, self.group, start, end, tuple(block.block_id for block in dropped)))
        pool.free(dropped)
        return len(dropped)


@dataclass(slots=True)
class PrefixCacheStats:
    """What prefix look-ups found.

    Attributes:
        skipped: requests without a look-up: caching is off, or the request asked for none.
        query_tokens: tokens of the requests that were looked up.
        hit_tokens: those of them that were cached.
    """

    skipped: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens that were cached, or None if no request was looked up."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A prefix that is cached: one block table per group, and the tokens that it covers."""

    tables: tuple[list[KVCacheBlock], ...]
    num_tokens: int


class KVCacheManager:
    """Blocks for requests, over all KV cache groups and one pool.

    Args:
        cache: block size, block counts, prefix caching.
        kv_cache: the groups; None for one group of full attention, which is all that a simulation needs.
        max_step_tokens: most tokens computed in one step, which bounds what a window needs.
    """

    def __init__(self, cache: CacheConfig, kv_cache: KVCacheConfig | None = None, max_step_tokens: int = 2048) -> None:
        specs = [group.spec for group in kv_cache.groups] if kv_cache else [KVCacheSpec("full", cache.block_size, 1, 1)]
        self.config, self.block_size, self.max_step_tokens = cache, cache.block_size, max_step_tokens
        self.block_pool = BlockPool(cache.num_gpu_blocks, lambda block: self.groups[block.group].index.remove(block))
        self.cpu_pool = BlockPool(cache.num_cpu_blocks + 1) if cache.num_cpu_blocks else None
        self.groups = [
            SingleTypeKVCacheManager(i, spec, self.block_pool, cache.prefix_cache_index) for i, spec in enumerate(specs)
        ]
        self.stats = PrefixCacheStats()
        self.swapped: dict[str, tuple[list[KVCacheBlock], ...]] = {}
        self._skips = any(group.skips for group in self.groups)
        self.caching_groups = [
            group for group in self.groups if cache.enable_prefix_caching and group.rules.prefix_cacheable
        ]

    def get_computed_blocks(self, request: Request) -> CacheHit:
        """Find the longest cached prefix of a request that holds no blocks. Takes nothing.

        Returns:
            A hit of a whole number of blocks, shorter than the request; of 0 tokens when caching is off or skipped.
        """
        nothing = CacheHit(tuple([] for _ in self.groups), 0)
        if not self.config.enable_prefix_caching or request.skip_reading_prefix_cache:
            return nothing
        blocks = (request.num_tokens - 1) // self.block_size
        tables: list[list[KVCacheBlock]] = []
        while len(tables) < len(self.groups) and blocks:
            table = self.groups[len(tables)].find_longest_cache_hit(request, blocks)
            if len(table) < blocks:
                blocks = len(table)
                tables.clear()  # the shorter length must suit every group again
                if len(self.groups) > 1:
                    continue
            tables.append(table)
        return CacheHit(tuple(tables), blocks * self.block_size) if blocks else nothing

    def count_lookup(self, request: Request, hit: CacheHit) -> None:
        """Count a look-up in `stats`, once per admitted request."""
        if not self.config.enable_prefix_caching or request.skip_reading_prefix_cache:
            self.stats.skipped += 1
        else:
            self.stats.query_tokens += request.num_tokens
            self.stats.hit_tokens += hit.num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: CacheHit | None = None,
        keep_free: int = 0,
        reserve_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> tuple[list[int], ...] | None:
        """Make room for the next `num_new_tokens` tokens of a request.

        Args:
            hit: for a request that holds no blocks yet: the prefix to start from.
            keep_free: succeed only if this many blocks are free afterwards.
            reserve_tokens: succeed only if this many tokens would fit; only `num_new_tokens` are taken.
            delay_cache_blocks: register none of the blocks: no step is going to fill them.

        Returns:
            The new block ids per group (with those of the hit), or None if there are not enough free blocks.
        """
        request_id, pool = request.request_id, self.block_pool
        if hit:
            computed, held = hit.num_tokens, [len(table) for table in hit.tables]
        else:
            computed, held = request.num_computed_tokens, [len(group.tables[request_id]) for group in self.groups]
        total = computed + num_new_tokens
        gaps, counts = [], []
        for group, n in zip(self.groups, held, strict=True):
            first = group.first_kept(n, total)
            gaps.append(first - n)
            counts.append(max(0, group.num_blocks(total) - first))
        num_new = wanted = sum(counts)
        if reserve_tokens:
            most = [g.rules.max_blocks(g.spec, reserve_tokens, self.max_step_tokens) for g in self.groups]
            wanted = sum(max(count, m - n) for count, m, n in zip(counts, most, held, strict=True))
        if hit:
            wanted += sum(block.ref_cnt == 0 and block is not pool.null_block for t in hit.tables for block in t)
        elif self._skips:
            for group in self.groups:
                group.remove_skipped_blocks(request_id, computed)
        if wanted + keep_free > pool.num_free:
            return None
        if hit:
            self._open(request_id, hit)
        try:
            new = pool.get_new_blocks(num_new) if num_new else []
        except BaseException:  # an eviction policy may raise anything
            if hit:
                self.free(request)
            raise
        ids = self._extend(request, total, gaps, counts, new, bool(hit))
        if not delay_cache_blocks and total // self.block_size > self.groups[0].num_cached[request_id]:
            self.cache_blocks(request, total)
        return ids

    def _open(self, request_id: str, hit: CacheHit) -> None:
        """Start block tables with the blocks of a hit."""
        for group, table in zip(self.groups, hit.tables, strict=True):
            group.tables[request_id] = list(table)
            group.num_cached[request_id] = len(table)
            group.num_skipped[request_id] = group.skipped_blocks(hit.num_tokens)[1]
            if table and self.block_pool.trace is not None:
                self.block_pool.trace(("hit", request_id, group.group, tuple(block.block_id for block in table)))
            self.block_pool.touch(table)

    def _extend(
        self, request: Request, total: int, gaps: list[int], counts: list[int], new: list[KVCacheBlock], opened: bool
    ) -> tuple[list[int], ...]:
        """Append null blocks and new blocks to the tables."""
        request_id, rest, ids, trace = request.request_id, iter(new), [], self.block_pool.trace
        for group, gap, count in zip(self.groups, gaps, counts, strict=True):
            table, blocks = group.tables[request_id], [self.block_pool.null_block] * gap + list(islice(rest, count))
            table.extend(blocks)
            new_ids = [block.block_id for block in blocks]
            if new_ids and trace is not None:
                trace(("alloc", request_id, group.group, tuple(new_ids)))
            ids.append([block.block_id for block in table] if opened else new_ids)
        request.capacity = -(-total // self.block_size) * self.block_size
        return tuple(ids)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks among a request's first `num_tokens` tokens: this step, or one before, computes them.

        A request that is scheduled later in this step, or in a later one, may share them, since steps run in order. If the step is
        not run after all, `uncache_blocks` takes them back.
        """
        for group in self.caching_groups:
            group.cache_full_blocks(request, num_tokens)

    def uncache_blocks(self, request: Request, num_tokens: int) -> None:
        """Take back the registration of blocks beyond a request's first `num_tokens` tokens: no step is going to fill them."""
        for group in self.caching_groups:
            group.uncache_blocks(request.request_id, num_tokens)

    def has_gap(self, request: Request, num_tokens: int) -> bool:
        """Whether a table of a request has null blocks beyond its first `num_tokens` tokens, so that no step can end there."""
        null, start = self.block_pool.null_block, -(-num_tokens // self.block_size)
        return any(block is null for group in self.groups for block in group.tables[request.request_id][start:])

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's blocks out of its tables without freeing them: something still reads or writes them. Returns them in the order to free them."""
        held, name = [], request.request_id
        for group in self.groups:
            held += [block for block in reversed(group.tables.pop(name)) if block is not self.block_pool.null_block]
            del group.num_cached[name], group.num_skipped[name]
        return held

    def free(self, request: Request, keep_cpu_blocks: bool = False) -> None:
        """Give back all blocks of a request. One that holds none is left alone."""
        request_id = request.request_id
        for group in self.groups:
            table = group.tables.get(request_id)
            if table is None:
                continue
            del group.tables[request_id], group.num_cached[request_id], group.num_skipped[request_id]
            null = self.block_pool.null_block
            blocks = [block for block in reversed(table) if block is not null]
            if self.block_pool.trace is not None:
                self.block_pool.trace(("free", request_id, group.group, tuple(block.block_id for block in blocks)))
            self.block_pool.free(blocks)
        request.capacity = 0
        if not keep_cpu_blocks:
            self.free_cpu(request_id)

    def free_cpu(self, request_id: str) -> None:
        """Give back the CPU blocks of a request that was swapped out, if it was."""
        tables = self.swapped.pop(request_id, None)
        if tables is not None and self.cpu_pool is not None:
            blocks = [block for table in tables for block in table]
            if self.block_pool.trace is not None:
                self.block_pool.trace(("free_cpu", request_id, tuple(b.block_id for b in blocks if b.block_id)))
            self.cpu_pool.free(blocks)

    def drop(self, request: Request, start: int, end: int) -> int:
        """Give back the blocks `start` to `end` - 1 of a request for good, between two steps. None of its later tokens may attend to them.

        Null blocks take their place, as when a window has passed. For research on what may be forgotten.

        Returns:
            How many blocks were given back; fewer than asked for if some had been given back before.

        Raises:
            ValueError: the request holds no blocks, not all of these are computed, or a block is a state, which holds all tokens.
        """
        if any(group.rules.is_state for group in self.groups):
            raise ValueError("a model with states cannot forget single blocks: a state is made of all tokens before it")
        computed = request.num_computed_tokens // self.block_size
        if request.request_id not in self.groups[0].tables or not 0 <= start or end > computed:
            raise ValueError(f"{request!r} has {computed} computed blocks; cannot drop {start} to {end - 1}")
        return sum(group.drop(request.request_id, start, end) for group in self.groups) if end > start else 0

    def swap_out(self, request: Request) -> tuple[tuple[int, int], ...] | None:
        """Give back the blocks of a request but keep copies in the CPU pool.

        Returns:
            `(gpu block, cpu block)` pairs to copy before the next step, or None, and nothing has changed, if the CPU pool
            has no room.
        """
        request_id, pool = request.request_id, self.cpu_pool
        tables = [group.tables[request_id] for group in self.groups]
        used = [group.num_blocks(request.num_computed_tokens) for group in self.groups]
        tables = [table[:count] for table, count in zip(tables, used, strict=True)]
        blocks = [block for table in tables for block in table if block.block_id]
        if pool is None or len(blocks) > pool.num_free:
            return None
        copies = iter(pool.get_new_blocks(len(blocks)))
        cpu = tuple([next(copies) if b.block_id else pool.null_block for b in table] for table in tables)
        pairs = tuple(
            (b.block_id, c.block_id)
            for table, copy in zip(tables, cpu, strict=True)
            for b, c in zip(table, copy, strict=True)
            if b.block_id
        )
        if (trace := self.block_pool.trace) is not None:
            trace(("swap_out", request_id, pairs))
        self.free(request)
        self.swapped[request_id] = cpu
        return pairs

    def swap_in(
        self, request: Request, num_new_tokens: int, keep_free: int = 0
    ) -> tuple[tuple[tuple[int, int], ...], tuple[list[int], ...]] | None:
        """Take blocks for a swapped request, if `num_new_tokens` more will fit afterwards. It keeps its CPU blocks.

        Returns:
            `(cpu block, gpu block)` pairs to copy before the next step and the block tables, or None if too few blocks
            are free. Call `free_cpu` once it is certain that they will be copied.
        """
        request_id = request.request_id
        cpu = self.swapped[request_id]
        needed = sum(bool(block.block_id) for table in cpu for block in table)
        total = request.num_computed_tokens + num_new_tokens
        growth = sum(
            max(0, g.num_blocks(total) - g.first_kept(len(table), total))
            for g, table in zip(self.groups, cpu, strict=True)
        )
        if needed + growth + keep_free > self.block_pool.num_free:
            return None
        new, null, pairs = iter(self.block_pool.get_new_blocks(needed)), self.block_pool.null_block, []
        for group, copies in zip(self.groups, cpu, strict=True):
            table = [next(new) if copy.block_id else null for copy in copies]
            pairs += [(c.block_id, b.block_id) for c, b in zip(copies, table, strict=True) if c.block_id]
            group.tables[request_id], group.num_cached[request_id] = table, 0
            group.num_skipped[request_id] = next((i for i, c in enumerate(copies) if c.block_id), len(copies))
            if self.block_pool.trace is not None:
                self.block_pool.trace(("alloc", request_id, group.group, tuple(block.block_id for block in table)))
        request.capacity = -(-request.num_computed_tokens // self.block_size) * self.block_size
        return tuple(pairs), self.get_block_ids(request_id)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The block tables of a request, one list per group; 0 stands for a block that a window has passed."""
        return tuple([block.block_id for block in group.tables[request_id]] for group in self.groups)

    def reset_prefix_cache(self) -> int:
        """Forget the content of every block. Blocks stay in use, but the requests that hold them register no further blocks.

        Returns:
            How many blocks were forgotten.
        """
        for group in self.groups:
            group.index.clear()
            group.num_cached = dict.fromkeys(group.num_cached, sys.maxsize)
        return self.block_pool.reset_prefix_cache()

    def cached_tokens(self, request: Request) -> int:
        """How many tokens of a waiting request a look-up would find now. Counts nothing."""
        return self.get_computed_blocks(request).num_tokens
