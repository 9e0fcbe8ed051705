"""Prefix tree view: shared beginnings, hits and evictions."""

# Generated from nbs/viz/prefix_tree.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.viz.palette import LIGHT, owner_colour, tint
from minivllm.viz.payload import Payload
from minivllm.viz.prefix_data import EVICTED, HIT, KINDS, Ints, PrefixTreeData, TreeReader
from minivllm.viz.view import MADE_UP, TraceView, counted, legend_above

__all__ = ["Branches", "PrefixTree", "branches", "draw_tree"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Branches:
    """The tree cut where texts part: one branch is a chain of blocks, each the only child of the one before.

    Attributes:
        nodes: all nodes, branch by branch, from the top of the picture down. [num_nodes]
        first: where each branch begins in `nodes`. [num_branches + 1]
        parent: the branch that it grows out of, -1 for none. [num_branches]
        hits: hits of its first block in the whole run. [num_branches]
    """

    nodes: Ints
    first: Ints
    parent: Ints
    hits: Ints


def branches(tree: PrefixTreeData) -> Branches:
    """Cut the tree into branches, the most found ones first."""
    hits = np.bincount(tree.events[tree.events[:, 2] == HIT, 1], minlength=tree.num_nodes)
    weight = hits.copy()
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    roots = []
    for node in range(tree.num_nodes - 1, -1, -1):  # children come after their parents
        parent = int(tree.parent[node])
        if parent >= 0:
            weight[parent] += weight[node]
            children[parent].append(node)
        else:
            roots.append(node)

    def order(some: list[int]) -> list[int]:  # last first: they are taken from the end of a stack
        return sorted(some, key=lambda node: (-int(tree.group[node]), int(weight[node]), -node))

    nodes, first, parents = [], [0], list[int]()
    stack = [(node, -1) for node in order(roots)]
    while stack:
        node, parent = stack.pop()
        while True:
            nodes.append(node)
            if len(children[node]) != 1:
                break
            node = children[node][0]
        stack += [(child, len(parents)) for child in order(children[node])]
        parents.append(parent)
        first.append(len(nodes))
    found = [hits[nodes[i]] for i in first[:-1]]
    return Branches(*(np.array(numbers, np.int32) for numbers in (nodes, first, parents, found)))


class PrefixTree(TraceView):
    """The tree of cached prefixes after each step: what is in use, kept, lost, and how often it was found."""

    module = "prefix_tree"
    title = "Prefix tree"
    figure_size = (8.0, 4.5)
    reader = TreeReader

    @cached_property
    def tree(self) -> PrefixTreeData:
        """What is drawn."""
        return self.reading.data()

    @cached_property
    def branches(self) -> Branches:
        """How it is laid out."""
        return branches(self.tree)

    def build(self) -> Payload:
        tree, laid = self.tree, self.branches
        payload = Payload({})
        place = np.empty(tree.num_nodes, np.int32)
        place[laid.nodes] = np.arange(tree.num_nodes, dtype=np.int32)
        events, refs = tree.events.T.copy(), tree.refs.T.copy()
        for rows in (events, refs):
            rows[1] = place[rows[1]]
            rows[0] = np.diff(rows[0], prepend=0)
        payload.header = self.header(
            blockSize=tree.block_size, groups=tree.num_groups, nodes=tree.num_nodes, branches=len(laid.parent), caching=self._caching,
            ids=payload.add_json([self.names[id] for id in tree.request_ids]),
            layout=payload.add_numbers(np.concatenate([np.diff(laid.first), laid.parent, laid.hits, tree.group[laid.nodes[laid.first[:-1]]], tree.depth[laid.nodes]])),
            events=payload.add_numbers(events), refs=payload.add_numbers(refs),
            names=payload.add_json([tree.names[node].hex()[:12] for node in laid.nodes]),
            texts=payload.add_json([self._text(node) for node in laid.nodes]), decoded=self.tokenizer is not None,
        )  # fmt: skip
        return payload

    @property
    def _caching(self) -> bool:
        return bool(self.trace.header.settings.get("enable_prefix_caching", True))

    def _text(self, node: int) -> str:
        """The tokens of a node in words, as far as they are known."""
        ids = [token for token in self.tree.tokens[node].tolist() if token >= 0]
        if ids and ids[0] >= MADE_UP:
            first = int(self.tree.depth[node]) * len(ids)
            return f"request {self.tree.request_ids[self.tree.owners[node]]}, tokens {first} to {first + len(ids) - 1}"
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids)) if ids else ""

    def describe(self) -> str:
        tree = self.tree
        if not tree.num_nodes:
            off = "Prefix caching was off, so nothing was kept."
            return "No block was full long enough to be cached." if self._caching else off
        now, kinds = tree.at(tree.num_steps - 1), tree.events[:, 2]
        text = f"{counted(tree.num_nodes, 'different block')} cached in {counted(len(self.branches.parent), 'branch', 'branches')}; at the end {int(now.cached.sum())} are, "
        text += f"{int((now.refs > 0).sum())} of them in use. Found again: {counted(int((kinds == HIT).sum()), 'time')}. Lost: {counted(int((kinds >= EVICTED).sum()), 'time')}."
        asked = tree.queries[:, 1].sum()
        if asked:
            text += f" {100 * tree.queries[:, 2].sum() / asked:.0f} % of the tokens of admitted requests were there already."
        if now.hits.max() > 0:
            best = int(np.argmax(now.hits))
            text += f" Most found: {_clip(self._text(best))!r}, {counted(int(now.hits[best]), 'time')}."
        return text

    def plot(self, ax: Axes | None = None, step: int = -1) -> Axes:
        """Draw the tree after a recorded step with matplotlib; returns the axes.

        Raises:
            ValueError: there is nothing to draw. IndexError: there is no such step.
        """
        if self.problem is None and not -self.tree.num_steps <= step < self.tree.num_steps:
            raise IndexError(f"step {step} of a trace with {self.tree.num_steps} steps")
        self._step = step % max(1, self.tree.num_steps) if self.problem is None else 0
        return TraceView.plot(self, ax)

    def draw(self, axes: Axes) -> None:
        draw_tree(axes, self.tree, self.branches, self._step, self._text)


def _clip(text: str, most: int = 36) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


MOST_ROWS, FOLD_FROM = 40, 4


def _shown(laid: Branches, most: int = MOST_ROWS) -> tuple[list[tuple[int, int]], int]:
    """Rows of the picture as (branch, how many it stands for), and branches left out. Siblings that end and were never found share a row."""
    has_children = np.zeros(len(laid.parent), bool)
    has_children[laid.parent[laid.parent >= 0]] = True
    plain = [not has_children[b] and laid.hits[b] == 0 for b in range(len(laid.parent))]
    siblings: dict[int, list[int]] = {}
    for b, parent in enumerate(laid.parent):
        if plain[b]:
            siblings.setdefault(int(parent), []).append(b)
    rows = []
    for b, parent in enumerate(laid.parent):
        same = siblings.get(int(parent), [])
        if not plain[b] or len(same) < FOLD_FROM:
            rows.append((b, 1))
        elif b == same[0]:
            rows.append((b, len(same)))
    return rows[:most], sum(n for _, n in rows[most:])


_LONGEST = 24  # blocks of a branch that a figure shows


def _style(kind: str, colour: str) -> dict[str, Any]:
    """In use: full. Kept: pale with a rim. Lost: crossed. Not yet cached: a faint rim."""
    return {
        "in use": {"facecolor": colour, "edgecolor": colour},
        "kept": {"facecolor": tint(colour, 0.3), "edgecolor": colour},
        "lost": {"facecolor": "none", "edgecolor": LIGHT["preempted"], "hatch": "xxxx"},
        "not yet cached": {"facecolor": "none", "edgecolor": LIGHT["line"]},
    }[kind]


def draw_tree(ax: Axes, tree: PrefixTreeData, laid: Branches, step: int, text: Any) -> None:
    """Branches as rows of blocks, in the colour of the request that computed them first. The number says how often a branch was found."""
    from matplotlib.patches import Patch, Rectangle

    now, (rows, left_out) = tree.at(step), _shown(laid)
    end_of: dict[int, int] = {}
    at_row: dict[int, int] = {}
    seen: set[str] = set()
    for row, (branch, stands_for) in enumerate(rows):
        nodes, parent = laid.nodes[laid.first[branch] : laid.first[branch + 1]], int(laid.parent[branch])
        x = end_of[parent] + 1 if parent in end_of else 0
        at_row[branch], end_of[branch] = row, x + min(len(nodes), _LONGEST)
        if parent in at_row:
            elbow = end_of[parent] - 0.5
            ax.plot([elbow, elbow, x], [at_row[parent] + 0.4, row, row], color=LIGHT["muted"], linewidth=0.7, zorder=1)
        for i, node in enumerate(nodes[:_LONGEST]):
            kind = now.kind(node)
            seen.add(kind)
            colour = owner_colour(max(0, int(tree.owners[node])))
            ax.add_patch(Rectangle((x + i + 0.06, row - 0.36), 0.88, 0.72, linewidth=0.6, **_style(kind, colour)))
        hits = int(now.hits[nodes[0]])
        more = f" +{len(nodes) - _LONGEST} blocks" if len(nodes) > _LONGEST else ""
        found = f"{hits}×  " if hits else ""
        note = f"{stands_for} branches like this, never found" if stands_for > 1 else found + _clip(text(nodes[0]), 30)
        ink = LIGHT["ink" if hits else "muted"]
        ax.text(end_of[branch] + 0.5, row, f"{more} {note}", va="center", fontsize=7.5, color=ink, parse_math=False)
    if left_out:
        words = f"and {counted(left_out, 'branch', 'branches')} more"
        ax.text(0, len(rows), words, va="center", fontsize=7.5, color=LIGHT["muted"])
    ax.set(xlim=(-0.3, max([*end_of.values(), 10]) * 1.5 + 8), yticks=[], xticks=[])
    ax.set(ylim=(max(len(rows), 1) + (0.6 if left_out else -0.4), -0.7))
    ax.set_xlabel(f"blocks of {tree.block_size} tokens, after step {step}")
    ax.spines[:].set_visible(False)
    if rows:
        legend = [Patch(label=k, linewidth=0.6, **_style(k, LIGHT["owner-0"])) for k in KINDS if k in seen]
        legend_above(ax, 4, handles=legend)
    else:
        ax.text(0.5, 0.5, "nothing was cached", transform=ax.transAxes, ha="center", color=LIGHT["muted"])
