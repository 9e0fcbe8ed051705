"""Other weights in a running engine, and memory that is given back: the tokens of an engine made of the new checkpoint."""

import asyncio
import copy
import os
import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, randomise, save_tiny_model

from minivllm.core.config import EngineArgs
from minivllm.core.module import capture_problem
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.models.loading import SINGLE
from minivllm.runtime import weights
from minivllm.runtime.weights import Parked, pack_function
from minivllm.sampling.params import RequestOutputKind, SamplingParams

SIZES = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_gpu_blocks": 60}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["A long beginning that all share, and one", "Hello", "A long beginning that all share, and another"]
MODES = {
    "packed": ("llama-tied-biased", {"dtype": "bfloat16"}),
    "experts": ("mixtral", {}),
    "states": ("mamba2", {}),
    "latent": ("deepseek-v3", {}),
    "int8": ("llama-tied-biased", {"quantization": "int8_per_channel_weight_only"}),
    "int4": ("llama", {"quantization": "int4_per_group_weight_only", "dtype": "bfloat16"}),
    "adapters and fp8 cache": ("llama", {"enable_lora": True, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}),
    "drafts": ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
}


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function: two checkpoints of a tiny model."""

    def make(name: str) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("weights")
        first = save_tiny_model(name, folder / "a")
        second = save_tiny_model(name, folder / "b")
        model = copy.deepcopy(hf_model(name))
        randomise(model, seed=7)
        model.save_pretrained(second)
        return str(first), str(second)

    return make


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_the_tokens_of_an_engine_made_of_the_new_checkpoint(mode, pair):
    """From a folder, from its own again, from tensors, and after both levels of sleep."""
    name, changes = MODES[mode]
    a, b = pair(name)
    with LLM(b, **SIZES | changes) as llm:
        new = tokens(llm)
    with LLM(a, **SIZES | changes) as llm:
        old = tokens(llm)
        assert old != new
        assert llm.load_weights(b) == 1 and tokens(llm) == new
        assert llm.load_weights() == 2 and tokens(llm) == old
        assert llm.load_weights(load_file(f"{b}/{SINGLE}").items(), version=7) == 7 and tokens(llm) == new
        llm.sleep(level=2)
        llm.load_weights(a)
        llm.wake_up()
        assert tokens(llm) == old
        llm.sleep()
        llm.wake_up(["kv_cache"])
        assert llm.is_sleeping()
        llm.wake_up()
        assert tokens(llm) == old and not llm.is_sleeping()


@pytest.fixture(scope="module")
def two(pair):
    return pair("llama")


@pytest.fixture
def llm(two):
    with LLM(two[0], **SIZES) as llm:
        yield llm


def test_requests_in_flight_go_on_by_the_new_weights_or_end(llm, two):
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with llm.record() as trace:
        engine.add_request("x", PROMPTS[0], params)
        while len(before := engine.step()[0].outputs[0].token_ids) < 4:
            pass
        engine.load_weights(two[1], version=3)
        while not (output := engine.step())[0].finished:
            pass
    (output,) = output
    kept, given = output.prompt_token_ids + list(before), output.outputs[0].token_ids
    with LLM(two[1], **SIZES) as fresh:
        rest = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        want = fresh.generate({"prompt_token_ids": kept}, rest, use_tqdm=False)[0].outputs[0].token_ids
    assert list(given) == list(before) + list(want) and output.weight_version == 3
    assert ("note", "weight_version", 3, "load_weights") in trace.events
    trace.check()
    assert engine.get_metrics()["weight_version"] == engine.weight_version == 3
    engine.add_request("y", PROMPTS[0], params)
    engine.step()
    engine.load_weights(mode="abort")
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort" and not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="mode must be 'abort' or 'keep'"):
        engine.load_weights(mode="wait")


def test_what_is_wrong_is_said_before_a_weight_changes(llm, two, tmp_path):
    old = tokens(llm)
    other = save_tiny_model("llama-mha", tmp_path / "other")
    with pytest.raises(ValueError, match="is another model"):
        llm.load_weights(other)
    with pytest.raises(ValueError, match="version must be a number"):
        llm.load_weights(version=-1)
    for nothing in ({}, [], 5, [1, 2], [("model.norm.weight", "x")], {"model.norm.weight": np.ones(4)}, ""):
        with pytest.raises((TypeError, ValueError), match=r"^load_weights.*(takes|no tensor|is empty)"):
            llm.load_weights(nothing)
    assert tokens(llm) == old and llm.llm_engine.weight_version == 0
    state = load_file(f"{two[1]}/{SINGLE}")
    del state["model.norm.weight"]
    (tmp_path / "part").mkdir()
    save_file(state, tmp_path / "part" / SINGLE)
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        llm.load_weights(tmp_path / "part")
    state = load_file(f"{two[1]}/{SINGLE}")
    first, (name, matrix) = next(iter(state)), next((n, t) for n, t in reversed(state.items()) if t.ndim == 2)
    nan, big = matrix.clone(), matrix.double()
    nan[-1, -1], big[-1, -1] = torch.nan, 1e300
    for wrong, said in (
        ({"model.extra.weight": torch.ones(2)}, "has a tensor 'model.extra.weight' that this model has no place for"),
        ({name: matrix[1:].clone()}, f"{name}' must have shape"),
        ({name: nan}, f"tensor '{name}' has values that are no finite numbers"),
        ({name: big}, f"tensor '{name}' has values that are no finite numbers in torch.float32"),
        ({name: matrix.int()}, f"tensor '{name}' has dtype torch.int32"),
        ({name: matrix.to(torch.float8_e4m3fn)}, f"tensor '{name}' has dtype torch.float8"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)}, "must be one number above 0"),
    ):
        for given in (state | wrong, iter((state | wrong).items())):
            with pytest.raises(ValueError, match=re.escape(said)):
                llm.load_weights(given)
    with pytest.raises(ValueError, match=f"tensor '{first}' came twice"):
        llm.load_weights([*state.items(), (first, state[first])])
    assert tokens(llm) == old and llm.llm_engine.weight_version == 0
    assert llm.load_weights(load_file(f"{two[0]}/{SINGLE}"), version=5) == 5  # a dict
    assert tokens(llm) == old
    with pytest.raises(ValueError, match="must be a number from 5 on, that of the weights now; got 4"):
        llm.load_weights(version=4)
    assert llm.load_weights(version=5) == 5
    llm.sleep()
    llm.wake_up("weights")
    assert llm.llm_engine.core.missing() == {"kv_cache": "wake_up()"}
    llm.wake_up("kv_cache")
    with pytest.raises(ValueError, match="level must be 1"):
        llm.sleep(3)
    with pytest.raises(ValueError, match="'weights' and 'kv_cache', got 'cache'"):
        llm.wake_up(["cache"])


def test_weights_that_are_torn_end_requests_with_an_error(llm, two, monkeypatch):
    """Loading fails when some weights have changed: nothing waits for ever, and no call says that all is well."""
    old, engine, load = tokens(llm), llm.llm_engine, Decoder.load_weights

    def fail(model, weights):
        load(model, islice(weights, 3))

    engine.add_request("x", PROMPTS[0], GREEDY)
    engine.step()
    monkeypatch.setattr(Decoder, "load_weights", fail)
    with pytest.raises(RuntimeError, match="load_weights has failed half-way.*lacks"):
        engine.load_weights(two[1])
    engine.add_request("y", PROMPTS[1], GREEDY)
    ended = engine.step()
    assert [o.request_id for o in ended] == ["x", "y"] and all("half-way" in o.error for o in ended)
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="sleeps"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(RuntimeError, match=r"weights by load_weights\(\)"):
        engine.step()
    for tags in (None, ["weights"]):
        with pytest.raises(RuntimeError, match="failed half-way"):
            llm.wake_up(tags)
    assert llm.is_sleeping() and engine.weight_version == 0
    monkeypatch.undo()
    llm.load_weights(load_file(f"{two[0]}/{SINGLE}"))
    assert tokens(llm) == old and not llm.is_sleeping()


def test_a_model_of_transformers_sleeps_with_its_weights(two):
    with LLM(two[0], model_impl="transformers", **SIZES) as llm:
        want = tokens(llm)
        for call in (lambda: llm.sleep(level=2), lambda: llm.load_weights(two[1])):
            llm.llm_engine.add_request("x", PROMPTS[0], GREEDY)
            with pytest.raises(ValueError, match="are not the decoder's"):
                call()
            assert "x" in llm.llm_engine.core.scheduler.requests  # it has not ended
            llm.llm_engine.abort_request("x")
        assert tokens(llm) == want
        llm.sleep()
        llm.wake_up()
        assert tokens(llm) == want


def test_a_function_of_the_model(llm, monkeypatch):
    assert llm.apply_model(lambda model: model.spec.num_layers) == [4]
    assert llm.collective_rpc("has_weights") == [True]
    with pytest.raises(ValueError, match="by its module and name"):
        pack_function(lambda model: 1)
    for method, said in (("sleep", "which has sleep"), ("load_weights", "which has load"), ("fly", "attribute 'fly'")):
        with pytest.raises(ValueError, match=rf"^collective_rpc\('{method}'\).*{said}"):
            llm.collective_rpc(method, args=(1,))
    runner = llm.llm_engine.core.executor.runner
    monkeypatch.setattr(runner, "fall", lambda: runner.model.wings, raising=False)
    with pytest.raises(AttributeError, match="'Decoder' object has no attribute 'wings'"):
        llm.collective_rpc("fall")
    assert not llm.is_sleeping()


@pytest.mark.skipif(sys.platform != "linux", reason="gives pages back by madvise")
def test_what_sleep_gives_back(tmp_path):
    """Measured: pages of this process. A model of 40 MB, and as much of a cache that was written."""
    folder = save_tiny_model("llama", tmp_path / "model")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    with LLM(
        str(folder), load_format="dummy", hf_overrides=sizes, **SIZES | {"num_gpu_blocks": 1200, "block_size": 32}
    ) as llm:
        executor = llm.llm_engine.core.executor
        before = tokens(llm)
        for cache in executor.runner.kv_caches:
            cache.fill_(1.0)
        cache = sum(cache.nbytes for cache in executor.runner.kv_caches)
        weights = sum(
            4 * n for n in map(torch.Size.numel, map(torch.Size, executor.runner.model.spec.weight_shapes().values()))
        )
        assert min(cache, weights) > 30e6
        full = resident()
        llm.sleep(level=1)
        awake = full - resident()
        llm.wake_up()
        assert tokens(llm) == before
        less = resident()
        llm.sleep(level=2)
        assert 0.95 < awake / cache < 1.1 and 0.9 < (less - resident()) / weights < 1.2
        llm.load_weights()
        llm.wake_up()
        assert tokens(llm) == before


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_of_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="on Linux, not on darwin"):
        Parked([torch.ones(3)])


class Card:
    """Storage as of a GPU, which keeps its address here."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.kept = torch.full((8,), 7, dtype=torch.uint8).untyped_storage()
        self.nbytes, self.resize_, address = self.kept.nbytes, self.kept.resize_, self.kept.data_ptr()
        self.data_ptr = lambda: address


def test_a_copy_to_the_host_that_fails_changes_no_weight(monkeypatch):
    cards, real, room = [Card() for _ in range(3)], torch.empty, [1]

    def empty(*shape, pin_memory=False, **about):
        if pin_memory and not room:
            raise RuntimeError("no pinned memory")
        if pin_memory:
            room.pop()
        return real(*shape, **about)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "untyped_storage", lambda tensor: cards[int(tensor)])
        parked = Parked(map(torch.tensor, range(3)))
    monkeypatch.setattr(weights, "_bytes", lambda card: real(0, dtype=torch.uint8).set_(card.kept))
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        parked.free(keep=True)
    assert [card.nbytes() for card in cards] == [0, 8, 8]
    parked.restore()
    assert [list(card.kept) for card in cards] == [[7] * 8] * 3


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_a_sleep_that_fails_half_way(level, part, llm, monkeypatch):
    """At level 1 the engine goes on. At level 2 weights are lost, and it says so."""
    old, core, free = tokens(llm), llm.llm_engine.core, Parked.free
    failing = ["weights", "kv_cache"].index(part)
    calls = []

    def refuse(parked: Parked, keep: bool = False) -> int:
        calls.append(keep)
        if len(calls) == failing + 1:
            raise OSError("refused")
        return free(parked, keep)

    monkeypatch.setattr(Parked, "free", refuse)
    with pytest.raises(OSError, match="refused"):
        llm.sleep(level)
    monkeypatch.undo()
    assert llm.is_sleeping() == (level == 2) and core.missing() == ({} if level == 1 else {"weights": "load_weights()"})
    if level == 2:
        llm.load_weights()
    assert tokens(llm) == old
    llm.sleep(level)
    assert llm.is_sleeping() and len(core.asleep) == 2
    llm.load_weights()
    llm.wake_up()
    assert tokens(llm) == old


def test_ranks_that_sleep_wake_up_if_another_fails(llm, monkeypatch):
    """A second rank stands here for those of `collective_rpc`."""
    old, core = tokens(llm), llm.llm_engine.core
    first, second = core.executor.collective_rpc, {"has_weights": True}

    def both(method, timeout=None, args=(), kwargs=None, non_block=False):
        found = first(method, timeout, args, kwargs)
        if method == "sleep":
            raise RuntimeError("rank 1: no pinned memory")
        return found * 2 if second[method if method in second else "has_weights"] else found

    monkeypatch.setattr(core.executor, "collective_rpc", both)
    with pytest.raises(RuntimeError, match="rank 1"):
        llm.sleep()
    assert not llm.is_sleeping() and tokens(llm) == old
    with pytest.raises(RuntimeError, match="rank 1"):
        llm.sleep(2)
    assert core.missing() == {"weights": "load_weights()"}
    llm.load_weights()
    assert tokens(llm) == old


def test_requests_go_on_when_what_was_asked_is_refused(llm, two, tmp_path, monkeypatch):
    engine = llm.llm_engine
    other = save_tiny_model("llama-mha", tmp_path / "other")
    engine.add_request("x", PROMPTS[0], GREEDY)
    engine.step()
    for wrong in (other, "/nowhere"):
        with pytest.raises((ValueError, OSError)):
            engine.load_weights(wrong, mode="abort")
    monkeypatch.setattr(sys, "platform", "darwin")
    for level in (1, 2):
        with pytest.raises(ValueError, match="on Linux"):
            engine.sleep(level)
    monkeypatch.undo()
    assert engine.collective_rpc("has_weights") == [True] and not engine.is_sleeping()
    while not (output := engine.step())[0].finished:
        pass
    assert output[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("place", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_requests_wait_while_the_engine_sleeps(place, two):
    """As in vLLM. Tensors reach an engine in another process by a file."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    with LLM(two[1], **SIZES) as fresh:
        want = tokens(fresh)[0]

    async def main(engine: AsyncLLM) -> None:
        running = await engine.submit(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(running)
        await engine.sleep(level=2)
        outputs = [output async for output in running]
        assert outputs[-1].outputs[0].finish_reason == "abort" and await engine.is_sleeping()
        with pytest.raises(RuntimeError, match="sleeps already"):
            await engine.sleep()
        stream = await engine.submit(PROMPTS[0], params)
        await asyncio.sleep(0.05)
        await engine.wake_up()
        assert await engine.is_sleeping()
        assert await engine.load_weights(load_file(f"{two[1]}/{SINGLE}").items()) == 1
        (output,) = [output async for output in stream]
        assert list(output.outputs[0].token_ids) == want and output.weight_version == 1
        assert await engine.collective_rpc("has_weights") == [True]
        if place == "process":
            assert await engine.apply_model(capture_problem) == [None]
            for function, words in ((lambda model: 1, "by its module and name"), (copy.copy, "cannot cross")):
                with pytest.raises((TypeError, ValueError), match=words):
                    await engine.apply_model(function)

    engine = AsyncLLM.from_engine_args(EngineArgs(model=two[0], **SIZES), engine_in=place)
    try:
        asyncio.run(main(engine))
    finally:
        engine.shutdown()
