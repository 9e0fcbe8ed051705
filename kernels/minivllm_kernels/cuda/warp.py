"""Warp and tensor-core primitives as inline PTX."""

# Generated from nbs/numba_kernels/cuda/warp.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir

__all__: list[str] = []


# %% nbs/numba_kernels/cuda/warp.ipynb #code-1f3366
try:  # numba-cuda carries its own copies of numba's compiler modules
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature
except ImportError:  # numba alone: enough to import, not to compile for a current GPU
    from numba.core import cgutils, types
    from numba.core.typing import signature
    from numba.extending import intrinsic

LLVM: dict[str, Any] = {"f32": ir.FloatType(), "u32": ir.IntType(32), "i32": ir.IntType(32)}
NUMBA: dict[str, Any] = {"f32": types.float32, "u32": types.uint32, "i32": types.int32}
REGISTER = {"f32": "f", "u32": "r", "i32": "r"}


# %% nbs/numba_kernels/cuda/warp.ipynb #ptx
def ptx(text: str, result: str = "", arguments: str = "", effect: bool = False) -> Any:
    """A kernel function made of inline PTX.

    `result` and `arguments` are types separated by spaces: f32, u32, i32, or ptr (a pointer and an index).
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


# %% nbs/numba_kernels/cuda/warp.ipynb #_bf16
def _bf16(codegen_bits) -> Any:
    @intrinsic
    def unpack(typingctx, word):
        def codegen(context, builder, sig, values):
            return builder.bitcast(codegen_bits(builder, values[0]), ir.FloatType())

        return signature(types.float32, types.uint32), codegen

    return unpack


bf16_lo = _bf16(lambda builder, word: builder.shl(word, ir.Constant(ir.IntType(32), 16)))
bf16_hi = _bf16(lambda builder, word: builder.and_(word, ir.Constant(ir.IntType(32), 0xFFFF0000)))
pack_bf16 = ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", "u32", "f32 f32")
f16_lo = ptx("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", "f32", "u32")
f16_hi = ptx("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", "f32", "u32")
pack_f16 = ptx("cvt.rn.f16x2.f32 $0, $2, $1;", "u32", "f32 f32")
_e4m3 = "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, %s; }"
e4m3_lo = ptx(_e4m3 % "a", "u32", "u32")
e4m3_hi = ptx(_e4m3 % "b", "u32", "u32")
pack_e4m3 = ptx("{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.u32.u16 $0, a; }", "u32", "f32 f32")


# %% nbs/numba_kernels/cuda/warp.ipynb #code-1f88eb
fmax = ptx("max.f32 $0, $1, $2;", "f32", "f32 f32")  # numba's max compares and selects: two instructions
exp2 = ptx("ex2.approx.ftz.f32 $0, $1;", "f32", "f32")
rsqrt = ptx("rsqrt.approx.ftz.f32 $0, $1;", "f32", "f32")
prmt = ptx("prmt.b32 $0, $1, $2, $3;", "u32", "u32 u32 u32")
shfl_xor = ptx("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "f32", "f32 i32", effect=True)
movmatrix = ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "u32", "u32", effect=True)


# %% nbs/numba_kernels/cuda/warp.ipynb #_mma
def _mma(kind: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return ptx(text, "f32 f32 f32 f32", "u32 u32 u32 u32 u32 u32 f32 f32 f32 f32")


mma_bf16 = _mma("bf16")
mma_f16 = _mma("f16")


# %% nbs/numba_kernels/cuda/warp.ipynb #stg128
_FOUR = "u32 u32 u32 u32"
ldg128 = ptx("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", _FOUR, "ptr", effect=True)
ldg128_stream = ptx("ld.global.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];", _FOUR, "ptr", effect=True)
ldg64_stream = ptx("ld.global.L1::no_allocate.L2::128B.v2.u32 {$0,$1}, [$2];", "u32 u32", "ptr", effect=True)
ldcg2 = ptx("ld.global.cg.v2.f32 {$0,$1}, [$2];", "f32 f32", "ptr", effect=True)
grid_wait = ptx("griddepcontrol.wait;", effect=True)
grid_release = ptx("griddepcontrol.launch_dependents;", effect=True)
atomic_inc = ptx("atom.global.add.s32 $0, [$1], 1;", "i32", "ptr", effect=True)


@intrinsic
def stg128(typingctx, pointer, index, words):
    """Store a tuple of four words with one 16-byte store."""

    def codegen(context, builder, sig, values):
        parts = [builder.extract_value(values[2], i) for i in range(4)]
        text, constraints = "st.global.v4.u32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r,~{memory}"
        return _call(context, builder, text, constraints, [], ["ptr"] + _FOUR.split(), [*values[:2], *parts], True)

    return signature(types.void, pointer, types.int64, types.UniTuple(types.uint32, 4)), codegen


# %% nbs/numba_kernels/cuda/warp.ipynb #smem_addr
cp_commit = ptx("cp.async.commit_group;", effect=True)
cp_wait_older = ptx("cp.async.wait_group 1;", effect=True)  # all groups but the newest have arrived
_cp16 = "{ .reg .b32 a; add.s32 a, $0, $1; cp.async.cg.shared.global [a], [$2], 16; }"
cp_async16 = ptx(_cp16, "", "u32 i32 ptr", effect=True)
_ldm = "{ .reg .b32 a; add.s32 a, $4, $5; ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {$0,$1,$2,$3}, [a]; }"
ldmatrix_x4 = ptx(_ldm % "", _FOUR, "u32 i32", effect=True)
ldmatrix_x4_trans = ptx(_ldm % ".trans", _FOUR, "u32 i32", effect=True)


_sts = "{ .reg .b32 a; add.s32 a, $0, $1; st.shared.v4.u32 [a], {$2,$3,$4,$5}; }"
sts128 = ptx(_sts, "", "u32 i32 " + _FOUR, effect=True)


@intrinsic
def smem_addr(typingctx, array):
    """Byte address of a shared array in the shared window."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, ir.IntType(32))

    return signature(types.uint32, array), codegen
