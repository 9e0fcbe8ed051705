"""Warp and tensor-core instructions, each as inline PTX and in plain Python for the simulator."""

# Generated from nbs/numba_kernels/cuda/warp.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir

from minivllm_kernels.cuda import warp_sim
from minivllm_kernels.cuda.warp_sim import SIM

__all__ = [
    "LLVM", "NUMBA", "REGISTER", "as_f32", "as_word", "atomic_arrive", "atomic_inc", "bf16_hi", "bf16_lo",
    "cp_async16", "cp_commit", "cp_wait_older", "e4m3_hi", "e4m3_lo", "exp2", "f16_hi", "f16_lo", "fmax",
    "fmax_or_nan", "grid_release", "grid_wait", "int8_hi", "int8_lo", "ldcg2", "ldg64_stream", "ldg128",
    "ldg128_stream", "ldmatrix_x4", "ldmatrix_x4_trans", "max_bf16", "max_f16", "mma_bf16", "mma_f16",
    "movmatrix", "pack_bf16", "pack_e4m3", "pack_f16", "pack_int8", "prefetch_l2", "prmt", "rsqrt",
    "shfl_xor", "smem_addr", "stg128", "sts128",
]  # fmt: skip

try:  # numba-cuda carries its own copies of numba's compiler modules
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature
except ImportError:  # numba alone: enough to import, not to compile for a current GPU
    from numba.core import cgutils, types
    from numba.core.typing import signature
    from numba.extending import intrinsic

LLVM: dict[str, Any] = {"f32": ir.FloatType(), "u32": ir.IntType(32), "i32": ir.IntType(32), "i64": ir.IntType(64)}
NUMBA: dict[str, Any] = {"f32": types.float32, "u32": types.uint32, "i32": types.int32, "i64": types.int64}
REGISTER = {"f32": "f", "u32": "r", "i32": "r", "i64": "l"}


def ptx(text: str, result: str = "", arguments: str = "", effect: bool = False) -> Any:
    """A kernel function made of inline PTX.

    `result` and `arguments` are types separated by spaces: f32, u32, i32, i64, or ptr (a pointer and an index).
    Several results come back as a tuple.
    """
    results, wanted = result.split(), arguments.split()
    outputs = ",".join("=" + REGISTER[r] for r in results)
    inputs = ",".join("l" if a == "ptr" else REGISTER[a] for a in wanted)
    constraints = ",".join(part for part in (outputs, inputs, "~{memory}" if effect else "") if part)

    def operation(typingctx, *given):
        sig = signature(_result_type(results), *_argument_types(wanted, given))

        def codegen(context, builder, sig, values):
            return _call(context, builder, text, constraints, results, wanted, list(values), effect)

        return sig, codegen

    names = [f"a{i}" for i in range(len(wanted) + wanted.count("ptr"))]
    positional = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("typingctx", *names)]
    operation.__signature__ = Signature(positional)  # type: ignore[attr-defined]  # numba lowers no *args
    return intrinsic(operation)


def _result_type(results: list[str]) -> Any:
    if not results:
        return types.void
    return NUMBA[results[0]] if len(results) == 1 else types.UniTuple(NUMBA[results[0]], len(results))


def _argument_types(wanted: list[str], given: tuple) -> list:
    rest, found = list(given), []
    for name in wanted:
        found += [rest.pop(0), types.int64] if name == "ptr" else [NUMBA[name]]
        del rest[:1]
    return found


def _call(context, builder, text, constraints, results, wanted, values, effect):
    operands = []
    for name in wanted:
        value = values.pop(0)
        operands.append(
            builder.ptrtoint(builder.gep(value, [values.pop(0)]), ir.IntType(64)) if name == "ptr" else value
        )
    if not results:
        returned: Any = ir.VoidType()
    elif len(results) == 1:
        returned = LLVM[results[0]]
    else:
        returned = ir.LiteralStructType([LLVM[r] for r in results])
    function = ir.InlineAsm(
        ir.FunctionType(returned, [o.type for o in operands]), text, constraints, side_effect=effect
    )
    out = builder.call(function, operands)
    if not results:
        return context.get_dummy_value()
    if len(results) == 1:
        return out
    return cgutils.pack_array(builder, [builder.extract_value(out, i) for i in range(len(results))])


def instruction(text: str, result: str = "", arguments: str = "", effect: bool = False) -> Callable[[Callable], Any]:
    """Decorator: the function is the instruction's form in the simulator; on a GPU the PTX text takes its place.

    Args: see `ptx`.
    """
    return lambda simulated: simulated if SIM else ptx(text, result, arguments, effect)


@instruction("max.f32 $0, $1, $2;", "f32", "f32 f32")  # numba's max compares and selects: two instructions
def fmax(a, b):
    """The larger of two float32."""
    return max(a, b)


@instruction("ex2.approx.ftz.f32 $0, $1;", "f32", "f32")
def exp2(x):
    """2 ** x in float32."""
    return np.float32(np.exp2(np.float32(x)))


@instruction("rsqrt.approx.ftz.f32 $0, $1;", "f32", "f32")
def rsqrt(x):
    """1 / sqrt(x) in float32."""
    return np.float32(1 / np.sqrt(np.float32(x)))


@instruction("prmt.b32 $0, $1, $2, $3;", "u32", "u32 u32 u32")
def prmt(a, b, selector):
    """Pick four bytes out of the eight of (a, b): one nibble of the selector per byte."""
    source = [(int(a) >> (8 * i)) & 255 for i in range(4)] + [(int(b) >> (8 * i)) & 255 for i in range(4)]
    return np.uint32(sum(source[(int(selector) >> (4 * i)) & 7] << (8 * i) for i in range(4)))


def _bf16(bits_of: Callable, simulated: Callable) -> Any:
    @intrinsic
    def unpack(typingctx, word):
        def codegen(context, builder, sig, values):
            return builder.bitcast(bits_of(builder, values[0]), ir.FloatType())

        return signature(types.float32, types.uint32), codegen

    return simulated if SIM else unpack


bf16_lo = _bf16(
    lambda builder, word: builder.shl(word, ir.Constant(ir.IntType(32), 16)),
    lambda word: np.uint32((int(word) << 16) & 0xFFFFFFFF).view(np.float32),
)
bf16_hi = _bf16(
    lambda builder, word: builder.and_(word, ir.Constant(ir.IntType(32), 0xFFFF0000)),
    lambda word: np.uint32(int(word) & 0xFFFF0000).view(np.float32),
)


@instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "u32", "f32 f32")
def pack_bf16(lo, hi):
    """A word of two bfloat16, rounded to nearest even."""
    return np.uint32(warp_sim.bf16_bits(lo) | (warp_sim.bf16_bits(hi) << 16))


@instruction("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", "f32", "u32")
def f16_lo(word):
    """float32 of the low float16 of a word."""
    return np.float32(np.uint16(int(word) & 0xFFFF).view(np.float16))


@instruction("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", "f32", "u32")
def f16_hi(word):
    """float32 of the high float16 of a word."""
    return np.float32(np.uint16(int(word) >> 16).view(np.float16))


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", "f32 f32")
def pack_f16(lo, hi):
    """A word of two float16, rounded to nearest even."""
    low, high = (int(np.float16(x).view(np.uint16)) for x in (lo, hi))
    return np.uint32(low | (high << 16))


@instruction("{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.u32.u16 $0, a; }", "u32", "f32 f32")
def pack_e4m3(lo, hi):
    """Two e4m3 in the low half of a word, rounded to nearest even; what is beyond +-448 becomes +-448."""
    return np.uint32(warp_sim.e4m3_bits(lo) | (warp_sim.e4m3_bits(hi) << 8))


def _unpack_e4m3(word):
    low, high = (warp_sim.f16_bits_of_e4m3(int(word) >> shift & 255) for shift in (0, 8))
    return np.uint32(low | high << 16)


@instruction("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a; }", "u32", "u32")
def e4m3_lo(word):
    """A word of two float16 from the two e4m3 in the low half of a word."""
    return _unpack_e4m3(word)


@instruction("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, b; }", "u32", "u32")
def e4m3_hi(word):
    """A word of two float16 from the two e4m3 in the high half of a word."""
    return _unpack_e4m3(int(word) >> 16)


@instruction("max.NaN.f32 $0, $1, $2;", "f32", "f32 f32")
def fmax_or_nan(a, b):
    """The larger one; NaN if one of them is."""
    return np.maximum(np.float32(a), np.float32(b))


@instruction("max.NaN.bf16x2 $0, $1, $2;", "u32", "u32 u32")
def max_bf16(a, b):
    """`fmax_or_nan` of the low and of the high bfloat16 of two words."""
    return pack_bf16(fmax_or_nan(bf16_lo(a), bf16_lo(b)), fmax_or_nan(bf16_hi(a), bf16_hi(b)))


@instruction("max.NaN.f16x2 $0, $1, $2;", "u32", "u32 u32")
def max_f16(a, b):
    """`fmax_or_nan` of the low and of the high float16 of two words."""
    return pack_f16(fmax_or_nan(f16_lo(a), f16_lo(b)), fmax_or_nan(f16_hi(a), f16_hi(b)))


@instruction("mov.b32 $0, $1;", "f32", "u32")
def as_f32(word):
    """The float32 that a word is."""
    return np.uint32(word).view(np.float32)


@instruction("mov.b32 $0, $1;", "u32", "f32")
def as_word(x):
    """The word that a float32 is."""
    return np.float32(x).view(np.uint32)


@instruction(
    "{ .reg .b32 a, b, c; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; mov.b32 c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, c; }",
    "u32",
    "f32 f32",
)
def pack_int8(lo, hi):
    """Two int8 in the low half of a word, rounded to nearest even; NaN becomes 0."""
    low, high = (0 if np.isnan(x) else int(np.clip(np.rint(x), -128, 127)) & 255 for x in (lo, hi))
    return np.uint32(low | high << 8)


def _unpack_int8(at: int) -> Any:
    text = f"prmt.b32 s, $1, 0x43434343, {0x4140 + 0x101 * at}; and.b32 a, s, 0xFF7FFF7F; and.b32 s, s, 0xFF80FF80;"

    @instruction(f"{{ .reg .b32 s, a, m; mov.b32 m, 0xBF80BF80; {text} fma.rn.bf16x2 $0, s, m, a; }}", "u32", "u32")
    def unpack(word):
        """A word of two bfloat16 from the two int8 in a half of a word.

        The low seven bits become the fraction of a number from 128 to 255; then 128 is subtracted, or 256 if the sign bit is set."""
        low, high = np.array([int(word) >> 8 * at & 0xFFFF], np.uint16).view(np.int8)
        return pack_bf16(np.float32(low), np.float32(high))

    return unpack


int8_lo, int8_hi = _unpack_int8(0), _unpack_int8(2)


def _mma(kind: str, simulated: Callable) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return instruction(text, "f32 f32 f32 f32", "u32 u32 u32 u32 u32 u32 f32 f32 f32 f32")(simulated)


mma_bf16 = _mma("bf16", warp_sim.mma_bf16)
mma_f16 = _mma("f16", warp_sim.mma_f16)
shfl_xor = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "f32", "f32 i32", effect=True)(warp_sim.shfl_xor)
movmatrix = instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "u32", "u32", effect=True)(warp_sim.movmatrix)

_FOUR = "u32 u32 u32 u32"


@instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", _FOUR, "ptr", effect=True)
def ldg128(pointer, index):
    """Four words from `pointer[index]`: one 16-byte load."""
    return tuple(pointer[index + k] for k in range(4))


@instruction("ld.global.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", _FOUR, "ptr", effect=True)
def ldg128_stream(pointer, index):
    """Four words that are read once: L1 keeps nothing of them."""
    return tuple(pointer[index + k] for k in range(4))


@instruction("ld.global.L1::no_allocate.L2::128B.v2.u32 {$0,$1}, [$2];", "u32 u32", "ptr", effect=True)
def ldg64_stream(pointer, index):
    """Two words that are read once: one 8-byte load."""
    return pointer[index], pointer[index + 1]


@instruction("prefetch.global.L2 [$0];", "", "ptr", effect=True)
def prefetch_l2(pointer, index):
    """Bring the 128 bytes around `pointer[index]` into L2."""
    pointer.check(index)


@instruction("ld.global.cg.v2.f32 {$0,$1}, [$2];", "f32 f32", "ptr", effect=True)
def ldcg2(pointer, index):
    """Two float32 that another block may have written, from L2."""
    return pointer[index], pointer[index + 1]


def _store_four(pointer, index, words):
    for k in range(4):
        pointer[index + k] = words[k]


@intrinsic
def _stg128(typingctx, pointer, index, words):
    def codegen(context, builder, sig, values):
        parts = [builder.extract_value(values[2], i) for i in range(4)]
        text, constraints = "st.global.v4.u32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r,~{memory}"
        return _call(context, builder, text, constraints, [], ["ptr"] + _FOUR.split(), [*values[:2], *parts], True)

    return signature(types.void, pointer, types.int64, types.UniTuple(types.uint32, 4)), codegen


stg128: Any = _store_four if SIM else _stg128  # (pointer, index, four words): one 16-byte store

_lock = threading.Lock()


@instruction("atom.global.add.s32 $0, [$1], 1;", "i32", "ptr", effect=True)
def atomic_inc(pointer, index):
    """Add one to `pointer[index]`; the value before."""
    with _lock:
        old = int(pointer[index])
        pointer[index] = old + 1
    return old


@instruction("atom.acq_rel.gpu.global.add.s32 $0, [$1], 1;", "i32", "ptr", effect=True)
def atomic_arrive(pointer, index):
    """`atomic_inc` that keeps earlier writes before it and later reads after it, so the last block to arrive sees what all blocks wrote.

    One thread calls it, between two `syncthreads`."""
    return atomic_inc(pointer, index)


@instruction("griddepcontrol.wait;", effect=True)
def grid_wait():
    """Wait until the previous kernel has ended; what it wrote can be read from here on."""


@instruction("griddepcontrol.launch_dependents;", effect=True)
def grid_release():
    """Let the next kernel start; it runs up to its `grid_wait`."""


@intrinsic
def _smem_addr(typingctx, array):
    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, ir.IntType(32))

    return signature(types.uint32, array), codegen


smem_addr: Any = (lambda array: array) if SIM else _smem_addr  # the byte address that the following take


@instruction(
    "{ .reg .b32 a; add.s32 a, $0, $1; st.shared.v4.u32 [a], {$2,$3,$4,$5}; }", "", "u32 i32 " + _FOUR, effect=True
)
def sts128(base, offset, a, b, c, d):
    """Store four words at byte `offset` of the shared array `base`."""
    _store_four(base, int(offset) // 4, (a, b, c, d))


@instruction(
    "{ .reg .b32 a; add.s32 a, $0, $1; cp.async.cg.shared.global [a], [$2], 16; }", "", "u32 i32 ptr", effect=True
)
def cp_async16(base, offset, pointer, index):
    """Start copying 16 bytes to byte `offset` of the shared array `base`."""
    _store_four(base, int(offset) // 4, [pointer[index + k] for k in range(4)])


@instruction("cp.async.commit_group;", effect=True)
def cp_commit():
    """Close a group of started copies."""


@instruction("cp.async.wait_group 1;", effect=True)
def cp_wait_older():
    """Wait until all groups of copies but the newest have arrived."""


_LDMATRIX = "{ .reg .b32 a; add.s32 a, $4, $5; ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {$0,$1,$2,$3}, [a]; }"
ldmatrix_x4 = instruction(_LDMATRIX % "", _FOUR, "u32 i32", effect=True)(warp_sim.ldmatrix_x4)
ldmatrix_x4_trans = instruction(_LDMATRIX % ".trans", _FOUR, "u32 i32", effect=True)(warp_sim.ldmatrix_x4_trans)
