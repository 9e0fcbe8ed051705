"""Programs: many kernels by one launch, whatever the number of threads; and the matmul on AMX."""

import re
import time

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
import llvmlite.binding as llvm
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_kernels.cpu import program as cpu_program
from minivllm_kernels.cpu.compile import compile_kernel, machine_for, only, pack, to_llvm
from minivllm_kernels.cpu.matmul.layout import PackedMatmul, host_dots, host_tiles, tile_configs
from minivllm_kernels.cpu.program import Program
from minivllm_kernels.cpu.simd import claim, floats_at


def add_neighbour(args):
    """out[i] = x[i] + x[i - 1], an item a number: wrong if x is not finished yet."""
    x, out = floats_at(args[3], 32), floats_at(args[4], 32)
    while True:
        i = claim(args, 0, 1)
        if i >= args[1]:
            break
        out[i] = x[i] + x[max(i - 1, 0)]


@pytest.fixture(scope="module")
def kernel():
    return compile_kernel(add_neighbour)


def record(kernel, arrays, order, threads=1):
    program = Program()
    for source, target in order:
        args = pack(arrays[0].size, arrays[source].ctypes.data, arrays[target].ctypes.data)
        program.run(kernel, args, threads)
    program.finalize()
    return program


pairs = st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(lambda p: p[0] != p[1])


@settings(max_examples=60, deadline=None)
@given(order=st.lists(pairs, min_size=1, max_size=40), size=st.integers(1, 60), threads=st.sampled_from([1, 2, 5]))
def test_a_program_does_what_its_kernels_do_one_after_the_other(kernel, order, size, threads):
    want = [np.arange(i, i + size).astype(np.float32) for i in range(3)]
    got = [x.copy() for x in want]
    program = record(kernel, got, order)
    for _ in range(2):
        for source, target in order:
            x = want[source]
            want[target][:] = x + np.concatenate([x[:1], x[:-1]])
        program(threads)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def busy(args):
    """Counts up to x[0]."""
    x = floats_at(args[3], 32)
    if claim(args, 0, 1) < args[1]:
        for i in range(int(x[0])):
            x[1] += i % 3


@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_are_timed_within_their_launch(kernel, threads):
    program, args = Program(), [np.array([count, 0], np.float32) for count in (10, 3_000_000, 10)]
    for x in args:
        program.run(compile_kernel(busy), pack(1, x.ctypes.data), threads)
    program.finalize()
    start = time.perf_counter()
    took = program.timed(threads)
    passed = time.perf_counter() - start
    assert took.shape == (3,) and (took >= 0).all() and took.sum() <= passed
    assert took[1] > 1e-4, "no core counts so far in a tenth of a millisecond"
    assert all(x[1] > 0 for x in args), "a timed program runs, too"


def test_kernels_of_a_program_keep_the_memory_that_they_were_given():
    program = Program()
    first, again = program.scratch(100), program.scratch(50)
    larger = program.scratch(1 << 20)
    assert first == again != larger and all(x % 64 == 0 for x in (first, larger))
    assert program.scratch(100) == larger, "kernels share one piece"
    assert len(program._scratch._pieces) == 2, "and the first one is still there"


def test_more_arguments_than_a_program_keeps_are_refused(kernel):
    with pytest.raises(ValueError, match=rf"add_neighbour has {Program.WIDTH + 1} arguments, a program keeps"):
        Program().run(kernel, pack(1, *range(Program.WIDTH - 2)), 1)


@pytest.mark.parametrize(("triple", "x86"), [("x86_64-unknown-linux-gnu", 1), ("aarch64-unknown-linux-gnu", 0)])
def test_the_worker_loop_can_be_built_for_either_family(triple, x86):
    symbol, code = to_llvm(cpu_program.worker_loop(10, x86))
    code = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', code)
    code = re.sub(r'target datalayout = ".*"\n', "", code)
    machine = machine_for(triple, "x86-64" if x86 else "generic", "")
    assembly = machine.emit_assembly(only(llvm.parse_assembly(code), symbol, machine))
    assert len(re.findall(r"\bpause\b", assembly)) == x86
    assert re.search(r"lock|xadd" if x86 else r"ldar|ldaxr", assembly), "threads see each other's numbers"


# ---- AMX


def test_tile_configs_describe_the_rows_that_there_are():
    """A register with no rows must have no bytes either, else the unit refuses the whole description."""
    configs = tile_configs()
    assert configs.shape == (33, 64) and (configs[:, 0] == 1).all()
    for n, config in enumerate(configs):
        rows, sizes = config[48:56], config[16:32].view(np.uint16)
        upper, lower = min(n, 16), max(n - 16, 0)
        assert rows.tolist() == [upper, upper, lower, lower, upper, lower, 16, 16]
        assert (sizes == np.where(rows > 0, 64, 0)).all()


def packed(weight, block):
    """A bf16 weight [outputs, inputs] in the packed order, outputs padded with zeros to whole blocks."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % block))
    return padded.view(-1, block, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


ON_TILES = pytest.mark.skipif(not host_tiles(), reason="this CPU has no AMX")
ON_DOTS = pytest.mark.skipif(not host_dots(), reason="this CPU has no dot products of bf16")
UNITS = [pytest.param("tiles", marks=ON_TILES), pytest.param("dots", marks=ON_DOTS)]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("outputs", "inputs", "block"), [(96, 64, 32), (70, 160, 64), (200, 32, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul_by_a_unit_for_bf16_is_right_and_a_row_the_same_in_any_batch(unit, outputs, inputs, block, biased):
    torch.manual_seed(outputs)
    weight, x = (torch.randn(s).bfloat16() for s in ((outputs, inputs), (70, inputs)))
    bias = torch.randn(outputs) if biased else None
    memory = packed(weight, block)
    where = 0 if bias is None else bias.data_ptr()
    matmul = PackedMatmul(memory.data_ptr(), outputs, inputs, inputs, block, where, **{unit: True})

    def times(x, threads=2):
        # what lies around the rows must be neither read into the result nor written over
        around = torch.full((len(x) + 2, inputs), torch.nan, dtype=torch.bfloat16)
        around[1:-1] = x
        out = torch.full((len(x) + 2, outputs), -7.0, dtype=torch.bfloat16)
        matmul(around[1:].data_ptr(), out[1:].data_ptr(), len(x), threads)
        assert (out[0] == -7).all() and (out[-1] == -7).all()
        return out[1:-1]

    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(times(x).double(), want, rtol=0.01, atol=0.02)
    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65):
        assert torch.equal(times(x[:rows], threads=rows % 3 + 1), times(x)[:rows])


def test_inputs_that_do_not_fill_tiles_are_refused():
    with pytest.raises(ValueError, match="48 inputs are not a multiple of 32"):
        PackedMatmul(0, 32, 48, 48, 32, tiles=True)


@pytest.mark.parametrize("unit", [None, *UNITS])
@pytest.mark.parametrize("biased", [False, True])
def test_wide_results_are_rounded_as_narrow_ones(unit, biased):
    torch.manual_seed(0)
    weight, x, bias = torch.randn(70, 64).bfloat16(), torch.randn(67, 64).bfloat16(), torch.randn(70)
    memory, results = packed(weight, 32), []
    for dtype, bits in ((torch.bfloat16, 16), (torch.float32, 32)):
        where = bias.data_ptr() if biased else 0
        matmul = PackedMatmul(memory.data_ptr(), 70, 64, 64, 32, where, out_bits=bits, **({unit: True} if unit else {}))
        results.append(torch.empty(67, 70, dtype=dtype))
        matmul(x.data_ptr(), results[-1].data_ptr(), 67, 2)
    narrow, wide = results
    assert torch.equal(narrow.float(), wide) and wide.abs().sum() > 0
