"""Prefix tree data: every cached block, its hits and its eviction."""

# Generated from nbs/viz/prefix_data.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.core.events import FoldReader
from minivllm.core.prefix import hash_block
from minivllm.viz.payload import Ints, as_rows

CACHED, HIT, EVICTED, FORGOTTEN = range(4)
KINDS = ("in use", "kept", "lost", "not yet cached")

DEFAULT_ROOT = b"minivllm"  # `core.prefix.root_hash` of a request without salt, adapter or other extra keys


@dataclass(frozen=True, slots=True)
class TreeState:
    """The tree after one step. All arrays have one entry per node.

    Attributes:
        cached: whether a block holds the node's content.
        hits: how often a request has found it so far.
        refs: requests that hold its block now.
        ever: whether it has been cached at all so far.
    """

    cached: npt.NDArray[np.bool_]
    hits: Ints
    refs: Ints
    ever: npt.NDArray[np.bool_]

    def kind(self, node: int) -> str:
        """Which of `KINDS` a node is."""
        if not self.ever[node]:
            return "not yet cached"
        return "lost" if not self.cached[node] else "in use" if self.refs[node] else "kept"


@dataclass(frozen=True)
class PrefixTreeData:
    """Every block of tokens that was ever cached, once per content and KV cache group, and what happened to it.

    Attributes:
        request_ids: in order of arrival; the numbers below index this list.
        parent: node of the block before it, -1 for the first block of a text or an unknown one. Parents come before children. [num_nodes]
        depth: which block of its text it is, from 0. [num_nodes]
        group: KV cache group. [num_nodes]
        names: the content's hash.
        tokens: its token ids; -1 where the recording began too late to know. [num_nodes, block_size]
        events: rows of step, node, kind (`CACHED`, `HIT`, `EVICTED`, `FORGOTTEN` by a reset or as its step was not run), physical block, and request: who computed it,
            found it, or needed its room; -1 if unknown. In order. [num_events, 5]
        refs: rows of step, node, change of the number of requests that hold it. In order. [n, 3]
        queries: rows of step, prompt tokens looked up, tokens found; one per admission. [n, 3]
    """

    request_ids: list[str]
    block_size: int
    num_groups: int
    num_steps: int
    parent: Ints
    depth: Ints
    group: Ints
    names: list[bytes]
    tokens: npt.NDArray[np.int64]
    events: Ints
    refs: Ints
    queries: Ints

    @cached_property
    def owners(self) -> Ints:
        """The request that computed each node first; -1 if that was before the trace. [num_nodes]"""
        owners, cached = np.full(self.num_nodes, -1, np.int32), self.events[self.events[:, 2] == CACHED][::-1]
        owners[cached[:, 1]] = cached[:, 4]
        return owners

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    def at(self, step: int) -> TreeState:
        """The tree after a recorded step."""
        n = self.num_nodes
        events = self.events[: np.searchsorted(self.events[:, 0], step, side="right")]
        refs = self.refs[: np.searchsorted(self.refs[:, 0], step, side="right")]
        node, kind = events[:, 1], events[:, 2]
        held = np.bincount(node[kind == CACHED], minlength=n) - np.bincount(node[kind >= EVICTED], minlength=n)
        hits = np.bincount(node[kind == HIT], minlength=n).astype(np.int32)
        users = np.zeros(n, np.int32)
        np.add.at(users, refs[:, 1], refs[:, 2])
        return TreeState(held > 0, hits, users, np.bincount(node[kind == CACHED], minlength=n) > 0)


@dataclass(slots=True)
class _Text:
    """One request: its tokens, if the trace has them, and the names of its blocks per group, as far as they are known."""

    number: int
    tokens: list[int] | None
    length: int
    names: list[dict[int, bytes]]


class TreeReader(FoldReader):
    """Grows the tree while the events go by: `read(trace, reader)`, then `reader.data()`."""

    def begin(self) -> None:
        """What is cached when the recording begins. Whose text it is can only be told where a request holds the blocks."""
        self.block_size, start = self.header.block_size, self.fold.now
        self.ids: list[str] = []
        self.texts: dict[str, _Text] = {}
        self.number: dict[tuple[int, bytes], int] = {}
        self.name: list[bytes] = []
        self.nodes: list[tuple[int, int, int]] = []
        self.tokens: list[Sequence[int]] = []
        self.first: dict[tuple[int, tuple[int, ...]], list[bytes]] = {}
        self.events: list[list[int]] = []
        self.refs: list[tuple[int, int, int]] = []
        self.queries: list[tuple[int, int, int]] = []
        self.of_block: dict[int, int] = {}
        self._pushed_out: list[list[int]] = []
        for request, state in start.requests.items():
            text = self._open(request, None, state.num_tokens)
            for group, table in enumerate(state.tables):
                for position, block in enumerate(table):
                    if not block or (name := start.hashes[block]) is None:
                        continue
                    if block not in self.of_block:
                        self._cache(block, self._node(text, group, position, name), text.number)
                    text.names[group][position] = name
        for block, name in enumerate(start.hashes):
            if name is not None and block not in self.of_block:
                self._cache(block, self._add(0, name, -1, 0, ()), -1)

    def _open(self, name: str, tokens: list[int] | None, length: int) -> _Text:
        text = _Text(len(self.ids), tokens, length, [{} for _ in range(self.fold.now.num_groups)])
        self.ids.append(name)
        self.texts[name] = text
        return text

    def _tokens(self, text: _Text, position: int) -> tuple[int, ...]:
        size = self.block_size
        return tuple(text.tokens[position * size : (position + 1) * size]) if text.tokens else ()

    def _add(self, group: int, name: bytes, parent: int, depth: int, tokens: tuple[int, ...]) -> int:
        number = self.number[group, name] = len(self.nodes)
        self.nodes.append((parent, depth, group))
        self.name.append(name)
        self.tokens.append(tokens)
        if depth == 0:
            self.first.setdefault((group, tokens), []).append(name)
        return number

    def _node(self, text: _Text, group: int, position: int, name: bytes) -> int:
        known = self.number.get((group, name))
        if known is not None:
            return known
        before = self._parent_name(text, group, position, name) if position else None
        parent = -1 if before is None else self.number.get((group, before), -1)
        return self._add(group, name, parent, position, self._tokens(text, position))

    def _parent_name(self, text: _Text, group: int, position: int, name: bytes) -> bytes | None:
        """The name of the block before. A block whose content was cached already has no separate event; its name follows from its tokens."""
        names = text.names[group]
        if position - 1 in names:
            return names[position - 1]
        if text.tokens is None:
            return None
        known = max((p for p in names if p < position), default=-1)
        starts = [names[known]] if known >= 0 else [DEFAULT_ROOT]
        if known < 0 and position:
            starts += self.first.get((group, self._tokens(text, 0)), [])
        for i, begin in enumerate(starts):
            at = known if known >= 0 or i == 0 else 0
            chain = self._chain(text, at, begin, position)
            if chain[position] == name:
                names.update({p: h for p, h in chain.items() if p >= 0 and p < position})
                return chain[position - 1]
        return None

    def _chain(self, text: _Text, at: int, name: bytes, end: int) -> dict[int, bytes]:
        """Names of the blocks `at` (given; -1 for what stands before the first) to `end`."""
        chain = {at: name}
        for position in range(at + 1, end + 1):
            chain[position] = hash_block(chain[position - 1], list(self._tokens(text, position)))
        return chain

    def _cache(self, block: int, node: int, request: int) -> None:
        self.of_block[block] = node
        self.events.append([self.step, node, CACHED, block, request])
        if users := self.fold.now.ref_cnt[block]:
            self.refs.append((self.step, node, users))

    def _use(self, blocks: Iterable[int], change: int) -> None:
        self.refs += [(self.step, self.of_block[block], change) for block in blocks if block in self.of_block]

    def _lose(self, block: int, kind: int) -> list[int]:
        node = self.of_block.pop(block)
        event = [self.step, node, kind, block, -1]
        self.events.append(event)
        if users := self.fold.now.ref_cnt[block]:
            self.refs.append((self.step, node, -users))
        return event

    def _on_add(self, request: str, num_prompt: int, *fields: Any) -> None:
        prompt, output = fields[4], fields[5]
        self._open(request, [*prompt, *output], num_prompt + len(output))

    def _on_update(self, time: float, tokens: dict[str, list[int]], step: int | None = None) -> None:
        for name, new in tokens.items():
            text = self.texts[name]
            text.length += len(new)
            if text.tokens is not None:
                text.tokens.extend(new)

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        self.queries.append((self.step, self.texts[request].length, num_computed))

    def _on_alloc(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self._use(blocks, 1)
        for event in self._pushed_out:
            event[4] = self.texts[request].number
        self._pushed_out.clear()

    def _on_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        text = self.texts[request]
        for position, block in enumerate(blocks):
            if block:
                node = self.of_block[block]
                text.names[group][position] = self.name[node]
                self.events.append([self.step, node, HIT, block, text.number])
        self._use(blocks, 1)

    def _on_cache(self, request: str, group: int, positions: Any, blocks: Any, hashes: Any) -> None:
        text = self.texts[request]
        for position, block, name in zip(positions, blocks, hashes, strict=True):
            node = self._node(text, group, position, name)
            text.names[group][position] = name
            self._cache(block, node, text.number)

    def _on_free(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self._use(blocks, -1)

    def _on_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self._use(blocks, -1)

    def _on_evict(self, block: int, hash: bytes) -> None:
        self._pushed_out.append(self._lose(block, EVICTED))

    def _on_uncache(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._lose(block, FORGOTTEN)

    def _on_reset(self) -> None:
        for block in list(self.of_block):
            self._lose(block, FORGOTTEN)

    def data(self) -> PrefixTreeData:
        """What was read."""
        nodes = as_rows(self.nodes, 3)
        tokens = np.full((len(nodes), self.block_size), -1, np.int64)
        for row, ids in zip(tokens, self.tokens, strict=True):
            row[: len(ids)] = ids
        return PrefixTreeData(
            self.ids, self.block_size, self.header.num_groups, self.step + 1, nodes[:, 0], nodes[:, 1], nodes[:, 2],
            self.name, tokens, as_rows(self.events, 5), as_rows(self.refs, 3), as_rows(self.queries, 3),
        )  # fmt: skip
