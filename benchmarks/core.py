"""How fast is the scheduler alone? Decode steps per second with a fake executor, against running and waiting requests.

    python benchmarks/core.py [--quick]

Prints steps per second (256 running: at least 1,500), nanoseconds per scheduled token, and the cost of recording, each as a ratio within this run.
"""

import argparse
import gc
import statistics
import time

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import FCFS, Priority
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


def decoding(running: int, waiting: int, context: int = 64, policy=None) -> Scheduler:
    """A scheduler with this many requests in the middle of decoding and this many waiting behind them."""
    blocks = running * (-(-(context + 4096) // 16)) + 1
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=running * context, max_model_len=context + 4096
    )
    scheduler = Scheduler(config, CacheConfig(16, blocks), policy=policy)
    for i in range(running + waiting):
        scheduler.add_request(Request(str(i), [i % 1000] * context, max_tokens=4000))
    step(scheduler)
    assert len(scheduler.running) == running
    return scheduler


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    scheduler.update_from_output(
        output, ModelRunnerOutput({request_id: [7] for request_id in output.num_scheduled_tokens})
    )


def rate(scheduler: Scheduler, steps: int) -> float:
    """Steps per second over `steps` steps."""
    start = time.perf_counter()
    for _ in range(steps):
        step(scheduler)
    return steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    quick = parser.parse_args().quick
    gc.freeze()
    base = None
    print(f"{'running':>8} {'waiting':>8} {'context':>8} {'policy':>9} {'steps/s':>9} {'ns/token':>9} {'ratio':>6}")
    points = [
        (256, 0, 64, FCFS),
        (64, 0, 64, FCFS),
        (1024, 0, 64, FCFS),
        (256, 10_000, 64, FCFS),
        (256, 10_000, 64, Priority),
        (256, 0, 2048, FCFS),
    ]
    if not quick:
        points += [(4096, 0, 64, FCFS), (256, 100_000, 64, FCFS), (256, 100_000, 64, Priority), (256, 0, 4096, FCFS)]
    for running, waiting, context, policy in points:
        scheduler = decoding(running, waiting, context, policy())
        n = max(32, 64_000 // running)
        steps = statistics.median(rate(scheduler, n // 4) for _ in range(15))
        ns = 1e9 / steps / running
        base = base or ns
        print(f"{running:>8} {waiting:>8} {context:>8} {policy.__name__:>9} {steps:>9.0f} {ns:>9.0f} {ns / base:>6.2f}")
        del scheduler
    off, on = decoding(256, 0), decoding(256, 0)
    on.record()
    ratios = [rate(off, 100) / rate(on, 100) for _ in range(21)]
    print(f"recording on, time against off: {statistics.median(ratios):.2f} (limit 1.35)")


if __name__ == "__main__":
    main()
