"""Puzzles on paged KV caches: allocate, append, share, copy on write."""

# Generated from nbs/book/paging.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from minivllm.book.exercise import is_blank
from minivllm.core.events import Fold, State, TraceHeader
from minivllm.core.trace import Trace
from minivllm.viz.block_map import BlockMap
from minivllm.viz.palette import owner_colour

__all__ = ["Puzzle"]

_CELL, _ROW = 30, 34  # pixels


@dataclass(frozen=True)
class Replay:
    """What a function did to the blocks, step by step. True if it was checked and found right.

    Attributes:
        text: the verdict, or why the story went no further; may be empty.
        trace: the story; captions: what happens in each of its steps.
    """

    text: str
    trace: Trace
    captions: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.text == "right"

    def __repr__(self) -> str:
        return self.text or "\n".join(self.captions)

    def block_map(self) -> BlockMap:
        """The view of real runs, with a slider for the steps."""
        return BlockMap(self.trace)

    def svg(self) -> str:
        """One line of blocks a step: the letter of the request that holds it, outlined if it is free but its content can be reused, a ring where something changed."""
        states = [self.trace.start, *(state for _, state in self.trace.states())]
        numbers: dict[str, int] = {}
        for state in states:
            for request in state.requests:
                numbers.setdefault(request, len(numbers))
        blocks = range(self.trace.header.num_blocks)
        parts = [f'<text x="{_CELL * (b + 0.5)}" y="12" class="c">{b}</text>' for b in blocks]
        for row, ((before, after), caption) in enumerate(zip(pairwise(states), self.captions, strict=True)):
            y = 20 + row * _ROW
            parts += [_square(b, y, before, after, numbers) for b in blocks]
            parts.append(f'<text x="{_CELL * (len(blocks) + 0.4)}" y="{y + 18}">{row + 1}. {escape(caption)}</text>')
        width = _CELL * (len(blocks) + 1) + 8 * (4 + max(map(len, self.captions)))
        height = 24 + _ROW * len(self.captions)
        style = (
            ".story text{font:12px ui-monospace,monospace;fill:currentColor}"
            ".story .c{text-anchor:middle}.story .w{text-anchor:middle;fill:#fff}"
        )
        label = f"{len(self.captions)} steps on a block map"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="story" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{label}"'
            f' style="max-width:100%"><style>{style}</style>{"".join(parts)}</svg>'
        )

    def _repr_html_(self) -> str:
        words = f"<pre>{escape(self.text)}</pre>" if self.text else ""
        return words if self or not self.captions else words + self.svg()


def _square(block: int, y: int, before: State, after: State, numbers: dict[str, int]) -> str:
    x, owners = _CELL * block, after.owners(block)
    ring = ""
    if owners != before.owners(block) or bool(after.hashes[block]) != bool(before.hashes[block]):
        ring = f'<rect x="{x + 1}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" rx="5" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    if block == 0:
        return f'<text x="{x + _CELL / 2}" y="{y + 18}" class="c">×</text>'
    place = f'x="{x + 4}" y="{y + 3}" width="{_CELL - 8}" height="{_CELL - 8}" rx="3"'
    if owners:
        colour = owner_colour(numbers[owners[0]])
        return f'{ring}<rect {place} fill="{colour}"/><text x="{x + _CELL / 2}" y="{y + 18}" class="w">{escape("".join(owners))}</text>'
    if after.hashes[block]:
        return f'{ring}<rect {place} fill="none" stroke="#8b94a1" stroke-width="2"/>'
    return f'{ring}<circle cx="{x + _CELL / 2}" cy="{y + _CELL / 2 - 1}" r="2.5" fill="#8b94a1"/>'


class _Stop(Exception):
    """The story goes no further."""


class Game:
    """One run of a story. Methods are named for what happens.

    Args:
        answer: the function to ask; right: one whose answers are known to be right.
        judged: whether the story stops at the first wrong answer.
    """

    def __init__(
        self, answer: Callable[..., Any], right: Callable[..., Any], judged: bool, blocks: int = 9, size: int = 4
    ) -> None:
        self.answer, self.right, self.judged = answer, right, judged
        self.trace = Trace(TraceHeader(block_size=size, num_blocks=blocks))
        self.fold = Fold(self.trace.start)
        self.captions: list[str] = []
        self.complaint: str | None = None

    def ask(self, **given: Any) -> dict[str, Any]:
        """What the function left in its arguments, by name, and its result under "answer"."""
        try:
            inspect.signature(self.answer).bind(*given.values())
        except TypeError as error:
            raise _Stop(f"the function of this puzzle takes ({', '.join(given)}): {error}") from None
        right = _called(self.right, given)
        try:
            mine = _called(self.answer, given)
        except Exception as error:  # noqa: BLE001 - whatever a reader's code may raise is the verdict on it
            raise _Stop(self._here(f"it raised {type(error).__name__}: {error}")) from None
        if "return" not in inspect.getsource(self.right):  # what counts is in the arguments; it may return one as well
            mine["answer"] = None
        for name, value in right.items():
            wrong = _difference(f"the {name}" if name == "answer" else name, mine[name], value)
            self.complaint = self.complaint or (wrong and self._here(wrong))
        return mine

    def _here(self, what: str) -> str:
        return f"step {len(self.captions)} ({self.captions[-1]}): {what}"

    def step(self, caption: str) -> None:
        """The story goes on."""
        if self.judged and self.complaint:
            raise _Stop(self.complaint)
        self.tell("step", len(self.captions), 0.0)
        self.captions.append(caption)

    def tell(self, *event: Any) -> None:
        """Write an event of the trace. ValueError if it is impossible."""
        self.fold.apply(event)
        self.trace.events.append(event)

    def enter(self, request: str, num_tokens: int, blocks: Iterable[int] = ()) -> None:
        """A request with this many prompt tokens runs from now on, and takes blocks."""
        self.tell("add", request, num_tokens, 16, 0.0, 0, None, None, (), len(self.fold.now.requests))
        self.tell("admit", request, 0, 0)
        self.take(request, blocks)

    def take(self, request: str, blocks: Iterable[int]) -> None:
        """It takes free blocks. The content of one that has some is given up."""
        for block in blocks:
            if self.fold.now.hashes[block]:
                self.tell("evict", block, self.fold.now.hashes[block])
            self.tell("alloc", request, 0, (block,))

    def keep(self, request: str) -> None:
        """What its blocks hold is complete, and can be found again."""
        table = self.fold.now.requests[request].tables[0]
        names = tuple(self.fold.now.hashes[b] or f"{request}{i}".encode() for i, b in enumerate(table))
        self.tell("cache", request, 0, tuple(range(len(table))), tuple(table), names)

    def leave(self, request: str, blocks: Sequence[int]) -> None:
        """It frees blocks, in this order, and ends."""
        self.tell("free", request, 0, tuple(blocks))
        self.tell("finish", request, "length", None)


def _called(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name as the function leaves them, and its result. It may call them by other names."""
    mine = deepcopy(given)
    return {"answer": function(*mine.values()), **mine}


def _shown(value: Any) -> str:
    return value.hex()[:6] if isinstance(value, bytes) else repr(value)


def _difference(name: str, got: Any, want: Any) -> str | None:
    """The first place in which two values differ, in words; None if they are equal."""
    if got == want:
        return None
    if isinstance(want, list) and isinstance(got, list):
        parts = ((f"{name}[{i}]", g, w) for i, (g, w) in enumerate(zip(got, want, strict=False)))
        size = f"{name} should have {len(want)} entr{'y' if len(want) == 1 else 'ies'}, and has {len(got)}"
        return next((wrong for part in parts if (wrong := _difference(*part))), size)
    if isinstance(want, dict) and isinstance(got, dict):
        for key in [*want, *got]:
            if key not in got or key not in want:
                return f"{name} should {'' if key in want else 'not '}have {_shown(key)}"
            if wrong := _difference(f"{name}[{_shown(key)}]", got[key], want[key]):
                return wrong
    return f"{name} should be {_shown(want)}, and is {_shown(got)}"


@dataclass(frozen=True, repr=False)
class Puzzle:
    """A function to write.

    Attributes:
        name: of the puzzle; task: what the function should do.
        story: plays a game.
        answer: a right function.
        wrong: wrong functions, each with words that the verdict on it must hold; the tests run them.
    """

    name: str
    task: str
    story: Callable[[Game], None]
    answer: Callable[..., Any]
    wrong: dict[Callable[..., Any], str]

    def show(self, function: Callable[..., Any]) -> Replay:
        """What the function does, right or wrong, as far as that is possible."""
        return self._play(function, judged=False)

    def check(self, function: Callable[..., Any]) -> Replay:
        """The verdict, and the blocks up to the first wrong step."""
        if is_blank(function):
            return Replay("no answer yet: put your lines in place of the dots", Trace(TraceHeader()), ())
        return self._play(function, judged=True)

    def _play(self, function: Callable[..., Any], judged: bool) -> Replay:
        game, text = Game(function, self.answer, judged), ""
        try:
            self.story(game)
        except _Stop as stop:
            text = str(stop)
        except Exception as error:  # the story went on with whatever the function gave
            if game.complaint is None:  # the function was right so far: the story is wrong, or the signature
                raise
            text = f"the story cannot go on: {str(error) or type(error).__name__}"
        return Replay((game.complaint or text or "right") if judged else text, game.trace, tuple(game.captions))

    @property
    def solution(self) -> str:
        """The source of a right function."""
        return textwrap.dedent(inspect.getsource(self.answer))

    def __repr__(self) -> str:
        return f"{self.name}: {self.task}"

    def _repr_html_(self) -> str:
        task = re.sub(r"`(\w+)`", r"<code>\1</code>", escape(self.task))
        return f"<b>{escape(self.name)}</b>: {task}{self.show(self.answer).svg()}"
