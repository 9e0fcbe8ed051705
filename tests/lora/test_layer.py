"""A layer with adapters, over every kind of base method, against the formula; and the engine's calls for adapters."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from adapters import VARIANTS, peft_adapter
from tiny_models import tiny_model_path  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.lora import linear
from minivllm.lora.adapter import LoRAWeights, lora_targets
from minivllm.lora.linear import LoRABatch, LoRALinear, add_grouped
from minivllm.models.linear.layer import Linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["torch", "cpu", "int8", "int4_32", "torch_int8"])
@pytest.mark.parametrize("rows", [1, 7, 64, 150])
def test_over_every_base(method: str, dtype: torch.dtype, rows: int) -> None:
    if dtype == torch.float16 and method != "torch":
        pytest.skip("no such method in float16")
    pytest.importorskip("numba")
    torch.manual_seed(rows)
    inputs = 96 if rows == 7 else 128  # with 128, bfloat16 is for a tile unit, if there is one
    layer = Linear(inputs, {"q": 80, "v": 48}, dtype=dtype, device=CPU, method=method)
    layer.method.weights["weight"].normal_()
    layer.method.process_weights_after_loading()
    x = torch.randn(rows, inputs).to(dtype)
    base, batch = layer(x).clone(), LoRABatch(256, CPU)
    layer.method = LoRALinear(layer, batch, max_loras=3, max_rank=12 if rows == 7 else 40, invariant=False)
    adapters: list[dict[str, Any]] = [
        {"q": LoRAWeights(torch.randn(12, inputs).to(dtype), torch.randn(80, 12).to(dtype))},
        {
            part: LoRAWeights(torch.randn(5, inputs).to(dtype), torch.randn(n, 5).to(dtype))
            for part, n in layer.parts.items()
        },
        {},
    ]
    for slot, adapter in enumerate(adapters):
        layer.method.set_slot(slot, adapter)
    slots = np.random.default_rng(rows).integers(-1, 3, rows) if rows < 150 else np.repeat([0, 1], (140, 10))
    batch.set(slots)
    more = torch.zeros(rows, 128)
    for row, slot in enumerate(slots):
        for part, weights in (adapters[slot] if slot >= 0 else {}).items():
            start = 0 if part == "q" else 80
            more[row, start : start + len(weights.b)] += (x[row].float() @ weights.a.float().T) @ weights.b.float().T
    off = (layer(x).float() - base.float() - more).abs().max() / more.abs().max().clamp(min=1)
    assert off < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    batch.set(np.full(rows, -1))
    assert torch.equal(layer(x), base)


def test_grouped_matmuls_are_the_loop_over_the_adapters():
    """What a GPU does for many rows, here on the CPU. One slot has no rows, one has nothing for a part."""
    torch.manual_seed(0)
    rows, inputs, spans = 40, 48, ((0, 32), (32, 56))
    slots = np.array([[2, -1, 0, 2][i * 7 % 4] for i in range(rows)])
    a, b = torch.randn(4, 2, 16, inputs).bfloat16() / 7, torch.randn(4, 16, 56).bfloat16()
    b[2, :, 32:] = 0
    x, base = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, 56)
    batch, out = LoRABatch(64, CPU), base.clone()
    batch.set(slots)
    add_grouped(x, out, a, b, spans, batch.ends(4))
    want = base.double()
    for row, slot in enumerate(slots):
        for part, (start, end) in enumerate(spans):
            if slot >= 0:
                want[row, start:end] += x[row].double() @ a[slot, part].double().T @ b[slot, :, start:end].double()
    assert (out - want).norm() / (want - base).norm() < 8e-3
    assert torch.equal(out[slots < 0], base[slots < 0])


class OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(returned.alias_info is not None for returned in func._schema.returns), f"torch computes {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_fill_a_slot_is_to_copy_memory(dtype: torch.dtype) -> None:
    """A step does it while streams wait; each of torch's own operations may start threads, and there are hundreds of layers."""
    pytest.importorskip("numba")
    layer, batch = Linear(128, {"q": 80, "v": 48}, dtype=dtype, device=CPU, method="cpu"), LoRABatch(16, CPU)
    method = LoRALinear(layer, batch, max_loras=2, max_rank=40, invariant=False)
    prepared = method.prepare({"v": LoRAWeights(torch.randn(20, 128), torch.randn(48, 20))})
    with OnlyViews():
        method.put(1, prepared)
        method.put(0, None)


def test_groups_are_rows_of_one_slot_and_at_most_sixteen() -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 5, 40, 100):
        batch, slots = LoRABatch(128, CPU, invariant=True), rng.integers(-1, 3, rows)
        batch.set(slots)
        used, groups = batch.used
        ends = batch.starts[: groups + 1].tolist()
        assert ends[0] == 0 and ends[-1] == used == (slots >= 0).sum()
        for first, end in itertools.pairwise(ends):
            assert 0 < end - first <= 16 and len(set(batch.slots[first:end])) == 1
        assert groups == sum(-(-int((slots == slot).sum()) // 16) for slot in range(3))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_torch_all_the_way(tiny_model_path, monkeypatch, backend):  # noqa: F811
    """Where torch multiplies with the base's weights, numba adds nothing; else this backend would be no oracle for it."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a kernel of numba")

    monkeypatch.setattr(linear, "_CPUKernels", refuse)
    with LLM(tiny_model_path("llama"), enable_lora=True, attention_backend=backend, num_gpu_blocks=8):
        pass
    with pytest.raises(AssertionError, match="a kernel of numba"):
        LLM(tiny_model_path("llama"), enable_lora=True, attention_backend="numba_cpu", num_gpu_blocks=8)


def test_memory_is_taken_when_the_model_is_built_and_only_for_what_can_have_an_adapter(tiny_model_path, tmp_path):  # noqa: F811
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "embed_tokens", "lm_head"]}
    peft_adapter("qwen2-moe", settings, tmp_path / "a", seed=0)
    with LLM(tiny_model_path("qwen2-moe"), enable_lora=True, max_loras=2, num_gpu_blocks=64) as llm:
        model = llm.llm_engine.core.executor.runner.model
        targets = lora_targets(model.spec)
        for i, layer in enumerate(model.layers):
            for block in (layer.mixer, layer.mlp):
                for each in block.linears():
                    can = any(model.spec.names.layer.format(i) + part in targets for part in each.parts)
                    assert isinstance(each.method, LoRALinear) == can, each.parts
        before = slot_memory(model)
        llm.generate([[1, 2]], SamplingParams(max_tokens=1), lora_request=LoRARequest("a", 1, str(tmp_path / "a")))
        assert slot_memory(model) == before


def slot_memory(model: Any) -> dict[int, int]:
    """{address: bytes} of all tensors that adapters are copied into."""
    holders = [model.lora, *(each.method for each in [model.head, *model.linears()])]
    tensors = [x for holder in holders for name, x in vars(holder).items() if name in ("_a", "_b")]
    assert all(isinstance(x, torch.Tensor) for x in tensors)
    return {x.data_ptr(): x.nbytes for x in tensors}


def test_the_engines_calls(tiny_model_path, tmp_path):  # noqa: F811
    peft_adapter("llama", VARIANTS["all-linear"], tmp_path / "a", seed=0)
    params = SamplingParams(temperature=0, max_tokens=4)
    sizes: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks": 64}
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=2, **sizes) as llm:
        engine, request = llm.llm_engine, LoRARequest("a", 7, str(tmp_path / "a"))
        assert engine.add_lora(request) and engine.list_loras() == {7}
        assert engine.pin_lora(7)
        with pytest.raises(ValueError, match="no adapter has lora_int_id 8"):
            engine.pin_lora(8)
        engine.add_request("x", [1, 2, 3], params, lora_request=request)
        assert engine.remove_lora(7) and not engine.remove_lora(7)
        engine.abort_request("x")
        while engine.core.has_requests():
            engine.step()
        (output,) = llm.generate([[1, 2, 3]], params, lora_request=request, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(ValueError, match=r"prompts\[1\]: there is no adapter folder"):
            llm.generate([[1], [2]], params, lora_request=[request, LoRARequest("b", 9, "/no/where")], use_tqdm=False)
        (tmp_path / "a" / "adapter_model.safetensors").unlink()  # it is in memory, and stays there
        (output,) = llm.generate([[1, 2, 3, 4]], params, lora_request=request, use_tqdm=False)
        assert output.error is None
    with LLM(tiny_model_path("llama"), **sizes) as plain, pytest.raises(ValueError, match="enable_lora=True"):
        plain.generate([[1]], params, lora_request=LoRARequest("a", 1, "x"), use_tqdm=False)
    with pytest.raises(ValueError, match="need enable_lora=True"):
        LLM(tiny_model_path("llama"), max_loras=4)
