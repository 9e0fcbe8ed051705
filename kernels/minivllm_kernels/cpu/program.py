"""Records CPU kernel calls and runs them in one launch over a shared thread pool."""

# Generated from nbs/numba_kernels/cpu/program.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT, OWN, Kernel, host_is_x86, kernel, pack, run

__all__ = [
    "ARGS", "ENTERED_BY", "ENTRY", "FIELDS", "LAUNCHER", "LEFT_BY", "SPINS", "STEPS", "YIELD", "Launcher",
    "Program", "Scratch", "aligned", "worker_loop",
]  # fmt: skip

"""Programs: kernel calls that are recorded with their arguments, and run one after the other by a single launch."""


def aligned(size: int) -> np.ndarray:
    """uint8 [size] that begins with a cache line, as torch's memory does: a vector that lies in two of them is loaded twice."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


class Scratch:
    """Memory that kernels share, one at a time. A larger request gets a new piece; earlier kernels keep the old one."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []

    def take(self, size: int) -> int:
        """Address of at least `size` bytes."""
        if not self._pieces or self._pieces[-1].nbytes < size:
            self._pieces.append(aligned(size))
        return self._pieces[-1].ctypes.data


class Launcher(threading.local):
    """Launches kernels for this Python thread: at once, or into a program that is being captured. Each thread has scratch memory."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._program: Program | None = None

    def run(self, kernel: Kernel, args: "array[int]", threads: int) -> None:
        """Run a kernel on `threads` threads, or record it."""
        if self._program is None:
            run(kernel, args, threads)
        else:
            self._program.run(kernel, args, threads)

    def scratch(self, size: int) -> int:
        """Address of at least `size` bytes that are free until the next kernel."""
        return self._scratch.take(size) if self._program is None else self._program.scratch(size)

    @contextmanager
    def capture(self, program: "Program") -> Iterator[None]:
        """Inside, this thread's launches are recorded in `program` and do not run."""
        before, self._program = self._program, program
        try:
            yield
        finally:
            self._program = before


LAUNCHER = Launcher()

STEPS, YIELD = range(OWN, OWN + 2)
"""Arguments of `worker_loop`: addresses of the steps, and of the system call that yields the core. `COUNT` is the number of steps."""
ENTRY, ARGS, ENTERED_BY, LEFT_BY, FIELDS = range(5)
"""Fields of a step, int64: addresses of the kernel's code and arguments; how many threads entered and left it."""
SPINS = 2000
"""Polls of a waiting thread before it yields its core: a tenth of a millisecond on a recent Intel CPU, less on others."""


def worker_loop(spins: int, x86: int) -> Callable[[Any], None]:
    """Body of the kernel that runs a program. `x86`: see `simd.relax`."""
    from minivllm_kernels.cpu.simd import call, claim, ints_at, peek, relax

    def body(args):
        steps = ints_at(args[STEPS], 64)
        for i in range(args[COUNT]):
            at = i * FIELDS
            claim(steps, at + ENTERED_BY, 1)
            call(steps[at + ENTRY], steps[at + ARGS], 0)
            claim(steps, at + LEFT_BY, 1)
            polls = 0
            while peek(steps, at + LEFT_BY) != peek(steps, at + ENTERED_BY):
                polls += 1
                if polls < spins:
                    relax(x86)
                else:
                    call(args[YIELD], 0, 0)

    return body


CLOCK, CLOCK_FIRST, CLOCK_SECOND = range(OWN, OWN + 3)
"""Arguments of `read_clock`: address of `clock_gettime`, and its two arguments."""


def read_clock() -> Callable[[Any], None]:
    """Body of the kernel that records the time."""
    from minivllm_kernels.cpu.simd import call, claim

    def body(args):
        if claim(args, NEXT, 1) < args[COUNT]:
            call(args[CLOCK], args[CLOCK_FIRST], args[CLOCK_SECOND])

    return body


def _addresses(rows: np.ndarray) -> np.ndarray:
    """Address of each row of an array."""
    return rows.ctypes.data + rows.strides[0] * np.arange(len(rows))


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _yield_address() -> int:
    """Address of the system call that lets another thread have this core."""
    if os.name == "nt":
        return _address(ctypes.WinDLL("kernel32").SwitchToThread)  # type: ignore[attr-defined]
    return _address(ctypes.CDLL(None).sched_yield)


@functools.cache
def _clock() -> tuple[int, int]:
    """(address of `clock_gettime`, the id of the monotonic clock)."""
    if not hasattr(time, "CLOCK_MONOTONIC"):
        raise NotImplementedError("a program's kernels can be timed only on systems with clock_gettime")
    return _address(ctypes.CDLL(None).clock_gettime), time.CLOCK_MONOTONIC


class Program:
    """Kernel calls that are recorded once and run one after the other by a single launch, as often as wanted.

    Record with `run`, then `finalize`, then call. What the arguments point to must outlive the program. A kernel may write
    only for work items that it has claimed: a late thread finds none left, while others may already be at the next kernel.

    Args:
        scratch: memory to share with other programs that never run at the same time.

    Attributes:
        kernels: the recorded kernels, in order.
        args: int64 [kernels, WIDTH], their arguments, after `finalize`. A caller may change them between two launches.
    """

    WIDTH = 24
    """The most arguments of a kernel."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.kernels: list[Kernel] = []
        self._scratch = scratch or Scratch()
        self.scratch = self._scratch.take
        self.args = np.zeros((0, self.WIDTH), np.int64)
        self._recorded: list[array[int]] = []

    def __len__(self) -> int:
        return len(self.kernels)

    def run(self, kernel: Kernel, args: "array[int]", threads: int) -> None:
        """Record a kernel, with its arguments as they are now. All threads of the launch will enter it."""
        if len(args) > self.WIDTH:
            raise ValueError(f"{kernel.name} has {len(args)} arguments, a program keeps {self.WIDTH}")
        self.kernels.append(kernel)
        self._recorded.append(args[:])

    def finalize(self) -> None:
        """Lay everything out in memory. Nothing can be recorded afterwards."""
        self.args = np.zeros((len(self), self.WIDTH), np.int64)
        for row, args in zip(self.args, self._recorded, strict=True):
            row[: len(args)] = args
        self._steps = np.zeros((len(self), FIELDS), np.int64)
        self._steps[:, ENTRY] = [k.address for k in self.kernels]
        self._steps[:, ARGS] = _addresses(self.args)
        self._worker_loop = kernel("minivllm_kernels.cpu.program:worker_loop", SPINS, int(host_is_x86()))
        self._own = pack(len(self), self._steps.ctypes.data, _yield_address())

    def __call__(self, threads: int) -> None:
        """Run it. The GIL is released meanwhile. Not thread-safe."""
        self._reset()
        run(self._worker_loop, self._own, threads)

    def timed(self, threads: int) -> np.ndarray:
        """Run it, and read the clock after each kernel: float64 [kernels], the seconds that each took.

        Reading the clock takes a small part of a microsecond. So does the threads' wait for each other, which counts for the
        kernel before it.
        """
        self._reset()
        clock, first = _clock()
        times = np.zeros((len(self) + 1, 2), np.int64)
        clock_args = np.zeros((len(times), OWN + 3), np.int64)
        clock_args[:, COUNT], clock_args[:, CLOCK], clock_args[:, CLOCK_FIRST] = 1, clock, first
        clock_args[:, CLOCK_SECOND] = _addresses(times)
        steps = np.zeros((2 * len(self) + 1, FIELDS), np.int64)
        steps[1::2] = self._steps
        steps[::2, ENTRY] = kernel("minivllm_kernels.cpu.program:read_clock").address
        steps[::2, ARGS] = _addresses(clock_args)
        run(self._worker_loop, pack(len(steps), steps.ctypes.data, _yield_address()), threads)
        return np.diff(times[:, 0] + 1e-9 * times[:, 1])

    def _reset(self) -> None:
        self.args[:, (NEXT, ENTERED)] = 0
        self._steps[:, ENTERED_BY:] = 0
