"""Block map view: owner, content and hash of every KV block, step by step."""

# Generated from nbs/viz/block_map.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.trace import Event, Fold, State, Trace
from minivllm.viz.palette import LIGHT, owner_colour
from minivllm.viz.payload import Payload
from minivllm.viz.view import TraceSource, TraceView

__all__ = [
    "BlockMap", "block_states", "group_names", "request_numbers", "request_tokens", "token_texts", "usage",
]  # fmt: skip


# %% nbs/viz/block_map.ipynb #code-17d13d
if TYPE_CHECKING:
    from matplotlib.axes import Axes


# %% nbs/viz/block_map.ipynb #Op
HASH_BYTES = 3  # of a content hash that travel, to be read by people


class Op:
    """Operations of the stream, each followed by its operands. A list of blocks is its length, the first, then differences. A request is
    the difference of its number from that of the request before it in the step (0 before the first); "absolute" ones are plain.
    """

    ALLOC = 0  # request, group, why (0 runs on, 1 starts, 2 starts again, 3 comes back from the swap pool), list; or length -n: n from the free list
    HIT = 1  # request, group, list
    CACHE = 2  # request, group, n, then n times: position, block, name; or -n, jump: n blocks of its table with the next n names, so far from where such a run of its last ended
    FREE = 3  # request, group, cause, detail, by (absolute), list; or length -1: the whole table, last block first
    SKIP = 4  # request, group, start, end, list
    EVICT = 5  # request that needs them (number -1 if none is known), list; or length -n: the first n in the free list that have content
    RESET = 6
    SWAP_OUT = 7  # request, n, n times: block of the pool, block of the swap pool
    FREE_CPU = 8  # request, list
    SCHEDULE = 9  # n, n times: request, tokens (only where they differ from the step before; 0 for none)
    FORGET = 10  # a request that has finished
    RESTART = 11  # request, its computed tokens from now on; also said of one that arrives


class Cause:
    """Why a request gave its blocks back."""

    TAKEN_BACK = 0  # its admission failed half-way
    FINISH = 1  # detail: the reason's string
    PREEMPT = 2  # detail: the mode's string; by: the request that needed the blocks


# %% nbs/viz/block_map.ipynb #_Numbers
class _Numbers:
    """Gives every distinct value a number, in order of appearance."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.of.setdefault(value, len(self.of))


def _listed(blocks: Sequence[int]) -> list[int]:
    return [len(blocks), *(b - a for a, b in zip((0, *blocks), blocks, strict=False))]


# %% nbs/viz/block_map.ipynb #BlockStream
class BlockStream:
    """The block events of a trace in chunks of whole numbers.

    Attributes:
        chunks: (first step, numbers) each.
        requests, strings: ids and words by number.
        names: content hash -> number.
        origins: runs of names: the request, the group and the position that filled the first of the run first, and the length of the run.
            The request is -1 where that was before the trace.
    """

    LEAST = 2048  # numbers of a chunk
    SHARE = 6  # events, as a multiple of the keyframe before them

    def __init__(self, trace: Trace) -> None:
        self.trace, self.fold = trace, Fold(trace.start)
        self.requests, self.strings, self.names = _Numbers(), _Numbers(), _Numbers()
        self.origins: list[list[int]] = []
        self.chunks: list[tuple[int, list[int]]] = []
        self._scheduled: dict[str, int] = {}
        self._filled: dict[tuple[int, int], int] = {}  # (request, group) -> where its last run of new content ended
        self._last = 0  # the request before, in this step
        for request in trace.start.requests:
            self.requests(request)
        for name in trace.start.hashes:
            if name is not None:
                self._name(name, -1, 0, 0)
        self._run()

    def _name(self, name: bytes, request: int, group: int, position: int) -> int:
        known = len(self.names.of)
        number = self.names(name)
        if number == known:
            last = self.origins[-1] if self.origins else [-2]
            if last[:2] == [request, group] and last[2] + last[3] == position:
                last[3] += 1
            else:
                self.origins.append([request, group, position, 1])
        return number

    def _run(self) -> None:
        keyframe, step = 0, -1
        for begin, end in _step_ranges(self.trace):
            step += 1
            if not self.chunks or len(self.chunks[-1][1]) > max(self.LEAST, (1 + self.SHARE) * keyframe):
                self.chunks.append((step, self._keyframe()))
                keyframe = len(self.chunks[-1][1])
            ops: list[int] = []
            self._last = 0
            for i in range(begin, end):
                ops += self._code(i)
                self.fold.apply(self.trace.events[i])
            self.chunks[-1][1].extend([len(ops), *ops])

    def _keyframe(self) -> list[int]:
        """Length; names given so far; number of requests, then each one's number, computed tokens, block tables and swapped blocks; the free
        list; for every block in the order of its first mention, what it holds: 0 or its name + 1, as differences (neighbours hold neighbours).
        """
        state, mentioned = self.fold.now, dict.fromkeys([0])
        numbers = [len(self.names.of), len(state.requests)]
        for request, its in state.requests.items():
            numbers += [self.requests(request), its.num_computed_tokens]
            for table in (*its.tables, its.cpu_blocks):
                numbers += _listed(table)
            for table in its.tables:
                mentioned.update(dict.fromkeys(table))
        free = list(self.fold.free_blocks)
        held = [state.hashes[block] for block in dict.fromkeys([*mentioned, *free])][1:]
        numbers += _listed(free) + _listed([0 if name is None else self.names(name) + 1 for name in held])[1:]
        self._scheduled, self._filled = {}, {}
        return [len(numbers), *numbers]

    # ---- one event

    def _request(self, request: str | None) -> int:
        """The difference from the request before; None is number -1."""
        number = -1 if request is None else self.requests(request)
        self._last, last = number, self._last
        return number - last

    def _code(self, i: int) -> list[int]:
        event = self.trace.events[i]
        coder = getattr(self, "_on_" + event[0], None)
        return coder(i, *event[1:]) if coder else []

    def _after(self, i: int) -> Iterator[Event]:
        return (self.trace.events[j] for j in range(i + 1, len(self.trace.events)))

    def _on_add(self, i: int, request: str, *_: Any) -> list[int]:
        return [Op.RESTART, self._request(request), 0]

    def _on_alloc(self, i: int, request: str, group: int, blocks: Sequence[int]) -> list[int]:
        why = {"RUNNING": 0, "WAITING": 1, "PREEMPTED": 2, "SWAPPED": 3}[self.fold.now.requests[request].status]
        first = list(islice(self.fold.free_blocks, len(blocks)))
        which = [-len(blocks)] if first == list(blocks) else _listed(blocks)
        return [Op.ALLOC, self._request(request), group, why, *which]

    def _on_hit(self, i: int, request: str, group: int, blocks: Sequence[int]) -> list[int]:
        return [Op.HIT, self._request(request), group, *_listed(blocks)]

    def _on_admit(self, i: int, request: str, computed: int, cached: int) -> list[int]:
        return [Op.RESTART, self._request(request), computed]

    def _on_preempt(self, i: int, request: str, mode: str, *_: str) -> list[int]:
        return [] if mode == "swap" else [Op.RESTART, self._request(request), 0]

    def _on_cache(self, i: int, request: str, group: int, positions: Any, blocks: Any, hashes: Any) -> list[int]:
        number, known = self.requests(request), len(self.names.of)
        names = [self._name(name, number, group, position) for position, name in zip(positions, hashes, strict=True)]
        table = self.fold.now.requests[request].tables[group]
        first, end = positions[0], positions[0] + len(positions)
        runs_on = list(positions) == list(range(first, end)) and names == list(range(known, known + len(names)))
        if not (runs_on and list(blocks) == table[first:end]):
            rows = zip(positions, blocks, names, strict=True)
            return [Op.CACHE, self._request(request), group, len(names), *(x for row in rows for x in row)]
        jump = first - self._filled.get((number, group), 0)
        self._filled[number, group] = end
        return [Op.CACHE, self._request(request), group, -len(names), jump]

    def _on_free(self, i: int, request: str, group: int, blocks: Sequence[int]) -> list[int]:
        table = self.fold.now.requests[request].tables[group]
        whole = list(blocks) == [block for block in reversed(table) if block]
        return [Op.FREE, self._request(request), group, *self._cause(i, request), *([-1] if whole else _listed(blocks))]

    def _cause(self, i: int, request: str) -> tuple[int, int, int]:
        """The blocks of a request are given back just before the event that says why."""
        for event in self._after(i):
            if event[0] == "finish" and event[1] == request:
                return Cause.FINISH, self.strings(event[2]), -1
            if event[0] == "preempt" and event[1] == request:
                return Cause.PREEMPT, self.strings(f"{event[2]}, chosen by {event[4]}"), self.requests(event[3])
            if event[0] not in ("free", "free_cpu", "cache"):
                break
        return Cause.TAKEN_BACK, 0, -1

    def _on_skip(self, i: int, request: str, group: int, start: int, end: int, blocks: Sequence[int]) -> list[int]:
        return [Op.SKIP, self._request(request), group, start, end, *_listed(blocks)]

    def _on_evict(self, i: int, block: int, name: bytes) -> list[int]:
        if self.trace.events[i - 1][0] == "evict":
            return []  # told with the first of the series
        evicted = [event[1] for event in takewhile(lambda event: event[0] == "evict", self._after(i - 1))]
        cached = (free for free in self.fold.free_blocks if self.fold.now.hashes[free] is not None)
        oldest = list(islice(cached, len(evicted)))
        return [Op.EVICT, self._request(self._taker(i)), *([-len(evicted)] if evicted == oldest else _listed(evicted))]

    def _taker(self, i: int) -> str | None:
        """Blocks are evicted just before somebody takes them."""
        for event in self._after(i):
            if event[0] == "alloc":
                return str(event[1])
            if event[0] not in ("evict", "hit"):
                break
        return None

    def _on_reset(self, i: int) -> list[int]:
        return [Op.RESET]

    def _on_swap_out(self, i: int, request: str, pairs: Any) -> list[int]:
        return [Op.SWAP_OUT, self._request(request), len(pairs), *(x for pair in pairs for x in pair)]

    def _on_free_cpu(self, i: int, request: str, blocks: Sequence[int]) -> list[int]:
        return [Op.FREE_CPU, self._request(request), *_listed(blocks)]

    def _on_schedule(self, i: int, scheduled: dict[str, int]) -> list[int]:
        changed = [(r, n) for r, n in scheduled.items() if self._scheduled.get(r) != n]
        changed += [(r, 0) for r in self._scheduled if r not in scheduled]
        self._scheduled = scheduled
        return [Op.SCHEDULE, len(changed), *(x for r, n in changed for x in (self._request(r), n))]

    def _on_finish(self, i: int, request: str, reason: str, stop_reason: Any) -> list[int]:
        for group in range(self.trace.header.num_groups):
            self._filled.pop((self.requests(request), group), None)
        return [Op.FORGET, self._request(request)]

    def packed_origins(self) -> list[int]:
        """Origins in columns: requests, as differences; groups; positions, from where the last run of the request and the group ended; lengths."""
        ends: dict[tuple[int, int], int] = {}
        jumps, last, requests = [], 0, []
        for request, group, position, length in self.origins:
            jumps.append(position - ends.get((request, group), 0))
            ends[request, group] = position + length
            requests.append(request - last)
            last = request
        return [*requests, *(o[1] for o in self.origins), *jumps, *(o[3] for o in self.origins)]


def _step_ranges(trace: Trace) -> Iterator[tuple[int, int]]:
    """Where the events of each step begin and end; what came before the first step belongs to it."""
    begin, seen = 0, False
    for i, event in enumerate(trace.events):
        if event[0] == "step":
            if seen:
                yield begin, i
                begin = i
            seen = True
    if seen:
        yield begin, len(trace.events)


# %% nbs/viz/block_map.ipynb #request_tokens
def request_tokens(trace: Trace) -> dict[str, list[int]]:
    """The known token ids of every request that was added while recording, prompt first. A later request of the same id replaces the first."""
    tokens: dict[str, list[int]] = {}
    for event in trace.events:
        if event[0] == "add":
            tokens[event[1]] = [*(event[7] or ()), *event[8]]
        elif event[0] == "update":
            for request, new in event[2].items():
                if request in tokens:
                    tokens[request].extend(new)
    return tokens


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """The text of each distinct token, as it reads in the middle of a text: some tokenizers drop a blank at the start."""
    texts = {}
    for token in sorted(set(token_ids)):
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        texts[token] = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
    return texts


# %% nbs/viz/block_map.ipynb #BlockMap
class BlockMap(TraceView):
    """Every physical block of the KV cache, step by step: who holds it, what it holds, and its history.

    Colour says which request holds a block (the oldest one, if several do); shape says in which state it is. Click a block to pin it and read its
    history; choose a request to see its block table as arrows to the physical blocks.

    Args:
        trace: a trace, or the path of a saved one.
        tokenizer: anything with `decode(token_ids)`, to show tokens as text; None takes `trace.tokenizer`, and without that token ids are shown.
        tokens: whether the page carries the tokens. None carries them if they take less than 16 KB there.

    Raises:
        TypeError: neither trace nor path, or a tokenizer that cannot decode.
    """

    module = "block_map"
    title = "KV cache blocks"
    wide = True
    options = frozenset({"tokenizer"})
    TOKENS_LIMIT = 16_000  # bytes, deflated

    def __init__(self, trace: TraceSource, tokenizer: Any = None, tokens: bool | None = None) -> None:
        super().__init__(trace)
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(f"a tokenizer has decode(token_ids); got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer if tokenizer is not None else self.trace.tokenizer
        self.tokens = tokens
        columns, rows = _grid(self.trace.header.num_blocks)
        self.figure_size = (7.0, 6.6 * rows / columns + 0.75)

    def build(self) -> Payload:
        stream, head = BlockStream(self.trace), self.trace.header
        payload = Payload({})
        chunks = [[first, payload.add_numbers(np.asarray(numbers))] for first, numbers in stream.chunks]
        short = b"".join(name[:HASH_BYTES] for name in stream.names.of)
        payload.header = self.header(
            subtitle=f"{_counted(head.num_blocks - 1, 'block')} of {_counted(head.block_size, 'token')}",
            num_blocks=head.num_blocks,
            num_cpu_blocks=head.num_cpu_blocks,
            block_size=head.block_size,
            groups=group_names(self.trace),
            first_number=self._first_number(),
            chunks=chunks,
            words=payload.add_json({"requests": list(stream.requests.of), "strings": list(stream.strings.of)}),
            origins=payload.add_numbers(stream.packed_origins()),
            hash_bytes=HASH_BYTES,
            hashes=payload.add_bytes(short),
            tokens=self._add_tokens(payload, stream),
        )
        return payload

    def _first_number(self) -> int:
        """The engine's own number of the first recorded step."""
        return next(event[1] for event in self.trace.events if event[0] == "step")

    def _add_tokens(self, payload: Payload, stream: BlockStream) -> dict[str, int] | None:
        """Token ids of every request, and their texts; None if the page goes without."""
        if self.tokens is False:
            return None
        known = request_tokens(self.trace)
        listed = [known.get(request, []) for request in stream.requests.of]
        if self.tokens is None and sum(map(len, listed)) > 8 * self.TOKENS_LIMIT:  # hopeless: do not even try
            return None
        ids = payload.add_numbers([x for tokens in listed for x in (len(tokens), *tokens)])
        if self.tokens is None and len(payload.parts[ids]) > self.TOKENS_LIMIT:
            payload.drop_last()
            return None
        parts = {"ids": ids}
        if self.tokenizer is not None:
            texts = token_texts(self.tokenizer, (token for tokens in listed for token in tokens))
            parts["texts"] = payload.add_json({str(token): text for token, text in texts.items()})
        return parts

    def describe(self) -> str:
        trace, total = self.trace, self.trace.header.num_blocks - 1
        used, last = usage(trace), trace.at(-1)
        shared = sum(count > 1 for count in last.ref_cnt)
        cached = sum(last.hashes[block] is not None for block in last.free)
        events = [event[0] for event in trace.events]
        most = f"Most in use: {max(used):,} of {total:,} blocks, at step {used.index(max(used))}."
        end = f"At the last step {used[-1]:,} are in use, {shared:,} of them shared; {cached:,} free ones hold cached tokens."
        what = f"{events.count('evict'):,} evictions, {events.count('preempt'):,} preemptions in {trace.num_steps:,} steps."
        return f"{most}\n{end}\n{what}"

    def plot(self, ax: Axes | None = None, step: int = -1) -> Axes:
        """Draw the blocks after a step (-1: the last) with matplotlib; returns the axes.

        Raises:
            ValueError: there is nothing to draw. IndexError: there is no such step.
        """
        self._step = step
        return super().plot(ax)

    _step = -1

    def draw(self, axes: Axes) -> None:
        state, count = self.trace.at(self._step), self.trace.num_steps
        draw_blocks(axes, state, request_numbers(self.trace))
        axes.set_title(f"KV cache blocks after step {self._step % count} of {count - 1}", loc="left", fontsize=10)


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def group_names(trace: Trace) -> list[str]:
    """What the KV cache groups are called: their kind of attention and their layers, as far as the trace was told."""
    groups = trace.header.groups
    if len(groups) != trace.header.num_groups:
        return (
            ["KV cache group"]
            if trace.header.num_groups == 1
            else [f"KV cache group {i}" for i in range(trace.header.num_groups)]
        )
    names = []
    for i, group in enumerate(groups):
        spec, layers = group["spec"], len(group["layers"])
        kind = {
            "full": "full attention",
            "sliding_window": f"sliding window of {spec['window']}",
            "chunked_local": f"chunks of {spec['window']}",
        }[spec["kind"]]
        names.append(f"group {i}: {kind}, {layers} layer{'s' * (layers != 1)}")
    return names


# %% nbs/viz/block_map.ipynb #request_numbers
def request_numbers(trace: Trace) -> dict[str, int]:
    """The number of every request, in order of arrival: what its colour is chosen by."""
    ids = [*trace.start.requests, *(event[1] for event in trace.events if event[0] == "add")]
    return {request: i for i, request in enumerate(dict.fromkeys(ids))}


def block_states(state: State, numbers: dict[str, int]) -> list[tuple[str, int | None]]:
    """For every physical block how it is drawn and the number of its oldest holder: ("used" | "shared", n), ("cached", None), ("free", None), ("null", None)."""
    owner: dict[int, int] = {}
    for request, its in state.requests.items():
        for table in its.tables:
            for block in table:
                owner[block] = min(numbers[request], owner.get(block, numbers[request]))
    drawn: list[tuple[str, int | None]] = [("null", None)]
    for block in range(1, len(state.ref_cnt)):
        count = state.ref_cnt[block]
        if count:
            drawn.append(("shared" if count > 1 else "used", owner[block]))
        else:
            drawn.append(("free" if state.hashes[block] is None else "cached", None))
    return drawn


def usage(trace: Trace) -> list[int]:
    """Blocks in use after every step."""
    fold, counts = Fold(trace.start), []
    for begin, end in _step_ranges(trace):
        for event in trace.events[begin:end]:
            fold.apply(event)
        counts.append(trace.header.num_blocks - 1 - len(fold.free_blocks))
    return counts


# %% nbs/viz/block_map.ipynb #draw_blocks
def _grid(count: int) -> tuple[int, int]:
    """Columns (a power of two) and rows, about twice as wide as high."""
    columns = 2 ** math.ceil(math.log2(max(16.0, math.sqrt(count * 1.8))))
    return columns, math.ceil(count / columns)


_MARKS = {
    "used": ("in use, by request", "s", 1.0),
    "shared": ("shared", "s", 1.0),
    "cached": ("free, with cached tokens", "s", 0.9),
    "free": ("free", "o", 0.25),
    "null": ("null block", "x", 0.7),
}


def draw_blocks(axes: Axes, state: State, numbers: dict[str, int]) -> None:
    """Draw a state's blocks as a grid: filled squares are in use, those with a hole are shared, outlines are cached, dots are free, a cross is the null block."""
    drawn = block_states(state, numbers)
    columns, rows = _grid(len(drawn))
    box = axes.get_window_extent()
    side = min(box.width / columns, box.height / rows) * 72 / axes.figure.dpi * 0.8  # points
    for kind, (_, marker, size) in _MARKS.items():
        chosen = [(i, n) for i, (look, n) in enumerate(drawn) if look == kind]
        if not chosen:
            continue
        x, y = [i % columns for i, _ in chosen], [i // columns for i, _ in chosen]
        colours = [LIGHT[kind] if n is None else owner_colour(n) for _, n in chosen]
        inside = {"facecolors": "none", "edgecolors": colours} if kind == "cached" else {"c": colours}
        line = max(0.5, side * 0.1) if kind in ("cached", "null") else 0
        axes.scatter(x, y, s=(side * size) ** 2, marker=marker, linewidths=line, **inside)
        if kind == "shared":
            axes.scatter(x, y, s=(side * 0.36) ** 2, marker="s", c=LIGHT["panel"], linewidths=0)
    axes.set(xlim=(-0.7, columns - 0.3), ylim=(rows - 0.3, -0.7), aspect="equal", xticks=[])
    every = max(1, math.ceil(rows / 8))
    axes.set_yticks(range(0, rows, every), [str(row * columns) for row in range(0, rows, every)])
    axes.tick_params(length=0, labelsize=8, colors=LIGHT["muted"])
    axes.spines[:].set_visible(False)
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    handles = []
    for kind, (_, marker, size) in _MARKS.items():
        colour = LIGHT["owner-0" if kind in ("used", "shared") else kind]
        fill = "none" if kind == "cached" else colour
        mark = Line2D(
            [],
            [],
            ls="",
            marker=marker,
            ms=7 * size,
            mfc=fill,
            mec=colour,
            mew=0.0 if fill == colour and marker != "x" else 1.0,
        )
        hole = Line2D([], [], ls="", marker="s", ms=2.5, mfc=LIGHT["panel"], mew=0)
        handles.append((mark, hole) if kind == "shared" else (mark,))
    axes.legend(
        handles, [label for label, _, _ in _MARKS.values()], handler_map={tuple: HandlerTuple(ndivide=1)}, loc="upper left",
        bbox_to_anchor=(0, -0.01), ncols=5, frameon=False, fontsize=8, handletextpad=0.2, columnspacing=1.2, borderpad=0,
    )  # fmt: skip
