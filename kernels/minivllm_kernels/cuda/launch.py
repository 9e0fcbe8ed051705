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
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
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
import socket, sys
sys.path[:] = sys.argv[2:]
from minivllm_kernels.cuda.launch import compile_jobs
compile_jobs(int(sys.argv[1]), socket.socket(fileno=0))
"""


class Compilers:
    """Processes that compile kernels and put their PTX into the cache. All take kernels from one queue."""

    def __init__(self, count: int) -> None:
        # one queue: each message goes whole to the process that reads first
        self.jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the processes
        self.processes: list[subprocess.Popen] = []
        command = [sys.executable, "-P", "-c", COMPILER, str(os.getpid()), *sys.path]
        with theirs:
            try:
                for _ in range(count):
                    self.processes.append(
                        subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.errors)
                    )
            except OSError as error:  # too many processes, or Python is embedded in another program
                logger.warning("no process can be started to compile kernels ahead: %s", error)

    def are_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def compile(self, jobs: Sequence[Any]) -> None:
        """Give them jobs, the last ones: they end when nothing is left to do."""
        with self.jobs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # all have failed: see `errors`
            for job in jobs:
                self.jobs.send(pickle.dumps(job))

    def wait_for(self, path: Path) -> None:
        """Wait until a file is in the cache, or the processes have ended. If they ended without the file, log why."""
        while not path.exists() and self.are_running():
            time.sleep(0.005)
        if not path.exists():
            said = os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
            why = said[-1] if said else "no message"
            logger.warning("compiling kernels ahead failed, %s is compiled when it is needed: %s", path.stem, why)


_ahead: dict[Path, Compilers] = {}
_early: Compilers | None = None
MOST_EARLY = 16
IDLE_SECONDS = 60.0


def start_compilers() -> int:
    """Start the processes of `compile_ahead` before the kernels are known, unless the cache has kernels of this version.

    They import numba meanwhile, and end if no job comes for `IDLE_SECONDS`. Returns their number.
    """
    global _early
    cores = len(os.sched_getaffinity(0))
    if _early is not None or cores < 2 or compiler_missing() is not None:
        return 0
    if any(cache_dir().glob(f"*-{_sources().hex()[:8]}*.ptx")):
        return 0
    _early = Compilers(min(cores, MOST_EARLY))
    return len(_early.processes)


def compile_ahead(kernels: Sequence["CudaKernel"], cc: tuple[int, int]) -> int:
    """Let other processes, at most one per core, compile the kernels missing from the cache, in the order given.

    Returns the number of processes: 0 if no kernel is missing, on one core, or where nothing can be compiled. They end when all kernels
    are compiled; if this process ends before, each stops after the kernel that it is compiling.
    """
    global _early
    files = {ptx_file(kernel, cc): kernel.maker for kernel in kernels if kernel.maker is not None}
    missing = {path: maker for path, maker in files.items() if path not in _ahead and not path.exists()}
    compilers, _early = _early, None
    if compilers is None or not compilers.are_running():
        if (cores := len(os.sched_getaffinity(0))) < 2 or not missing or compiler_missing() is not None:
            return 0
        compilers = Compilers(min(cores, len(missing)))
    compilers.compile([(cc, maker) for maker in missing.values()])
    if compilers.processes:
        _ahead.update(dict.fromkeys(missing, compilers))
    return len(compilers.processes) if missing else 0


def compile_jobs(parent: int, jobs: socket.socket) -> None:
    """What a process of `compile_ahead` does: compile one kernel after the other, as long as its parent lives."""
    from minivllm_kernels.cuda import cache

    if not select.select([jobs], [], [], 0)[0] and compiler_missing() is None:
        cache.copy_blocks().ptx((9, 0))  # to pass the time: a first kernel loads parts of numba that all need
    jobs.settimeout(IDLE_SECONDS)
    try:
        while (job := jobs.recv(1 << 16)) and os.getppid() == parent:
            cc, (make, args, kwargs) = pickle.loads(job)
            cached_ptx(make(*args, **kwargs), cc)
    except TimeoutError:  # the parent had no use for it
        return


def load_compiled(kernels: Sequence["CudaKernel"], device: int, cc: tuple[int, int]) -> None:
    """Wait for the kernels that other processes compile. Load each on a device as soon as it is compiled: loading takes the driver time, too."""
    files = {ptx_file(kernel, ptx_target(cc)): kernel for kernel in kernels}
    waiting = {path: kernel for path, kernel in files.items() if path in _ahead}
    while waiting:
        done = [path for path in waiting if path.exists() or path not in _ahead or not _ahead[path].are_running()]
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
