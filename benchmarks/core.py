"""How fast is the scheduler alone? Decode steps per second with a fake executor, against running and waiting requests.

    python benchmarks/core.py [--quick]

Prints steps per second (256 running: at least 1,500), nanoseconds per scheduled token, and the cost of recording, each as a ratio within this run;
and microseconds to admit a prompt.
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


def admission(scheduler: Scheduler, first: int, length: int = 512) -> float:
    """Microseconds to schedule a prompt, in a burst of 256 of which nothing is cached. first: number of the first request."""
    for i in range(first, first + 256):
        scheduler.add_request(Request(str(i), list(range(i, i + length)), max_tokens=1))
    seconds = 0.0
    while scheduler.has_requests():
        start = time.perf_counter()
        output = scheduler.schedule()
        seconds += time.perf_counter() - start
        done = [name for name in output.num_scheduled_tokens if scheduler.requests[name].num_computed_tokens == length]
        scheduler.update_from_output(output, ModelRunnerOutput({name: [7] for name in done}))
    return 1e6 * seconds / 256


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
    limits = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2048)
    scheduler = Scheduler(limits, CacheConfig(16, 8192))  # a burst evicts what the one before left
    times = [admission(scheduler, 256 * turn) for turn in range(11)][2:]
    print(f"admission of a prompt of 512 tokens, with eviction: {statistics.median(times):.0f} us")


if __name__ == "__main__":
    main()
