"""Traces to look at, made by the real scheduler with a model that samples a few tokens over and over."""

import random

from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, Swap, VirtualClock
from minivllm.core.trace import Trace


def make_trace(
    num_blocks: int = 96,
    steps: int = 80,
    *,
    kind: str = "full",
    block_size: int = 4,
    swap: int = 0,
    seqs: int = 12,
    rate: float = 0.5,
    prompt: int = 40,
    output: int = 40,
    budget: int = 96,
    seed: int = 0,
    prefixes: int = 3,
    vocabulary: int = 1000,
) -> Trace:
    """A run of `steps` steps in which about `rate` requests arrive a step, sharing `prefixes` first halves of their prompts."""
    draw, clock = random.Random(seed), VirtualClock()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=4 * (prompt + output)),
        CacheConfig(block_size, num_blocks, num_cpu_blocks=swap),
        None if kind == "full" else kv_config(kind, block_size, num_blocks, window=4 * block_size),
        clock=clock,
        preemption=Swap(swap) if swap else None,
    )
    heads = [[draw.randrange(vocabulary) for _ in range(prompt // 2)] for _ in range(prefixes)]
    trace, number = scheduler.record(), 0
    for _ in range(steps):
        while draw.random() < rate / (1 + rate):
            tail = [draw.randrange(vocabulary) for _ in range(draw.randint(1, prompt))]
            scheduler.add_request(
                Request(
                    f"r{number}",
                    draw.choice(heads) + tail,
                    max_tokens=draw.randint(2, output),
                    arrival_time=clock.now(),
                )
            )
            number += 1
        made = scheduler.schedule()
        clock.advance(0.01 + 0.0005 * made.total_num_scheduled_tokens)
        scheduler.update_from_output(made, fake_model(made, scheduler))
    scheduler.stop_recording()
    return trace


def named(ids: list[str], steps: int = 60) -> Trace:
    """Requests of these names, and this many steps: a pool that they have to share."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200)
    scheduler = Scheduler(config, CacheConfig(4, 24))
    made = scheduler.record()
    for i, name in enumerate(ids):
        scheduler.add_request(Request(name, [1, 2, 3, 4, 5, 6, 7, 8, i], max_tokens=20))
    for _ in range(steps):
        output = scheduler.schedule()
        scheduler.update_from_output(output, fake_model(output, scheduler))
    return made


def aborted(steps: int) -> Trace:
    """One request that is aborted before it ran, and this many empty steps."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40)
    scheduler = Scheduler(config, CacheConfig(4, 14))
    made = scheduler.record()
    scheduler.add_request(Request("a", [1, 2, 3], max_tokens=4))
    scheduler.finish_requests(["a"])
    for _ in range(steps):
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({}))
    return made
