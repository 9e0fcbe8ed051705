"""Does the lab tell the truth? A cost model fitted to one run of the real model predicts other runs that it has not seen.

    python benchmarks/fidelity.py [--rounds 3] [--model smollm2]

A run is recorded and fitted; then another workload runs for real, and in simulation with requests that arrive at the same moments. The model
runs on one thread, and the engine's clock counts the time that this thread has had on a core (`--clock wall`: all time), so that other programs
on the machine do not count. Machines are unsteady all the same: each workload is predicted from a run just before it, `--rounds` times over, and its
median error counts. Below stands what the machine alone contributes: how much the learnt workload differs from itself. Status 1 if a limit is missed.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"  # before torch and numba are loaded

import argparse
import sys
import time
from collections import deque
from statistics import median

from minivllm import SamplingParams
from minivllm.core.clock import WallClock
from minivllm.core.config import EngineArgs
from minivllm.core.trace import Trace
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lab import CostModel, Workload, replay, simulate
from minivllm.lab.meter import Meter
from minivllm.lab.simulation import Run
from minivllm.lab.workload import bursts, poisson, shared_prefix

LIMITS = {"total": 0.10, "median TTFT": 0.15, "median TPOT": 0.15}


def workloads() -> dict[str, Workload]:
    """The one to learn from, and those to predict: other lengths, other arrivals, shared prefixes, everything at once."""
    return {
        "learnt": bursts(4.0, 36, (8, 400), (4, 48), burstiness=0.3, seed=1),
        "steady": poisson(2.5, 20, (30, 250), (16, 40), seed=2),
        "bursts": bursts(2.0, 16, (100, 500), (8, 32), burstiness=0.15, seed=3),
        "shared": shared_prefix(3.0, 24, 4, 256, (8, 64), (16, 40), seed=4),
        "all at once": poisson(1e6, 24, (16, 128), (16, 48), seed=5),
    }


class ThreadClock:
    """Seconds that the calling thread has had on a core; waiting for an arrival is a jump."""

    def __init__(self) -> None:
        self._jumped = 0.0

    def now(self) -> float:
        return time.thread_time() + self._jumped

    def wait_until(self, moment: float) -> None:
        self._jumped += max(0.0, moment - self.now())


class PatientWallClock(WallClock):
    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


def live(engine: LLMEngine, workload: Workload) -> Trace:
    """Serve a workload with the real model and record it."""
    clock = engine.clock
    assert isinstance(clock, ThreadClock | PatientWallClock)
    engine.reset_prefix_cache()
    coming = deque(workload.in_vocabulary(1000, 40_000))
    with engine.record() as trace:
        start = clock.now()
        while coming or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                clock.wait_until(start + coming[0].arrival_time)
            while coming and start + coming[0].arrival_time <= clock.now():
                request = coming.popleft()
                params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
                prompt = {"prompt_token_ids": request.prompt_token_ids()}
                engine.add_request(request.request_id, prompt, params, arrival_time=start + request.arrival_time)
            engine.step()
    return trace


def figures(meter: Meter) -> dict[str, float]:
    """Total time from the first arrival to the last token, and medians over requests; seconds."""
    table = meter.to_pandas()
    total = table["finished"].max() - table["arrival"].min()
    return dict(zip(LIMITS, (total, table["ttft"].median(), table["tpot"].median()), strict=True))


def errors(real: Trace, run: Run) -> list[float]:
    """Relative error of each figure."""
    truth, guess = figures(Meter.of(real)), figures(run.meter)
    return [guess[name] / truth[name] - 1 for name in LIMITS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clock", choices=["thread", "wall"], default="thread")
    args = parser.parse_args()
    settings = EngineArgs(model=args.model, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512)
    clock = ThreadClock() if args.clock == "thread" else PatientWallClock()
    engine = LLMEngine.from_engine_args(settings, clock=clock)
    todo = workloads()
    learnt = todo.pop("learnt")
    live(engine, learnt.head(8))  # warm up
    found: dict[str, list[list[float]]] = {name: [] for name in todo}
    itself: list[dict[str, float]] = []
    last: dict[str, tuple[Trace, Run]] = {}
    for _ in range(args.rounds):
        for name, workload in todo.items():
            known = live(engine, learnt)
            itself.append(figures(Meter.of(known)))
            cost = CostModel.fit(known)
            trace = live(engine, workload)
            replay(trace)  # raises if one decision differs
            run = simulate(trace, cost_model=cost)
            last[name] = trace, run
            found[name].append(errors(trace, run))
    print(f"the last cost model: {cost}\n")
    print(
        f"{'workload':>12} {'requests':>8} {'figure':>12} {'real ms':>9} {'predicted':>9} {'error':>7} {'limit':>6}  every round"
    )
    missed = 0
    for name, (trace, run) in last.items():
        real, guess = figures(Meter.of(trace)), figures(run.meter)
        for (figure, limit), values in zip(LIMITS.items(), zip(*found[name], strict=True), strict=True):
            error = median(values)
            missed += abs(error) > limit
            print(
                f"{name:>12} {len(run.meter):>8} {figure:>12} {real[figure] * 1e3:>9.1f} {guess[figure] * 1e3:>9.1f} {error:>+7.1%} {limit:>6.0%}"
                f"  {' '.join(f'{value:+.1%}' for value in values)}"
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
