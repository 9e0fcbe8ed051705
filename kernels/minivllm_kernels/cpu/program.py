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
from typing import Any, Protocol

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT, OWN, Kernel, host_is_x86, kernel, pack, run

__all__ = [
    "ARGS", "CAME", "ENTRY", "FIELDS", "NOW", "PATIENCE", "STEPS", "WENT", "YIELD", "Launcher", "Now",
    "Program", "Scratch", "aligned", "conduct",
]  # fmt: skip

"""Programs: kernels noted down with their arguments, and carried out one after the other by one launch."""


def aligned(size: int) -> tuple[np.ndarray, int]:
    """(memory, address in it that is a multiple of 64, with `size` bytes from there)."""
    memory = np.empty(size + 64, np.uint8)
    return memory, -(-memory.ctypes.data // 64) * 64


class Scratch:
    """Memory that kernels share, of which only one runs at a time. A larger piece is taken when one is wanted; kernels that were
    noted down before keep theirs."""

    def __init__(self) -> None:
        self._pieces: list[tuple[np.ndarray, int]] = []

    def take(self, size: int) -> int:
        """Address of at least `size` bytes."""
        if not self._pieces or self._pieces[-1][0].nbytes < size + 64:
            self._pieces.append(aligned(size))
        return self._pieces[-1][1]


class Launcher(Protocol):
    """Where kernels are launched: `NOW`, or a `Program`."""

    def run(self, kernel: Kernel, args: "array[int]", threads: int) -> None:
        """Have `threads` threads carry out a kernel."""

    def scratch(self, size: int) -> int:
        """Address of at least `size` bytes that are free until the next kernel."""


class Now(threading.local):
    """Where this Python thread launches kernels: they run at once, or go to a program while one is being captured.

    Each Python thread has memory for them.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._program: Program | None = None

    def run(self, kernel: Kernel, args: "array[int]", threads: int) -> None:
        """See `Launcher`."""
        if self._program is None:
            run(kernel, args, threads)
        else:
            self._program.run(kernel, args, threads)

    def scratch(self, size: int) -> int:
        """See `Launcher`."""
        return self._scratch.take(size) if self._program is None else self._program.scratch(size)

    @contextmanager
    def capture(self, program: "Program") -> Iterator[None]:
        """Inside, what this thread launches is noted down in `program`, and does not run."""
        before, self._program = self._program, program
        try:
            yield
        finally:
            self._program = before


NOW = Now()

(STEPS, YIELD) = range(OWN, OWN + 2)
"""Arguments of `conduct`: address of the steps, and of the system's function that gives a core away. `COUNT` is their number."""
ENTRY, ARGS, CAME, WENT, FIELDS = range(5)
"""A step, in int64 numbers: where a kernel's code is, where its arguments are; how many threads came and went."""
PATIENCE = 2000
"""Looks in vain until a thread offers its core to others: a tenth of a millisecond on a recent Intel CPU, less on others."""


def conduct(patience: int, x86: int) -> Callable[[Any], None]:
    """Body of the kernel that carries out a program. `x86`: see `cpu_vector.relax`."""
    from minivllm_kernels.cpu.simd import call, claim, ints_at, peek, relax

    def body(args):
        steps = ints_at(args[STEPS], 64)
        for i in range(args[COUNT]):
            at = i * FIELDS
            claim(steps, at + CAME, 1)
            call(steps[at + ENTRY], steps[at + ARGS], 0)
            claim(steps, at + WENT, 1)
            looks = 0
            while peek(steps, at + WENT) != peek(steps, at + CAME):
                looks += 1
                if looks < patience:
                    relax(x86)
                else:
                    call(args[YIELD], 0, 0)

    return body


(CLOCK, CLOCK_FIRST, CLOCK_SECOND) = range(OWN, OWN + 3)
"""Arguments of `look_at_clock`: address of the system's function, and what it is called with."""


def look_at_clock() -> Callable[[Any], None]:
    """Body of the kernel that notes the time."""
    from minivllm_kernels.cpu.simd import call, claim

    def body(args):
        if claim(args, NEXT, 1) < args[COUNT]:
            call(args[CLOCK], args[CLOCK_FIRST], args[CLOCK_SECOND])

    return body


def _addresses(rows: np.ndarray) -> np.ndarray:
    """Where each row of an array begins."""
    return rows.ctypes.data + rows.strides[0] * np.arange(len(rows))


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@functools.cache
def _yield_address() -> int:
    """Where the system's function is that lets another thread have this core."""
    give = ctypes.WinDLL("kernel32").SwitchToThread if os.name == "nt" else ctypes.CDLL(None).sched_yield  # type: ignore[attr-defined]
    return _address(give)


@functools.cache
def _clock() -> tuple[int, int]:
    """Where the system's function is that tells the time as (seconds, nanoseconds), and its first argument."""
    if not hasattr(time, "CLOCK_MONOTONIC"):
        raise NotImplementedError(
            "kernels of a program are timed where there is a clock_gettime, and this system has none"
        )
    return _address(ctypes.CDLL(None).clock_gettime), time.CLOCK_MONOTONIC


class Program:
    """Kernels noted down, to be carried out one after the other by a single launch, again and again.

    Note them down with `run`, then `seal`, then call. What their arguments point to must outlive the program. A kernel may write
    only for a work item that it has claimed: a thread that comes late finds none, and others may be ahead already.

    Args:
        scratch: memory to share with other programs that never run at the same time.

    Attributes:
        kernels: in order.
        args: int64 [kernels, WIDTH], their arguments, from `seal` on. A caller may change them between two launches.
    """

    WIDTH = 24
    """Numbers that a kernel's arguments may be, at most."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.kernels: list[Kernel] = []
        self._scratch = scratch or Scratch()
        self.args = np.zeros((0, self.WIDTH), np.int64)
        self._noted: list[array[int]] = []

    def __len__(self) -> int:
        return len(self.kernels)

    def run(self, kernel: Kernel, args: "array[int]", threads: int) -> None:
        """Note down a kernel, with its arguments as they are now. All threads of the launch will enter it."""
        if len(args) > self.WIDTH:
            raise ValueError(f"{kernel.name} has {len(args)} arguments, a program keeps {self.WIDTH}")
        self.kernels.append(kernel)
        self._noted.append(args[:])

    def scratch(self, size: int) -> int:
        """See `Launcher`."""
        return self._scratch.take(size)

    def seal(self) -> None:
        """Lay everything out in memory. Nothing can be noted down afterwards."""
        self.args = np.zeros((len(self), self.WIDTH), np.int64)
        for row, args in zip(self.args, self._noted, strict=True):
            row[: len(args)] = args
        self._steps = np.zeros((len(self), FIELDS), np.int64)
        self._steps[:, ENTRY] = [k.address for k in self.kernels]
        self._steps[:, ARGS] = _addresses(self.args)
        self._conductor = kernel("minivllm_kernels.cpu.program:conduct", PATIENCE, int(host_is_x86()))
        self._own = pack(len(self), self._steps.ctypes.data, _yield_address())

    def __call__(self, threads: int) -> None:
        """Carry it out. Python's lock is released meanwhile; one thread at a time may call."""
        self._reset()
        run(self._conductor, self._own, threads)

    def timed(self, threads: int) -> np.ndarray:
        """Carry it out, with a look at the clock after each kernel: float64 [kernels], the seconds that each took.

        A look takes a small part of a microsecond, and so does the wait of the threads for each other, which counts for the kernel
        before it.
        """
        self._reset()
        clock, first = _clock()
        looks = np.zeros((len(self) + 1, 2), np.int64)
        asked = np.zeros((len(looks), OWN + 3), np.int64)
        asked[:, COUNT], asked[:, CLOCK], asked[:, CLOCK_FIRST] = 1, clock, first
        asked[:, CLOCK_SECOND] = _addresses(looks)
        steps = np.zeros((2 * len(self) + 1, FIELDS), np.int64)
        steps[1::2] = self._steps
        steps[::2, ENTRY] = kernel("minivllm_kernels.cpu.program:look_at_clock").address
        steps[::2, ARGS] = _addresses(asked)
        run(self._conductor, pack(len(steps), steps.ctypes.data, _yield_address()), threads)
        return np.diff(looks[:, 0] + 1e-9 * looks[:, 1])

    def _reset(self) -> None:
        self.args[:, (NEXT, ENTERED)] = 0
        self._steps[:, CAME:] = 0
