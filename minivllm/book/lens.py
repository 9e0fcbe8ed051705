"""Records and draws the memory accesses of kernels in numba's CUDA simulator."""

# Generated from nbs/book/lens.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import linecache
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import islice
from typing import Any

import numpy as np
from numba import cuda

from minivllm_kernels.cuda.warp import SIM

__all__ = ["Lens"]

SECTOR, BANKS, WARP = 32, 32, 32
"""Bytes that global memory gives at least; banks of shared memory, each 4 bytes wide; threads that run together."""


@dataclass(frozen=True, slots=True)
class Access:
    """One thread touched one element of one array, once.

    Attributes:
        array: its name. space: "global" or "shared".
        index: flat, row-major; of an element outside, as if the array went on.
        write: else a read.
        block, thread: linear numbers, in the grid and in the block.
        line: of the kernel's source. turn: how often the thread had made this access before.
        epoch: how many barriers the thread had passed.
        inside: the element exists.
        atomic: read and written in one step that no other thread can divide.
    """

    array: str
    space: str
    index: int
    write: bool
    block: int
    thread: int
    line: int
    turn: int
    epoch: int
    inside: bool
    atomic: bool = False

    @property
    def who(self) -> str:
        return f"thread {self.thread} of block {self.block}"

    @property
    def does(self) -> str:
        return "writes" if self.write else "reads"


class Watched:
    """An array for a kernel in the simulator, which reports every access to a lens. Made by `Lens.run`."""

    def __init__(self, name: str, array: np.ndarray, lens: "Lens", space: str = "global") -> None:
        self.name, self.array, self.lens, self.space = name, array, lens, space
        self.shape, self.size, self.ndim, self.dtype = array.shape, array.size, array.ndim, array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def _place(self, index: Any) -> tuple[int, ...]:
        place = index if isinstance(index, tuple) else (index,)
        if len(place) > self.ndim or not all(isinstance(i, (int, np.integer)) for i in place):
            raise self._no_element(index)
        return tuple(int(i) for i in place)

    def _no_element(self, index: Any) -> TypeError:
        what = f"a thread takes one element, so {self.ndim} integers are needed here"
        return TypeError(f"{self.name}[{index}]: {what}")

    def note(self, place: tuple[int, ...], write: bool, line: int, atomic: bool = False) -> bool:
        """Tell the lens of an access. Whether the element exists. TypeError for less than a whole index."""
        if len(place) < self.ndim:
            raise self._no_element(place)
        flat = 0
        for i, n in zip(place, self.shape):
            flat = flat * n + i
        inside = all(0 <= i < n for i, n in zip(place, self.shape))
        self.lens.note(self, flat, write, inside, line, atomic)
        return inside

    def read(self, place: tuple[int, ...], line: int) -> Any:
        """One element, or the part of the array that fewer indices name, as in `cache[block][slot]`."""
        if len(place) < self.ndim:
            return Part(self, place)
        if self.note(place, False, line):
            return self.array[place]
        return self.dtype.type(np.nan if self.dtype.kind == "f" else np.iinfo(self.dtype).min)

    def write(self, place: tuple[int, ...], value: Any, line: int) -> None:
        """Store one element; outside of the array nothing is stored."""
        if self.note(place, True, line):
            self.array[place] = value

    def __getitem__(self, index: Any) -> Any:
        return self.read(self._place(index), sys._getframe(1).f_lineno)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.write(self._place(index), value, sys._getframe(1).f_lineno)


@dataclass(frozen=True)
class Part:
    """What `cache[block]` is of a watched array: the rest of the indices follow."""

    of: Watched
    place: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape[len(self.place) :]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.of.read((*self.place, *self.of._place(index)), sys._getframe(1).f_lineno)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.of.write((*self.place, *self.of._place(index)), value, sys._getframe(1).f_lineno)


@dataclass(frozen=True)
class Instruction:
    """What the threads of one warp did together.

    Attributes:
        accesses: of its threads, in order of the threads.
        itemsize: bytes of an element.
    """

    accesses: tuple[Access, ...]
    itemsize: int

    @property
    def pieces(self) -> int:
        """Pieces of 32 bytes that global memory moves for it."""
        return len({a.index * self.itemsize // SECTOR for a in self.accesses})

    @property
    def needed(self) -> int:
        """Pieces that as many different elements need if they lie side by side."""
        return -(-len({a.index for a in self.accesses}) * self.itemsize // SECTOR)

    @property
    def ways(self) -> int:
        """Different words in the busiest bank of shared memory: 1 is free of conflicts, 32 takes 32 times as long."""
        words: dict[int, set[int]] = defaultdict(set)
        for access in self.accesses:
            word = access.index * self.itemsize // 4
            words[word % BANKS].add(word)
        return max(map(len, words.values()))


class Lens:
    """Runs kernels in numba's CUDA simulator and remembers every access to their arrays.

    After `run`, look at `accesses`, `outside()`, `races()`, `table()`, `report()`, or let the notebook draw it.
    """

    def __init__(self) -> None:
        if not SIM:
            raise RuntimeError("a lens looks at the simulator: set NUMBA_ENABLE_CUDASIM=1 before numba is imported")
        self.accesses: list[Access] = []
        self.arrays: dict[str, Watched] = {}
        self.filename = ""
        self._turns: dict[tuple, int] = defaultdict(int)
        self._lock = threading.Lock()

    def run(self, kernel: Callable, grid: Any, threads: Any, **arguments: Any) -> "Lens":
        """Run a kernel, given as a Python function; its arguments by name, arrays are changed in place."""
        names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
        if sorted(names) != sorted(arguments):
            raise TypeError(f"{kernel.__name__} takes {', '.join(names)}; given: {', '.join(arguments)}")
        self.filename = kernel.__code__.co_filename
        given = [self._watch(n, arguments[n]) if isinstance(arguments[n], np.ndarray) else arguments[n] for n in names]
        with _watching(self):
            cuda.jit(kernel)[grid, threads](*given)
        return self

    def _watch(self, name: str, array: np.ndarray, space: str = "global") -> Watched:
        self.arrays[name] = Watched(name, array, self, space)
        return self.arrays[name]

    def note(self, watched: Watched, index: int, write: bool, inside: bool, line: int, atomic: bool) -> None:
        """Remember an access of the thread that calls."""
        thread: Any = threading.current_thread()
        (x, y, z), (gx, gy, _) = thread.blockIdx, thread._manager._grid_dim
        block, epoch = x + gx * (y + gy * z), getattr(thread, "epoch", 0)
        with self._lock:
            key = (watched.name, write, block, thread.thread_id, line)
            turn = self._turns[key]
            self._turns[key] += 1
            who = (block, thread.thread_id, line, turn, epoch)
            self.accesses.append(Access(watched.name, watched.space, index, write, *who, inside, atomic))

    def outside(self) -> list[Access]:
        """Accesses to elements that do not exist."""
        return [a for a in self.accesses if not a.inside]

    def races(self) -> list[tuple[Access, Access]]:
        """Pairs of accesses to one element by two threads, a write among them, with nothing that puts them in order.

        Threads of a block are in order if a barrier lies between them; threads of different blocks never are. Two atomic
        operations need no order.
        """
        at: dict[tuple, list[Access]] = defaultdict(list)
        for a in self.accesses:
            at[a.array, a.index, a.block if a.space == "shared" else 0].append(a)
        found = []
        for accesses in at.values():
            for w in (a for a in accesses if a.write):
                others = (a for a in accesses if (a.block, a.thread) != (w.block, w.thread))
                at_once = (a for a in others if a.block != w.block or a.epoch == w.epoch)
                clash = next((a for a in at_once if not (a.atomic and w.atomic)), None)
                if clash is not None:
                    found.append((w, clash))
                    break
        return found

    def instructions(self) -> list[Instruction]:
        """Accesses put together by warp, in the order in which each was first made."""
        groups: dict[tuple, list[Access]] = defaultdict(list)
        for a in self.accesses:
            groups[a.block, a.thread // WARP, a.line, a.array, a.write, a.turn].append(a)
        sizes = {name: watched.dtype.itemsize for name, watched in self.arrays.items()}
        return [Instruction(tuple(sorted(g, key=lambda a: a.thread)), sizes[g[0].array]) for g in groups.values()]

    def source(self, line: int) -> str:
        """A line of the kernel."""
        return linecache.getline(self.filename, line).strip()

    def table(self) -> list[dict[str, Any]]:
        """A row for every line, array and direction: what it cost. `pandas.DataFrame(lens.table())` reads it.

        Columns: line, source, array, space, does, instructions (of warps), pieces (of 32 bytes moved), needed (by the same elements
        side by side), ways (the worst bank conflict; 1 is none). The last three are None where they do not apply.
        """
        rows: dict[tuple, dict[str, Any]] = {}
        for instruction in self.instructions():
            a = instruction.accesses[0]
            shared = a.space == "shared"
            none = {"instructions": 0} | dict.fromkeys(("pieces", "needed"), None if shared else 0)
            what = {"line": a.line, "source": self.source(a.line), "array": a.array, "space": a.space, "does": a.does}
            row = rows.setdefault((a.line, a.array, a.write), what | none | {"ways": 1 if shared else None})
            row["instructions"] += 1
            if shared:
                row["ways"] = max(row["ways"], instruction.ways)
            else:
                row["pieces"] += instruction.pieces
                row["needed"] += instruction.needed
        return [rows[key] for key in sorted(rows)]

    def element(self, array: str, index: int) -> str:
        """`cache[3, 0, 2]`: an element as one writes it."""
        shape = self.arrays[array].shape
        inside = 0 <= index < self.arrays[array].size
        place = np.unravel_index(index, shape) if inside else (index,)
        return f"{array}[{', '.join(str(int(i)) for i in place)}]"

    def faults(self) -> Iterator[str]:
        """In words: accesses outside of an array, then races."""
        for a in self.outside():
            place = f"{a.array}[{a.index}] of shape {self.arrays[a.array].shape}"
            yield f"{a.who} {a.does} outside {a.array}, at {place}: {self.source(a.line)}"
        for w, other in self.races():
            both = f"{w.who} writes {self.element(w.array, w.index)}, {other.who} {other.does} it"
            yield f"a race: {both}, and no barrier is between them: {self.source(w.line)}"

    def report(self) -> str:
        """In words: the first faults, and what each line costs. Lines count from the kernel's `def`."""
        lines = list(islice(self.faults(), 5))
        for row in self.table():
            cost = f"{row['pieces']} pieces of 32 bytes; {row['needed']} would do"
            if row["space"] == "shared":
                cost = f"{row['ways']}-way"
            lines.append(f"{row['does']:6} {row['array']}: {cost}: {row['source']}")
        return "\n".join(lines)

    def svg(self, arrays: list[str] | None = None, columns: int = 16) -> str:
        """A picture of the arrays (all, or the named ones), `columns` cells wide, or as wide as their last dimension."""
        parts: list[str] = []
        top = 0
        for name in self.arrays if arrays is None else arrays:
            watched = self.arrays[name]
            wide = watched.shape[-1] if watched.ndim > 1 and watched.shape[-1] <= 32 else columns
            drawn, height = self._draw(watched, wide, top + 16)
            title = f"{escape(name)} {watched.shape} {watched.space}"
            parts.append(f'<text x="0" y="{top + 11}" class="n">{title}</text>{drawn}')
            top += height + 26
        style = (
            ".lens text{font:11px ui-monospace,monospace;fill:currentColor}.lens .n{font-weight:600}"
            ".lens .c text{fill:#fff;text-anchor:middle}.lens .r{text-anchor:end;opacity:.7}"
            ".lens .e{fill:none;stroke:#8888;}.lens .o{fill:#d00000}"
        )
        width = LEFT + 32 * CELL_WIDTH
        label = f"Which thread touched which element: {len(self.accesses)} accesses, {len(self.outside())} outside"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="lens" viewBox="0 0 {width} {max(top, 20)}" width="{width}" role="img"'
            f' aria-label="{label}" style="max-width:100%"><style>{style}</style>{"".join(parts)}</svg>'
        )

    def _draw(self, watched: Watched, wide: int, top: int) -> tuple[str, int]:
        touched: dict[int, dict[int, bool]] = defaultdict(dict)
        for a in self.accesses:
            if a.array == watched.name:
                touched[a.index][a.thread] = touched[a.index].get(a.thread, False) or a.write
        cells: list[str] = []
        rows = -(-watched.size // wide)
        for index in [*range(watched.size), *sorted(i for i in touched if not 0 <= i < watched.size)[:32]]:
            inside = 0 <= index < watched.size
            row, column = divmod(index, wide) if inside else (rows, len([c for c in cells if 'class="o"' in c]))
            x, y = LEFT + column * CELL_WIDTH, top + row * CELL_HEIGHT
            cells.append(self._cell(x, y, touched.get(index, {}), inside, index))
            if inside and column == 0:
                where = ", ".join(map(str, np.unravel_index(index, watched.shape)[: max(1, watched.ndim - 1)]))
                name = where if watched.ndim > 1 else index
                cells.append(f'<text x="{LEFT - 6}" y="{top + row * CELL_HEIGHT + 14}" class="r">{name}</text>')
        strays = any(not 0 <= i < watched.size for i in touched)
        if strays:
            cells.append(f'<text x="{LEFT - 6}" y="{top + rows * CELL_HEIGHT + 14}" class="r">outside</text>')
        return "".join(cells), (rows + strays) * CELL_HEIGHT

    def _cell(self, x: int, y: int, threads: dict[int, bool], inside: bool, index: int) -> str:
        box = f'x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" rx="3"'
        if not threads:
            return f'<rect {box} class="e"/>'
        first = min(threads)
        text = str(first) if len(threads) == 1 else f"×{len(threads)}"
        fill = 'class="o"' if not inside else f'fill="{colour(first)}"'
        wrote = any(threads.values())
        line = f'<line x1="{x + 5}" x2="{x + CELL_WIDTH - 5}" y1="{y + 17}" y2="{y + 17}" stroke="#fff"/>'
        mark = line if wrote else ""
        who = ", ".join(map(str, sorted(threads)))
        title = f"element {index}: thread {who}" + (" wrote" if wrote else " read")
        return f'<g class="c"><title>{title}</title><rect {box} {fill}/><text x="{x + CELL_WIDTH // 2}" y="{y + 14}">{text}</text>{mark}</g>'

    def _repr_html_(self) -> str:
        return f"{self.svg()}<pre>{escape(self.report())}</pre>"

    def __repr__(self) -> str:
        return self.report()


def _noted(operation: Callable) -> Callable:
    """An atomic operation of the simulator which reports to the lens that a thread reads and writes one element at once."""

    def atomic(self: Any, array: Any, index: Any, *more: Any) -> Any:
        if not isinstance(array, Watched):
            return operation(self, array, index, *more)
        place = array._place(index)
        inside = array.note(place, True, sys._getframe(1).f_lineno, atomic=True)
        return operation(self, array.array, place, *more) if inside else array.dtype.type(0)

    return atomic


@contextmanager
def _watching(lens: Lens) -> Iterator[None]:
    from numba.cuda.simulator import kernel, kernelapi

    plain_array, plain_barrier = kernelapi.FakeCUDAShared.array, kernel.BlockThread.syncthreads

    def array(self: Any, shape: Any, dtype: Any) -> Watched:
        line = sys._getframe(1).f_lineno
        target = linecache.getline(lens.filename, line).partition("=")[0].strip()
        thread: Any = threading.current_thread()
        block = str(thread.blockIdx)
        with lens._lock:
            made = self.__dict__.setdefault("watched", {})
            if (line, block) not in made:
                name = target if target.isidentifier() else f"shared, line {line}"
                dtype = getattr(dtype, "name", dtype)
                made[line, block] = lens._watch(name, np.full(shape, np.nan).astype(dtype), "shared")
            return made[line, block]

    def barrier(self: Any) -> None:
        plain_barrier(self)
        self.epoch = getattr(self, "epoch", 0) + 1

    atomics = vars(kernelapi.FakeCUDAAtomic)
    plain_atomics = {name: operation for name, operation in atomics.items() if not name.startswith("_")}
    for name, operation in plain_atomics.items():
        setattr(kernelapi.FakeCUDAAtomic, name, _noted(operation))
    kernelapi.FakeCUDAShared.array, kernel.BlockThread.syncthreads = array, barrier
    try:
        yield
    finally:
        for name, operation in plain_atomics.items():
            setattr(kernelapi.FakeCUDAAtomic, name, operation)
        kernelapi.FakeCUDAShared.array, kernel.BlockThread.syncthreads = plain_array, plain_barrier


def colour(thread: int) -> str:
    """Of a thread, as neighbours in a warp differ a little and its ends differ much. Dark enough for white text."""
    return f"hsl({(thread % WARP) * 300 // WARP} 45% 42%)"


CELL_WIDTH, CELL_HEIGHT, LEFT = 30, 20, 130
