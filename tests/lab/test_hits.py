"""Hit rates: the published figure, plain simulations written apart from the product, and exhaustive search."""

import json
import math
from collections import Counter, OrderedDict
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.policy import LFU, Clairvoyant, DeepestFirst, Policy
from minivllm.core.prefix import extend_block_hashes
from minivllm.lab import hit_rates, read_workload
from minivllm.lab.hits import BlockSequence, clairvoyant_hits, infinite_hits, real_hits
from minivllm.lab.workload import Workload, WorkloadRequest, chat, poisson, shared_prefix, text


def plain_lru(prompts: list[tuple[list[int], int]], block_size: int, num_blocks: int) -> int:
    """Hits of vLLM's block cache. A prompt is (a name per block, tokens); the last block need not be full.

    Written from the rules, without the product's code: blocks are taken from the front of one list and given back to its end,
    the last of a request first; only full blocks keep their name, one without goes to the front; the block of the last token is always computed, and what is
    computed twice is kept twice; of several blocks with one name the oldest is hit.
    """
    free: OrderedDict[int, int | None] = OrderedDict.fromkeys(range(num_blocks))  # block -> its name
    where: dict[int, list[int]] = {}  # name -> blocks, oldest first
    hits = 0
    for names, tokens in prompts:
        full, usable = tokens // block_size, (tokens - 1) // block_size
        table: list[int] = []
        while len(table) < usable and where.get(names[len(table)]):
            table.append(where[names[len(table)]][0])
        hits += len(table)
        hit = {block: free.pop(block) for block in table}
        for name in names[len(table) :]:
            block, old = free.popitem(last=False)
            if old is not None:
                where[old].remove(block)
            table.append(block)
        for i, block in enumerate(table[:full]):
            if block not in hit:
                where.setdefault(names[i], []).append(block)
        for i in reversed(range(len(table))):
            free[table[i]] = names[i] if i < full else None
            if i >= full:
                free.move_to_end(table[i], last=False)
    return hits


def mooncake(path) -> list[tuple[list[int], int]]:
    with path.open() as file:
        return [(row["hash_ids"], row["input_length"]) for row in map(json.loads, file)]


@pytest.mark.slow
def test_infinite_cache_on_mooncake_is_the_published_figure(trace_files):
    path = trace_files / "mooncake_conversation.jsonl"
    sequence = BlockSequence(read_workload(path), 512)
    assert (infinite_hits(sequence), len(sequence.blocks)) == (105_710, 288_500)
    seen: set[int] = set()
    hits = 0
    for names, _ in mooncake(path):
        hits += len(seen.intersection(names))
        seen.update(names)
    assert hits == 105_710 and round(100 * hits / 288_500, 2) == 36.64


@pytest.mark.parametrize("num_blocks", [300, 2000])
def test_real_manager_is_a_plain_lru_on_a_slice_of_mooncake(trace_files, num_blocks):
    path = trace_files / "mooncake_conversation.jsonl"
    real = real_hits(read_workload(path, limit=600), 512, num_blocks)
    assert real == plain_lru(mooncake(path)[:600], 512, num_blocks) > 100


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [2_000, 10_000, 50_000])
def test_real_manager_is_a_plain_lru_on_mooncake(trace_files, num_blocks):
    path = trace_files / "mooncake_conversation.jsonl"
    assert real_hits(read_workload(path), 512, num_blocks) == plain_lru(mooncake(path), 512, num_blocks)


def test_a_policy_that_counts_hits_by_itself_hears_of_them():
    """LFU again, from what `on_hit` tells; the counts outlive a block, and so they can be better than the block's own."""

    class Counts(Policy):
        def on_start(self):
            self.hits = Counter()

        def on_hit(self, request, blocks):
            self.hits.update(block.block_hash for block in blocks)

        def evict_key(self, block):
            return self.hits[block.block_hash]

    workload, counts = shared_prefix(1.0, 300, 12, (16, 160), (1, 80), 1, skew=0.7, seed=2), Counts()
    found = real_hits(workload, 16, 40, counts)
    assert sum(counts.hits.values()) == found > real_hits(workload, 16, 40)


def named(workload, block_size):
    numbers: dict[bytes, int] = {}
    return [
        ([numbers.setdefault(n, len(numbers)) for n in r.block_names(block_size)], r.num_prompt_tokens)
        for r in workload.unrolled()
    ]


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=14),
    block_size=st.integers(1, 4),
    spare=st.integers(0, 8),
)
@settings(max_examples=300)
def test_real_manager_is_a_plain_lru_on_anything(prompts, block_size, spare):
    workload = Workload.of(WorkloadRequest(str(i), float(i), (p,), [9]) for i, p in enumerate(prompts))
    num_blocks = max(math.ceil(len(p) / block_size) for p in prompts) + spare
    real = real_hits(workload, block_size, num_blocks)
    assert real == plain_lru(named(workload, block_size), block_size, num_blocks)
    sequence = BlockSequence(workload, block_size)
    assert real <= clairvoyant_hits(sequence, num_blocks) <= infinite_hits(sequence)


def best_hits(requests: list[list[int]], num_blocks: int) -> int:
    """The most hits that any choice of what to keep can give: exhaustive search."""
    states = {frozenset(): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            n = 0
            while n < len(blocks) and blocks[n] in cached:
                n += 1
            others = [b for b in cached if b not in blocks]
            for size in range(min(len(others), num_blocks - len(blocks)) + 1):
                for kept in combinations(others, size):
                    state = frozenset(kept) | frozenset(blocks)
                    after[state] = max(after.get(state, 0), hits + n)
        states = after
    return max(states.values())


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=8),
    spare=st.integers(0, 3),
)
@settings(max_examples=200)
def test_clairvoyant_is_the_best_there_is(prompts, spare):
    workload = Workload.of(WorkloadRequest(str(i), float(i), (p,), [9]) for i, p in enumerate(prompts))
    num_blocks = max(map(len, prompts)) + spare
    requests = [names for names, _ in named(workload, 1)]
    assert clairvoyant_hits(BlockSequence(workload, 1), num_blocks) == best_hits(requests, num_blocks)


CHATS = chat(0.5, 40, (2, 6), 40, 100, (20, 200), (50, 200), seed=1)


def test_rates_meet_when_there_is_room():
    rates = hit_rates(CHATS, 16)
    assert rates["clairvoyant"] == rates["infinite"] >= rates["real"] > 0.9 * rates["infinite"]
    sequence = BlockSequence(CHATS, 16)
    assert rates["real"] == real_hits(CHATS, 16, 20_000) / len(sequence.blocks)


def test_rates_grow_with_room():
    rates = [hit_rates(CHATS, 16, size) for size in (150, 400, 1200)]
    for name in ("real", "clairvoyant"):
        assert sorted(r[name] for r in rates) == [r[name] for r in rates]
    assert all(r["real"] < r["clairvoyant"] < r["infinite"] for r in rates[:2])


def test_an_eviction_policy_is_asked_and_the_clairvoyant_one_comes_closest():
    chats = chat(0.5, 15, (2, 6), 40, 60, (20, 80), (30, 80), seed=1)
    uses: dict[bytes, list[int]] = {}
    for i, request in enumerate(chats.unrolled()):
        for name in extend_block_hashes(request.to_request(), 16):
            uses.setdefault(name, []).append(i)
    now = {"step": 0}

    class Knows(Clairvoyant):
        def evict(self, free_blocks, view):
            now["step"] = view.step
            return super().evict(free_blocks, view)

    knows = Knows(lambda name: next((use for use in uses[name] if use > now["step"]), math.inf))
    found = {p.name if p else "LRU": real_hits(chats, 16, 70, p) for p in (None, LFU(), DeepestFirst(), knows)}
    assert len(set(found.values())) > 2
    assert max(found, key=found.get) == "Knows" and found["Knows"] <= clairvoyant_hits(BlockSequence(chats, 16), 70)


def test_no_sharing_no_hits_and_no_requests_no_rate():
    assert set(hit_rates(poisson(1, 50, (1, 2000), 1), 512).values()) == {0.0}
    assert all(math.isnan(rate) for rate in hit_rates(Workload.of([]), 512).values())


def test_salted_requests_share_nothing():
    same = [WorkloadRequest(str(i), float(i), (text(1, 64),), [1], cache_salt=f"user {i}") for i in range(4)]
    assert set(hit_rates(Workload.of(same), 16).values()) == {0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"block_size": 16, "num_blocks": 3}, r"a prompt of \d+ blocks does not fit into num_blocks=3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        hit_rates(CHATS, **arguments)
