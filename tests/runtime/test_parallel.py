"""Several ranks give the tokens of one: tensor and expert parallelism by worker processes."""

import json
import re
import sys
from pathlib import Path

import pytest

from tiny_models import tiny_model_path  # noqa: F401

from minivllm.core.config import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.llm import LLM
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.adapter import LoRARequest
from minivllm.models.parallel import Share
from minivllm.models.tokenizer import get_tokenizer
from minivllm.runtime.executor import plan_engine
from minivllm.runtime.executors.mp import MultiprocExecutor, start_workers
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets are inherited")
SIZES = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_gpu_blocks": 60, "attention_backend": "sdpa"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHARED = "A long beginning that several of the requests share, word by word, "
PROMPTS = [SHARED + "and then one", "Hello", SHARED + "and then another", "abcabcabcabcabc", "The end", "x"]


@pytest.fixture(scope="module")
def pair():
    """Two workers, for all tests."""
    workers = start_workers(2, "cpu")
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def four():
    workers = start_workers(4, "cpu")
    yield workers
    workers.close()


def sharded(workers, path, **changes) -> LLM:
    """An LLM whose ranks are these workers."""
    args = EngineArgs(model=str(path), tensor_parallel_size=workers.size, **{**SIZES, **changes})
    plan = plan_engine(args)
    executor = MultiprocExecutor(plan, workers)
    tokenizer = get_tokenizer(plan.model.path)
    grammar = GrammarCompiler(tokenizer, plan.config.model.vocab_size)
    core = EngineCore(executor.config, executor, grammar=grammar)
    llm = LLM.__new__(LLM)
    llm._start_with(LLMEngine(executor.config, core, tokenizer, plan.model.generation_config))
    llm.llm_engine.know_adapters(plan.model.spec)
    return llm


def tokens(llm: LLM, params=GREEDY, prompts=PROMPTS, **options) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False, **options)]


def both(workers, path, run, **changes):
    """What `run` gives on one rank and on the workers, and the bytes that `memory` counts there."""
    results = []
    for make in (lambda: LLM(str(path), **{**SIZES, **changes}), lambda: sharded(workers, path, **changes)):
        llm = make()
        results.append(run(llm))
        memory = llm.llm_engine.core.executor.collective_rpc("memory") if llm.config.args.world_size > 1 else None
        llm.llm_engine.close()
    return *results, memory


def check_bytes(path, memory, **changes):
    """Weights and cache of every rank are what the plan says."""
    args = EngineArgs(model=str(path), tensor_parallel_size=len(memory), **{**SIZES, **changes})
    plan = plan_engine(args)
    shapes = plan.model.spec.weight_shapes(Share(0, len(memory), args.enable_expert_parallel))
    matrices = sum(4 * rows * columns for rows, columns in (shape for shape in shapes.values() if len(shape) == 2))
    extra = [shape for name, shape in shapes.items() if re.search("kv_b_proj|wpe|embed_positions", name)]
    for rank in memory:
        assert rank["matrices"] == matrices - sum(4 * rows * columns for rows, columns in extra)
        assert rank["kv_cache"] == plan.config.kv_cache.num_blocks * plan.config.kv_cache.bytes_per_block


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tied-biased", "phi3", "gemma3", "gpt-oss", "deepseek-v3"])
def test_two_ranks_give_the_tokens_of_one(name, pair, tiny_model_path):
    """Prefix hits, and preemption: 14 blocks do not hold all."""
    path = tiny_model_path(name)
    want, got, memory = both(pair, path, tokens, num_gpu_blocks=15 if name != "gemma3" else 40)
    assert got == want
    check_bytes(path, memory, num_gpu_blocks=15 if name != "gemma3" else 40)
