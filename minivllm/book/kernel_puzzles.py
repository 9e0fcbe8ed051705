"""Kernel puzzles: from a guarded copy to paged attention, checked in numba's CUDA simulator."""

# Generated from nbs/book/kernel_puzzles.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import inspect
import linecache
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numba import cuda

from minivllm.book.lens import Lens

__all__ = ["PUZZLES", "Puzzle"]


@dataclass(frozen=True)
class Verdict:
    """What `Puzzle.check` found; true if the kernel is right."""

    text: str
    lens: Lens | None = None

    def __bool__(self) -> bool:
        return self.text == "right"

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        picture = "" if self or self.lens is None else self.lens.svg()
        return f"<pre>{escape(self.text)}</pre>{picture}"


@dataclass(frozen=True, repr=False)
class Puzzle:
    """A kernel to write.

    Attributes:
        name: of the puzzle; task: what the kernel should do.
        case: from a random generator to the arguments by name; `out` arrays (see `outputs`) come filled with NaN or -1.
        expected: from the arguments to the right outputs by name, in plain NumPy.
        grid, threads: of the launch.
        answer: a right kernel.
        wrong: mistakes: (text of the answer, what stands in its place, words that the verdict must hold).
        demand: what else the lens must find: gives a complaint, or None.
    """

    name: str
    task: str
    case: Callable[[np.random.Generator], dict[str, Any]]
    expected: Callable[..., dict[str, np.ndarray]]
    grid: int
    threads: int
    answer: Callable
    wrong: tuple[tuple[str, str, str], ...]
    demand: Callable[[Lens], str | None] | None = None

    def deal(self, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(arguments by name, right outputs) of one case."""
        arguments = self.case(np.random.default_rng(seed))
        copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        return arguments, self.expected(**copies)

    def show(self, kernel: Callable) -> Lens:
        """What the kernel did on the first case: a picture in a notebook, and in words."""
        return Lens().run(kernel, self.grid, self.threads, **self.deal(0)[0])

    @property
    def solution(self) -> str:
        """The source of a right kernel."""
        return textwrap.dedent(inspect.getsource(self.answer))

    def mistakes(self) -> Iterator[tuple[Callable, str]]:
        """Wrong kernels, each with words that the verdict on it must hold; the tests run them."""
        for number, (right, wrong, words) in enumerate(self.wrong):
            source, filename = self.solution.replace(right, wrong), f"<{self.name}, mistake {number}>"
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            names = dict(globals())
            exec(compile(source, filename, "exec"), names)
            yield names[self.answer.__name__], words

    def _repr_html_(self) -> str:
        lens = self.show(self.answer)
        launch = f"{self.grid} block{'s' * (self.grid > 1)} of {self.threads} thread{'s' * (self.threads > 1)}"
        return f"<b>{escape(self.name)}</b> ({launch}): {escape(self.task)}{lens.svg()}"

    def __repr__(self) -> str:
        return f"{self.name}: {self.task}"

    def check(self, kernel: Callable) -> Verdict:
        """Try the kernel on three cases. TypeError if its arguments have other names than the puzzle's."""
        for seed in range(3):
            (arguments, right), lens = self.deal(seed), Lens()
            try:
                lens.run(kernel, self.grid, self.threads, **arguments)
            except TypeError as error:
                if not lens.accesses and kernel.__name__ in str(error):
                    raise
                return Verdict(f"it raised: {error}", lens)
            except Exception as error:  # noqa: BLE001 - whatever a reader's code may raise is the verdict on it
                return Verdict(f"it raised {type(error).__name__}: {error}", lens)
            complaint = _outside(lens) or _race(lens) or _first_wrong(lens, arguments, right)
            complaint = complaint or _alone(lens, self.grid * self.threads) or (self.demand and self.demand(lens))
            if complaint:
                return Verdict(complaint, lens)
        return Verdict("right")


def _outside(lens: Lens) -> str | None:
    for a in lens.outside():
        does, size = ("writes", "reads")[not a.write], lens.arrays[a.array].shape
        return f"thread {a.thread} of block {a.block} {does} outside {a.array}, which has shape {size}: {lens.source(a.line)}"
    return None


def _race(lens: Lens) -> str | None:
    for w, other in lens.races():
        does, what = ("write", "read")[not other.write], lens.element(w.array, w.index)
        return (
            f"a race: thread {w.thread} of block {w.block} writes {what} and thread {other.thread} of block {other.block} may {does} it at the"
            f" same time: {lens.source(w.line)}"
        )
    return None


def _alone(lens: Lens, num_threads: int) -> str | None:
    if num_threads > 1 and len({(a.block, a.thread) for a in lens.accesses}) == 1:
        return f"right, and slow: one thread does all the work, and {num_threads} are there"
    return None


def _first_wrong(lens: Lens, arguments: dict[str, Any], right: dict[str, np.ndarray]) -> str | None:
    for name, expected in right.items():
        wrong = np.flatnonzero(~np.isclose(arguments[name], expected, rtol=1e-4, atol=1e-5, equal_nan=True))
        if len(wrong):
            return _wrong_element(lens, name, int(wrong[0]), arguments[name].flat[wrong[0]], expected.flat[wrong[0]])
    return None


def _wrong_element(lens: Lens, name: str, index: int, found: float, expected: float) -> str:
    writes = [a for a in lens.accesses if (a.array, a.index, a.write) == (name, index, True)]
    who = "no thread wrote it"
    if writes:
        who = f"thread {writes[-1].thread} of block {writes[-1].block} wrote it: {lens.source(writes[-1].line)}"
    wish = "should be left alone, and is" if np.isnan(expected) else f"should be {expected:.6g}, and is"
    return f"{lens.element(name, index)} {wish} {found:.6g}; {who}"


def nothing(*shape: int) -> np.ndarray:
    """An array of NaN: what nobody writes can be told from a zero."""
    return np.full(shape, np.nan, np.float32)


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Small whole numbers as float32, easy to read in a picture."""
    return rng.integers(1, 100, shape).astype(np.float32)


def _copy(out, a):
    i = cuda.threadIdx.x
    out[i] = a[i]


copy = Puzzle(
    "copy",
    "thread i writes a[i] to out[i].",
    lambda rng: {"out": nothing(8), "a": numbers(rng, 8)},
    lambda out, a: {"out": a},
    1,
    8,
    _copy,
    (
        ("out[i] = a[i]", "pass", "no thread wrote it"),
        ("out[i]", "out[0]", "a race"),
        (
            "out[i] = a[i]",
            "for j in range(8 * (i == 0)):\n        out[j] = a[j]",
            "one thread does all the work, and 8 are",
        ),
    ),
)


def _guard(out, a):
    i = cuda.threadIdx.x
    if i < a.shape[0]:
        out[i] = 10 * a[i]


guard = Puzzle(
    "guard",
    "out[i] = 10 * a[i], with more threads than elements; a.shape[0] tells how many there are.",
    lambda rng: {"out": nothing(6), "a": numbers(rng, 6)},
    lambda out, a: {"out": 10 * a},
    1,
    8,
    _guard,
    (
        ("i < a.shape[0]", "True", "thread 6 of block 0 reads outside a"),
        ("a.shape[0]", "a.shape[0] - 1", "out[5] should be"),
    ),
)


def _grid(out, a):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < a.shape[0]:
        out[i] = a[i] + 1


grid = Puzzle(
    "grid",
    "out[i] = a[i] + 1, with three blocks of four threads for ten elements.",
    lambda rng: {"out": nothing(10), "a": numbers(rng, 10)},
    lambda out, a: {"out": a + 1},
    3,
    4,
    _grid,
    (
        ("cuda.blockIdx.x * cuda.blockDim.x + ", "", "a race"),
        ("i < a.shape[0]", "True", "thread 2 of block 2 reads outside a"),
    ),
)


def _store_case(rng: np.random.Generator) -> dict[str, Any]:
    slots = rng.permutation(np.arange(4, 24))[:5].astype(np.int32)
    slots[3] = -1
    return {"cache": nothing(6, 4, 4), "k": numbers(rng, 5, 4), "slots": slots}


def _stored(cache, k, slots):
    for t, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // 4, slot % 4] = k[t]
    return {"cache": cache}


def _store(cache, k, slots):
    t, d = cuda.blockIdx.x, cuda.threadIdx.x
    slot = slots[t]
    if slot >= 0:
        cache[slot // cache.shape[1], slot % cache.shape[1], d] = k[t, d]


store = Puzzle(
    "store",
    "cache[block, row, d] = k[t, d] for the block and row of slots[t]; negative slots are skipped. cache.shape[1] is the block size.",
    _store_case,
    _stored,
    5,
    4,
    _store,
    (
        ("slot >= 0", "True", "writes outside cache"),
        ("cache[slot // cache.shape[1], slot %", "cache[t // cache.shape[1], t %", "should be left alone"),
    ),
)


def _paged(rng: np.random.Generator, tokens: int, blocks: int = 6, block_size: int = 4, dim: int = 4) -> dict[str, Any]:
    """A cache in which only the request's own rows hold numbers, and the block table of `tokens` tokens."""
    table = rng.permutation(np.arange(1, blocks))[: -(-tokens // block_size)].astype(np.int32)
    cache = nothing(blocks, block_size, dim)
    for t in range(tokens):
        cache[table[t // block_size], t % block_size] = rng.normal(size=dim).round(2)
    return {"cache": cache, "table": table}


def _rows(cache, table, tokens):
    return np.stack([cache[table[t // cache.shape[1]], t % cache.shape[1]] for t in range(tokens)])


def _gather(out, cache, table):
    t, d = cuda.blockIdx.x, cuda.threadIdx.x
    size = cache.shape[1]
    out[t, d] = cache[table[t // size], t % size, d]


gather = Puzzle(
    "gather",
    "out[t, d] is dimension d of token t of the request with this block table.",
    lambda rng: {"out": nothing(10, 4), **_paged(rng, 10)},
    lambda out, cache, table: {"out": _rows(cache, table, 10)},
    10,
    4,
    _gather,
    (
        ("table[t // size]", "t // size", "out[0, 0] should be"),
        ("t // size", "t", "reads outside table"),
    ),
)


def _heads(out, q, k):
    h = cuda.threadIdx.x
    group = q.shape[0] // k.shape[0]
    total = 0.0
    for d in range(q.shape[1]):
        total += q[h, d] * k[h // group, d]
    out[h] = total


heads = Puzzle(
    "heads",
    "out[h] = q[h] . k[the key head of h]; heads of a group are neighbours.",
    lambda rng: {"out": nothing(6), "q": numbers(rng, 6, 4), "k": numbers(rng, 2, 4)},
    lambda out, q, k: {"out": (q * np.repeat(k, 3, axis=0)).sum(1)},
    1,
    6,
    _heads,
    (("h // group", "h % k.shape[0]", "out[1] should be"),),
)


def _scattered(lens: Lens) -> str | None:
    for row in lens.table():
        if row["space"] == "global" and row["pieces"] > row["needed"]:
            return f"right, and slow: a warp {row['does']} {row['array']} in {row['pieces']} pieces where {row['needed']} would do: {row['source']}"
    return None


def _side_by_side(out, x, x_t):
    t = cuda.threadIdx.x
    total = 0.0
    for d in range(8):
        total += x_t[d, t]
    out[t] = total


def _sum_case(rng: np.random.Generator) -> dict[str, Any]:
    x = numbers(rng, 32, 8)
    return {"out": nothing(32), "x": x, "x_t": np.ascontiguousarray(x.T)}


side_by_side = Puzzle(
    "side by side",
    "out[t] = sum of x[t, :]. x_t holds the same numbers the other way round, [8, 32].",
    _sum_case,
    lambda out, x, x_t: {"out": x.sum(1)},
    1,
    32,
    _side_by_side,
    (("x_t[d, t]", "x[t, d]", "right, and slow"),),
    _scattered,
)


def _tree(out, a):
    i = cuda.threadIdx.x
    part = cuda.shared.array(32, np.float32)
    part[i] = a[i]
    cuda.syncthreads()
    half = 16
    while half > 0:
        if i < half:
            part[i] = part[i] + part[i + half]
        cuda.syncthreads()
        half //= 2
    if i == 0:
        out[0] = part[0]


tree = Puzzle(
    "tree",
    "out[0] = the sum of a[0..31].",
    lambda rng: {"out": nothing(1), "a": numbers(rng, 32)},
    lambda out, a: {"out": a.sum(keepdims=True)},
    1,
    32,
    _tree,
    (
        ("        cuda.syncthreads()\n        half", "        half", "a race"),
        ("half > 0", "half > 8", "out[0] should be"),
    ),
)


def _banks_demand(lens: Lens) -> str | None:
    slow = _scattered(lens)
    if slow:
        return slow
    for row in lens.table():
        if row["space"] == "shared" and row["ways"] > 1:
            return f"right, and slow: a {row['ways']}-way bank conflict: {row['source']}"
    return None


def _banks(out, a):
    i = cuda.threadIdx.x
    tile = cuda.shared.array((32, 33), np.float32)
    for r in range(32):
        tile[r, i] = a[r, i]
    cuda.syncthreads()
    for r in range(32):
        out[r, i] = tile[i, r]


banks = Puzzle(
    "banks",
    "out[r, c] = a[c, r]; no scattered access and no bank conflict.",
    lambda rng: {"out": nothing(32, 32), "a": numbers(rng, 32, 32)},
    lambda out, a: {"out": a.T},
    1,
    32,
    _banks,
    (
        ("(32, 33)", "(32, 32)", "32-way bank conflict"),
        ("= tile[i, r]", "= a[i, r]", "right, and slow"),
    ),
    _banks_demand,
)


def _scores(out, q, cache, table, length):
    t = cuda.threadIdx.x
    if t < length:
        size = cache.shape[1]
        total = 0.0
        for d in range(q.shape[0]):
            total += q[d] * cache[table[t // size], t % size, d]
        out[t] = total


def _scores_case(rng: np.random.Generator) -> dict[str, Any]:
    length = int(rng.integers(5, 12))
    return {"out": nothing(12), "q": rng.normal(size=4).astype(np.float32), **_paged(rng, length), "length": length}


def _scored(out, q, cache, table, length):
    out[:length] = _rows(cache, table, length) @ q
    return {"out": out}


scores = Puzzle(
    "scores",
    "out[t] = q . k_t for t < length, straight from the blocks.",
    _scores_case,
    _scored,
    1,
    12,
    _scores,
    (
        ("t < length", "True", "outside table"),
        ("t < length", "t < length - 1", "and is nan; no thread"),
    ),
)


def _softmax(out, s):
    top = s[0]
    for i in range(1, s.shape[0]):
        top = max(top, s[i])
    total = 0.0
    for i in range(s.shape[0]):
        total += math.exp(s[i] - top)
    for i in range(s.shape[0]):
        out[i] = math.exp(s[i] - top) / total


def _softmax_of(out, s):
    e = np.exp(s.astype(np.float64) - s.max())
    return {"out": e / e.sum()}


softmax = Puzzle(
    "softmax",
    "out[i] = exp(s[i]) / sum of all exp(s), without overflow.",
    lambda rng: {"out": nothing(8), "s": (1000 + 3 * rng.normal(size=8)).astype(np.float32)},
    _softmax_of,
    1,
    1,
    _softmax,
    (
        (" - top", "", "OverflowError"),
        (" / total", "", "out[0] should be"),
    ),
)


def _online(out, s, v):
    d = cuda.threadIdx.x
    top, total, acc = s[0], 1.0, v[0, d]
    for t in range(1, s.shape[0]):
        new = max(top, s[t])
        old, weight = math.exp(top - new), math.exp(s[t] - new)
        total, acc, top = total * old + weight, acc * old + weight * v[t, d], new
    out[d] = acc / total


def _one_pass(lens: Lens) -> str | None:
    reads = [a for a in lens.accesses if a.array == "s" and a.thread == 0 and not a.write]
    first = next((a.index for n, a in enumerate(reads) if any(b.index > a.index for b in reads[:n])), None)
    return None if first is None else f"right, but not in one pass: it goes back to {lens.element('s', first)}"


def _online_of(out, s, v):
    e = np.exp(s.astype(np.float64) - s.max())
    return {"out": (e / e.sum()) @ v}


online = Puzzle(
    "online softmax",
    "out[d] = softmax(s) . v[:, d], reading s from front to back once.",
    lambda rng: {"out": nothing(4), "s": (5 * rng.normal(size=9)).astype(np.float32), "v": numbers(rng, 9, 4)},
    _online_of,
    1,
    4,
    _online,
    (
        ("math.exp(top - new)", "1.0", "out[0] should be"),
        (
            "s[0], 1.0, v[0, d]\n    for t in range(1, s.shape[0])",
            "max(s[t] for t in range(9)), 0.0, 0.0\n    for t in range(9)",
            "not in one pass",
        ),
    ),
    _one_pass,
)


def _window(out, cache, table, length, window):
    d = cuda.threadIdx.x
    size = cache.shape[1]
    total = 0.0
    for t in range(max(0, length - window), length):
        total += cache[table[t // size], t % size, d]
    out[d] = total


def _window_case(rng: np.random.Generator) -> dict[str, Any]:
    length, window = int(rng.integers(13, 17)), 5
    paged = _paged(rng, length, blocks=8)
    paged["table"][: (length - window) // 4] = 0
    return {"out": nothing(4), **paged, "length": length, "window": window}


def _windowed(out, cache, table, length, window):
    return {"out": _rows(cache, table, length)[length - window :].sum(0)}


def _null_block(lens: Lens) -> str | None:
    for a in lens.accesses:
        if a.array == "cache" and a.index < 16:
            return f"thread {a.thread} reads {lens.element('cache', a.index)}: block 0 is the null block"
    return None


window = Puzzle(
    "window",
    "out[d] = the sum of dimension d over the last `window` tokens.",
    _window_case,
    _windowed,
    1,
    4,
    _window,
    (
        ("max(0, length - window)", "0", "and is nan"),
        ("length - window", "length - window - 1", "out[0] should be"),
    ),
    _null_block,
)


def _fold(out, top, total, acc):
    d = cuda.threadIdx.x
    best = top[0]
    for p in range(1, top.shape[0]):
        best = max(best, top[p])
    weights, result = 0.0, 0.0
    for p in range(top.shape[0]):
        scale = math.exp(top[p] - best)
        weights += scale * total[p]
        result += scale * acc[p, d]
    out[d] = result / weights


def _fold_case(rng: np.random.Generator) -> dict[str, Any]:
    s, v = (5 * rng.normal(size=(4, 6))).astype(np.float32), rng.normal(size=(4, 6, 4))
    top = s.max(1)
    weights = np.exp(s - top[:, None])
    total, acc = weights.sum(1), np.einsum("pt,ptd->pd", weights, v)
    top[3], total[3], acc[3] = -1e30, 0, 0
    return {"out": nothing(4), "top": top, "total": total, "acc": acc.astype(np.float32)}


def _folded(out, top, total, acc):
    scale = np.exp(top.astype(np.float64) - top.max())
    return {"out": (scale @ acc) / (scale @ total)}


fold = Puzzle(
    "fold",
    "out[d] = the attention over all parts, from the parts' (top, total, acc).",
    _fold_case,
    _folded,
    1,
    4,
    _fold,
    (
        ("scale * acc[p, d]", "acc[p, d] / total[p]", "and is nan"),
        ("math.exp(top[p] - best)", "1.0", "out[0] should be"),
    ),
)

PUZZLES = (copy, guard, grid, store, gather, heads, side_by_side, tree, banks, scores, softmax, online, window, fold)
