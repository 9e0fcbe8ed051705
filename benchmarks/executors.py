"""What does a step cost more when the model runs in other processes?

    python benchmarks/executors.py [--model smollm2] [--batch 1 16] [--steps 60] [--rounds 5] [--output FOLDER]

All executors are there at once and take turns. Prints, for each and each batch size, the median time of a decode step as the engine sees it,
and the median of its ratios to that of one rank in the engine's own process in the same round. `mp` with one rank shows what the way there
and back costs, `ray` what that costs through actors (left out where Ray is not installed); with three ranks on a CPU, what the sums between
the matmuls cost; with two stages, what handing hidden states on costs (one batch at a time, so that nothing overlaps). `empty` is a decision
there and back with nothing to compute.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from platform import machine

from minivllm.core.config import EngineArgs
from minivllm.core.output import NewRequestData, SchedulerOutput
from minivllm.runtime.executor import Executor, plan_engine
from minivllm.runtime.executors.select import make_executor
from minivllm.sampling.params import SamplingParams

WAYS = {
    "uni": {},
    "uni, eager": {"enforce_eager": True},
    "mp, 1 rank": {"distributed_executor_backend": "mp"},
    "ray, 1 rank": {"distributed_executor_backend": "ray"},
    "mp, 3 ranks": {"tensor_parallel_size": 3},  # SmolLM2 has 9 heads
    "mp, 2 stages": {"pipeline_parallel_size": 2},
}
PROMPT, BLOCK = 32, 16


def decisions(batch: int, steps: int) -> Iterator[SchedulerOutput]:
    """The prompts of a batch, and then a token of each in every step."""
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True, seed=0)
    need = -(-(PROMPT + steps) // BLOCK)
    names = [f"r{i}" for i in range(batch)]
    tables = [list(range(1 + i * need, 1 + (i + 1) * need)) for i in range(batch)]
    new = tuple(
        NewRequestData(name, [1 + i] * PROMPT, [], params, (table,), 0)
        for i, (name, table) in enumerate(zip(names, tables))
    )
    yield SchedulerOutput(0, dict.fromkeys(names, PROMPT), PROMPT * batch, new)
    for step in range(1, steps):
        yield SchedulerOutput(step, dict.fromkeys(names, 1), batch)
    yield SchedulerOutput(steps, {}, 0, finished=tuple(names))


def step_ms(executor: Executor, batch: int, steps: int) -> float:
    """Milliseconds of a decode step, in the middle of many."""
    times = []
    for output in decisions(batch, steps):
        start = time.perf_counter()
        executor.execute_model(output)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[4:-1])


def empty_ms(executor: Executor, count: int = 300) -> float:
    """Milliseconds of a decision with nothing in it."""
    times = []
    for step in range(count):
        start = time.perf_counter()
        executor.execute_model(SchedulerOutput(step, {}, 0))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def start(way: str, args: argparse.Namespace) -> Executor:
    """An executor with the model, and a KV cache for the largest batch."""
    need = max(args.batch) * -(-(PROMPT + args.steps) // BLOCK) + 1
    settings = EngineArgs(
        model=args.model,
        load_format=args.load_format,
        max_model_len=PROMPT + args.steps,
        num_gpu_blocks=need,
        **WAYS[way],
    )
    return make_executor(plan_engine(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ways", nargs="+", default=[way for way in WAYS if "ray" not in way or find_spec("ray")], choices=list(WAYS)
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    kinds = ["empty", *(f"batch {batch}" for batch in args.batch)]
    executors = {way: start(way, args) for way in args.ways}
    times: dict[tuple[str, str], list[float]] = {(way, kind): [] for way in args.ways for kind in kinds}
    for number in range(args.rounds + 1):  # the first one warms up
        for way, executor in executors.items():
            found = [empty_ms(executor), *(step_ms(executor, batch, args.steps) for batch in args.batch)]
            for kind, ms in zip(kinds, found, strict=True):
                times[way, kind] += [ms] if number else []
    for executor in executors.values():
        executor.shutdown()

    def ratio(way: str, other: str, kind: str) -> float:
        return statistics.median(a / b for a, b in zip(times[way, kind], times[other, kind], strict=True))

    rows: list[dict[str, object]] = []
    for way in args.ways:
        row: dict[str, object] = {"executor": way}
        for kind in kinds:
            row[f"{kind}, ms"] = round(statistics.median(times[way, kind]), 3)
        for other in [args.ways[0], *(["mp, 1 rank"] if way.startswith("ray") and "mp, 1 rank" in args.ways else [])]:
            row |= {f"{kind}, against {other}": round(ratio(way, other, kind), 3) for kind in kinds[1:]}
        rows.append(row)
        print(f"{way:14}", "   ".join(f"{key}: {value}" for key, value in row.items() if key != "executor"), flush=True)
    if args.output is not None:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
        name = next((line.split(": ", 1)[1].strip() for line in lines if line.startswith("model name")), machine())
        about = {
            "machine": f"{name}, {os.cpu_count()} cores",
            "model": args.model,
            "steps": args.steps,
            "rounds": args.rounds,
        }
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "executors.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
