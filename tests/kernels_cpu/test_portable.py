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
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.layer import Linear
from minivllm.models.linear.quantized import CPUScaledWeight, PackedWeight
from minivllm.models.linear.scaled import FP8, quantize_channels
from minivllm_kernels.cpu import attention as cpu_attention
from minivllm_kernels.cpu.compile import LIBC, host_is_x86, host_lanes, machine_for, only, to_llvm
from minivllm_kernels.cpu.features import LEVELS, VARIABLE
from minivllm_kernels.cpu.matmul import bf16_dots, gemv, packed, quantized, scaled
from minivllm_kernels.cpu.matmul.layout import FOURS, PAIRS, PLAIN

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
            if method != "int4_32":
                torch.testing.assert_close(layer(x[:rows].to(dtype)).double(), want, rtol=tolerance, atol=tolerance)
            else:
                assert (layer(x[:rows]).double() - want).norm() < 0.01 * want.norm()
    spec = make_spec(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
    case = Case(spec, [(1, 40), (9, 50)])
    got = case.run(numba_cpu.NumbaCPUBackend()).double()
    torch.testing.assert_close(got, case.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("format", [FP8, torch.int8])
def test_weights_with_scales_are_right(format):
    """By a kernel, but fp8 on a CPU that cannot read it: torch writes it out there."""
    torch.manual_seed(0)
    layer, weight = (
        Linear(64, {"all": 40}, dtype=torch.float32, device=torch.device("cpu"), method="cpu"),
        torch.randn(40, 64),
    )
    stored = quantize_channels(weight, format)
    layer.load("all", "weight", stored)
    layer.method.process_weights_after_loading()
    reads = format == torch.int8 or not host_is_x86() or host_lanes() > 4
    assert isinstance(layer.method.values[0], CPUScaledWeight) == reads
    x = torch.randn(5, 64)
    want = stored.round_activations(x) @ stored.dequantize().T
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("group", [64, 32, 16])
def test_quantized_matmuls_are_right(group):
    """8 bits with lows, and code books: each row alone as in a batch, and as float64 has it with the activations rounded."""
    torch.manual_seed(0)
    coded, dtype = group < 64, torch.float32 if group < 64 else torch.bfloat16
    if coded:
        q, codes = torch.randint(0, 256, (40, 32), dtype=torch.uint8), torch.arange(16) - 5.5
        weight = GroupedWeight(q, torch.rand(40, 64 // group).half(), codes=codes)
    else:
        q = torch.randint(-128, 128, (40, 64)).to(torch.int8)
        weight = GroupedWeight(q, torch.rand(40, 1), torch.randn(40, 1))
    packed, x = PackedWeight(weight, dtype, tiles=False), torch.randn(12, 64).to(dtype)
    parts = x.double().unflatten(1, (-1, group))
    step = parts.abs().amax(2, keepdim=True) / 127
    want = ((parts / step).round() * step).flatten(1) @ weight.dequantize().double().T
    tolerance = 1e-5 if coded else 0.01
    got = packed.apply(x)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    for rows in (1, 2, 3, 8):
        assert torch.equal(packed.apply(x[:rows]), got[:rows])


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
    "fp8 attention": lambda lanes, registers: cpu_attention.attend(64, 3, 16, 16, 8, lanes, registers),
    "gemv": lambda lanes, registers: gemv.matmul(16, lanes, registers),
    "scaled": lambda lanes, registers: scaled.matmul(8, 1, 16, lanes, lanes, registers),
    "packed": lambda lanes, registers: packed.matmul(16, lanes, registers, 64),
}
DOTS = {  # triple, CPU, features, unit, lanes, registers; the instruction that does the work
    "avx2": (*TARGETS["avx2"][:3], PAIRS, 8, 16, r"vpmaddubsw.*%ymm"),
    "avx_vnni": (TARGETS["avx2"][0], "alderlake", "", FOURS, 8, 16, r"vpdpbusd.*%ymm"),
    "vnni": (TARGETS["avx2"][0], "cooperlake", "", FOURS, 16, 32, r"vpdpbusd.*%zmm"),
    "neon": (*TARGETS["neon"][:3], PLAIN, 4, 32, r"\smla\s+v\d+\.4s"),
    "sse2": (*TARGETS["sse2"][:3], PLAIN, 4, 16, r"\spmaddwd\s"),
}


def assembly(kernel, triple, cpu, features, lanes, registers):
    """What LLVM makes of a kernel for another machine."""
    return assembly_of(KERNELS[kernel](lanes, registers), triple, cpu, features)


def assembly_of(body, triple, cpu, features):
    symbol, code = to_llvm(body)
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
        ("fp8 attention", "avx2"),
        ("fp8 attention", "neon"),
        ("gemv", "neon"),
        ("packed", "avx2"),
        ("scaled", "avx2"),
        ("scaled", "neon"),
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


@pytest.mark.slow
@pytest.mark.parametrize("target", DOTS)
def test_dot_products_of_bytes_are_the_instructions_of_a_machine(target):
    *machine, unit, lanes, registers, instruction = DOTS[target]
    text = assembly_of(quantized.matmul(4, 0, 2, 16, 32, 0, 16, 16, unit, lanes, registers), *machine)
    assert len(re.findall(instruction, text)) >= 50
    calls = {name.removesuffix("@PLT") for name in re.findall(r"^\s+(?:callq|bl)\s+([\w.$@]+)", text, re.MULTILINE)}
    assert not {name for name in calls if name.startswith("__")}, "calls of functions that no library would provide"


def test_sums_of_bf16_dot_products_stay_in_registers():
    text = assembly_of(bf16_dots.matmul(16), TARGETS["avx2"][0], "cooperlake", "")
    blocks = re.split(r"^\.LBB\w+:", text, flags=re.MULTILINE)
    assert any(len(re.findall(r"vdpbf16ps\t%zmm", block)) == 16 for block in blocks), (
        "eight rows, two registers of outputs"
    )
    assert not re.findall(r"zmm\d+, -?\d*\(%rsp", text), "a register is written to the stack"


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
