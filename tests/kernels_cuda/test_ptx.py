"""Compile the kernels for an H100, with no GPU: no spilled registers, no local memory, the right instructions.

Needs numba-cuda and NVIDIA's compiler wheels: pip install "numba-cuda[cu13]>=0.30" "nvidia-nvvm==13.0.*" "nvidia-cuda-nvcc==13.0.*"
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chapter import chapter_cells

from minivllm_kernels.cuda import (
    all_reduce,
    cache,
    decode,
    drafts,
    gemv,
    launch,
    lora,
    matmul_hopper,
    pointwise,
    prefill,
    prefill_hopper,
    quantized,
    simt,
)
from minivllm_kernels.cuda.matmul_hopper import MatmulTile
from minivllm_kernels.cuda.planning import AttentionShape

INSTALL = 'pip install "numba-cuda[cu13]>=0.30" "nvidia-nvvm==13.0.*" "nvidia-cuda-nvcc==13.0.*"'


def find_ptxas() -> str | None:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which("ptxas")
    return next((str(f.locate()) for f in files if Path(str(f)).name == "ptxas"), shutil.which("ptxas"))


PTXAS = find_ptxas()
MISSING = launch.compiler_missing() or (None if PTXAS else "ptxas is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}; {INSTALL}")]

BF16, FP16 = "bfloat16", "float16"
KERNELS = {
    "decode naive": (lambda: decode_rungs().naive(AttentionShape(BF16, 128, 4, 16)), 64),
    "decode fma": (lambda: decode_rungs().fma_split_kv(AttentionShape(BF16, 128, 4, 16)), 128),
    "decode mma 64": (lambda: decode.mma_split_kv(AttentionShape(BF16, 64, 3, 16), 2), 168),
    "decode mma 80": (lambda: decode.mma_split_kv(AttentionShape(FP16, 80, 1, 32), 4), 168),
    "decode mma 96": (lambda: decode.mma_split_kv(AttentionShape(BF16, 96, 8, 8, True), 4), 168),
    "decode mma 128, 8 warps": (lambda: decode.mma_split_kv(AttentionShape(BF16, 128, 4, 16), 8), 255),
    "decode mma 128, 4 warps": (lambda: decode.mma_split_kv(AttentionShape(BF16, 128, 4, 16), 4), 168),
    "decode mma 128, 2 warps": (lambda: decode.mma_split_kv(AttentionShape(FP16, 128, 16, 64), 2), 168),
    "decode mma 256": (lambda: decode.mma_split_kv(AttentionShape(BF16, 256, 4, 16), 4), 255),
    "decode mma 64, fp8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 64, 3, 16, fp8_kv=True), 2), 128),
    "decode mma 96, fp8": (lambda: decode.mma_split_kv(AttentionShape(FP16, 96, 8, 8, True, True), 4), 128),
    "decode mma 128, fp8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 128, 4, 16, fp8_kv=True), 8), 128),
    "decode mma 256, fp8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 256, 4, 16, fp8_kv=True), 4), 255),
    "decode mma 64, int8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 64, 3, 16, int8_kv=True), 2), 128),
    "decode mma 96, int8": (lambda: decode.mma_split_kv(AttentionShape(FP16, 96, 8, 8, True, int8_kv=True), 4), 128),
    "decode mma 128, int8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 128, 4, 16, int8_kv=True), 8), 128),
    "decode mma 256, int8": (lambda: decode.mma_split_kv(AttentionShape(BF16, 256, 4, 16, int8_kv=True), 4), 255),
    "prefill fma": (lambda: prefill_rungs().fma_tiles(AttentionShape(BF16, 128, 4, 16)), 128),
    "prefill mma 64": (lambda: mma_tiles(AttentionShape(FP16, 64, 3, 16, True)), 255),
    "prefill mma 80": (lambda: mma_tiles(AttentionShape(BF16, 80, 1, 32)), 255),
    "prefill mma 96": (lambda: mma_tiles(AttentionShape(BF16, 96, 8, 8)), 255),
    "prefill mma 128": (lambda: mma_tiles(AttentionShape(BF16, 128, 4, 16)), 255),
    "prefill mma 256": (lambda: mma_tiles(AttentionShape(FP16, 256, 4, 16)), 255),
    "prefill mma 64, fp8": (lambda: mma_tiles(AttentionShape(FP16, 64, 3, 16, True, True)), 255),
    "prefill mma 128, fp8": (lambda: mma_tiles(AttentionShape(BF16, 128, 4, 16, fp8_kv=True)), 255),
    "prefill wgmma 64": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(FP16, 64, 3, 16, True)), 168),
    "prefill wgmma 80": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(BF16, 80, 5, 128)), 168),
    "prefill wgmma 96": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(BF16, 96, 8, 8)), 168),
    "prefill wgmma 128": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(BF16, 128, 4, 16)), 168),
    "prefill wgmma 128, capped": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(FP16, 128, 7, 256, True)), 168),
    "prefill wgmma 256": (lambda: prefill_hopper.wgmma_tiles(AttentionShape(FP16, 256, 4, 16)), 168),
    "prefill mma 64, int8": (lambda: mma_tiles(AttentionShape(FP16, 64, 3, 16, True, int8_kv=True)), 255),
    "prefill mma 128, int8": (lambda: mma_tiles(AttentionShape(BF16, 128, 4, 16, int8_kv=True)), 255),
    "prefill mma 256, int8": (lambda: mma_tiles(AttentionShape(BF16, 256, 4, 16, int8_kv=True)), 255),
    "reshape_and_cache to int8": (lambda: cache.reshape_and_cache_int8(BF16, 8, 128, 16), 64),
    "rope to int8": (lambda: pointwise.rope_and_cache(BF16, 32, 8, 128, 16, True, "int8"), 64),
    "reshape_and_cache to fp8": (lambda: cache.reshape_and_cache(16, 128, BF16), 64),
    "rope to fp8": (lambda: pointwise.rope_and_cache(BF16, 32, 8, 128, 16, True, "fp8"), 64),
    "reshape_and_cache": (lambda: cache.reshape_and_cache(16), 64),
    "copy_blocks": (lambda: cache.copy_blocks(), 64),
    "norm": (lambda: pointwise.add_rms_norm(BF16, 4096), 64),
    "rope": (lambda: pointwise.rope_and_cache(BF16, 32, 8, 128, 16, True), 64),
    "argmax": (lambda: pointwise.first_largest(BF16), 64),
    "argmax of float32": (lambda: pointwise.first_largest("float32"), 64),
    "gemv fma": (lambda: gemv.fma_gemv(BF16, 3072, 4), 64),
    "gemv fma, gated": (lambda: gemv.fma_gemv(FP16, 1032, 4, True), 64),
    "gemv mma": (lambda: gemv.mma_gemv(BF16, 3072, 8, 16), 128),
    "gemv mma by 16 of long rows": (lambda: gemv.mma_gemv(BF16, 14336, 16, 16), 128),
    "gemv mma, gated": (lambda: gemv.mma_gemv(FP16, 1000, 16, 2, True), 168),
    "quantized gemv mma, int4": (lambda: quantized_gemv("int4", 4096, 128, BF16, 8), 128),
    "quantized gemv mma, int4, float16": (lambda: quantized_gemv("int4", 4096, 128, FP16, 8, dtype=FP16), 128),
    "quantized gemv mma, int4 by 16": (lambda: quantized_gemv("int4", 12288, 128, FP16, 16, True), 255),
    "quantized gemv mma, int4 by outputs": (lambda: quantized_gemv("int4", 4096, 4096, FP16, 8, True, 24576), 128),
    "quantized gemv mma, int4, most tiles": (lambda: quantized_gemv("int4", 4096, 32, BF16, 8, outputs=14336), 128),
    "quantized gemv mma, int4 of few": (lambda: quantized_gemv("int4", 4096, 32, FP16, 16, True, 6144), 255),
    "quantized gemv mma, int4, zeros of many": (lambda: quantized_gemv("int4", 4096, 128, FP16, 8, True, 24576), 128),
    "quantized gemv mma, fp8 of few": (lambda: quantized_gemv("fp8", 4096, 128, "float32", 16, outputs=6144), 128),
    "quantized gemv mma, fp8": (lambda: quantized_gemv("fp8", 4096, 128, "float32", 16), 255),
    "quantized gemv mma, int8": (lambda: quantized_gemv("int8", 4096, 4096, "float32", 8), 255),
    "dequantize": (lambda: quantized.dequantize(quantized.Format("int4", BF16, 4096, 32, BF16)), 64),
    "matmul": (lambda: matmul_hopper.wgmma_matmul(BF16, MatmulTile(32, 1, 9, False)), 168),
    "matmul, gated": (lambda: matmul_hopper.wgmma_matmul(FP16, MatmulTile(96, 1, 5, True)), 168),
    "matmul, 128 rows": (lambda: matmul_hopper.wgmma_matmul(BF16, MatmulTile(96, 1, 8, True, 128)), 168),
    "matmul, clusters": (lambda: matmul_hopper.wgmma_matmul(BF16, MatmulTile(32, 4, 8, False)), 168),
    "matmul, gated, clusters": (lambda: matmul_hopper.wgmma_matmul(BF16, MatmulTile(256, 2, 4, True)), 168),
    "all-reduce": (lambda: all_reduce.one_shot(BF16, 2), 64),
    "all-reduce, 8 ranks": (lambda: all_reduce.one_shot("float32", 8), 64),
    "silu": (lambda: pointwise.silu_mul(FP16, 4096), 64),
    "place tokens": (lambda: drafts.place_tokens(16), 64),
    "verify drafts, n-grams": (lambda: drafts.verify_drafts((2, 4)), 64),
    "verify drafts, repeated": (lambda: drafts.verify_drafts(None), 64),
    "lora shrink": (lambda: lora.lora_shrink(BF16, 3072), 128),
    "lora expand": (lambda: lora.lora_expand(FP16), 128),
}


def decode_rungs():
    return chapter_cells("numba_kernels/cuda/decode", "online_softmax", "one_query", "naive", "fma_parts")


def prefill_rungs():
    return chapter_cells("numba_kernels/cuda/prefill", "fma_tiles")


def quantized_gemv(kind, features, group, scale, rows, zeros=False, outputs=8192, dtype=BF16):
    format = quantized.Format(kind, dtype, features, group, scale, zeros)
    return quantized.quantized_gemv(format, rows, quantized.choose_tiling(format, outputs, rows, 132, (9, 0)))


def mma_tiles(shape):
    return prefill.mma_tiles(shape, prefill.best_warps(shape))


@pytest.mark.parametrize("name", KERNELS)
def test_no_spills(name, tmp_path):
    make, limit = KERNELS[name]
    kernel = make()
    text, arch = kernel.ptx((9, 0)), "sm_90a" if kernel.hopper_only else "sm_90"
    (tmp_path / "k.ptx").write_text(text)
    command = [str(PTXAS), f"-arch={arch}", "-v", "-o", os.devnull, str(tmp_path / "k.ptx")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack.*?(\d+) bytes spill s.*?(\d+) bytes spill l", report).groups()
    )
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert (stack, stores, loads) == (0, 0, 0), report
    assert registers <= limit, report
    assert "C75" not in report, report  # wgmma one after the other, or setmaxnreg ignored
    assert ".f64" not in text, "an accumulator became float64"
    assert ("e4m3x2" in text) == ("fp8" in name and "gemv" not in name)
    if " mma" in name:
        assert "mma.sync.aligned.m16n8k16" in text and ("cp.async" in text) == name.startswith(("prefill", "quantized"))
    if name.startswith("matmul"):
        assert text.count(".param .align 64 .b8") == 2 and "wgmma.mma_async" in text
        assert "griddepcontrol" not in text  # beside its blocks the kernel before, and the one after, would be slower
        assert (".reqnctapercluster" in text) == ("barrier.cluster" in text) == ("clusters" in name)
    if " wgmma" in name:
        assert text.count("wgmma.commit_group") == 4  # Q K^T and P V: before, in and after the loop
        assert text.count("setmaxnreg") == 2 and text.count(".param .align 64 .b8") == 4


def without_names(text):
    """They count what a process has compiled."""
    return re.sub(r"_ZN\w+|smem_\d+", "", text)


@pytest.mark.parametrize("name", ["norm", "gemv mma", "matmul, gated", "decode mma 96, int8"])
def test_what_is_exchanged_in_numba_changes_no_ptx(name, monkeypatch):
    make, args, how = KERNELS[name][0]().maker
    texts = []
    for exchanged in (simt._exchanged((9, 0)), simt._exchanged((9, 0))[:1]):
        monkeypatch.setattr(simt, "_exchanged", lambda cc, exchanged=exchanged: exchanged)
        texts.append(without_names(make.__wrapped__(*args, **how).ptx((9, 0))))
    assert texts[0] == texts[1] and len(texts[0]) > 5000


def test_kernels_are_compiled_ahead_side_by_side(monkeypatch, tmp_path):
    """With the real compiler: what other processes put into the cache equals this process's PTX, except for names."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    kernels = [
        pointwise.add_rms_norm(BF16, 1024),
        cache.reshape_and_cache(16),
        mma_tiles(AttentionShape(BF16, 96, 8, 8)),
    ]
    assert launch.compile_ahead(kernels, (8, 0)) == 3
    want = [kernel.ptx((8, 0)) for kernel in kernels]
    monkeypatch.setattr(type(kernels[0]), "ptx", None)
    for kernel, text in zip(kernels, want, strict=True):
        assert without_names(text) == without_names(launch.cached_ptx(kernel, (8, 0))) and len(text) > 5000
