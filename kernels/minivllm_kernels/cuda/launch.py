"""Low-overhead CUDA launch: driver calls by ctypes, PTX cache, compiling ahead, parameter buffers."""

# Generated from nbs/numba_kernels/cuda/launch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_kernels.cuda.warp_sim import SIM

if TYPE_CHECKING:  # not imported: that takes as long as numba does, and `start_compilers` is to be called before
    from minivllm_kernels.cuda.simt import CudaKernel

logger = logging.getLogger(__name__)

CODES = {"f32": "f", "i32": "i", "u32": "I", "i64": "q", "map": "128s"}


class Layout:
    """How the arguments of a signature lie in the parameter buffer: `format` for struct, and byte `offsets`."""

    def __init__(self, signature: str):
        self.format, self.offsets, end = "=", [], 0
        for kind in signature.split():
            code = "Q" if kind.endswith("*") else CODES[kind]
            size = struct.calcsize("=" + code)
            padding = -end % size
            self.format += "x" * padding + code
            self.offsets.append(end + padding)
            end += padding + size
        self.size = end


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


ADVICE = {
    100: "no CUDA device is visible",
    201: "no CUDA context: allocate a tensor on the device first",
    209: "the kernel was built for another card",
    218: "the driver's compiler refused the PTX",
    222: "the driver is older than the compiler: update the driver, or install the compiler of its CUDA version, for "
    'example pip install "nvidia-nvvm==13.0.*" for a driver of CUDA 13.0',
    700: "a kernel read or wrote outside its memory",
    701: "a block asks for more registers or shared memory than a multiprocessor has",
    719: "a kernel stopped itself, as the all-reduce does when another rank has not come for about a minute, or it failed",
}


class Driver:
    """The few functions of libcuda that launching needs."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("libcuda.so.1 is not there: no NVIDIA driver is installed") from error
        self.launch = self.cuda.cuLaunchKernelEx
        self.launch.argtypes = [ctypes.c_void_p] * 4

    def check(self, code: int, what: str) -> None:
        """Raise for a driver's return code."""
        if code:
            name = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(name))
            advice = f": {ADVICE[code]}" if code in ADVICE else ""
            raise CudaError(f"{what} failed with {(name.value or b'unknown').decode()} ({code}){advice}")

    def load(self, ptx: str, name: str) -> int:
        """Let the driver turn PTX into machine code for the current device: the kernel's handle."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode() + b"\0"), f"loading kernel {name}")
        entry = ptx.split(".visible .entry", 1)[1].split("(", 1)[0].strip()
        self.check(
            self.cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding kernel {name}"
        )
        return int(function.value or 0)

    def allow_shared(self, function: int, size: int, name: str) -> None:
        """Permit `size` bytes of dynamic shared memory per block. The driver wants this if static and dynamic together exceed 48 KB."""
        code = self.cuda.cuFuncSetAttribute(ctypes.c_void_p(function), 8, size)
        self.check(code, f"reserving {size} bytes of shared memory a block for kernel {name}")


_driver: Driver | None = None


def driver() -> Driver:
    """The driver, loaded at the first call."""
    global _driver
    if _driver is None:
        _driver = Driver()
    return _driver


OLDEST_NUMBA_CUDA = (0, 30)


def compiler_missing() -> str | None:
    """What is missing to compile kernels, in words; None if nothing is."""
    install = 'pip install "numba-cuda>=0.30" "nvidia-nvvm==13.0.*"'
    if SIM:
        return "NUMBA_ENABLE_CUDASIM is set, so kernels run in the simulator only"
    if importlib.util.find_spec("numba_cuda") is None:
        return f"numba-cuda is not installed ({install})"
    version = importlib.metadata.version("numba-cuda")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_NUMBA_CUDA:
        return f"numba-cuda {version} is too old, {'.'.join(map(str, OLDEST_NUMBA_CUDA))} is needed ({install})"
    return None


def cache_dir() -> Path:
    """Where PTX is kept: `kernels` in the folder named by MINIVLLM_CACHE, else in ~/.cache/minivllm."""
    try:
        return Path(os.environ.get("MINIVLLM_CACHE", "~/.cache/minivllm")).expanduser() / "kernels"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"minivllm-{os.getuid()}" / "kernels"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _sources() -> bytes:
    """A hash of the compiler's versions and the kernels' modules."""
    packages = ("numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc", "llvmlite", "numba")
    digest = hashlib.sha256("".join(map(_version, packages)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


def fingerprint(kernel: "CudaKernel", cc: tuple[int, int]) -> str:
    """A hash of everything that the PTX of a kernel depends on. It begins with that of the sources."""
    about = repr((kernel.name, kernel.signature, kernel.threads, kernel.min_blocks, cc))
    return _sources().hex()[:8] + hashlib.sha256(about.encode() + _sources()).hexdigest()[:16]


def ptx_file(kernel: "CudaKernel", cc: tuple[int, int]) -> Path:
    """Where a kernel's PTX is kept."""
    return cache_dir() / f"{kernel.name}-{fingerprint(kernel, cc)}.ptx"


def cached_ptx(kernel: "CudaKernel", cc: tuple[int, int]) -> str:
    """The kernel's PTX: from the cache, or compiled and put there. If another process is to compile it ahead, waits for that one."""
    path = ptx_file(kernel, cc)
    if (compilers := _ahead.pop(path, None)) is not None:
        compilers.wait_for(path)
    if path.exists():
        return path.read_text()
    if (missing := compiler_missing()) is not None:
        raise CudaError(f"kernel {kernel.name} cannot be compiled: {missing}")
    text = kernel.ptx(cc)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)  # whole, or not at all: other processes may be looking
    return text


COMPILER = """
import gc, socket, sys
gc.disable()
sys.path[:] = sys.argv[3:]
from minivllm_kernels.cuda.launch import compile_jobs
compile_jobs(int(sys.argv[1]), int(sys.argv[2]), socket.socket(fileno=0))
"""


class Compilers:
    """A process that imports the compiler, and `count` forks of it, which compile kernels and put their PTX into the cache."""

    def __init__(self, count: int) -> None:
        # one queue: each message goes whole to the fork that reads first
        self.jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process: subprocess.Popen | None = None
        command = [sys.executable, "-P", "-c", COMPILER, str(os.getpid()), str(count), *sys.path]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process that forks had better have one thread
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.errors, env=environment
                )
            except OSError as error:  # too many processes, or Python is embedded in another program
                logger.warning("no process can be started to compile kernels ahead: %s", error)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def compile(self, jobs: Sequence[Any]) -> None:
        """Give it jobs."""
        with contextlib.suppress(OSError):  # it has failed: see `errors`
            for job in jobs:
                self.jobs.send(pickle.dumps(job))

    def wait_for(self, path: Path) -> None:
        """Wait until a file is in the cache, or all jobs are done. If they were done without the file, log why. No job may follow."""
        self.jobs.close()
        while not path.exists() and self.is_running():
            time.sleep(0.005)
        if not path.exists():
            said = os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
            why = said[-1] if said else "no message"
            logger.warning("compiling kernels ahead failed, %s is compiled when it is needed: %s", path.stem, why)


_ahead: dict[Path, Compilers] = {}
_compilers: Compilers | None = None
IDLE_SECONDS = 60.0


def _open_compilers() -> Compilers | None:
    """What takes jobs: that of the last call, or a new one. None on one core, or where nothing can be compiled."""
    global _compilers
    if _compilers is None or _compilers.jobs.fileno() < 0 or not _compilers.is_running():
        cores = len(os.sched_getaffinity(0))
        _compilers = Compilers(cores) if cores > 1 and compiler_missing() is None else None
    return _compilers


def start_compilers() -> bool:
    """Start the process of `compile_ahead` before the kernels are known, unless the cache has kernels of this version.

    It imports numba meanwhile, and ends if no job comes for `IDLE_SECONDS`. Returns whether it runs.
    """
    if any(cache_dir().glob(f"*-{_sources().hex()[:8]}*.ptx")):
        return False
    compilers = _open_compilers()
    return compilers is not None and compilers.is_running()


def compile_ahead(kernels: Sequence["CudaKernel"], cc: tuple[int, int]) -> int:
    """Let other processes, at most one per core, compile the kernels missing from the cache, in the order given.

    Returns the number of kernels that they compile: 0 on one core, or where nothing can be compiled. If this process ends before,
    they end after the kernels that they are compiling.
    """
    files = {ptx_file(kernel, cc): kernel.maker for kernel in kernels if kernel.maker is not None}
    missing = {path: maker for path, maker in files.items() if path not in _ahead and not path.exists()}
    if not missing or (compilers := _open_compilers()) is None or not compilers.is_running():
        return 0
    compilers.compile([(cc, maker) for maker in missing.values()])
    _ahead.update(dict.fromkeys(missing, compilers))
    return len(missing)


def compile_jobs(parent: int, count: int, jobs: socket.socket) -> None:
    """What the process of `Compilers` does: import the compiler, and fork `count` times. The forks take jobs from one queue as long as the parent lives."""
    from minivllm_kernels.cuda import cache

    if compiler_missing() is None:
        cache.copy_blocks().ptx((9, 0))  # a first kernel loads parts of numba that all need
    jobs.settimeout(IDLE_SECONDS)
    for _ in range(count):
        if os.fork() == 0:
            try:
                _compile_next(parent, jobs)
            except Exception:  # noqa: BLE001 - the parent logs it
                traceback.print_exc()
            finally:
                os._exit(0)
    for _ in range(count):
        os.wait()


def _compile_next(parent: int, jobs: socket.socket) -> None:
    """Compile one kernel after the other, until nothing is left to do or the parent is gone."""
    with contextlib.suppress(TimeoutError, ProcessLookupError):  # no job came; no parent
        while job := jobs.recv(1 << 16):
            os.kill(parent, 0)  # stops nothing, but says whether it lives
            cc, (make, args, kwargs) = pickle.loads(job)
            cached_ptx(make(*args, **kwargs), cc)


def load_compiled(kernels: Sequence["CudaKernel"], device: int, cc: tuple[int, int]) -> None:
    """Wait for the kernels that other processes compile. Load each on a device as soon as it is compiled: loading takes the driver time, too."""
    files = {ptx_file(kernel, ptx_target(cc)): kernel for kernel in kernels}
    waiting = {path: kernel for path, kernel in files.items() if path in _ahead}
    for path in waiting:
        _ahead[path].jobs.close()
    while waiting:
        done = [path for path in waiting if path.exists() or path not in _ahead or not _ahead[path].is_running()]
        for path in done:
            launcher(waiting.pop(path), device, cc)
        time.sleep(0 if done else 0.005)


CONFIG = struct.Struct("=7I4xQQI4x")
"""CUlaunchConfig: grid, block and shared memory; stream; address and number of attributes."""
OVERLAP, OVERLAP_ID = struct.Struct("=I4xi60x"), 6
"""CUlaunchAttribute, of the kind that lets a kernel start while the one before it in the stream still runs."""


class Launch:
    """A kernel on the current device: `launch(grid_x, grid_y, stream, *numbers)`; pointers are addresses."""

    def __init__(self, kernel: "CudaKernel", cc: tuple[int, int]):
        self.kernel, self.driver = kernel, driver()
        ptx = cached_ptx(kernel, cc)
        self.function = self.driver.load(ptx, kernel.name)
        if kernel.shared_bytes:
            self.driver.allow_shared(self.function, kernel.shared_bytes, kernel.name)
        layout = Layout(kernel.signature)
        self.pack = struct.Struct(layout.format).pack_into
        self.buffer = ctypes.create_string_buffer(layout.size + 8)
        base = ctypes.addressof(self.buffer)
        self.addresses = (ctypes.c_void_p * len(layout.offsets))(*[base + at for at in layout.offsets])
        self.parameters = ctypes.addressof(self.addresses)
        self.call, self.threads, self.shared = self.driver.launch, kernel.threads, kernel.shared_bytes
        overlaps = "griddepcontrol.wait" in ptx
        self.attribute = ctypes.create_string_buffer(OVERLAP.pack(OVERLAP_ID, 1), OVERLAP.size)
        self.attributes = (ctypes.addressof(self.attribute), 1) if overlaps else (0, 0)
        self.config = ctypes.create_string_buffer(CONFIG.size)
        self.lock = threading.Lock()

    def __call__(self, grid_x: int, grid_y: int, stream: int, *numbers: Any) -> None:
        with self.lock:
            self.pack(self.buffer, 0, *numbers)
            shape = grid_x, grid_y, 1, self.threads, 1, 1, self.shared
            attributes = self.attributes if grid_x <= self.kernel.early_blocks else (0, 0)
            CONFIG.pack_into(self.config, 0, *shape, stream, *attributes)
            code = self.call(self.config, self.function, self.parameters, None)
        if code:
            self.driver.check(code, f"launching {self.kernel.name} on a grid of {grid_x} x {grid_y}")


def ptx_target(cc: tuple[int, int]) -> tuple[int, int]:
    """The compute capability to compile for, from the card's: 9.0 at most, as PTX for 9.0 runs on later cards too."""
    return min(cc, (9, 0))


_launches: dict[tuple[int, int], Launch] = {}
_loading = threading.Lock()


def launcher(kernel: "CudaKernel", device: int, cc: tuple[int, int]) -> Launch:
    """The launch of a kernel on a device, compiled and loaded at the first call. The device must be current."""
    key = (id(kernel), device)
    if key not in _launches:
        with _loading:
            if key not in _launches:
                _launches[key] = Launch(kernel, ptx_target(cc))
    return _launches[key]
