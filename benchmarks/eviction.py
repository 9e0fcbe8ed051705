"""Eviction: what a policy's choice costs beside the least recently used block.

    python benchmarks/eviction.py [num_blocks]

Prompts go by one after the other through a cache of `num_blocks` blocks (10,000), most of which must be evicted again. A row per policy: seconds,
their ratio to LRU's, and the share of blocks found. A limit: LFU takes at most twice LRU's time.
"""

from __future__ import annotations

import sys
import time

from minivllm.core.policy import LFU, LRU, DeepestFirst, Policy
from minivllm.lab.hits import real_hits
from minivllm.lab.workload import shared_prefix


class PrefixAware(Policy):
    """Leaves before what they go on from, of these the least used: the tree of blocks is kept up to date."""

    track_blocks = True

    @staticmethod
    def evict_key(block: object) -> object:
        return (block.num_hits, -block.depth)  # type: ignore[attr-defined]


def main(num_blocks: int = 10_000) -> bool:
    """Print the table; True if the limit is kept."""
    workload = shared_prefix(1.0, 2_000, 60, (256, 1024), (16, 512), (1, 2), skew=0.8, seed=1)
    seconds: dict[str, float] = {}
    print(f"{'policy':14} {'seconds':>8} {'x LRU':>6} {'hits':>8}")
    for policy in (LRU(), LFU(), DeepestFirst(), PrefixAware()):
        best = 1e9
        for _ in range(3):
            start = time.perf_counter()
            hits = real_hits(workload, 16, num_blocks, policy)
            best = min(best, time.perf_counter() - start)
        seconds[policy.name] = best
        print(f"{policy.name:14} {best:8.2f} {best / seconds['LRU']:6.2f} {hits:8}")
    return seconds["LFU"] <= 2 * seconds["LRU"]


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:2])) else "LFU takes more than twice LRU's time")
