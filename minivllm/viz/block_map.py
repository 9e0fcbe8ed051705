"""Block map view: owner, content and hash of every KV block, step by step."""

# Generated from nbs/viz/block_map.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.config import KV_CACHE_KINDS, KVCacheSpec
from minivllm.core.events import EVENTS, SCHEMA, Event, Fold, FoldReader, State, by_step, named, read
from minivllm.core.trace import Trace
from minivllm.viz.palette import LIGHT, owner_colour
from minivllm.viz.payload import Payload
from minivllm.viz.view import MADE_UP, TraceSource, TraceView, counted, most_eventful

__all__ = [
    "BlockMap", "block_states", "fetched_blocks", "group_names", "media_blocks", "request_media",
    "request_numbers", "request_tokens", "state_groups", "still_fetched", "token_texts",
]  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HASH_BYTES = 3  # of a content hash that travel, to be read by people
STATUSES = ("WAITING", "RUNNING", "PREEMPTED", "SWAPPED", "WAITING_FOR_REMOTE_KVS")
MODES = ("recompute", "swap")
_WIRED = (
    "add", "admit", "alloc", "hit", "cache", "uncache", "skip", "free", "evict", "preempt", "swap_out", "free_cpu",
    "schedule", "rollback", "finish", "reset", "kv_load", "kv_wait", "kv_arrive", "kv_keep", "kv_release",
)  # fmt: skip
_IN_PART = {
    "add": ("request",), "evict": ("block",), "finish": ("request", "reason"),
    "cache": ("request", "group", "positions"),  # with blocks and hashes
    "kv_load": ("request", "group", "blocks"), "kv_wait": ("request",),
}  # fmt: skip
WIRE = {kind: _IN_PART.get(kind, SCHEMA[kind]) for kind in _WIRED}  # the events that travel, and their fields


class _Numbers:
    """Gives every distinct value a number, in order of appearance."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.of.setdefault(value, len(self.of))


def _listed(blocks: Sequence[int]) -> list[int]:
    return [len(blocks), *(b - a for a, b in zip((0, *blocks), blocks, strict=False))]


class BlockStream(FoldReader):
    """The events of `WIRE` in chunks of whole numbers, read beside a fold: `read(trace, stream)`, or `BlockStream.of(trace)`.

    Attributes:
        chunks: (first step, numbers) each.
        requests, strings: ids and words by number.
        names: content hash -> number.
        origins: runs of names: the request, the group and the position that filled the first of the run first, and the length of the run.
            The request is -1 where that was before the trace.
        used: blocks in use after each step.
        touched: the blocks that were ever held or held content.
        fetched: the blocks whose content a KV connector has brought, or is bringing, as far as the trace tells.
    """

    LEAST = 2048  # numbers of a chunk
    SHARE = 6  # events, as a multiple of the keyframe before them

    _keyframe_size = 0

    @classmethod
    def of(cls, trace: Trace) -> BlockStream:
        """The stream of a whole trace."""
        stream = cls()
        read(trace, stream)
        return stream

    def begin(self) -> None:
        self.requests, self.strings, self.names = _Numbers(), _Numbers(), _Numbers()
        self.origins: list[list[int]] = []
        self.chunks: list[tuple[int, list[int]]] = []
        self.used: list[int] = []
        self.fetched, self.num_fetched = set[int](), 0
        numbered: dict[str, Callable[[Any], int]] = {
            "needed_by": self.requests, "owner": self.requests, "mode": MODES.index, "chosen_by": self.strings, "reason": self.strings,
        }  # fmt: skip

        def coder(field: str) -> Callable[[Any], list[int]]:
            if (number := numbered.get(field)) is not None:
                return lambda event: [number(getattr(event, field))]
            return getattr(self, f"_write_{field}", lambda event: [getattr(event, field)])

        self._coders = {kind: [coder(field) for field in fields] for kind, fields in WIRE.items()}
        now = self.fold.now
        known = enumerate(zip(now.ref_cnt, now.hashes, strict=True))
        self.touched = {block for block, (count, name) in known if count or name}
        for request in now.requests:
            self.requests(request)
        for name in now.hashes:
            if name is not None:
                self._name(name, -1, 0, 0)
        self._start_step(0)

    def _start_step(self, step: int) -> None:
        if not self.chunks or len(self.chunks[-1][1]) > max(self.LEAST, (1 + self.SHARE) * self._keyframe_size):
            self.chunks.append((step, self._keyframe()))
            self._keyframe_size = len(self.chunks[-1][1])
        self._ops: list[int] = []
        self._last = 0  # the request before, in this step

    def end_step(self) -> None:
        self.chunks[-1][1].extend([len(self._ops), *self._ops])
        self.used.append(self.fold.num_used)

    def feed(self, event: Event) -> None:
        """Write one event."""
        kind = event[0]
        coders = self._coders.get(kind)
        if coders is not None:
            fields = EVENTS[kind](*event)
            self._ops.append(_KIND[kind])
            for coder in coders:
                self._ops += coder(fields)
            if kind in ("alloc", "kv_load", "kv_arrive"):
                self.num_fetched += len(fields.blocks) if kind == "kv_load" else 0
                self.fetched = still_fetched(self.fetched, fields, self.fold.now, self.header.block_size)
        elif kind == "step" and self.step:  # what comes before the first step belongs to it
            self._start_step(self.step)

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

    def _keyframe(self) -> list[int]:
        """Length; names given so far; number of requests, then each one's number, status, computed tokens, block tables and swapped blocks; the
        queues; number of ended requests whose blocks are kept, then each one's number and blocks; fetched blocks; the free list; for every block in the order of its first mention, what it holds: 0 or its name + 1, as differences (neighbours hold
        neighbours).
        """
        state, mentioned = self.fold.now, dict.fromkeys([0])
        numbers = [len(self.names.of), len(state.requests)]
        for request, its in state.requests.items():
            numbers += [self.requests(request), STATUSES.index(its.status), its.num_computed_tokens]
            for table in (*its.tables, its.cpu_blocks):
                numbers += _listed(table)
            for table in its.tables:
                mentioned.update(dict.fromkeys(table))
        for queue in (state.waiting, state.running, state.remote):
            numbers += _listed([self.requests(request) for request in queue])
        numbers.append(len(state.kept))
        for request, blocks in state.kept.items():
            numbers += [self.requests(request), *_listed(blocks)]
            mentioned.update(dict.fromkeys(blocks))
        numbers += _listed(sorted(self.fetched))
        free = list(self.fold.free_blocks)
        held = [state.hashes[block] for block in dict.fromkeys([*mentioned, *free])][1:]
        numbers += _listed(free) + _listed([0 if name is None else self.names(name) + 1 for name in held])[1:]
        self._scheduled: dict[str, int] = {}
        self._filled: dict[tuple[int, int], int] = {}  # (request, group) -> where its last run of new content ended
        return [len(numbers), *numbers]

    def _write_request(self, event: Any) -> list[int]:
        """The difference from the request before."""
        number = self.requests(event.request)
        self._last, last = number, self._last
        if event.kind == "finish":
            for group in range(self.fold.now.num_groups):
                self._filled.pop((number, group), None)
        return [number - last]

    def _write_blocks(self, event: Any) -> list[int]:
        expected: Iterable[int] = ()
        if event.kind == "alloc":
            self.touched.update(event.blocks)
            expected = islice(self.fold.free_blocks, len(event.blocks))
        elif event.kind == "free":
            table = self.fold.now.requests[event.request].tables[event.group]
            expected = (block for block in reversed(table) if block)
        return [-len(event.blocks)] if list(event.blocks) == list(expected) else _listed(event.blocks)

    def _write_block(self, event: Any) -> list[int]:
        """-1 for the first free block behind those without content."""
        behind = len(self.fold.free_blocks) - self.fold.num_cached_free
        return [-1 if event.block == next(islice(self.fold.free_blocks, behind, None), None) else event.block]

    def _write_positions(self, event: Any) -> list[int]:
        """n, then n times position, block, name; or -n, jump: n blocks of the table with the next n names, so far from where such a run ended last."""
        key, known, positions = (self.requests(event.request), event.group), len(self.names.of), event.positions
        names = [self._name(name, *key, position) for position, name in zip(positions, event.hashes, strict=True)]
        table = self.fold.now.requests[event.request].tables[event.group]
        first, end = positions[0], positions[0] + len(positions)
        runs_on = list(positions) == list(range(first, end)) and names == list(range(known, known + len(names)))
        if not (runs_on and list(event.blocks) == table[first:end]):
            return [len(names), *(x for row in zip(positions, event.blocks, names, strict=True) for x in row)]
        jump = first - self._filled.get(key, 0)
        self._filled[key] = end
        return [-len(names), jump]

    def _write_pairs(self, event: Any) -> list[int]:
        return [len(event.pairs), *(block for pair in event.pairs for block in pair)]

    def _write_num_rejected(self, event: Any) -> list[int]:
        return [len(event.num_rejected), *(x for r, n in event.num_rejected.items() for x in (self.requests(r), n))]

    def _write_num_scheduled(self, event: Any) -> list[int]:
        """n, then n times request, tokens: only where they differ from the step before; 0 for none."""
        new = event.num_scheduled
        changed = [(r, n) for r, n in new.items() if self._scheduled.get(r) != n]
        changed += [(r, 0) for r in self._scheduled if r not in new]
        self._scheduled = new
        numbers = [len(changed)]
        for request, n in changed:
            number = self.requests(request)
            numbers += [number - self._last, n]
            self._last = number
        return numbers

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


_KIND = {kind: number for number, kind in enumerate(SCHEMA)}


def still_fetched(fetched: set[int], event: Any, before: State, block_size: int) -> set[int]:
    """Which blocks hold what a KV connector has brought, or is bringing, after an event; the state is the one before."""
    if event.kind == "kv_load":
        return fetched | {*event.blocks}
    if event.kind == "alloc":
        return fetched - {*event.blocks}
    if event.kind == "kv_arrive":  # what lies behind could not be brought
        return fetched - {
            b for t in before.requests[event.request].tables for b in t[event.num_computed // block_size :]
        }
    return fetched


def fetched_blocks(trace: Trace, step: int) -> frozenset[int]:
    """The blocks whose content a KV connector has brought, or is bringing, after a step."""
    fold, found = Fold(trace.start), set[int]()
    if any(event[0] == "kv_load" for event in trace.events):
        for number, events in by_step(trace.events):
            for event in events if number <= step % trace.num_steps else ():
                if event[0] in ("alloc", "kv_load", "kv_arrive"):
                    found = still_fetched(found, named(event), fold.now, trace.header.block_size)
                fold.apply(event)
    return frozenset(found)


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


def request_media(trace: Trace) -> dict[str, list[tuple[int, int, str]]]:
    """First token, token behind the last, and modality of each input besides text, of every request that was added while recording."""
    media: dict[str, list[tuple[int, int, str]]] = {}
    for event in trace.events:
        if event[0] == "add":
            media.pop(event[1], None)
        elif event[0] == "attributes" and event[2].get("mm_features"):
            media[event[1]] = [(first, first + n, kind) for _, kind, _, first, n, *_ in event[2]["mm_features"]]
    return media


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """The text of each distinct token, as it reads in the middle of a text: some tokenizers drop a blank at the start."""
    texts = {}
    for token in sorted(set(token_ids)):
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        texts[token] = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
    return texts


class BlockMap(TraceView):
    """Every physical block of the KV cache, step by step: who holds it, what it holds, and its history.

    Colour says which request holds a block (the oldest one, if several do); shape says in which state it is; a missing lower corner, that tokens of a
    picture or clip are in it; a missing upper corner, that its content came from elsewhere, by a KV connector. Click a block to pin it and read its
    history; choose a request to see its block table as arrows to the physical blocks. Blocks that the run never touched are folded into one line.

    Args:
        trace, tokenizer: see `TraceView`.
        tokens: whether the page carries the tokens. None carries them if they take less than 16 KB there.
    """

    module = "block_map"
    title = "KV cache blocks"
    wide = True
    reader = BlockStream
    TOKENS_LIMIT = 16_000  # bytes, deflated

    def __init__(self, trace: TraceSource, tokenizer: Any = None, tokens: bool | None = None) -> None:
        super().__init__(trace, tokenizer)
        self.tokens = tokens

    @cached_property
    def shown(self) -> list[int]:
        """The blocks that are drawn: the null block and those that the run touched; all of a pool that was touched nearly everywhere."""
        total, touched = self.trace.header.num_blocks, self.reading.touched | {0}
        return sorted(touched) if len(touched) < 0.8 * total and total > 64 else list(range(total))

    @property
    def figure_size(self) -> tuple[float, float]:  # type: ignore[override]
        columns, rows = _grid(len(self.shown))
        return 7.0, 6.6 * rows / columns + 0.75

    def build(self) -> Payload:
        stream, head = self.reading, self.trace.header
        payload = Payload({})
        chunks = [[first, payload.add_numbers(np.asarray(numbers))] for first, numbers in stream.chunks]
        short = b"".join(name[:HASH_BYTES] for name in stream.names.of)
        ids = list(stream.requests.of)
        payload.header = self.header(
            subtitle=f"{counted(head.num_blocks - 1, 'block')} of {counted(head.block_size, 'token')}",
            num_blocks=head.num_blocks, num_cpu_blocks=head.num_cpu_blocks, block_size=head.block_size,
            groups=group_names(self.trace), states=sorted(state_groups(self.trace)), chunks=chunks, shown=payload.add_numbers(np.diff(self.shown, prepend=0)),
            words=payload.add_json({"requests": ids, "names": [self.names[id] for id in ids], "strings": list(stream.strings.of)}),
            origins=payload.add_numbers(stream.packed_origins()), hash_bytes=HASH_BYTES, hashes=payload.add_bytes(short),
            tokens=self._add_tokens(payload, ids), media=self._add_media(payload, ids), fetched=stream.num_fetched,
        )  # fmt: skip
        return payload

    def _add_tokens(self, payload: Payload, requests: list[str]) -> dict[str, int] | None:
        """Token ids of every request, and their texts; None if the page goes without."""
        if self.tokens is False:
            return None
        known = request_tokens(self.trace)
        listed = [known.get(request, []) for request in requests]
        if self.tokens is None and sum(map(len, listed)) > 8 * self.TOKENS_LIMIT:  # hopeless: do not even try
            return None
        told = [[min(token, MADE_UP) for token in tokens] for tokens in listed]
        ids = payload.add_numbers([x for tokens in told for x in (len(tokens), *tokens)])
        if self.tokens is None and len(payload.parts[ids]) > self.TOKENS_LIMIT:
            payload.drop_last()
            return None
        parts = {"ids": ids}
        if self.tokenizer is not None:
            texts = token_texts(self.tokenizer, (token for tokens in listed for token in tokens))
            parts["texts"] = payload.add_json({str(token): text for token, text in texts.items()})
        return parts

    def _add_media(self, payload: Payload, requests: list[str]) -> int | None:
        """By the number of a request, its media: see `request_media`. None if there are none."""
        known = request_media(self.trace)
        listed = {str(i): known[request] for i, request in enumerate(requests) if request in known}
        return payload.add_json(listed) if listed else None

    def describe(self) -> str:
        stream, total = self.reading, self.trace.header.num_blocks - 1
        used, fold = stream.used, stream.fold
        shared = sum(count > 1 for count in fold.now.ref_cnt)
        most = f"Most in use: {max(used):,} of {total:,} blocks, at step {used.index(max(used))}."
        end = f"At the last step {used[-1]:,} are in use, {shared:,} of them shared; {fold.num_cached_free:,} free ones hold cached tokens."
        kinds = Counter(event[0] for event in self.trace.events)
        what = f"{kinds['evict']:,} evictions, {kinds['preempt']:,} preemptions in {self.trace.num_steps:,} steps."
        if stream.num_fetched:
            what += f" {counted(stream.num_fetched, 'block')} came from elsewhere, {len(stream.fetched):,} of them are there at the end."
        return f"{most}\n{end}\n{what}"

    def plot(self, ax: Axes | None = None, step: int | None = None) -> Axes:
        """Draw the blocks after a step (-1: the last; None: the most eventful one) with matplotlib; returns the axes.

        Raises:
            ValueError: there is nothing to draw. IndexError: there is no such step.
        """
        self._step = step
        return TraceView.plot(self, ax)

    def draw(self, axes: Axes) -> None:
        step = most_eventful(self.trace) if self._step is None else self._step
        state, count = self.trace.at(step), self.trace.num_steps
        media, fetched = media_blocks(self.trace, state), fetched_blocks(self.trace, step)
        draw_blocks(axes, state, request_numbers(self.trace), self.shown, state_groups(self.trace), media, fetched)
        folded = len(state.ref_cnt) - len(self.shown)
        rest = f" ({counted(folded, 'block')} that this run never touched left out)" if folded else ""
        axes.set_title(f"KV cache blocks after step {step % count} of {count - 1}{rest}", loc="left", fontsize=10)


def _kind_of(spec: dict[str, Any]) -> str:
    """A group's kind in words; its bare name if it is registered only where the trace was recorded."""
    if spec["kind"] not in KV_CACHE_KINDS:
        return str(spec["kind"])
    made = KVCacheSpec(**{**spec, "options": tuple(map(tuple, spec.get("options", ())))})
    return made.rules.describe(made)


def group_names(trace: Trace) -> list[str]:
    """What the KV cache groups are called: their kind of attention and their layers, as far as the trace was told."""
    groups, count = trace.header.groups, trace.header.num_groups
    if len(groups) != count:
        return ["KV cache group"] if count == 1 else [f"KV cache group {i}" for i in range(count)]
    told = ((_kind_of(group["spec"]), counted(len(group["layers"]), "layer")) for group in groups)
    return [f"group {i}: {kind}, {layers}" for i, (kind, layers) in enumerate(told)]


def state_groups(trace: Trace) -> frozenset[int]:
    """The KV cache groups whose blocks hold states, as far as the trace was told."""
    kinds = {name for name, rules in KV_CACHE_KINDS.items() if rules.is_state}
    return frozenset(i for i, group in enumerate(trace.header.groups) if group["spec"]["kind"] in kinds)


def request_numbers(trace: Trace) -> dict[str, int]:
    """The number of every request, in order of arrival: what its colour is chosen by."""
    ids = [*trace.start.requests, *(event[1] for event in trace.events if event[0] == "add")]
    return {request: i for i, request in enumerate(dict.fromkeys(ids))}


def block_states(
    state: State, numbers: dict[str, int], states: frozenset[int] = frozenset()
) -> list[tuple[str, int | None]]:
    """For every physical block how it is drawn and the number of its oldest holder, which may have ended: ("used" | "state" | "shared", n), ("cached", None), ("free", None), ("null", None).

    states: KV cache groups whose blocks hold states.
    """
    owner: dict[int, int] = {}
    holds_state = set[int]()
    for request, its in state.requests.items():
        for group, table in enumerate(its.tables):
            holds_state.update(table if group in states else ())
            for block in table:
                owner[block] = min(numbers[request], owner.get(block, numbers[request]))
    for request, blocks in state.kept.items():
        owner |= {block: min(numbers[request], owner.get(block, numbers[request])) for block in blocks}
    drawn: list[tuple[str, int | None]] = [("null", None)]
    for block in range(1, len(state.ref_cnt)):
        count = state.ref_cnt[block]
        if count:
            drawn.append(("shared" if count > 1 else "state" if block in holds_state else "used", owner[block]))
        else:
            drawn.append(("free" if state.hashes[block] is None else "cached", None))
    return drawn


def media_blocks(trace: Trace, state: State) -> frozenset[int]:
    """The blocks that requests hold for tokens of pictures, clips or given embeddings."""
    size, states, known = trace.header.block_size, state_groups(trace), request_media(trace)
    found = set[int]()
    for request, its in state.requests.items():
        for group, table in enumerate(its.tables):
            for first, end, _ in known.get(request, ()) if group not in states else ():
                found.update(table[first // size : -(-end // size)])
    return frozenset(found - {0})


def _grid(count: int) -> tuple[int, int]:
    """Columns (a power of two) and rows, about twice as wide as high."""
    columns = 2 ** math.ceil(math.log2(max(16.0, math.sqrt(count * 1.8))))
    return columns, math.ceil(count / columns)


_CORNER = [(-1, 1), (0, 1), (-1, 0)]  # the upper left one, as a marker
_MARKS = {
    "used": ("in use, by request", "s", 1.0),
    "shared": ("shared", "s", 1.0),
    "cached": ("free, with cached tokens", "s", 0.9),
    "free": ("free", "o", 0.25),
    "null": ("null block", "x", 0.7),
    "state": ("a state, overwritten by every step", "o", 1.0),
    "fetched": ("came from elsewhere", "s", 1.0),
}


def draw_blocks(
    axes: Axes, state: State, numbers: dict[str, int], shown: Sequence[int] | None = None,
    states: frozenset[int] = frozenset(),
    media: frozenset[int] = frozenset(),
    fetched: frozenset[int] = frozenset(),
) -> None:  # fmt: skip
    """Draw a state's blocks as a grid: filled squares are in use, those with a hole are shared, outlines are cached, dots are free, a cross
    is the null block. `shown`: only these blocks. `states`: KV cache groups whose blocks hold states, drawn as discs. `media`: blocks
    with tokens of pictures and the like, drawn with a missing lower corner. `fetched`: blocks that came from elsewhere: a missing upper corner.
    """
    drawn = block_states(state, numbers, states)
    blocks = range(len(drawn)) if shown is None else shown
    columns, rows = _grid(len(blocks))
    box = axes.get_window_extent()
    side = min(box.width / columns, box.height / rows, 40) * 72 / axes.figure.dpi * 0.8  # points
    for kind, (_, marker, size) in _MARKS.items():
        chosen = [(i, drawn[block][1]) for i, block in enumerate(blocks) if drawn[block][0] == kind]
        x, y = [i % columns for i, _ in chosen], [i // columns for i, _ in chosen]
        colours = [LIGHT[kind] if n is None else owner_colour(n) for _, n in chosen]
        inside = {"facecolors": "none", "edgecolors": colours} if kind == "cached" else {"c": colours}
        line = max(0.5, side * 0.1) if kind in ("cached", "null") else 0
        axes.scatter(x, y, s=(side * size) ** 2, marker=marker, linewidths=line, **inside)
        if kind == "shared":
            axes.scatter(x, y, s=(side * 0.36) ** 2, marker="s", c=LIGHT["panel"], linewidths=0)
    if marked := [i for i, block in enumerate(blocks) if block in media]:
        at = [i % columns + 0.28 for i in marked], [i // columns + 0.28 for i in marked]
        axes.scatter(*at, s=(side * 0.34) ** 2, marker="s", c=LIGHT["panel"], linewidths=0, label="media")
    if marked := [i for i, block in enumerate(blocks) if block in fetched and drawn[block][0] != "free"]:
        at = [i % columns for i in marked], [i // columns for i in marked]
        axes.scatter(*at, s=(side * 1.05) ** 2, marker=_CORNER, c=LIGHT["panel"], linewidths=0, label="fetched")
    axes.set(xlim=(-0.7, columns - 0.3), ylim=(rows - 0.3, -0.7), aspect="equal", xticks=[])
    every = max(1, math.ceil(rows / 8))
    axes.set_yticks(range(0, rows, every), [str(blocks[row * columns]) for row in range(0, rows, every)])
    axes.tick_params(length=0, labelsize=8, colors=LIGHT["muted"])
    axes.spines[:].set_visible(False)
    _add_legend(axes, [kind for kind in _MARKS if (kind != "state" or states) and (kind != "fetched" or fetched)])


def _add_legend(axes: Axes, kinds: list[str]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    handles = []
    for kind in kinds:
        _, marker, size = _MARKS[kind]
        colour = LIGHT["owner-0" if kind in ("used", "shared", "state", "fetched") else kind]
        edge = 1.0 if kind in ("cached", "null") else 0.0
        face = "none" if kind == "cached" else colour
        mark = Line2D([], [], ls="", marker=marker, ms=7 * size, mfc=face, mec=colour, mew=edge)
        hole = Line2D([], [], ls="", marker="s", ms=2.5, mfc=LIGHT["panel"], mew=0)
        corner = Line2D([], [], ls="", marker=_CORNER, ms=7.5, mfc=LIGHT["panel"], mew=0)
        handles.append((mark, hole) if kind == "shared" else (mark, corner) if kind == "fetched" else (mark,))
    axes.legend(
        handles, [_MARKS[kind][0] for kind in kinds], handler_map={tuple: HandlerTuple(ndivide=1)}, loc="upper left",
        bbox_to_anchor=(0, -0.01), ncols=5, frameon=False, fontsize=8, handletextpad=0.2, columnspacing=1.2, borderpad=0,
    )  # fmt: skip
