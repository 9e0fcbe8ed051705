"""A policy can be slow, never wrong: greedy tokens are the same however the work is cut, ordered, moved and shared."""

import random
from typing import Any

import pytest
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.block_pool import FreeBlockQueue
from minivllm.core.policy import FCFS, LFU, DeepestFirst, FairShare, LongestPrefixMatch, Policy, Priority, ShortestFirst
from minivllm.core.scheduler import Recompute, Swap

ROOMY: dict[str, Any] = {"num_gpu_blocks": 400}


class Bites(FCFS):
    """Never more than seven tokens of one request in a step."""

    def chunk(self, request: Any, budget_left: int, view: Any) -> int:
        return min(7, budget_left)


class OldestGivesWay(FCFS):
    def victim(self, running: Any, view: Any) -> Any:
        return running[0]


POLICIES: list[Policy] = [
    FCFS(),
    Priority(),
    ShortestFirst(),
    FairShare(),
    LongestPrefixMatch(),
    LFU(),
    DeepestFirst(),
    Bites(),
    OldestGivesWay(),
]

# Settings that must not matter. "tight" pools hold one request of the greatest length, and little more.
WAYS: dict[str, dict[str, Any]] = {
    **{f"policy-{policy.name}": {"policy": policy, "tight": True} for policy in POLICIES},
    "one-by-one": {"max_num_seqs": 1, **ROOMY},
    "small-budget": {"max_num_batched_tokens": 9, "max_num_seqs": 5, **ROOMY},
    "threshold": {"long_prefill_token_threshold": 5, **ROOMY},
    "block-8": {"block_size": 8, **ROOMY},
    "block-32": {"block_size": 32, **ROOMY},
    "no-prefix-cache": {"enable_prefix_caching": False, **ROOMY},
    "radix": {"prefix_cache_index": "radix", **ROOMY},
    "recompute": {"preemption": Recompute(), "tight": True},
    "swap": {"preemption": Swap(200), "tight": True},
    "swap-little": {"preemption": Swap(6), "tight": True},
    "permuted": {"permute": True, **ROOMY},
}


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(vocab) for _ in range(40)]
    own = [[rng.randrange(vocab) for _ in range(rng.randrange(1, 50))] for _ in range(10)]
    return [shared[: 8 * (i % 6)] + tokens for i, tokens in enumerate(own)]


def answers(path: Any, groups: int, way: dict[str, Any], max_tokens: int = 18, vocab: int = 250, **fixed: Any) -> Any:
    way = dict(way)
    tight, permute = way.pop("tight", False), way.pop("permute", False)
    if tight:
        way["num_gpu_blocks"] = groups * 8 + 3
    with LLM(path, dtype="float32", max_model_len=128, **{"block_size": 16, **fixed, **way}) as llm:
        scheduler = llm.llm_engine.core.scheduler
        if permute:
            blocks = scheduler.kv_cache_manager.block_pool.blocks[1:]
            random.Random(1).shuffle(blocks)
            scheduler.kv_cache_manager.block_pool.free_queue = FreeBlockQueue(blocks)
        count = len(prompts(vocab))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)
        with llm.record() as trace:
            outs = llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts(vocab)],
                params,
                use_tqdm=False,
                priority=[i % 3 for i in range(count)],
                user=[str(i % 2) for i in range(count)],
            )
        trace.check()
        assert scheduler.kv_cache_manager.block_pool.num_free == scheduler.kv_cache_manager.block_pool.num_blocks
        if tight:
            assert scheduler.num_preemptions, "the pool was meant to be too small"
        tokens = [out.outputs[0].token_ids for out in outs]
        logprobs = [
            [step[t].logprob for step, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
            for o in outs
        ]
        return tokens, logprobs


# All ways on one full-attention model, and those that move blocks about on models with windows.
HARD = ("policy-OldestGivesWay", "small-budget", "recompute", "swap", "block-8")
REFERENCE = [("llama", way) for way in WAYS] + [(m, way) for m in ("mistral-window", "gemma3") for way in HARD]
FAST = [("llama", "policy-ShortestFirst"), ("llama", "small-budget"), ("gemma3", "swap"), ("gemma3", "permuted")]


@pytest.fixture(scope="module")
def expected(tiny_model_path: Any) -> Any:  # noqa: F811
    """What each model answers with room for everything, computed once."""
    known: dict[str, Any] = {}

    def answer(name: str) -> tuple[Any, int, Any]:
        path, groups = tiny_model_path(name), 2 if name == "gemma3" else 1
        if name not in known:
            known[name] = answers(path, groups, ROOMY, attention_backend="reference")
        return path, groups, known[name]

    return answer


@pytest.mark.parametrize(("model", "way"), REFERENCE)
def test_tokens_and_logits_are_bit_identical_on_the_reference_backend(expected: Any, model: str, way: str) -> None:
    path, groups, same = expected(model)
    assert answers(path, groups, WAYS[way], attention_backend="reference") == same


@pytest.mark.parametrize(("model", "way"), FAST)
@pytest.mark.parametrize("backend", ["sdpa", "numba_cpu"])
def test_tokens_are_identical_on_the_fast_backends(expected: Any, model: str, way: str, backend: str) -> None:
    path, groups, (tokens, _) = expected(model)
    assert answers(path, groups, WAYS[way], attention_backend=backend)[0] == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "policy-ShortestFirst",
        "policy-LongestPrefixMatch",
        "policy-Bites",
        "small-budget",
        "block-32",
        "swap",
        "recompute",
        "no-prefix-cache",
        "permuted",
    ],
)
def test_tokens_of_the_real_model(smollm2_path: Any, way: str, request: pytest.FixtureRequest) -> None:
    cache = request.config.stash.setdefault(REAL, {})
    if not cache:
        cache["expected"] = answers(smollm2_path, 1, ROOMY, max_tokens=16, vocab=20_000)[0]
    assert answers(smollm2_path, 1, WAYS[way], max_tokens=16, vocab=20_000)[0] == cache["expected"]


REAL: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
