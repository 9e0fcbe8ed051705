"""Routers: what they choose, and what they keep."""

import random

import pytest

from minivllm.core.prefix import extend_block_hashes
from minivllm.core.request import Request
from minivllm.core.routing import ROUTERS, LeastLoaded, PrefixAware, Replica, RoundRobin


def request(tokens, name="r", **more) -> Request:
    return Request(name, tokens, max_tokens=1, **more)


def test_round_robin_and_least_loaded():
    replicas = [Replica(0, 2, 10), Replica(1, 1, 90), Replica(2, 1, 30)]
    router = RoundRobin()
    assert [router.choose(request([1]), replicas) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert LeastLoaded().choose(request([1]), replicas) == 2


def test_prefix_aware_against_brute_force():
    """Of the replicas that are not too busy, the one that was sent the longest beginning."""
    rng, router, sent = random.Random(0), PrefixAware(block_size=4, slack=2), [[], [], []]
    replicas = [Replica(i) for i in range(3)]
    begins = [[rng.randrange(9) for _ in range(24)] for _ in range(5)]
    for step in range(300):
        begin = rng.choice(begins)
        tokens = begin[: rng.randrange(1, 25)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        for replica in replicas:
            replica.num_requests = rng.randrange(5)
            replica.num_tokens = rng.randrange(50)

        def known(i, tokens=tokens):
            full = len(tokens) // 4
            return max(
                (n for n in range(full + 1) if n == 0 or any(s[: 4 * n] == tokens[: 4 * n] for s in sent[i])), default=0
            )

        least = min(r.num_requests for r in replicas)
        allowed = [r for r in replicas if r.num_requests <= least + 2]
        want = min(allowed, key=lambda r: (-known(r.index), r.num_requests, r.num_tokens, r.index)).index
        assert router.choose(request(tokens, str(step)), replicas) == want
        sent[want].append(tokens)


def test_prefix_aware_forgets_the_least_recent_and_tells_adapters_apart():
    replicas = [Replica(0, 1), Replica(1, 0)]
    router = PrefixAware(block_size=2, slack=5, blocks=3)
    assert router.choose(request([1, 2, 3, 4]), replicas) == 1
    replicas[1].num_requests = 2
    assert router.choose(request([1, 2, 3, 4, 5]), replicas) == 1
    assert router.choose(request([1, 2, 3, 4, 5], lora_name="x"), replicas) == 0  # another adapter, other blocks
    assert router.choose(request([1, 2, 3, 4], cache_salt="s"), replicas) == 0
    replicas[0].num_requests = 9
    assert router.choose(request([7, 8, 9, 10]), replicas) == 1  # 0 is too busy; now 1 has sent 4 blocks, one too many
    replicas[0].num_requests, replicas[1].num_requests = 0, 2
    assert router.choose(request([1, 2, 3, 4]), replicas) == 0
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        PrefixAware(block_size=0)


def test_names_are_those_of_the_blocks():
    r = request(list(range(40)))
    PrefixAware(block_size=16).choose(r, [Replica(0)])
    assert r.block_hashes == extend_block_hashes(request(list(range(40))), 16)
    assert set(ROUTERS) == {"round_robin", "least_loaded", "prefix_aware"}
