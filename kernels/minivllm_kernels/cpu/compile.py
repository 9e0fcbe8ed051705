"""Compiles numba kernels to object code for the host and caches it on disk."""

# Generated from nbs/numba_kernels/cpu/compile.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from minivllm_kernels.cpu.features import VARIABLE, chosen_level

__all__ = [
    "COUNT", "ENTERED", "LIBC", "NEXT", "OWN", "Kernel", "compile_kernel", "compile_object", "host_is_x86",
    "host_lanes", "host_machine", "host_registers", "kernel", "launch", "load_object", "logger",
    "machine_for", "only", "openmp", "pack", "read_cached", "run", "to_llvm", "write_cached",
]  # fmt: skip

"""Kernels for the CPU: compiled once into a file, loaded without numba, run on the threads that torch uses.

A kernel is a Python function `body(args)`, `args` a pointer to int64: [0] the next work item, [1] their number,
[2] how many threads have entered; the kernel's own arguments follow. It must not allocate, raise, or touch Python objects.
"""

NEXT, COUNT, ENTERED, OWN = 0, 1, 2, 3
logger = logging.getLogger(__name__)


@functools.cache
def host_machine() -> tuple[str, str, str]:
    """(triple, CPU, features) to compile for.

    MINIVLLM_CPU_FEATURES narrows it (see `features`). As numba does, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
    (`+avx2,+fma`), set together, choose another CPU of the family.

    Raises:
        ValueError: the CPU lacks what MINIVLLM_CPU_FEATURES asks for.
    """
    triple, there = llvm.get_process_triple(), llvm.get_host_cpu_features().flatten()
    level, cpu = chosen_level(), os.environ.get("NUMBA_CPU_NAME")
    if level is not None:
        missing = sorted({*level.llvm_features.split(",")} - {*there.split(",")})
        if missing:
            raise ValueError(f"{VARIABLE} asks for more than this CPU has: {', '.join(missing)}")
        return triple, level.llvm_cpu, level.llvm_features
    if cpu is not None:
        return triple, cpu, os.environ.get("NUMBA_CPU_FEATURES") or ""
    return triple, llvm.get_host_cpu_name(), there


def host_is_x86() -> bool:
    """Whether this machine is an x86-64."""
    return llvm.get_process_triple().startswith("x86_64")


def host_lanes() -> int:
    """float32 numbers in a vector register of this machine: 16 (AVX-512), 8 (AVX2), else 4 (SSE, NEON)."""
    features = host_machine()[2].split(",")
    return 16 if "+avx512f" in features else 8 if "+avx2" in features else 4


def host_registers() -> int:
    """Vector registers of this machine: 32 (AVX-512, Arm), else 16."""
    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    return 32 if arm or host_lanes() == 16 else 16


def machine_for(triple: str, cpu: str, features: str) -> Any:
    """LLVM's description of the machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if triple != llvm.get_process_triple():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def to_llvm(body: Callable[[Any], None]) -> tuple[str, str]:
    """Compile a kernel's body with numba: (name of its entry, LLVM code).

    numba's own entry reports Python errors, with functions that only a process with numba has. A kernel has none to
    report, so it gets another entry, which drops the status.
    """
    from numba import cfunc, types

    function = cfunc(types.void(types.CPointer(types.int64)), error_model="numpy")(body)
    native = function.native_name.removeprefix("cfunc.")
    entry = f"kernel.{native}"
    return entry, function.inspect_llvm() + (
        f'define void @"{entry}"(ptr %args) {{\n'
        "  %result = alloca ptr\n  %error = alloca ptr\n"
        f'  call i32 @"{native}"(ptr %result, ptr %error, ptr %args)\n'
        "  ret void\n}\n"
    )


def only(module: Any, entry: str, machine: Any) -> Any:
    """Drop from an LLVM module everything that `entry` does not call. Raises ValueError if it calls a function outside the module."""
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = llvm.Linkage.internal
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    outside = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if outside:
        raise ValueError(f"a kernel must not allocate, raise or touch Python objects, and this one calls {outside}")
    return module


@dataclass(frozen=True)
class Kernel:
    """Machine code in memory.

    Attributes:
        name: for messages.
        address: of the entry, `void kernel(int64_t *args)`.
        cached: it came from the disk.
        seconds: to compile or load it.
    """

    name: str
    address: int
    cached: bool
    seconds: float
    keep_alive: Any

    @functools.cached_property
    def enter(self) -> Any:
        """The entry as a function of the address of its arguments, for the calling thread alone."""
        return _ENTRY(self.address)


_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


LIBC = ("memset", "memcpy", "memmove")
"""C functions that LLVM may put in place of a loop that clears or copies memory. A kernel calls nothing else outside itself."""


@functools.cache
def _know_libc() -> None:
    """Tell LLVM where the functions of the C library are: if it misses one name, it resolves none."""
    libc = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    for name in LIBC:
        llvm.add_symbol(name, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value)


def load_object(data: bytes, symbol: str) -> tuple[int, Any]:
    """Put an object into executable memory: (address of `symbol`, the engine, which must stay alive as long as the code is used)."""
    _know_libc()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine_for(*host_machine()))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if not address:
        raise RuntimeError(f"the compiled object has no {symbol}")
    return address, engine


def compile_object(body: Callable[[Any], None]) -> tuple[bytes, str]:
    """(object, name of its entry) for this machine."""
    symbol, code = to_llvm(body)
    machine = machine_for(*host_machine())
    return machine.emit_object(only(llvm.parse_assembly(code), symbol, machine)), symbol


def compile_kernel(body: Callable[[Any], None]) -> Kernel:
    """A kernel for this process only."""
    start = time.perf_counter()
    data, symbol = compile_object(body)
    address, engine = load_object(data, symbol)
    return Kernel(body.__name__, address, False, time.perf_counter() - start, engine)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `kernels` in $MINIVLLM_CACHE, else in the user's cache folder."""
    if chosen := os.environ.get("MINIVLLM_CACHE"):
        return Path(chosen).expanduser().absolute() / "kernels"
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser().absolute() / "minivllm" / "kernels"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"minivllm-{os.getuid()}" / "kernels"


@functools.cache
def _source(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {module!r}")
    return Path(spec.origin).read_bytes()


@functools.cache
def _sources() -> bytes:
    """The source of every CPU kernel module: kernels share functions, and other modules define the places of their arguments."""
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))


@functools.cache
def _numba_version() -> str:
    from importlib.metadata import version

    return version("numba")


def cache_key(builder: str, params: Sequence[int]) -> str:
    """A hash of all that the machine code depends on: builder, parameters, sources, compiler versions, CPU."""
    parts = [builder, repr(tuple(params)), _numba_version(), llvmlite.__version__, *host_machine()]
    return hashlib.sha256("\n".join(parts).encode() + _sources() + _source(builder.partition(":")[0])).hexdigest()[:24]


def read_cached(path: Path) -> tuple[bytes, str] | None:
    """(object, entry) from the file, or None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, rest = content[:32], content[32:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    symbol, _, data = rest.partition(b"\n")
    return data, symbol.decode()


def write_cached(path: Path, data: bytes, symbol: str) -> None:
    """Write the file as a whole or not at all; warn if it cannot be written."""
    rest = symbol.encode() + b"\n" + data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(rest).digest() + rest)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error}): each start will compile them again."
            " Set MINIVLLM_CACHE to a folder that can be written.",
            stacklevel=2,
        )


@functools.cache
def kernel(builder: str, *params: int) -> Kernel:
    """The kernel that `builder(*params)` describes, from memory, from the disk, or compiled now.

    Args:
        builder: `"module:function"`; the function takes `params` and returns the kernel's body.
        params: sizes and formats that the kernel is built for.
    """
    start = time.perf_counter()
    module, _, function = builder.partition(":")
    path = cache_folder() / f"{function}-{cache_key(builder, params)}.o"
    found = read_cached(path)
    if found is None:
        logger.info("compiling %s%s, once for this machine", function, params)
        found = compile_object(getattr(importlib.import_module(module), function)(*params))
        write_cached(path, *found)
        cached = False
    else:
        cached = True
    address, engine = load_object(*found)
    return Kernel(function, address, cached, time.perf_counter() - start, engine)


@functools.cache
def openmp() -> Any:
    """`GOMP_parallel` of the OpenMP runtime in this process, or None."""
    if os.name == "nt":
        return None
    try:
        launch = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    launch.restype = None
    return launch


@functools.cache
def _numba_threads() -> Any:
    """A function (address, args, threads) that enters a kernel on numba's threads."""
    from numba import njit, prange

    from minivllm_kernels.cpu.simd import call

    @njit("void(int64, int64, int64)", parallel=True, nogil=True)
    def enter(address: int, args: int, threads: int) -> None:
        for _ in prange(threads):
            call(address, args, 0)

    return enter


def launch(kernel: Kernel, where: int, threads: int, pool: str = "auto") -> None:
    """Run a kernel whose arguments lie at address `where`, on `threads` threads, and wait. See `run`."""
    if pool == "auto":
        pool = "caller" if threads == 1 else "openmp" if openmp() else "numba"
    if pool == "openmp":
        start = openmp()
        if start is None:
            raise RuntimeError("pool='openmp': there is no GOMP_parallel in this process; import torch first")
        start(kernel.address, where, threads, 0)
    elif pool == "caller":
        kernel.enter(where)
    elif pool == "numba":
        _numba_threads()(kernel.address, where, threads)
    else:
        raise ValueError(f"pool must be 'auto', 'openmp', 'numba' or 'caller', got {pool!r}")


def run(kernel: Kernel, args: "array[int]", threads: int, pool: str = "auto") -> None:
    """Run a kernel on `threads` threads and wait. Python's lock is released meanwhile.

    Args:
        args: from `pack`; its counters are reset here, so one thread at a time may use it.
        threads: how many enter the kernel. Pass `torch.get_num_threads()`: another number makes OpenMP change the size of torch's pool.
        pool: `auto`, or by name `openmp` (torch's threads), `numba` (numba's own) or `caller` (one thread, this one).
    """
    args[NEXT] = args[ENTERED] = 0
    launch(kernel, args.buffer_info()[0], 1 if args[COUNT] == 1 and pool == "auto" else threads, pool)


def pack(count: int, *own: int) -> "array[int]":
    """Arguments of a kernel with `count` work items: int64 numbers, `OWN` of them its counters."""
    return array("q", (0, count, 0, *own))
