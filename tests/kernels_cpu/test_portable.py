"""The CPU kernels on other machines: narrower registers, AVX2, plain x86-64, Arm.

This machine runs the levels of `MINIVLLM_CPU_FEATURES` that it has. For the other machines, kernels are compiled and the
assembly is checked.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
from attention.test_backends import Case, make_spec
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

pytest.importorskip("numba")
import llvmlite.binding as llvm

from minivllm.attention import numba_cpu
from minivllm.models.linear.layer import Linear
from minivllm_kernels.cpu import attention as cpu_attention
from minivllm_kernels.cpu.compile import LIBC, machine_for, only, to_llvm
from minivllm_kernels.cpu.features import LEVELS, VARIABLE
from minivllm_kernels.cpu.matmul import gemv, packed, quantized

HERE = {*llvm.get_host_cpu_features().flatten().split(",")}
TESTABLE = [name for name, level in LEVELS.items() if {*level.llvm_features.split(",")} <= HERE]


def test_matmul_and_attention_are_right():
    """At whatever level these tests run; the next test runs it at each level that this CPU has."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 72) / 8, torch.randn(5, 72)
    for method, dtype in (
        ("cpu_invariant", torch.float32),
        ("int4_32", torch.float32),
        ("cpu_invariant", torch.bfloat16),
    ):
        layer = Linear(72, {"all": 40}, dtype=dtype, device=torch.device("cpu"), method=method)
        layer.method.weights["weight"].copy_(weight)
        layer.method.process_weights_after_loading()
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for rows in (1, 5):
            want = x[:rows].to(dtype).double() @ layer.weight.double().T
            torch.testing.assert_close(layer(x[:rows].to(dtype)).double(), want, rtol=tolerance, atol=tolerance)
    spec = make_spec(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    case = Case(spec, [(1, 40), (9, 50)])
    got = case.run(numba_cpu.NumbaCPUBackend()).double()
    torch.testing.assert_close(got, case.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.skipif(VARIABLE in os.environ, reason="a level is set already")
@pytest.mark.parametrize("level", TESTABLE)
def test_the_kernels_are_right_at_every_level(level):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        os.path.dirname(__file__),
    ]
    done = subprocess.run(command, env=os.environ | {VARIABLE: level}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


TARGETS = {  # triple, CPU, features, lanes, registers; a vector multiply-add, and a scalar one
    "avx2": ("x86_64-unknown-linux-gnu", "haswell", "", 8, 16, r"vfmadd\w+ps\s.*%ymm", r"vfmadd\w+ss\s"),
    "neon": ("aarch64-unknown-linux-gnu", "generic", "+neon", 4, 32, r"fmla\s+v\d+\.4s", r"\sfn?m(add|sub)\s+s"),
    "sse2": ("x86_64-unknown-linux-gnu", "x86-64", "", 4, 16, r"\smulps\s", r"\sfmaf?\b"),
}
KERNELS = {
    "attention": lambda lanes, registers: cpu_attention.attend(64, 3, 16, 16, 16, lanes, registers),
    "gemv": lambda lanes, registers: gemv.matmul(16, lanes, registers),
    "packed": lambda lanes, registers: packed.matmul(16, lanes, registers),
    "int4": lambda lanes, registers: quantized.matmul(4, 16, lanes, registers),
}


def assembly(kernel, triple, cpu, features, lanes, registers):
    """What LLVM makes of a kernel for another machine."""
    symbol, code = to_llvm(KERNELS[kernel](lanes, registers))
    code = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', code)
    code = re.sub(r'target datalayout = ".*"\n', "", code)
    machine = machine_for(triple, cpu, features)
    return machine.emit_assembly(only(llvm.parse_assembly(code), symbol, machine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "target"),
    [
        ("attention", "avx2"),
        ("attention", "neon"),
        ("gemv", "neon"),
        ("packed", "avx2"),
        ("int4", "avx2"),
        ("int4", "neon"),
        ("int4", "sse2"),
    ],
)
def test_other_machines_get_vector_code_and_no_scalar_loop(kernel, target):
    *machine, vector, scalar = TARGETS[target]
    text = assembly(kernel, *machine)
    count = len(re.findall(vector, text))
    assert count >= 50, f"{count} vector multiply-adds"
    assert not re.findall(scalar, text)
    labels = set(re.findall(r"^([\w.$]+|\"[^\"]+\"):", text, re.MULTILINE))
    calls = {
        name.removesuffix("@PLT")
        for name in re.findall(r"^\s+(?:callq|bl)\s+(\"[^\"]+\"|[\w.$@]+)", text, re.MULTILINE)
    }
    assert calls - labels <= set(LIBC), "calls of functions that no library would provide"


GENERATE = """
import sys
from minivllm import LLM, SamplingParams
from minivllm_kernels.cpu.compile import host_lanes, host_registers
folder, quantization = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
options = {"device": "cpu", "dtype": "float32", "quantization": quantization, "num_gpu_blocks": 40}
llm = LLM(folder, attention_backend="numba_cpu", **options)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
out = llm.generate(["ab", "a longer prompt, of many tokens", "c"], params, use_tqdm=False)
print(host_lanes(), host_registers(), [list(one.outputs[0].token_ids) for one in out])
"""


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in TESTABLE, reason="this CPU has no AVX2")
def test_a_cpu_without_bf16_and_avx512_generates_the_same_tokens(tiny_model_path):  # noqa: F811
    def generate(environment, *quantization):
        command = [sys.executable, "-c", GENERATE, str(tiny_model_path("qwen3")), *quantization]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(maxsplit=2)

    for quantization in ((), ("int4_per_group_weight_only",)):
        lanes, registers, tokens = generate({VARIABLE: "avx2"}, *quantization)
        assert (lanes, registers) == ("8", "16")
        assert tokens == generate({}, *quantization)[2]
