"""One value says which features of the CPU are used, and a test can narrow it."""

import os
import subprocess
import sys

import pytest

from minivllm_kernels.cpu import compile as cpu_compile
from minivllm_kernels.cpu.compile import host_machine
from minivllm_kernels.cpu.features import LEVELS, VARIABLE

PROGRAM = """
import minivllm
from minivllm_kernels.cpu.compile import host_lanes, host_registers
from minivllm_kernels.cpu.matmul.layout import host_tiles
from minivllm.runtime.machine import has_native_bf16
import torch
print(host_lanes(), host_registers(), host_tiles(), has_native_bf16("cpu"), torch.backends.cpu.get_cpu_capability())
"""
EXPECTED = {
    "sse": "4 16 False False DEFAULT",
    "avx2": "8 16 False False AVX2",
    "avx512": "16 32 False False AVX512",
    "avx512_bf16": "16 32 False True AVX512",
}
HERE = {*cpu_compile.llvm.get_host_cpu_features().flatten().split(",")}


def python(program: str, level: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: level}
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):  # set here already if these tests run narrowed
        environment.pop(name, None)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_narrows_kernels_torch_and_the_dtype(level):
    if not {*LEVELS[level].llvm_features.split(",")} <= HERE:
        pytest.skip(f"this CPU has less than {level}")
    done = python(PROGRAM, level)
    assert done.stdout.split("\n")[-2:] == [EXPECTED[level], ""], done.stderr


def test_an_unknown_level_is_refused_with_the_known_ones():
    done = python("import minivllm", "avx1024")
    assert "MINIVLLM_CPU_FEATURES='avx1024' is not known; it can be sse, avx2, avx512, avx512_bf16" in done.stderr


def test_a_level_above_the_cpu_is_refused_by_what_is_missing(monkeypatch):
    class Plain:
        def flatten(self):
            return "+sse2,+avx2,-fma"

    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setattr(cpu_compile.llvm, "get_host_cpu_features", Plain)
    with pytest.raises(ValueError, match=r"asks for more than this CPU has: \+f16c, \+fma"):
        host_machine.__wrapped__()


def test_torch_that_was_imported_first_is_an_error():
    done = python("import torch, minivllm", "avx2")
    assert "torch was imported before minivllm" in done.stderr
