"""Hopper instructions for kernels: wgmma, TMA copies, mbarriers, setmaxnreg."""

# Generated from nbs/numba_kernels/cuda/wgmma.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir

from minivllm_kernels.cuda.launch import driver
from minivllm_kernels.cuda.warp import LLVM, NUMBA, REGISTER, intrinsic, ptx, signature, types

SWIZZLE = 128  # bytes of a row of a swizzled tile: 64 columns of 16 bits


def swizzled(row: int, column: int) -> int:
    """Byte where a 16-bit element of a tile of 64 columns lies, from the start of the tile (a multiple of 1024).

    The eight 16-byte pieces of a row change places with the row, so that 8 rows of a column lie in different banks.
    """
    return row * SWIZZLE + ((column // 8) ^ (row % 8)) * 16 + column % 8 * 2


def column_descriptor(half_bytes: int) -> int:
    """Descriptor bits of B read across: its rows are the sum's index, and 64 columns further is `half_bytes` further."""
    return (1 << 62) | (1024 // 16 << 32) | (half_bytes // 16 << 16)


K_MAJOR = column_descriptor(16)
"""Descriptor bits of a matrix whose rows are contiguous along the sum's index (Q and K): 128-byte swizzle, 8 rows every
1024 bytes. The two numbers of A or B that wgmma multiplies next to each other lie in one word."""


def base_descriptor(half_bytes: int, slices: int) -> list[int]:
    """What to add to a row-wise descriptor for each of `slices` pieces of 16 columns, in units of 16 bytes."""
    return [(i // 4) * (half_bytes // 16) + (i % 4) * 2 for i in range(slices)]


def _on_registers(text: str, registers: str, arguments: str) -> Any:
    """A kernel function made of inline PTX that works on whole local arrays.

    registers: what comes first among the arguments: "+f32:64" (read and written), "=f32:64" (written), "u32:4" (read).
    arguments: types of the scalars after them. Operands are numbered: written arrays; the read half of the written ones;
    read arrays; scalars.
    """
    arrays = [(s[0] if s[0] in "+=" else "", *s.lstrip("+=").split(":")) for s in registers.split()]
    scalars = arguments.split()

    def operation(typingctx, *given):
        sig = signature(types.void, *given[: len(arrays)], *[NUMBA[kind] for kind in scalars])

        def codegen(context, builder, sig, values):
            written: list[tuple] = []  # address, type, constraint
            read: list[tuple] = []  # value, constraint
            for array, typ, (mode, kind, count) in zip(values, sig.args, arrays):
                data = context.make_array(typ)(context, builder, array).data
                slots = [builder.gep(data, [ir.Constant(ir.IntType(32), i)]) for i in range(int(count))]
                if mode == "+":
                    read += [(builder.load(slot), str(len(written) + i)) for i, slot in enumerate(slots)]
                if mode:
                    written += [(slot, LLVM[kind], "=" + REGISTER[kind]) for slot in slots]
                else:
                    read += [(builder.load(slot), REGISTER[kind]) for slot in slots]
            read += [(value, REGISTER[kind]) for value, kind in zip(values[len(arrays) :], scalars)]
            returned = ir.LiteralStructType([kind for _, kind, _ in written])
            constraints = ",".join([c for _, _, c in written] + [c for _, c in read] + ["~{memory}"])
            inputs = [value for value, _ in read]
            called = ir.FunctionType(returned, [value.type for value in inputs])
            out = builder.call(ir.InlineAsm(called, text, constraints, side_effect=True), inputs)
            for i, (slot, _, _) in enumerate(written):
                builder.store(builder.extract_value(out, i), slot)
            return context.get_dummy_value()

        return sig, codegen

    names = ["typingctx", *(f"a{i}" for i in range(len(arrays) + len(scalars)))]
    positional = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    operation.__signature__ = Signature(positional)  # type: ignore[attr-defined]  # numba lowers no *args
    return intrinsic(operation)


def wgmma_text(dtype: str, n: int, b_steps: Sequence[int], a_steps: Sequence[int] | None = None) -> str:
    """PTX of a chain of wgmma, one for each 16 of the sum's index, as one group.

    With `a_steps`, A lies in shared memory and the chain starts from zero; without, A is in registers (four words a
    step), the chain adds to the existing sums, and B is read across. The steps move the descriptors.
    """
    count, kind = n // 2, {"bfloat16": "bf16", "float16": "f16"}[dtype]
    first = count if a_steps is not None else 2 * count + 4 * len(b_steps)  # operand number of the first descriptor

    def operands(start: int, size: int) -> str:
        return "{" + ",".join(f"${i}" for i in range(start, start + size)) + "}"

    lines = ["{ .reg .b64 a, b; .reg .pred no, yes; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for i, step in enumerate(b_steps):
        if a_steps is None:
            a, keep, across = operands(2 * count + 4 * i, 4), "yes", "1"
            lines.append(f"add.s64 b, ${first}, {step};")
        else:
            a, keep, across = "a", "yes" if i else "no", "0, 0"
            lines.append(f"add.s64 a, ${first}, {a_steps[i]}; add.s64 b, ${first + 1}, {step};")
        name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        lines.append(f"{name} {operands(0, count)}, {a}, b, {keep}, 1, 1, {across};")
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


def wgmma_shared(dtype: str, n: int, a_steps: Sequence[int], b_steps: Sequence[int]) -> Any:
    """(s, a, b): s[n / 2] = A B^T of a warpgroup, 64 x n; descriptors of A and B in shared memory. Asynchronous."""
    return _on_registers(wgmma_text(dtype, n, b_steps, a_steps), f"=f32:{n // 2}", "i64 i64")


def wgmma_add(dtype: str, n: int) -> Any:
    """(s, a, b, add): s[n / 2] += A B^T of a warpgroup for 64 columns, 64 x n; from zero if `add` is 0. Asynchronous."""
    count, kind = n // 2, {"bfloat16": "bf16", "float16": "f16"}[dtype]
    sums, first = ",".join(f"${i}" for i in range(count)), 2 * count  # operand number of the first descriptor
    lines = [f"{{ .reg .b64 a, b; .reg .pred p, yes; setp.ne.b32 p, ${first + 2}, 0; setp.eq.b32 yes, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    for i, step in enumerate(base_descriptor(0, 4)):
        lines.append(f"add.s64 a, ${first}, {step}; add.s64 b, ${first + 1}, {step};")
        name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        lines.append(f"{name} {{{sums}}}, a, b, {'yes' if i else 'p'}, 1, 1, 0, 0;")
    text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])
    return _on_registers(text, f"+f32:{count}", "i64 i64 i32")


def wgmma_registers(dtype: str, n: int, b_steps: Sequence[int]) -> Any:
    """(o, p, b): o[n / 2] += P V of a warpgroup, P in registers, V in shared memory by descriptor. Asynchronous."""
    return _on_registers(wgmma_text(dtype, n, b_steps), f"+f32:{n // 2} u32:{4 * len(b_steps)}", "i64")


def wgmma_wait(groups: int, count: int) -> Any:
    """(s): wait until at most `groups` groups are in flight. The array passes through: nothing reads it earlier."""
    return _on_registers(f"wgmma.wait_group.sync.aligned {groups};", f"+f32:{count}", "")


@intrinsic
def map_address(typingctx, pointer):
    """The address of a tensor map that the kernel was given."""

    def codegen(context, builder, sig, values):
        return builder.ptrtoint(values[0], ir.IntType(64))

    return signature(types.int64, pointer), codegen


mbarrier_init = ptx("mbarrier.init.shared::cta.b64 [$0], $1;", "", "i32 i32", effect=True)
mbarrier_fence = ptx("fence.mbarrier_init.release.cluster;", effect=True)
mbarrier_arrive = ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", "", "i32", effect=True)
mbarrier_expect = ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "i32 i32", effect=True)
mbarrier_wait = ptx(
    "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE; bra AGAIN; DONE: }",
    arguments="i32 i32",
    effect=True,
)

_TMA = "cp.async.bulk.tensor.%dd.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {%s}], [$2];"
tma_load_2d = ptx(_TMA % (2, "$3,$4"), "", "i32 i64 i32 i32 i32", effect=True)
tma_load_3d = ptx(_TMA % (3, "$3,$4,$5"), "", "i32 i64 i32 i32 i32 i32", effect=True)
tma_load_4d = ptx(_TMA % (4, "$3,$4,$5,$6"), "", "i32 i64 i32 i32 i32 i32 i32", effect=True)

cluster_arrive = ptx("barrier.cluster.arrive.relaxed.aligned;", effect=True)
cluster_wait = ptx("barrier.cluster.wait.acquire.aligned;", effect=True)
cluster_address = ptx("mapa.shared::cluster.u32 $0, $1, $2;", "i32", "i32 i32")
cluster_store = ptx(
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$2,$3,$4,$5}, [$1];",
    arguments="i32 i32 f32 f32 f32 f32",
    effect=True,
)
lds128 = ptx("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "f32 f32 f32 f32", "i32", effect=True)

more_registers = ptx("setmaxnreg.inc.sync.aligned.u32 216;", effect=True)
fewer_registers = ptx("setmaxnreg.dec.sync.aligned.u32 72;", effect=True)
first_lane = ptx("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "i32", "i32", effect=True)
shfl_word = ptx("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "u32", "u32 i32", effect=True)
sts32 = ptx("st.shared.b32 [$0], $1;", "", "i32 i32", effect=True)
lds32 = ptx("ld.shared.b32 $0, [$1];", "i32", "i32", effect=True)

# ptxas moves a wait up over arithmetic, but nothing over the end of a loop, and this loop needs the value
after = ptx("{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; SPIN: @p nanosleep.u32 20; @p bra SPIN; }", "", "f32", True)


@functools.lru_cache(4096)
def tensor_map(
    address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """A tensor map, 128 bytes: it tells TMA the layout of an array in global memory and the box to copy.

    Args:
        address: of the array, a multiple of 16.
        dtype: "bfloat16" or "float16".
        sizes: of the array, the innermost dimension first.
        strides: bytes from one index to the next in all dimensions but the innermost, multiples of 16.
        box: elements to copy in each dimension; the innermost at most 64. What is outside the array becomes zero.
    """
    rank, u32, u64 = len(sizes), ctypes.c_uint32, ctypes.c_uint64
    raw = ctypes.create_string_buffer(128 + 64)
    at = -(-ctypes.addressof(raw) // 64) * 64
    lists = (u64 * rank)(*sizes), (u64 * (rank - 1))(*strides), (u32 * rank)(*box), (u32 * rank)(*[1] * rank)
    kind = {"float16": 6, "bfloat16": 9}[dtype]
    swizzle_128, promote_128 = 3, 2
    code = driver().cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, rank, ctypes.c_void_p(address), *lists, 0, swizzle_128, promote_128, 0
    )
    driver().check(code, f"describing an array of {sizes} with strides {strides} for boxes of {box}")
    return ctypes.string_at(at, 128)
