"""Runs for the tests of the views: a small pool, so that everything happens that a view must show."""

import random
from typing import Any

import numpy as np
from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import FCFS
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace
from minivllm.viz.timeline_data import (
    DECODE,
    FINISHES,
    PREEMPTED,
    PREFILL,
    REMOTE,
    STALLED,
    SWAPPED,
    WAITING,
    TimelineData,
)


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


# What the page must tell of a cell of the timeline, from the spans.

WORDS = {
    WAITING: "waiting",
    PREEMPTED: "preempted",
    SWAPPED: "swapped out",
    REMOTE: "blocks on their way",
    STALLED: "running, but got no tokens",
}


def span(data: TimelineData, request: int, step: int) -> int | None:
    """The span of a request in a step; None before it came and after it ended."""
    found = np.flatnonzero((data.request == request) & (data.start <= step) & (step < data.end))
    return int(found[0]) if len(found) else None


def kind_of(data: TimelineData, request: int, step: int) -> int | None:
    i = span(data, request, step)
    return None if i is None else int(data.kind[i])


def words_of(data: TimelineData, request: int, step: int) -> str:
    """What happened to a request in a step, and why, in one line."""
    i = span(data, request, step)
    if i is None:
        return "not there yet" if step <= data.finish[request] else f"finished: {FINISHES[data.finish_kind[request]]}"
    kind, tokens, reason = int(data.kind[i]), int(data.tokens[i]), data.reasons[data.reason[i]]
    if kind == DECODE:
        here = data.drafts[(data.drafts[:, 0] == step) & (data.drafts[:, 1] == request)]
        return f"decode, {here[0, 3]} of {here[0, 2]} draft tokens accepted" if len(here) else "decode"
    if kind == PREFILL:
        cut = f" of the {data.wanted[i]} that it wanted: {reason}" if reason else ""
        return f"prefill, {tokens} token{'s' * (tokens != 1)}{cut}"
    why = "" if kind == STALLED else reason or behind(data, request, step)
    return f"{WORDS[kind]}: {why}" if why else WORDS[kind]


def behind(data: TimelineData, request: int, step: int) -> str:
    """Whom a request without its own reason waits behind."""
    heads = data.waits[data.waits[:, 0] <= step]
    if not len(heads):
        return ""
    _, first, code = heads[-1].tolist()
    if first == request or kind_of(data, first, step) not in (WAITING, PREEMPTED, SWAPPED, REMOTE):
        return ""
    return f"behind {data.names.get(data.request_ids[first], data.request_ids[first])} ({data.reasons[code]})"
