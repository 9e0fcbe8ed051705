"""Blocks that a request gives back in the middle: the pool, the trace and the answer stay right."""

import random

import pytest
from scheduling import Driver
from tiny_models import tiny_model_path  # noqa: F401

from minivllm import LLM, SamplingParams
from minivllm.attention.reference import ReferenceBackend
from minivllm.attention.select import register_backend
from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap, VirtualClock


@pytest.mark.parametrize("preemption", [Recompute(), Swap(20)])
def test_dropped_blocks_come_back_once(preemption):
    rng = random.Random(1)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    driver = Driver(Scheduler(limits, CacheConfig(4, 13), preemption=preemption, clock=VirtualClock()))
    driver.runner._read = lambda *read: None  # full attention would read what was dropped
    s = driver.scheduler
    for i in range(12):
        s.add_request(Request(str(i), [i % 3] * rng.randint(4, 20), max_tokens=30))
    dropped = 0
    while s.requests:
        driver.step()
        for request in s.running:
            if (end := request.num_computed_tokens // 4) > 2 and rng.random() < 0.2:
                start = rng.randint(1, end - 1)
                held = s.kv_cache_manager.get_block_ids(request.request_id)[0][start:end]
                assert s.kv_cache_manager.drop(request, start, end) == sum(map(bool, held))
                assert not any(s.kv_cache_manager.get_block_ids(request.request_id)[0][start:end])
                dropped += sum(map(bool, held))
        driver.check()
    assert dropped > 20 and s.num_preemptions and s.kv_cache_manager.block_pool.usage == 0


def test_what_is_not_computed_cannot_be_dropped():
    s = Scheduler(SchedulerConfig(max_model_len=64), CacheConfig(4, 20))
    request = Request("a", [1] * 10, max_tokens=4)
    s.add_request(request)
    with pytest.raises(ValueError, match="cannot drop 0 to 0"):
        s.kv_cache_manager.drop(request, 0, 1)
    s.schedule()
    with pytest.raises(ValueError, match="has 2 computed blocks; cannot drop 1 to 2"):
        s.kv_cache_manager.drop(request, 1, 3)
    assert s.kv_cache_manager.drop(request, 1, 1) == s.kv_cache_manager.drop(request, 1, -3) == 0


class SomeKeys(ReferenceBackend):
    """The first four keys and the last eight."""

    def visible(self, spec, position):
        recent = max(0, position + 1 - 8)
        return [*range(min(4, recent)), *range(recent, position + 1)]


def test_an_answer_does_not_change_when_what_it_does_not_see_is_dropped(tiny_model_path):  # noqa: F811
    register_backend("first-and-last", SomeKeys)
    answers = []
    for drop in (False, True):
        with LLM(
            str(tiny_model_path("llama")), dtype="float32", attention_backend="first-and-last", block_size=4, num_gpu_blocks=64,
            max_model_len=64, enable_prefix_caching=False,
        ) as llm, llm.record() as trace:  # fmt: skip
            engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
            for name in "ab":
                engine.add_request(name, name * 20, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
            done = {}
            while engine.has_unfinished_requests():
                done |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
                for request in scheduler.running if drop else ():
                    scheduler.kv_cache_manager.drop(request, 1, (request.num_computed_tokens - 8) // 4)
                    assert sum(map(bool, scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])) <= 5
        trace.check()
        answers.append({name: list(ids) for name, ids in done.items()})
    assert answers[0] == answers[1] and len(answers[0]["a"]) == 24
    with LLM(str(tiny_model_path("llama")), dtype="float32", attention_backend="reference", num_gpu_blocks=64) as llm:
        [full] = llm.generate("a" * 20, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), use_tqdm=False)
    assert list(full.outputs[0].token_ids) != answers[0]["a"]
