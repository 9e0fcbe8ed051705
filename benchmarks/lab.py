"""How fast is a simulation, how much memory does it need, and how good could the prefix cache be?

    python benchmarks/lab.py [--quick] [--only speed|memory|hits]

The published traces are looked for in $MINIVLLM_DATA/traces, or in ../shared/data/traces beside the repository; without them, a synthetic
workload of the same size stands in for the first table and the last one is left out.
"""

import argparse
import os
import resource
import time
from pathlib import Path

from minivllm.core.policy import ShortestFirst
from minivllm.lab import Roofline, Workload, hit_rates, read_workload, simulate
from minivllm.lab.workload import lognormal, poisson

AZURE_REQUESTS, MOONCAKE_BLOCKS = 19_366, (2_000, 10_000, 50_000)
LIMIT_S = 60.0


def data(name: str) -> Path | None:
    """A published file, if it is there."""
    root = os.environ.get("MINIVLLM_DATA")
    path = (Path(root) if root else Path(__file__).parents[2] / "shared" / "data") / "traces" / name
    return path if path.exists() else None


def memory_mb() -> float:
    """Memory that this process holds now (where /proc does not tell: the most that it has held)."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def conversations(limit: int) -> tuple[Workload, str]:
    path = data("azure_llm_2023_conv.csv")
    if path is not None:
        return read_workload(path, limit), path.name
    stand_in = poisson(5.5, limit, lognormal(870, 1.0, 14_000), lognormal(140, 0.9, 1000))
    return stand_in, "synthetic (no published traces found)"


def speed(limit: int) -> None:
    workload, name = conversations(limit)
    cost = Roofline("h100", "llama-3.1-8b")
    print(f"\nspeed: {name}, {cost}, limit {LIMIT_S:.0f} s for {AZURE_REQUESTS:,} requests")
    print(
        f"{'policy':>14} {'recorded':>9} {'requests':>9} {'steps':>8} {'tokens':>11} {'virtual s':>10} {'s':>6} {'requests/s':>11} {'of limit':>9} {'MB':>6}"
    )
    small = max(1, limit // 10)
    runs = [(limit, None, False), (limit, ShortestFirst(), False), (small, None, False), (small, None, True)]
    for n, policy, record in runs:
        run = simulate(workload.head(n), policy=policy, cost_model=cost, record=record)
        rate, m = n / run.wall_seconds, run.meter
        share = AZURE_REQUESTS / rate / LIMIT_S
        print(
            f"{run.policy:>14} {record!s:>9} {n:>9,} {m.num_steps:>8,} {m.num_tokens:>11,} {run.seconds:>10.0f} {run.wall_seconds:>6.1f}"
            f" {rate:>11.0f} {share:>9.2f} {memory_mb():>6.0f}",
            flush=True,
        )


def a_million(count: int) -> None:
    """Requests go by at nine tenths of what the device can serve; memory is read off after each tenth of them."""
    print(f"\nmemory: {count:,} synthetic requests, one run, not recorded")
    print(f"{'requests':>10} {'s':>7} {'MB':>7} {'bytes/request since':>20}")
    seen, started, first = 0, time.perf_counter(), memory_mb()

    def counted(request):
        nonlocal seen, first
        seen += 1
        if seen % (count // 10) == 0:
            now = memory_mb()
            first = now if seen == count // 10 else first
            growth = (now - first) * 1024 * 1024 / max(1, seen - count // 10)
            print(f"{seen:>10,} {time.perf_counter() - started:>7.1f} {now:>7.0f} {growth:>20.0f}", flush=True)
        return request

    workload = poisson(900, count, (8, 64), (1, 6)).map(counted)
    run = simulate(workload, config={"num_gpu_blocks": 8192}, cost_model=Roofline("h100", "smollm2"), record=False)
    print(f"{run}, {count / run.wall_seconds:,.0f} requests/s")


def hits(limit: int | None) -> None:
    path = data("mooncake_conversation.jsonl")
    if path is None:
        print("\nhit rates: no published traces found")
        return
    workload = read_workload(path, limit)
    print(
        f"\nhit rates: {path.name}{f', first {limit}' if limit else ''}, blocks of 512 tokens (infinite cache, all of it: 36.64 % is published)"
    )
    print(f"{'blocks':>8} {'real':>8} {'clairvoyant':>12} {'infinite':>9} {'real of best':>13} {'s':>6}")
    for blocks in MOONCAKE_BLOCKS:
        started = time.perf_counter()
        rates = hit_rates(workload, 512, blocks)
        took = time.perf_counter() - started
        share = rates["real"] / rates["clairvoyant"]
        print(
            f"{blocks:>8,} {rates['real']:>8.2%} {rates['clairvoyant']:>12.2%} {rates['infinite']:>9.2%} {share:>13.2f} {took:>6.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--only", choices=["speed", "memory", "hits"], help="one table of the three")
    args = parser.parse_args()
    tables = {
        "memory": lambda: a_million(100_000 if args.quick else 1_000_000),
        "speed": lambda: speed(AZURE_REQUESTS // 10 if args.quick else AZURE_REQUESTS),
        "hits": lambda: hits(1200 if args.quick else None),
    }
    for name, table in tables.items():
        if args.only in (None, name):
            table()


if __name__ == "__main__":
    main()
