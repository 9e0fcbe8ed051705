"""A rehearsal leaves nothing behind, whatever the cache looks like."""

from typing import Any

import pytest
from tiny_models import tiny_model_path

from minivllm.core.config import EngineArgs
from minivllm.engine.llm_engine import LLMEngine, rehearsal, warm_up
from minivllm.sampling.params import SamplingParams

__all__ = ["tiny_model_path"]


def answer(engine: LLMEngine) -> list[int]:
    engine.add_request("a", [1, 2, 3] * 20, SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {}),
        ("llama", {"max_num_seqs": 1, "num_gpu_blocks": 6}),
        ("llama", {"max_num_batched_tokens": 7}),
        ("mistral-window", {}),
        ("gemma3", {"num_gpu_blocks": 24}),  # two groups of layers share the blocks
    ],
)
def test_an_engine_that_has_rehearsed_is_like_a_new_one(tiny_model_path: Any, model: str, settings: dict[str, Any]):
    args = EngineArgs(model=str(tiny_model_path(model)), dtype="float32", **{"num_gpu_blocks": 64, **settings})
    fresh, warm = LLMEngine.from_engine_args(args), LLMEngine.from_engine_args(args)
    before = warm.get_metrics()
    decisions = list(rehearsal(warm.config))
    assert decisions[0].new_requests and decisions[-1].finished
    assert all(d.total_num_scheduled_tokens <= warm.config.scheduler.max_num_batched_tokens for d in decisions)
    used = [block for new in decisions[0].new_requests for table in new.block_ids for block in table]
    assert len(set(used)) == len(used) and 0 < min(used) and max(used) < warm.config.kv_cache.num_blocks
    warm_up(warm.core.executor, warm.config)
    assert warm.get_metrics() == before
    assert answer(warm) == answer(fresh)


def test_a_cache_without_room_is_left_alone(tiny_model_path: Any):
    args = EngineArgs(model=str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=64, max_model_len=3)
    assert list(rehearsal(LLMEngine.from_engine_args(args).config)) == []
