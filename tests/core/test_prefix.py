"""Names of blocks, and two indexes that must always agree."""

import os
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling import GROUPS, Driver, kv_config

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.core.kv_cache import KVCacheManager
from minivllm.core.prefix import HashIndex, RadixIndex, extend_block_hashes
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


def names(tokens, block_size=2, **keys):
    return list(extend_block_hashes(Request("r", tokens, max_tokens=1, **keys), block_size))


texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(texts, texts)
def test_equal_names_mean_equal_prefixes(a, b):
    for i, (x, y) in enumerate(zip(names(a), names(b), strict=False)):
        assert (x == y) == (a[: 2 * i + 2] == b[: 2 * i + 2])


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 40), st.booleans()
)
def test_the_chain_is_the_same_however_a_text_grows(tokens, size, known, pictured):
    picture = MultiModalFeatureSpec("p", "image", PlaceholderRange(1, 4)) if pictured else None
    request = Request("r", tokens[: known + 1], max_tokens=99, mm_features=(picture,) if picture else ())
    extend_block_hashes(request, size)
    for token in tokens[known + 1 :]:
        request.append_output_token(token)
    parent, chain = b"minivllm", []
    for start in range(0, len(tokens) - size + 1, size):
        content = b"".join(token.to_bytes(8, sys.byteorder) for token in tokens[start : start + size])
        seen = pictured and start < 5 and start + size > 1
        parent = sha256(parent + content + (f"['p@{1 - start}']".encode() if seen else b"")).digest()
        chain.append(parent)
    assert extend_block_hashes(request, size) == chain


def test_extra_keys_keep_users_apart():
    kinds = [
        names([1, 2]),
        names([1, 2], cache_salt="a"),
        names([1, 2], cache_salt="b"),
        names([1, 2], lora_name="a"),
        names([1, 2], extra_keys=("img",)),
    ]
    assert len({name[0] for name in kinds}) == 5


def test_names_do_not_depend_on_the_process():
    code = "from minivllm.core.prefix import extend_block_hashes; from minivllm.core.request import Request; print(extend_block_hashes(Request('r', [1, 2, 3, 4], max_tokens=1, cache_salt='s'), 2)[1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert names([1, 2, 3, 4], cache_salt="s")[1].hex() == seen.pop().strip()


@given(st.lists(st.tuples(st.sampled_from("ird"), texts, st.sampled_from([None, "s"]), st.integers(0, 5)), max_size=40))
def test_radix_and_hash_agree(actions):
    hashed, radix, blocks, n = HashIndex(2), RadixIndex(2), [], 0
    for action, tokens, salt, k in actions:
        request = Request("r", tokens, max_tokens=1, cache_salt=salt)
        full = len(extend_block_hashes(request, 2))
        if action == "i" and k < full:
            n += 1
            block = KVCacheBlock(n)
            block.block_hash = request.block_hashes[k]
            hashed.insert(request, k, block)
            radix.insert(request, k, block)
            blocks.append(block)
        elif action == "r" and blocks:
            block = blocks.pop(k % len(blocks))
            hashed.remove(block)
            radix.remove(block)
        assert list(hashed.walk(request, full)) == list(radix.walk(request, full))
        assert len(hashed) == len(radix) == len(blocks)
    for block in blocks:
        radix.remove(block)
    assert all(not root.children for root in radix._roots.values()), "the tree keeps paths that lead nowhere"


@given(
    st.lists(st.tuples(texts, st.integers(1, 4)), min_size=1, max_size=12),
    st.sampled_from(sorted(GROUPS)),
    st.integers(0, 10),
)
def test_both_indexes_give_the_same_run(requests, kind, extra):
    runs = []
    for index in ("hash", "radix"):
        kv = kv_config(kind, 2, 2, window=4)
        cache = CacheConfig(2, len(kv.groups) * 9 + extra, prefix_cache_index=index)
        driver = Driver(
            Scheduler(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=18), cache, kv)
        )
        for i, (prompt, max_tokens) in enumerate(requests):
            driver.scheduler.add_request(Request(str(i), prompt, max_tokens=max_tokens))
        driver.drain()
        runs.append(
            (
                driver.trace.events[1:] and [e for e in driver.trace.events if e[0] not in ("step", "update")],
                driver.scheduler.kv_cache_manager.stats,
            )
        )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind, window", [("full", None), ("sliding_window", 5), ("chunked_local", 6)])
def test_skipped_tokens_are_those_that_no_later_token_sees(kind, window):
    spec = (
        kv_config(
            "full" if window is None else {"sliding_window": "window", "chunked_local": "chunked"}[kind],
            2,
            4,
            window or 1,
        )
        .groups[0]
        .spec
    )

    def sees(query, key):
        if kind == "full":
            return key <= query
        if kind == "sliding_window":
            return query - window < key <= query
        return key <= query and key // window == query // window

    for computed in range(30):
        brute = next(key for key in range(computed + 1) if any(sees(query, key) for query in range(computed, 60)))
        assert spec.rules.skipped(spec, computed) == (0, brute)


@given(st.data())
def test_the_longest_hit_is_the_longest(data):
    """Against trying every length: every block that the next token still sees must be cached."""
    kind, window = data.draw(st.sampled_from([("full", 1), ("window", 3), ("window", 4), ("chunked", 4)]))
    kv = kv_config(kind, 2, 64, window)
    manager = KVCacheManager(CacheConfig(2, 64), kv)
    group, tokens = manager.groups[0], list(range(17))
    request = Request("r", tokens, max_tokens=1)
    extend_block_hashes(request, 2)
    cached = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    for i, yes in enumerate(cached):
        if yes:
            block = manager.block_pool.blocks[i + 1]
            block.block_hash = request.block_hashes[i]
            group.index.insert(request, i, block)
    limit = data.draw(st.integers(0, 8))
    brute = max(n for n in range(limit + 1) if all(cached[group.skipped_blocks(2 * n)[1] : n]))
    hit = group.find_longest_cache_hit(request, limit)
    assert len(hit) == brute
    needed = group.skipped_blocks(2 * brute)[1]
    assert [b.block_id for b in hit] == [0] * needed + [i + 1 for i in range(needed, brute)]
