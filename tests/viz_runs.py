"""Runs for the tests of the views: a small pool, so that everything happens that a view must show."""

import random
from typing import Any

from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import FCFS
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace


class Moody(FCFS):
    """Now and then gives a request nothing, so that it runs without a token."""

    def chunk(self, request: Any, budget_left: int, view: Any) -> int:
        return 0 if view.step % 7 == 3 and int(request.request_id[1:]) % 3 == 0 else budget_left


def busy_trace(
    seed: int = 0,
    kind: str = "full",
    swap: int = 0,
    salts: tuple[Any, ...] = (None,),
    blocks: int = 22,
    policy: Any = None,
) -> Trace:
    """Twenty-five requests with common beginnings; some are aborted, some preempted. Recording begins when two are under way."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=14, max_model_len=64),
        CacheConfig(block_size=4, num_gpu_blocks=blocks, num_cpu_blocks=swap),
        kv_config(kind, 4, blocks),
        policy=policy,
    )
    beginning = [rng.randrange(3) for _ in range(12)]

    def step() -> None:
        output = scheduler.schedule()
        scheduler.update_from_output(output, fake_model(output, scheduler))

    def add(name: str) -> None:
        prompt = beginning[: 4 * rng.randrange(4)] + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        scheduler.add_request(Request(name, prompt, max_tokens=rng.randrange(1, 20), cache_salt=rng.choice(salts)))

    for i in range(2):
        add(f"r{i}")
    step()
    trace = scheduler.record()
    for i in range(2, 25):
        add(f"r{i}")
        for _ in range(rng.randrange(4)):
            step()
        if rng.random() < 0.15 and scheduler.requests:
            scheduler.finish_requests([rng.choice(list(scheduler.requests))])
        if i == 18:
            scheduler.reset_prefix_cache(reset_running_requests=True)
    while scheduler.requests:
        step()
    return trace
