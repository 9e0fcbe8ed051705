"""What goes wrong with an adapter stays with the requests that asked for it, and the next request may succeed."""

import gc
import shutil
import threading
import weakref
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import GREEDY, SIZES, VARIANTS, greedy, peft_adapter, prompts_of
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.lora import store
from minivllm.lora.adapter import Adapter, AdapterError
from minivllm.lora.linear import LoRAModel, PreparedAdapter

PROMPT = prompts_of("base")[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Name, folder and merged model of three adapters."""
    root = tmp_path_factory.mktemp("faults")
    names = ("all-linear", "rslora", "gate-only")
    return {n: (root / n, peft_adapter("llama", VARIANTS[n], root / n, seed=i)) for i, n in enumerate(names)}


def request(made: Any, name: str, folder: Path | None = None) -> LoRARequest:
    return LoRARequest(name, list(made).index(name) + 1, str(folder or made[name][0]))


def run(llm: LLM, *loras: LoRARequest | None) -> list[Any]:
    return llm.generate([PROMPT] * len(loras), GREEDY, lora_request=list(loras), use_tqdm=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_that_fails_leaves_nothing_behind(tiny_model_path, made, tmp_path, is_async):  # noqa: F811
    """Its requests end with the reason, its slot is free, and no block of theirs is found later under the adapter's key."""
    shutil.copytree(made["rslora"][0], tmp_path / "a")
    lora, other = request(made, "rslora", tmp_path / "a"), request(made, "all-linear")
    few = SIZES | {"max_num_batched_tokens": 48}
    with LLM(
        tiny_model_path("llama"), enable_lora=True, max_loras=1, async_scheduling=is_async, block_size=4, **few
    ) as llm:
        scheduler, executor = llm.llm_engine.core.scheduler, llm.llm_engine.core.executor
        llm.llm_engine.add_lora(lora)
        run(llm, other)  # main memory holds one adapter: rslora must be read again
        (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "away")
        with llm.record() as trace:
            # as if they were read and then pushed out of main memory before their step
            llm.llm_engine.core._adapters[llm.llm_engine.input_processor.register(lora).key] = done()
            executor.runner.prefetch_lora = lambda *about: done()
            outputs = run(llm, lora, lora, None)
            trace.check()
        assert [o.error is not None for o in outputs] == [True, True, False]
        assert "cannot be loaded" in outputs[0].error and "adapter_model.safetensors" in outputs[1].error
        assert outputs[2].outputs[0].token_ids == greedy(hf_model("llama"), PROMPT)
        assert not scheduler.adapters.slot_of and not scheduler.adapters.loading
        del executor.runner.prefetch_lora
        (tmp_path / "away").rename(tmp_path / "a" / "adapter_model.safetensors")
        (output,) = run(llm, lora)
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == greedy(made["rslora"][1], PROMPT)


def done() -> Any:
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_raises_takes_its_loads_back(tiny_model_path, made, monkeypatch, is_async):  # noqa: F811
    """Else the next request would get the base model's text under the adapter's name."""
    lora, copy = request(made, "rslora"), LoRAModel.set_slot
    with LLM(tiny_model_path("llama"), enable_lora=True, async_scheduling=is_async, **SIZES) as llm:

        def fail(*about: Any) -> None:
            raise MemoryError("no room for a slot")

        monkeypatch.setattr(LoRAModel, "set_slot", fail)
        with llm.record() as trace, pytest.raises(MemoryError):
            run(llm, lora)
        trace.check()
        assert trace.at(-1).loras == {} == llm.llm_engine.core.scheduler.adapters.slot_of
        monkeypatch.setattr(LoRAModel, "set_slot", copy)
        (output,) = run(llm, lora)
        assert output.outputs[0].token_ids == greedy(made["rslora"][1], PROMPT)


def test_main_memory_holds_max_cpu_loras(tiny_model_path, made, monkeypatch):  # noqa: F811
    prepare, read = LoRAModel.prepare, list[Any]()

    def remember(*about: Any) -> PreparedAdapter:
        adapter = prepare(*about)
        read.append(weakref.ref(adapter))
        return adapter

    monkeypatch.setattr(LoRAModel, "prepare", remember)
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=1, max_cpu_loras=2, **SIZES) as llm:
        for name in (*made, *made):
            (output,) = run(llm, request(made, name))
            assert output.outputs[0].token_ids == greedy(made[name][1], PROMPT)
        gc.collect()
        assert len(read) >= 5 and sum(each() is not None for each in read) <= 2


def test_add_lora_waits_for_the_weights(tiny_model_path, made, tmp_path):  # noqa: F811
    """The error is the caller's, and the name is free for an adapter that can be read."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "a"
    shutil.copytree(made["rslora"][0], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: x * torch.nan for name, x in tensors.items()}, folder / "adapter_model.safetensors")
    with LLM(tiny_model_path("llama"), enable_lora=True, **SIZES) as llm:
        with pytest.raises(AdapterError, match="numbers that are not finite"):
            llm.llm_engine.add_lora(LoRARequest("a", 1, str(folder)))
        assert llm.llm_engine.list_loras() == set()
        save_file(tensors, folder / "adapter_model.safetensors")
        llm.llm_engine.add_lora(LoRARequest("a", 1, str(folder)))
        (output,) = run(llm, LoRARequest("a", 1, str(folder)))
        assert output.outputs[0].token_ids == greedy(made["rslora"][1], PROMPT)


def test_a_load_holds_no_other_stream_up(tiny_model_path, made, monkeypatch):  # noqa: F811
    """A stream has a token in every step: while the file is read, however long that takes, and when the slot is filled."""
    may_read, load = threading.Event(), store.load_adapter

    def slowly(*about: Any) -> Adapter:
        may_read.wait(10)
        return load(*about)

    monkeypatch.setattr(store, "load_adapter", slowly)
    with LLM(tiny_model_path("llama"), enable_lora=True, **SIZES) as llm:
        engine, said = llm.llm_engine, {"stream": 0, "late": 0}

        def step() -> None:
            before = said["stream"]
            for output in engine.step():
                said[output.request_id] = len(output.outputs[0].token_ids)
            assert said["stream"] == before + 1

        engine.add_request("stream", PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        step()
        engine.add_request("late", PROMPT, GREEDY, lora_request=request(made, "rslora"))
        for _ in range(10):
            step()
        assert said["late"] == 0
        may_read.set()
        wait([engine.core._adapters[engine.input_processor.register(request(made, "rslora")).key]])
        for _ in range(2):  # it joins in one step, and its prompt fits that step
            step()
        assert said["late"] > 0


class Guesses:
    """Knows the answers by prompt and adapter, and is wrong at every third token."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.answers = answers

    def propose(self, requests: Any, view: Any) -> list[list[int]]:
        drafts = []
        for each in requests:
            said = len(each.token_ids) - each.num_prompt_tokens
            truth = self.answers[each.request_id][said : said + 3]
            drafts.append([token if (said + i) % 3 else 0 for i, token in enumerate(truth)])
        return drafts


@pytest.mark.parametrize("backend", ["numba_cpu", "numba_cpu_invariant", "reference"])
def test_speculation_with_adapters_in_one_step(tiny_model_path, made, backend):  # noqa: F811
    """Draft tokens are verified by the adapter of their own request."""
    names = [None, *made, None, *made]
    want = [greedy(hf_model("llama") if name is None else made[name][1], PROMPT) for name in names]
    assert len({tuple(tokens) for tokens in want}) > 2
    proposer = Guesses({str(i): tokens for i, tokens in enumerate(want)})
    config = {"method": proposer, "num_speculative_tokens": 3, "dynamic_length": False}
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "attention_backend": backend, **SIZES}
    with LLM(tiny_model_path("llama"), speculative_config=config, **options) as llm:
        for name in made:  # read before: a request that waits for its adapter takes steps
            llm.llm_engine.add_lora(request(made, name))
        scheduler = llm.llm_engine.core.scheduler
        before = scheduler.step
        with llm.record() as trace:
            outputs = run(llm, *(name and request(made, name) for name in names))
        trace.check()
        assert [output.outputs[0].token_ids for output in outputs] == want
        assert scheduler.spec_stats.num_accepted_tokens > 20
        assert scheduler.spec_stats.num_draft_tokens > scheduler.spec_stats.num_accepted_tokens
        assert scheduler.step - before < len(want[0])
