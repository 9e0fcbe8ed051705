"""Facts about the machine: memory, cores, bf16 support, environment report."""

# Generated from nbs/runtime/machine.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import gc
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from minivllm.attention.numba_cuda import cuda_ops
from minivllm.core.config import EngineArgs, MachineFacts
from minivllm_kernels.cpu.features import chosen_level

logger = logging.getLogger("minivllm.runtime")
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def cpu_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> tuple[int, int]:
    """(free, total) bytes of main memory, within the limits of a container.

    Where the system does not say what is free (not Linux), half of all memory is assumed to be free.
    """
    if not meminfo.is_file():
        total = _installed_memory()
        return total // 2, total
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in meminfo.open())}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    limit = _read_number(cgroup / "memory.max")
    if limit is not None:
        used = (_read_number(cgroup / "memory.current") or 0) - _cached_files(cgroup)
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _cached_files(cgroup: Path) -> int:
    """Bytes of files that the container's memory holds and gives back when memory is wanted."""
    try:
        counts = dict(line.split() for line in (cgroup / "memory.stat").open())
    except (OSError, ValueError):
        return 0
    return int(counts.get("inactive_file", 0))


def cpu_quota(cgroup: Path = _CGROUP) -> int | None:
    """How many cores' time a container may use, rounded up; None without a limit."""
    try:
        most, period = (cgroup / "cpu.max").read_text().split()
        return None if most == "max" else max(1, -(-int(most) // int(period)))
    except (OSError, ValueError):
        return None


def limit_threads(quota: int | None) -> None:
    """Let torch, and kernels that ask it, use no more threads than cores: threads that must wait for their share hold the others up.

    A number in OMP_NUM_THREADS is the user's choice and stays.
    """
    if quota is not None and quota < torch.get_num_threads() and "OMP_NUM_THREADS" not in os.environ:
        logger.info("%d threads instead of %d: the container may use no more cores", quota, torch.get_num_threads())
        torch.set_num_threads(quota)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def _installed_memory() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    # MEMORYSTATUSEX: length and load (two 32-bit numbers), then total and free bytes
    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status[1])


def settle_vector_math() -> None:
    """Call each of MKL's functions that we use once, on one thread.

    A first call by several threads may compute with less precision: https://github.com/pytorch/pytorch/issues/188792.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.sqrt):
            function(one)


def keep_freed_memory() -> None:
    """Have the C library keep memory that tensors give back, for those of the next step.

    Otherwise it goes back to the system when many megabytes are free, and each step's first write to each page is a fault. Nothing
    changes where the C library is not GNU's.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(trim_threshold, 1 << 30)
        mallopt(mmap_threshold, 1 << 25)  # the most that it takes


_CPU_BF16 = ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16")


@functools.cache
def freeze_gc_heap() -> None:
    """Let the garbage collector pass over all that is there now, modules above all: going through it stops a process for 0.2 s.

    Does so once in a process. Later, an engine is among what is there, and must be freed when it is gone. From then on it looks for
    garbage after 20,000 new objects instead of 700: those of requests need no collector, and it takes long to go through their lists of tokens.
    """
    gc.freeze()
    if (often := gc.get_threshold()[0]) > 0:  # else the collector is switched off
        gc.set_threshold(max(often, 20_000), *gc.get_threshold()[1:])


def has_native_bf16(device: str) -> bool:
    """Whether the device multiplies bfloat16 by itself. MINIVLLM_CPU_FEATURES can narrow what a CPU seems to have."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    if (level := chosen_level()) is not None:
        return level.bf16
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not capabilities:  # an older torch
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    return any(capabilities.get(name) for name in _CPU_BF16)


def choose_device(asked: str) -> str:
    """`cpu` or `cuda`. Raises ValueError if a GPU is asked for and there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but torch finds no CUDA device; use device='cpu' or 'auto'")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def torch_device(device: str) -> torch.device:
    """`cpu`, or the current GPU with its number: of a device without one, torch asks the driver each time how many GPUs there are."""
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def choose_sums(device: str, args: EngineArgs) -> tuple[bool, str]:
    """Whether the ranks that share a layer add up in each other's memory, and why."""
    if device != "cuda" or args.tensor_parallel_size == 1:
        return False, "no ranks on GPUs share a layer"
    if args.disable_custom_all_reduce:
        return False, "asked for: NCCL adds up"
    if args.executor != "mp":
        return False, f"NCCL adds up: with {args.executor!r} the ranks may be on several machines"
    try:
        why = cuda_ops().peers_unsupported(args.tensor_parallel_size, args.pipeline_parallel_size)
    except ImportError as error:
        why = str(error)
    if why is not None:
        return False, f"NCCL adds up: {why}"
    most = cuda_ops().most_summed_bytes(args.tensor_parallel_size)
    return True, f"the GPUs read each other's memory: one kernel adds up to {most >> 10} KiB, NCCL what is longer"


def machine_facts(
    device: str, attention: tuple[str, str], linear: tuple[str, str], sums: tuple[bool, str] = (False, "default")
) -> MachineFacts:
    """What `core.config.resolve` wants to know of this machine. ``attention``, ``linear``, ``sums``: what was chosen, and why."""
    free, total = torch.cuda.mem_get_info() if device == "cuda" else cpu_memory()
    return MachineFacts(
        device=device,
        free_memory_bytes=free,
        total_memory_bytes=total,
        has_bf16=has_native_bf16(device),
        attention_backend=attention[0],
        attention_backend_why=attention[1],
        linear_kernel=linear[0],
        linear_kernel_why=linear[1],
        sums_by_peers=sums[0],
        sums_by_peers_why=sums[1],
    )


_PACKAGES = (
    "minivllm",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "numba",
    "safetensors",
    "gguf",
    "fastapi",
    "ray",
)


def environment_report() -> dict[str, str]:
    """Facts for a bug report: {name: value}. Names no user, folder or host."""
    from importlib.metadata import PackageNotFoundError, version

    report = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        try:
            report[package] = version(package)
        except PackageNotFoundError:
            report[package] = "not installed"
    free, total = cpu_memory()
    report["cpu"] = f"{_cpu_name()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads"
    report["cpu capability"] = f"{torch.backends.cpu.get_cpu_capability()}, native bfloat16: {has_native_bf16('cpu')}"
    report["memory"] = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}"
    report["cuda"] = "none"
    if torch.cuda.is_available():
        name, size = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        report["cuda"] = f"{name}, {size / 2**30:.0f} GiB, torch built for CUDA {torch.version.cuda}"
    return report


def _cpu_name() -> str:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return str(capabilities.get("cpu_name") or platform.processor() or "unknown")
