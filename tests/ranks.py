"""Engines on ranks that are there already, and what must hold for them however their ranks run."""

import asyncio
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM, EngineDeadError
from minivllm.engine.core import EngineCore
from minivllm.engine.llm import LLM
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lora.adapter import LoRARequest, lora_targets
from minivllm.models.mixers.moe import MoESpec
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
    shapes = plan.model.spec.weight_shapes(Share(0, len(memory), *args.expert_sharing))
    matrices = sum(4 * rows * columns for rows, columns in (shape for shape in shapes.values() if len(shape) == 2))
    extra = [shape for name, shape in shapes.items() if re.search("kv_b_proj|wpe|embed_positions", name)]
    for rank in memory:
        assert rank["matrices"] == matrices - sum(4 * rows * columns for rows, columns in extra)
        assert rank["kv_cache"] == plan.config.kv_cache.num_blocks * plan.config.kv_cache.bytes_per_block


def write_adapter(folder: Path, model, modules: str | tuple[str, ...]) -> LoRARequest:
    """A random adapter of rank 4 of a model's modules whose names end so, in PEFT's files."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    targets = lora_targets(plan_engine(EngineArgs(model=str(model), **SIZES)).model.spec)
    targets = {name: sizes for name, sizes in targets.items() if name.endswith(modules)}
    for name, (outputs, inputs) in targets.items():
        for kind, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
            values = torch.randn(shape, generator=generator) * 0.4 / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("one", 1, str(folder))


def check_all_to_all(workers: Calls, path, folder: Path) -> None:
    """Whole experts, to which tokens travel: the tokens of one rank, with preemption, prefix hits and adapters, also of routers.
    Every rank's trace shows the exchanges, and what all ranks put into them is what a formula says."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    changes = {"num_gpu_blocks": 12, "max_model_len": 100, "enable_lora": True}
    adapters = {"lora_request": [write_adapter(folder / "one", path, ("o_proj", "gate")), None] * 3}
    llm = LLM(str(path), **{**SIZES, **changes})
    want, adapted = tokens(llm, params), tokens(llm, params, **adapters)
    assert [a == b for a, b in zip(want, adapted, strict=True)] == [False, True] * 3
    llm.close()
    changes |= {"enable_expert_parallel": True, "all2all_backend": "all_to_all"}
    llm = sharded(workers, path, **changes)
    assert tokens(llm, params, **adapters) == adapted
    with llm.record(ranks=True) as trace:
        assert tokens(llm, params) == want
    metrics = llm.llm_engine.get_metrics()
    assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hits"] > 0
    spec = plan_engine(EngineArgs(model=str(path), **SIZES)).model.spec
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    steps = [sum(event.num_scheduled.values()) for event in trace if event.kind == "schedule" and event.num_scheduled]
    sent = [(rank, size) for rank, what, _, _, size in trace.ranks if what == "all_to_all"]
    for rank in range(workers.size):
        assert sum(one == rank for one, _ in sent) == 2 * len(mixtures) * len(steps)
    rows = sum(mixture.router.top_k for mixture in mixtures) * sum(steps)
    assert sum(size for _, size in sent) == 2 * rows * spec.hidden_size * 4
    gathered = sum(size for _, what, _, _, size in trace.ranks if what == "all_gather")
    shares = sum(workers.size * -(-n // workers.size) for n in steps) * spec.hidden_size * 4 * len(mixtures)
    logits = gathered - shares  # of the rows that one rank samples
    assert logits % (4 * workers.size * -(-spec.vocab_size // workers.size)) == 0 < logits
    check_bytes(path, llm.llm_engine.core.executor.collective_rpc("memory"), **changes)
    llm.close()


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
