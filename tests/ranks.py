"""Engines on ranks that are there already, and what must hold for them however their ranks run."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM, EngineDeadError
from minivllm.engine.core import EngineCore
from minivllm.engine.llm import LLM
from minivllm.engine.llm_engine import LLMEngine
from minivllm.models.parallel import Share
from minivllm.models.tokenizer import get_tokenizer
from minivllm.runtime.executor import plan_engine
from minivllm.runtime.executors.mp import Calls, MultiprocExecutor, WorkerError
from minivllm.runtime.executors.ray_executor import RayExecutor, RayWorkers
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.params import SamplingParams

SIZES = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_gpu_blocks": 60, "attention_backend": "sdpa"}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHARED = "A long beginning that several of the requests share, word by word, "
PROMPTS = [SHARED + "and then one", "Hello", SHARED + "and then another", "abcabcabcabcabc", "The end", "x"]
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}


def sharded(workers: Calls, path, **changes) -> LLM:
    """An LLM whose ranks are these workers."""
    args = EngineArgs(model=str(path), **{**SIZES, "tensor_parallel_size": workers.size, **changes})
    plan = plan_engine(args)
    executor = (RayExecutor if isinstance(workers, RayWorkers) else MultiprocExecutor)(plan, workers)
    tokenizer = get_tokenizer(plan.model.path)
    grammar = GrammarCompiler(tokenizer, plan.config.model.vocab_size)
    core = EngineCore(executor.config, executor, grammar=grammar)
    llm = LLM.__new__(LLM)
    llm._start_with(LLMEngine(executor.config, core, tokenizer, plan.model.generation_config))
    llm.llm_engine.know_adapters(plan.model.spec)
    return llm


def tokens(llm: LLM, params=GREEDY, prompts=PROMPTS, **options) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False, **options)]


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


def listening(pids: list[int]) -> set[str]:
    """The addresses that these processes listen on, as /proc/net/tcp has them."""
    inodes = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def check_that_a_death_reaches_every_waiter(workers: Calls, path, kill, how: str, **changes) -> None:
    """In a thread, with requests waiting and with none. kill: a function that kills rank 1. how: what is said then."""

    async def main() -> None:
        engine = AsyncLLM(sharded(workers, path, **changes).llm_engine)
        died = asyncio.Event()
        loop = asyncio.get_running_loop()
        engine.on_death = lambda error: loop.call_soon_threadsafe(died.set)
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        streams = [await engine.submit(prompt, params) for prompt in PROMPTS]
        await anext(streams[0])
        kill()
        for stream in streams:
            with pytest.raises(EngineDeadError, match=how):
                async for _ in stream:
                    pass
        await asyncio.wait_for(died.wait(), 20)
        with pytest.raises(EngineDeadError, match=how):
            await engine.submit("x", params)
        engine.shutdown()

    asyncio.run(main())
    with pytest.raises(WorkerError, match=how):
        workers.call("memory")
