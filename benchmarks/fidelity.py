"""Does the lab tell the truth? A cost model fitted to one run of the real model predicts other runs that it has not seen.

    python benchmarks/fidelity.py [--rounds 3] [--model smollm2]

A workload runs for real, and in simulation with requests that arrive at the same moments. The cost model comes from another workload, recorded at the
same time: machines are unsteady, so two engines take turns step by step, and what slows one slows the other. The models run on one thread; the clock of
each engine counts the time that this thread has had on a core for its own steps (`--clock wall`: all time), and waiting for an arrival is a jump. Each
workload is run and predicted `--rounds` times over; the median prediction is held against the median run. Below stands what the machine alone
contributes: how much the learnt workload differs from itself. Status 1 if a limit is missed.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"  # before torch and numba are loaded

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from minivllm import SamplingParams
from minivllm.core.config import EngineArgs
from minivllm.core.trace import Trace
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lab import CostModel, Workload, replay, simulate
from minivllm.lab.meter import Meter
from minivllm.lab.workload import bursts, poisson, shared_prefix

LIMITS = {"total": 0.10, "median TTFT": 0.15, "median TPOT": 0.15}


def together(*parts: tuple[float, Workload]) -> Workload:
    """The requests of workloads that begin at the given seconds, in the order in which they arrive."""
    requests = [
        replace(request, request_id=f"{i}-{request.request_id}", arrival_time=start + request.arrival_time)
        for i, (start, part) in enumerate(parts)
        for request in part
    ]
    return Workload.of(sorted(requests, key=lambda r: r.arrival_time), "together")


def workloads() -> dict[str, Workload]:
    """The one to learn from, with a bit of everything, and those to predict: other lengths, other arrivals, everything at once."""
    return {
        "learnt": together(
            (0.0, bursts(3.0, 30, (8, 400), (4, 48), burstiness=0.3, seed=1)),
            (0.0, shared_prefix(2.0, 18, 3, 192, (8, 96), (4, 48), seed=6)),
            *((start, poisson(1e6, 16, (16, 200), (4, 32), seed=start)) for start in (3, 6, 9)),
        ),
        "steady": poisson(2.5, 20, (30, 250), (16, 40), seed=2),
        "bursts": bursts(2.0, 16, (100, 500), (8, 32), burstiness=0.15, seed=3),
        "shared": shared_prefix(3.0, 24, 4, 256, (8, 64), (16, 40), seed=4),
        "all at once": poisson(1e6, 24, (16, 128), (16, 48), seed=5),
    }


class OwnClock:
    """Seconds on `clock` that have passed while it was running: those of its engine's own steps. Waiting for an arrival is a jump."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    def now(self) -> float:
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    def wait_until(self, moment: float) -> None:
        self._before += max(0.0, moment - self.now())

    def run(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._before, self._since = self.now(), None


def live(engine: LLMEngine, workload: Workload) -> Iterator[None]:
    """Serve a workload with the real model, one step for each `next`. The clock runs during the steps alone."""
    clock = engine.clock
    assert isinstance(clock, OwnClock)
    coming = deque(workload.in_vocabulary(1000, 40_000))
    start = clock.now()
    while coming or engine.has_unfinished_requests():
        clock.run()
        if not engine.has_unfinished_requests():
            clock.wait_until(start + coming[0].arrival_time)
        while coming and start + coming[0].arrival_time <= clock.now():
            request = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
            prompt = {"prompt_token_ids": request.prompt_token_ids()}
            engine.add_request(request.request_id, prompt, params, arrival_time=start + request.arrival_time)
        engine.step()
        clock.stop()
        yield


def in_turns(engines: Sequence[LLMEngine], workloads: Sequence[Workload]) -> list[Trace]:
    """Run each workload on its engine, one step of each in turn until all are done; their traces."""
    with ExitStack() as stack:
        for engine in engines:
            engine.reset_prefix_cache()
        traces = [stack.enter_context(engine.record()) for engine in engines]
        runs = deque(live(*each) for each in zip(engines, workloads, strict=True))
        while runs:
            run = runs.popleft()
            if next(run, runs) is not runs:
                runs.append(run)
    return traces


def figures(meter: Meter) -> dict[str, float]:
    """Total time from the first arrival to the last token, and medians over requests; seconds."""
    table = meter.to_pandas()
    total = table["finished"].max() - table["arrival"].min()
    return dict(zip(LIMITS, (total, table["ttft"].median(), table["tpot"].median()), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clock", choices=["thread", "wall"], default="thread")
    args = parser.parse_args()
    settings = EngineArgs(model=args.model, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512)
    clock = time.thread_time if args.clock == "thread" else time.perf_counter
    engines = [LLMEngine.from_engine_args(settings, clock=OwnClock(clock)) for _ in range(2)]
    todo = workloads()
    learnt = todo.pop("learnt")
    in_turns(engines, [learnt.head(8)] * 2)  # warm up
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in todo}
    itself: list[dict[str, float]] = []
    for _ in range(args.rounds):
        for name, workload in todo.items():
            known, trace = in_turns(engines, [learnt, workload])
            itself.append(figures(Meter.of(known)))
            cost = CostModel.fit(known)
            replay(trace)  # raises if one decision differs
            found[name].append((figures(Meter.of(trace)), figures(simulate(trace, cost_model=cost).meter)))
    print(f"the last cost model: {cost}\n")
    print(
        f"{'workload':>12} {'requests':>8} {'figure':>12} {'real ms':>9} {'predicted':>9} {'error':>7} {'limit':>6}  every round"
    )
    missed = 0
    for name, rounds in found.items():
        for figure, limit in LIMITS.items():
            real, guess = (median(each[i][figure] for each in rounds) for i in (0, 1))
            missed += abs(guess / real - 1) > limit
            every = " ".join(f"{predicted[figure] / ran[figure] - 1:+.1%}" for ran, predicted in rounds)
            print(
                f"{name:>12} {sum(1 for _ in todo[name]):>8} {figure:>12} {real * 1e3:>9.1f} {guess * 1e3:>9.1f} {guess / real - 1:>+7.1%} {limit:>6.0%}  {every}"
            )
    print("\nthe machine itself: the learnt workload, each time against its median")
    for figure in LIMITS:
        middle = median(run[figure] for run in itself)
        print(f"{figure:>12}  {' '.join(f'{run[figure] / middle - 1:+.1%}' for run in itself)}")
    print(f"\nreplays with the recorded times: all {args.rounds * len(todo)} identical, event by event")
    print(f"{missed} of {3 * len(todo)} predictions missed their limit")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
