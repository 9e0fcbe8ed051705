"""Which router is worth what, on the Mooncake trace: by the simulator, and by real replicas.

    python benchmarks/routers.py TRACE.jsonl [--requests 1000] [--replicas 4] [--real MODEL] [--shrink 64]

The simulator runs the trace as it is, on engines with an H100 and Llama 3.1 8B each (the trace's rate times `--faster`). `--real` starts two
replicas of a model on this machine and sends them the beginning of the trace with lengths divided by `--shrink`; their requests
share prefixes as the trace's do. Prints the share of the prompts' tokens that were cached, and the time to the first token.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

from minivllm.core.config import EngineArgs
from minivllm.core.routing import LeastLoaded, PrefixAware, RoundRobin, Router
from minivllm.engine.async_llm import AsyncLLM
from minivllm.lab import read_workload, simulate_replicas
from minivllm.lab.workload import Workload
from minivllm.sampling.params import SamplingParams


def routers(block_size: int = 16) -> list[Router]:
    return [RoundRobin(), LeastLoaded(), PrefixAware(block_size), PrefixAware(block_size, slack=16)]


def label(router: Router) -> str:
    return type(router).__name__ + (f", slack {router.slack}" if isinstance(router, PrefixAware) else "")


def simulated(workload: Workload, replicas: int) -> None:
    for router in routers():
        start = time.perf_counter()
        fleet = simulate_replicas(workload, router, replicas)
        ttft = fleet.requests.ttft
        print(
            f"  {label(router):22} hits {fleet.hit_rate:6.1%}   ttft median {ttft.median():7.3f} s, p99 {ttft.quantile(0.99):7.3f} s"
            f"   (computed in {time.perf_counter() - start:.0f} s)",
            flush=True,
        )


def shrunk(request, shrink: int, vocabulary: int = 400) -> list[int]:
    """Fewer tokens with the same shared beginnings: every `shrink`-th token, as a number that only it determines."""
    kept = request.prompt_token_ids()[::shrink]
    return [random.Random(token).randrange(10, vocabulary) for token in kept]


async def real(workload: Workload, model: str, shrink: int, router: Router, rate: float) -> None:
    requests = list(workload)
    longest = max(r.num_prompt_tokens for r in requests) // shrink + 64
    args = EngineArgs(model=model, data_parallel_size=2, max_model_len=longest, num_gpu_blocks=longest // 16 * 16)
    engine = AsyncLLM.from_engine_args(args, engine_in="process", router=router)
    firsts: list[float] = []

    async def one(request, number: int) -> None:
        await asyncio.sleep(number / rate)
        params = SamplingParams(temperature=0, max_tokens=max(1, request.num_output_tokens // shrink), ignore_eos=True)
        start = time.perf_counter()
        first = True
        async for _ in engine.generate({"prompt_token_ids": shrunk(request, shrink)}, params):
            if first:
                firsts.append(time.perf_counter() - start)
                first = False

    await asyncio.gather(*(one(request, i) for i, request in enumerate(requests)))
    metrics = engine.get_metrics()
    hits = metrics["prefix_cache_hits"] / metrics["prefix_cache_queries"]
    engine.shutdown()
    print(
        f"  {label(router):22} hits {hits:6.1%}   ttft median {statistics.median(firsts):7.3f} s, most {max(firsts):7.3f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--faster", type=float, default=1.0)
    parser.add_argument("--real", metavar="MODEL")
    parser.add_argument("--shrink", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second to the real replicas")
    args = parser.parse_args()
    trace = read_workload(args.trace, format="mooncake").head(args.requests)
    print(f"simulated: {args.requests} requests of {args.trace.name} on {args.replicas} replicas")
    simulated(trace.faster(args.faster), args.replicas)
    if args.real is not None:
        print(f"two real replicas of {args.real}, lengths divided by {args.shrink}")
        for router in routers():
            asyncio.run(real(trace.head(min(args.requests, 200)), args.real, args.shrink, router, args.rate))


if __name__ == "__main__":
    main()
