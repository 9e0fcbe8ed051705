"""Which router is worth what? Cached tokens and time to the first token, by two real replicas and by the simulator, on the Mooncake trace.

    python benchmarks/routers.py [TRACE.jsonl] [--requests 120] [--shrink 32] [--seconds 12] [--rounds 2] [--output FOLDER]
    python benchmarks/routers.py [TRACE.jsonl] --simulate 500 [--replicas 4] [--faster 1]

Without a trace the requests are made up: 12 long beginnings, which some ask for more often than others.

The first form starts two replicas, each a process with one thread and a small model with random weights. They get the first conversations
of the trace with several turns: every `--shrink`-th token, at the trace's moments squeezed into `--seconds`, once with each router. Then
the simulator is given the same requests, with step times fitted to what the replicas recorded. With --output the table goes to
routers-MACHINE.json. The second form only simulates, the trace as it is, on engines with an H100 and Llama 3.1 8B each.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.core.config import EngineArgs
from minivllm.core.routing import LeastLoaded, PrefixAware, RoundRobin, Router
from minivllm.core.trace import Trace
from minivllm.engine.async_llm import AsyncLLM
from minivllm.lab import read_workload, simulate_replicas
from minivllm.lab.cost import CostModel
from minivllm.lab.workload import Workload, WorkloadRequest, shared_prefix
from minivllm.sampling.params import SamplingParams

ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin, "least loaded": LeastLoaded, "by prefix": PrefixAware,
    "by prefix, slack 16": lambda: PrefixAware(slack=16),
}  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
ANSWER = 8  # tokens


def conversations(workload: Workload, most: int) -> list[WorkloadRequest]:
    """The first conversations with several turns: requests whose prompts begin as one before, beyond the first block of all."""
    turns = defaultdict(list)
    for request in workload:
        if len(request.prompt) > 2 and request.num_prompt_tokens <= 16384:
            turns[request.prompt[1]].append(request)
    chosen: list[WorkloadRequest] = []
    for conversation in turns.values():
        if len(conversation) > 2 and len(chosen) + len(conversation) <= most:
            chosen += conversation
    return sorted(chosen, key=lambda request: request.arrival_time)


def shrunk(requests: list[WorkloadRequest], shrink: int, seconds: float) -> Workload:
    """Fewer tokens with the same shared beginnings: every `shrink`-th, as a number that only it determines. Moments from 0 to `seconds`."""
    begin, end = requests[0].arrival_time, requests[-1].arrival_time
    number: dict[int, int] = {}
    made = []
    for request in requests:
        for token in request.prompt_token_ids()[::shrink]:
            number.setdefault(token, random.Random(token).randrange(10, MODEL["vocab_size"]))
        prompt = [number[token] for token in request.prompt_token_ids()[::shrink]]
        moment = (request.arrival_time - begin) / max(end - begin, 1e-9) * seconds
        made.append(replace(request, arrival_time=moment, prompt=(prompt,), output=range(ANSWER), max_tokens=None))
    return Workload.of(made)


def row_of(hits: float, firsts: list[float]) -> dict[str, float]:
    firsts = sorted(firsts)
    found = {
        "mean": statistics.mean(firsts),
        "p50": statistics.median(firsts),
        "p90": firsts[int(0.9 * (len(firsts) - 1))],
    }
    return {"hits": round(hits, 3)} | {f"ttft_{name}_ms": round(1e3 * value, 1) for name, value in found.items()}


async def ask(engine: AsyncLLM, workload: Workload) -> dict[str, float]:
    """Every request at its moment."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    firsts, cached, asked = list[float](), 0, 0

    async def one(request: WorkloadRequest) -> None:
        nonlocal cached, asked
        await asyncio.sleep(request.arrival_time)
        start, first = time.perf_counter(), 0.0
        async for output in engine.generate({"prompt_token_ids": list(request.prompt[0])}, params):
            first = first or time.perf_counter() - start
        firsts.append(first)
        cached, asked = cached + output.num_cached_tokens, asked + request.num_prompt_tokens

    await asyncio.gather(*map(one, workload))
    return row_of(cached / asked, firsts)


async def real(workload: Workload, args: EngineArgs, rounds: int, record: Path) -> list[dict[str, dict[str, float]]]:
    """By round and router. The replicas stay, and forget what they have cached."""
    engine = AsyncLLM.from_engine_args(args, engine_in="process", warm=True, router=RoundRobin())
    await ask(engine, workload.head(10))
    await engine.record_to(str(record))
    found = []
    try:
        for _ in range(rounds):
            found.append({})
            for name, make in ROUTERS.items():
                if not await engine.reset_prefix_cache():
                    raise RuntimeError("a replica still holds blocks")
                engine.llm_engine.core.router = make()
                found[-1][name] = await ask(engine, workload)
                print(f"  {name:20} {found[-1][name]}", flush=True)
    finally:
        engine.shutdown()
    return found


def compare(requests: list[WorkloadRequest], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two replicas, and the simulator with their step times."""
    workload = shrunk(requests, args.shrink, args.seconds)
    (folder / "config.json").write_text(json.dumps(MODEL))
    longest = max(request.num_prompt_tokens for request in workload) + ANSWER
    limits = {
        "max_model_len": longest,
        "num_gpu_blocks": args.blocks,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 16,
    }
    how = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, data_parallel_size=2, **limits)
    count = sum(request.num_prompt_tokens for request in workload)
    print(f"{len(requests)} requests with {count} tokens in {args.seconds:g} s, two replicas")
    rounds = asyncio.run(real(workload, how, args.rounds, folder / "steps.jsonl"))
    cost = CostModel.fit(Trace.load(folder / "steps-0.jsonl"))
    print(cost)
    rows = []
    for name, make in ROUTERS.items():
        measured = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        fleet = simulate_replicas(workload, make(), 2, config={"block_size": 16, **limits}, cost_model=cost)
        rows.append({"router": name, "real": measured, "simulated": row_of(fleet.hit_rate, list(fleet.requests.ttft))})
        print(f"  {name:20} simulated {rows[-1]['simulated']}", flush=True)
    about = {
        "requests": len(requests),
        "prompt_tokens": count,
        "seconds": args.seconds,
        "shrink": args.shrink,
        "rounds": args.rounds,
    }
    return {
        "workload": args.trace.name if args.trace else "12 shared beginnings",
        **about,
        "blocks_each": args.blocks,
        "rows": rows,
    }


def simulated(workload: Workload, replicas: int) -> None:
    for name, make in ROUTERS.items():
        start = time.perf_counter()
        fleet = simulate_replicas(workload, make(), replicas)
        row = row_of(fleet.hit_rate, list(fleet.requests.ttft))
        print(f"  {name:20} {row} (computed in {time.perf_counter() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--shrink", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=1000, help="KV blocks of each replica")
    parser.add_argument("--simulate", type=int, metavar="REQUESTS", help="only simulate so many requests, as they are")
    parser.add_argument("--replicas", type=int, default=4, help="with --simulate")
    parser.add_argument("--faster", type=float, default=1.0, help="with --simulate: times the trace's rate")
    parser.add_argument("--output", type=Path, help="folder for routers-MACHINE.json")
    args = parser.parse_args()
    if args.trace is not None:
        trace = read_workload(args.trace, format="mooncake")
    else:
        trace = shared_prefix(4.0, 2000, 12, prefix_tokens=8192, prompt_tokens=(512, 4096), skew=0.7)
    if args.simulate is not None:
        print(f"simulated: {args.simulate} requests on {args.replicas} replicas")
        return simulated(trace.head(args.simulate).faster(args.faster), args.replicas)
    with tempfile.TemporaryDirectory() as folder:
        made_up = args.trace is None
        requests = list(trace.head(args.requests)) if made_up else conversations(trace.head(4000), args.requests)
        result = compare(requests, args, Path(folder))
    if args.output is not None:
        machine = next((line.split(": ")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.machine())  # fmt: skip
        path = args.output / f"routers-{'intel-xeon' if 'Xeon' in machine else platform.machine()}.json"
        path.write_text(json.dumps({"machine": f"{machine}, 2 processes of one thread", **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
