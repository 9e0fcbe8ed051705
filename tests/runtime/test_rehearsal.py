"""A rehearsal names the kernels of first steps. No GPU is needed: kernels that would be launched are noted."""

import itertools

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm.core.config import EngineArgs
from minivllm.runtime import executor
from minivllm.runtime.executor import plan_engine
from minivllm.runtime.peak_memory import FIRST_STEPS
from minivllm_kernels.cuda import launch, ops

HEADS = {"head_dim": 64, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 1056}


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU: kernels are noted, not run. Their results are whatever memory holds, except that an argmax gives token 0."""
    launched, ahead, noted, loaded, run, largest = {}, [], [], [], ops.run, ops.first_largest

    def note(kernel, device, grid, *numbers):
        if ops._rehearsal.kernels is not None:
            noted.append(kernel.name)
            return run(kernel, device, grid, *numbers)
        if grid[0] and grid[1]:
            launched[kernel] = None

    monkeypatch.setattr(NumbaCudaBackend, "unsupported", lambda self, spec, device: None)
    monkeypatch.setattr(ops, "device_unsupported", lambda device: None)
    monkeypatch.setattr(ops, "_properties", lambda index: ((9, 0), 132))
    monkeypatch.setattr(ops, "_index", lambda device: 0)
    monkeypatch.setattr(ops, "upload", lambda arrays, device: [torch.from_numpy(x.copy()) for x in arrays])
    for maps in ("query_map", "attention_maps", "matmul_maps"):  # the driver makes them
        monkeypatch.setattr(ops, maps, lambda *args: ())
    monkeypatch.setattr(ops, "run", note)
    monkeypatch.setattr(ops, "first_largest", lambda x: largest(x).zero_())
    monkeypatch.setattr(ops, "compile_ahead", lambda kernels, cc: ahead.append((kernels, cc)))
    monkeypatch.setattr(ops, "load_compiled", lambda kernels, index, cc: loaded.append((kernels, cc)))
    return launched, ahead, noted, loaded


@pytest.mark.parametrize(
    ("name", "quantization", "kinds"),
    [("qwen3", None, 1), ("llama", "fp8", 1), ("gemma3", None, 2), ("mixtral", None, 1)],
)
def test_the_rehearsal_has_every_kernel_of_first_steps(gpu, name, quantization, kinds, monkeypatch, tmp_path):
    """It runs one layer of each kind, of four."""
    launched, ahead, noted, loaded = gpu
    family, changes = tiny_models.TINY_MODELS[name]
    monkeypatch.setitem(tiny_models.TINY_MODELS, f"wide {name}", (family, {**changes, **HEADS}))
    folder = tiny_models.save_tiny_model(f"wide {name}", tmp_path / "model")
    how = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "numba_cuda", "num_gpu_blocks": 400, "max_num_seqs": 64}  # fmt: skip
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    with LLM(str(folder), load_format="dummy", quantization=quantization, **how) as llm:
        ((kernels, cc),) = loaded
        (attention, _), *steps = ahead
        assert not launched and list(dict.fromkeys(itertools.chain(*(step for step, _ in steps)))) == kernels
        assert len(steps) == len(FIRST_STEPS) and {cc for _, cc in ahead} == {(9, 0)} == {cc}
        assert len(attention) == 3
        assert {kernel for kernel in kernels if kernel.name.startswith(("prefill", "decode"))} <= set(attention)
        caches = sum(kernel.startswith(("rope_and_cache", "reshape_and_cache")) for kernel in noted)
        assert caches == len(FIRST_STEPS) * kinds
        assert all(
            kernel.maker is not None and kernel.maker[0](*kernel.maker[1], **kernel.maker[2]) is kernel
            for kernel in kernels
        )
        for count, tokens in ((1, 5), (1, 100), (1, 1), (14, 30), (60, 2)):
            llm.generate([{"prompt_token_ids": [1] * tokens}] * count, params, use_tqdm=False)
            assert {kernel.name for kernel in launched} <= {kernel.name for kernel in kernels}
    assert len(launched) > 8
    assert any("quantized" in kernel.name for kernel in launched) == (quantization is not None)
    assert any(kernel.name.startswith("prefill") for kernel in launched) and any("decode" in k.name for k in launched)


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ({}, True),
        ({"attention_backend": "numba_cuda"}, True),
        ({"attention_backend": "torch"}, False),
        ({"distributed_executor_backend": "mp"}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_processes_that_compile_start_before_the_backend_is_chosen(settings, starts, tmp_path, monkeypatch):
    began = []

    def stop(*args):
        raise KeyError("far enough")

    monkeypatch.setattr(launch, "start_compilers", lambda: began.append(True))
    monkeypatch.setattr(executor, "select_backend", stop)
    monkeypatch.setattr(executor, "choose_device", lambda asked: "cuda" if asked == "auto" else asked)
    monkeypatch.setattr(executor, "has_native_bf16", lambda device: True)
    with pytest.raises(KeyError, match="far enough"):
        plan_engine(EngineArgs(model=str(tiny_models.save_tiny_model("qwen3", tmp_path / "model")), **settings))
    assert began == [True] * starts
