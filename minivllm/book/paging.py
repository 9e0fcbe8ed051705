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
from minivllm.core.prefix import hash_block
from minivllm.core.trace import Trace
from minivllm.viz.block_map import BlockMap
from minivllm.viz.palette import owner_colour

__all__ = ["PUZZLES", "Puzzle"]

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
        """One line of blocks a step: the letter of the request that holds it, outlined if it holds reusable content and nobody, a ring where something changed."""
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
        """A request with so many prompt tokens runs from now on, and takes blocks."""
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
        """It gives blocks back, in this order, and ends."""
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


def _slot(table, position, size):
    return table[position // size] * size + position % size


def _slot_in_one_piece(table, position, size):
    return table[0] * size + position


def _slot_mixed_up(table, position, size):
    return table[position % len(table)] * size + position % size


def _slots(game: Game) -> None:
    for request, tokens, table in (("a", 10, [3, 1, 5]), ("b", 6, [2, 7])):
        game.step(f"{request} comes with {tokens} tokens: blocks {table}")
        game.enter(request, tokens, table)
    for request, position in (("a", 0), ("a", 5), ("b", 4), ("a", 9)):
        game.step(f"where is token {position} of {request}?")
        game.ask(table=list(game.fold.now.requests[request].tables[0]), position=position, size=4)


slot = Puzzle(
    "slot",
    "the slot of the token at `position` of the request with this block table.",
    _slots,
    _slot,
    {
        _slot_in_one_piece: "step 4 (where is token 5 of a?): the answer should be 5, and is 17",
        _slot_mixed_up: "step 4 (where is token 5 of a?): the answer should be 5, and is 21",
    },
)


def _allocate(table, free, num_tokens, size):
    while len(table) * size < num_tokens:
        table.append(free.pop(0))


def _allocate_one_too_many(table, free, num_tokens, size):
    while len(table) <= num_tokens // size:
        table.append(free.pop(0))


def _allocate_from_the_back(table, free, num_tokens, size):
    while len(table) * size < num_tokens:
        table.append(free.pop())


def _allocations(game: Game) -> None:
    free = [3, 1, 5, 2, 6, 4, 7, 8]
    tables: dict[str, list[int]] = {"a": [], "b": []}
    for request, tokens in (("a", 10), ("b", 4), ("a", 12), ("a", 13), ("b", 5)):
        game.step(f"{request} has {tokens} tokens")
        held = len(tables[request])
        if not held:
            game.enter(request, tokens)
        left = game.ask(table=tables[request], free=free, num_tokens=tokens, size=4)
        tables[request], free = left["table"], left["free"]
        game.take(request, tables[request][held:])


allocate = Puzzle(
    "allocate",
    "append blocks from the front of `free` to `table` until `num_tokens` tokens have room.",
    _allocations,
    _allocate,
    {
        _allocate_one_too_many: "step 2 (b has 4 tokens): table should have 1 entry, and has 2",
        _allocate_from_the_back: "step 1 (a has 10 tokens): table[0] should be 3, and is 8",
    },
)


def _give_back(table, free):
    while table:
        free.append(table.pop())


def _give_back_in_order(table, free):
    free.extend(table)
    table.clear()


def _give_back_and_keep(table, free):
    free.extend(reversed(table))


def _ends(game: Game) -> None:
    tables, free = {"a": [3, 1, 5], "b": [2, 6]}, [4, 7, 8]
    for request, table in tables.items():
        game.step(f"{request} runs: blocks {table}")
        game.enter(request, 4 * len(table), table)
        game.keep(request)
    for request, table in tables.items():
        game.step(f"{request} ends")
        left = game.ask(table=table, free=free)
        game.leave(request, left["free"][len(free) :])
        free = left["free"]
    game.step("c takes four blocks from the front")
    game.enter("c", 16, free[:4])


give_back = Puzzle(
    "give back",
    "empty `table` into the end of `free`, its last block first.",
    _ends,
    _give_back,
    {
        _give_back_in_order: "step 3 (a ends): free[3] should be 5, and is 3",
        _give_back_and_keep: "table should have 0 entries, and has 3",
    },
)


def _share(table, blocks, ref, free):
    for block in blocks:
        if ref[block] == 0:
            free.remove(block)
        ref[block] += 1
        table.append(block)


def _share_without_counting(table, blocks, ref, free):
    for block in blocks:
        if block in free:
            free.remove(block)
        ref[block] = 1
        table.append(block)


def _share_and_leave_free(table, blocks, ref, free):
    for block in blocks:
        ref[block] += 1
        table.append(block)


def _sharing(game: Game) -> None:
    ref, free = [0, 1, 1, 1, 0, 0, 0, 0, 0], [4, 5, 6, 7, 8]
    game.step("a computes its prompt in blocks [1, 2, 3]")
    game.enter("a", 12, [1, 2, 3])
    game.keep("a")
    for request, blocks in (("b", [1, 2]), ("c", [1])):
        game.step(f"{request} begins like a, in blocks {blocks}")
        game.enter(request, 12)
        left = game.ask(table=[], blocks=blocks, ref=ref, free=free)
        game.tell("hit", request, 0, tuple(left["table"]))
        ref, free = left["ref"], left["free"]
    game.step("a ends: nobody uses block 3, which is last in the free list")
    game.leave("a", [3, 2, 1])
    ref, free = [0, ref[1] - 1, ref[2] - 1, 0, *ref[4:]], [*free, 3]
    game.step("d begins like a, in blocks [1, 2, 3]")
    game.enter("d", 16)
    left = game.ask(table=[], blocks=[1, 2, 3], ref=ref, free=free)
    game.tell("hit", "d", 0, tuple(left["table"]))


share = Puzzle(
    "share",
    "append `blocks` to `table`, count one more user of each in `ref`; those without a user leave `free`.",
    _sharing,
    _share,
    {
        _share_without_counting: "step 2 (b begins like a, in blocks [1, 2]): ref[1] should be 2, and is 1",
        _share_and_leave_free: "step 5 (d begins like a, in blocks [1, 2, 3]): free should have 5 entries, and has 6",
    },
)


def _release(table, ref, free):
    while table:
        block = table.pop()
        ref[block] -= 1
        if ref[block] == 0:
            free.append(block)


def _release_all(table, ref, free):
    while table:
        ref[table[-1]] -= 1
        free.append(table.pop())


def _release_only_its_own(table, ref, free):
    while table:
        block = table.pop()
        if ref[block] == 1:
            ref[block] = 0
            free.append(block)


def _releases(game: Game) -> None:
    tables, ref, free = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [1, 5]}, [0, 3, 2, 1, 1, 1, 0, 0, 0], [6, 7, 8]
    game.step("a, b and c share block 1, a and b block 2")
    game.enter("a", 12, [1, 2, 3])
    game.keep("a")
    for request, shared, own in (("b", (1, 2), [4]), ("c", (1,), [5])):
        game.enter(request, 4 * len(tables[request]))
        game.tell("hit", request, 0, shared)
        game.take(request, own)
        game.keep(request)
    for request in ("b", "a", "c"):
        game.step(f"{request} ends")
        table = list(tables[request])
        left = game.ask(table=tables[request], ref=ref, free=free)
        game.leave(request, table[::-1])
        ref, free = left["ref"], left["free"]


release = Puzzle(
    "release",
    "count one user less of every block of `table`, last first; those without a user go to the end of `free`.",
    _releases,
    _release,
    {_release_all: "step 2 (b ends): free", _release_only_its_own: "step 2 (b ends): ref[1] should be 2, and is 3"},
)


def _write(table, index, ref, free):
    old = table[index]
    if ref[old] == 1:
        return None
    new = free.pop(0)
    ref[old] -= 1
    ref[new] = 1
    table[index] = new
    return old, new


def _write_always(table, index, ref, free):
    old, new = table[index], free.pop(0)
    ref[old] -= 1
    ref[new] = 1
    table[index] = new
    return old, new


def _write_and_keep_the_count(table, index, ref, free):
    old = table[index]
    if ref[old] == 1:
        return None
    table[index] = free.pop(0)
    ref[table[index]] = 1
    return old, table[index]


def _writes(game: Game) -> None:
    tables, ref, free = {r: [1, 2] for r in "abc"}, [0, 3, 3, 0, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]
    game.step("three answers to a prompt of 6 tokens")
    game.enter("a", 6, [1, 2])
    game.keep("a")
    for request in "bc":
        game.enter(request, 6)
        game.tell("hit", request, 0, (1, 2))
    for request in "abc":
        game.step(f"{request} writes token 6 into its block {tables[request][1]}")
        left = game.ask(table=tables[request], index=1, ref=ref, free=free)
        first, second = left["table"]
        if second != tables[request][1]:
            game.tell("free", request, 0, tuple(tables[request][::-1]))
            game.tell("hit", request, 0, (first,))
            game.take(request, [second])
        tables[request], ref, free = left["table"], left["ref"], left["free"]


write = Puzzle(
    "copy on write",
    "before a write into `table[index]`: if that block is shared, put a fresh one in its place and return `(old, new)`.",
    _writes,
    _write,
    {
        _write_always: "step 4 (c writes token 6 into its block 2): the answer should be None, and is (2, 5)",
        _write_and_keep_the_count: "step 2 (a writes token 6 into its block 2): ref[2] should be 2, and is 3",
    },
)


def _names(tokens, size):
    found: list[bytes] = []
    for i in range(0, len(tokens) - size + 1, size):
        found.append(hash_block(found[-1] if found else b"", tokens[i : i + size]))
    return found


def _names_without_parents(tokens, size):
    return [hash_block(b"", tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


def _names_of_all(tokens, size):
    found: list[bytes] = []
    for i in range(0, len(tokens), size):
        found.append(hash_block(found[-1] if found else b"", tokens[i : i + size]))
    return found


def _naming(game: Game) -> None:
    prompts = {"a": [1, 2, 3, 4, 5, 6, 7, 8], "b": [9, 9, 9, 9, 5, 6, 7, 8], "c": [1, 2, 3, 4, 5, 6]}
    first = 1
    for request, tokens in prompts.items():
        game.step(f"{request} comes with {tokens}")
        blocks = tuple(range(first, first + -(-len(tokens) // 4)))
        first += len(blocks)
        game.enter(request, len(tokens), blocks)
        names = game.ask(tokens=tokens, size=4)["answer"]
        game.tell("cache", request, 0, tuple(range(len(names))), blocks[: len(names)], tuple(names))


names = Puzzle(
    "names",
    "the names of the full blocks of `tokens`, each made of the one before it and its tokens.",
    _naming,
    _names,
    {_names_without_parents: "step 1 (a comes with [1, 2, 3, 4, 5, 6, 7, 8]): the answer[1]", _names_of_all: "step 3"},
)


def _find(names, cached, num_tokens, size):
    found = []
    for name in names[: (num_tokens - 1) // size]:
        if name not in cached:
            break
        found.append(cached[name])
    return found


def _find_all(names, cached, num_tokens, size):
    return [cached[name] for name in names[: (num_tokens - 1) // size] if name in cached]


def _find_to_the_end(names, cached, num_tokens, size):
    found = []
    for name in names:
        if name not in cached:
            break
        found.append(cached[name])
    return found


def _finding(game: Game) -> None:
    prompt = list(range(12))
    game.step("a computes 0 to 11 in blocks [1, 2, 3]")
    game.enter("a", 12, [1, 2, 3])
    cached = dict(zip(_names(prompt, 4), (1, 2, 3), strict=True))
    game.tell("cache", "a", 0, (0, 1, 2), (1, 2, 3), tuple(cached))
    game.step("a ends")
    game.leave("a", [3, 2, 1])
    asked = {"b": ([*range(8), 50, 51], cached), "c": (prompt, cached)}
    asked["d"] = ([*range(14)], {name: block for name, block in cached.items() if block != 2})
    for request, (tokens, known) in asked.items():
        lost = "" if known is cached else "; the content of block 2 is gone"
        game.step(f"{request} has the tokens {tokens[0]} to {tokens[-1]}{lost}")
        if lost:
            for other in "bc":
                game.leave(other, game.fold.now.requests[other].tables[0][::-1])
            game.tell("evict", 2, game.fold.now.hashes[2])
        game.enter(request, len(tokens))
        found = game.ask(names=_names(tokens, 4), cached=known, num_tokens=len(tokens), size=4)["answer"]
        game.tell("hit", request, 0, tuple(found))


find = Puzzle(
    "find",
    "the cached blocks of the longest known prefix that leaves at least one of `num_tokens` tokens to compute.",
    _finding,
    _find,
    {
        _find_all: "step 5 (d has the tokens 0 to 13; the content of block 2 is gone): the answer should have 1 entry, and has 2",
        _find_to_the_end: "step 4 (c has the tokens 0 to 11): the answer should have 2 entries, and has 3",
    },
)


def _evict(free, content):
    block = next((b for b in free if b not in content), free[0])
    free.remove(block)
    content.pop(block, None)
    return block


def _evict_the_oldest(free, content):
    block = free.pop(0)
    content.pop(block, None)
    return block


def _evict_the_youngest(free, content):
    block = next((b for b in free if b not in content), free[-1])
    free.remove(block)
    content.pop(block, None)
    return block


def _evict_and_believe(free, content):
    block = next((b for b in free if b not in content), free[0])
    free.remove(block)
    return block


def _evictions(game: Game) -> None:
    tables = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7]}
    game.step("a, b and c run")
    for request, table in tables.items():
        game.enter(request, 4 * len(table), table)
        game.keep(request)
    game.step("a ends, then b, then c; block 8 was never used")
    for request, table in tables.items():
        game.leave(request, table[::-1])
    free, content = [3, 2, 1, 5, 4, 7, 6, 8], {3: "a", 2: "a", 1: "a", 5: "b", 4: "b", 7: "c", 6: "c"}
    game.step("d comes, and takes a block")
    game.enter("d", 4)
    for turn in range(3):
        if turn:
            game.step("d takes another one")
        left = game.ask(free=free, content=content)
        game.take("d", [left["answer"]])
        free, content = left["free"], left["content"]


evict = Puzzle(
    "evict",
    "take a block out of `free` and return it: one without `content`, or the first, whose content is then gone.",
    _evictions,
    _evict,
    {
        _evict_the_oldest: "step 3 (d comes, and takes a block): the answer should be 8, and is 3",
        _evict_the_youngest: "step 4 (d takes another one): the answer should be 3, and is 6",
        _evict_and_believe: "content should not have 3",
    },
)


def _slide(table, free, num_computed, window, size):
    first = max(0, num_computed - window + 1)
    for i in range(first // size):
        if table[i]:
            free.append(table[i])
            table[i] = 0


def _slide_too_late(table, free, num_computed, window, size):
    for i in range(max(0, num_computed - window) // size):
        if table[i]:
            free.append(table[i])
            table[i] = 0


def _slide_and_close_up(table, free, num_computed, window, size):
    for _ in range(max(0, num_computed - window + 1) // size):
        free.append(table.pop(0))


def _slide_again(table, free, num_computed, window, size):
    for i in range(max(0, num_computed - window + 1) // size):
        free.append(table[i])
        table[i] = 0


def _slide_by_six(table, free, num_computed, window, size):
    _slide(table, free, num_computed, 6, size)


def _sliding(game: Game) -> None:
    table, free = [3, 1, 5, 2], [4, 6, 7, 8]
    game.step("a has blocks [3, 1, 5, 2]; a token sees 6 positions, in the end 3")
    game.enter("a", 16, table)
    for computed, window in ((8, 6), (9, 6), (12, 6), (13, 6), (14, 3)):
        game.step(f"{computed} tokens are computed" + (", a token sees 3" if window == 3 else ""))
        left = game.ask(table=table, free=free, num_computed=computed, window=window, size=4)
        gone = [i for i, (old, new) in enumerate(zip(table, left["table"], strict=True)) if old and not new]
        if gone:
            game.tell("skip", "a", 0, gone[0], gone[-1] + 1, tuple(table[i] for i in gone))
        table, free = left["table"], left["free"]


slide = Puzzle(
    "slide",
    "give back the blocks before the window of the next token: their entries become 0, the blocks go to the end of `free`.",
    _sliding,
    _slide,
    {
        _slide_too_late: "step 3 (9 tokens are computed): table[0] should be 0, and is 3",
        _slide_and_close_up: "step 3 (9 tokens are computed): table[0] should be 0, and is 1",
        _slide_again: "step 4 (12 tokens are computed): free",
        _slide_by_six: "step 6 (14 tokens are computed, a token sees 3): table[2] should be 0, and is 5",
    },
)


def _make_room(running, tables, free, needed):
    out = []
    while len(free) < needed:
        out.append(running.pop())
        free.extend(reversed(tables[out[-1]]))
        tables[out[-1]] = []
    return out


def _make_room_at_the_front(running, tables, free, needed):
    out = []
    while len(free) < needed:
        out.append(running.pop(0))
        free.extend(reversed(tables[out[-1]]))
        tables[out[-1]] = []
    return out


def _make_room_once(running, tables, free, needed):
    out = []
    if len(free) < needed:
        out.append(running.pop())
        free.extend(reversed(tables[out[-1]]))
        tables[out[-1]] = []
    return out


def _preemptions(game: Game) -> None:
    running, tables = ["a", "b", "c", "d"], {"a": [1, 2], "b": [3], "c": [4, 5], "d": [6]}
    free = [7, 8]
    game.step("a, b, c and d run")
    for request in running:
        game.enter(request, 4 * len(tables[request]), tables[request])
        game.keep(request)
    for request, needed in (("a", 1), ("a", 3), ("a", 2)):
        game.step(f"{request} needs {needed} more")
        left = game.ask(running=running, tables=tables, free=free, needed=needed)
        for out in left["answer"]:
            game.tell("free", out, 0, tuple(reversed(tables[out])))
            game.tell("preempt", out, "recompute", request, "you")
        running, tables, free = left["running"], left["tables"], left["free"]
        taken, free = free[:needed], free[needed:]
        game.take(request, taken)
        tables[request] = tables[request] + taken


make_room = Puzzle(
    "make room",
    "until `free` has `needed` blocks, the last of `running` gives its blocks back; return those who did.",
    _preemptions,
    _make_room,
    {
        _make_room_at_the_front: "the answer[0] should be 'd', and is 'a'",
        _make_room_once: "step 3 (a needs 3 more): the answer should have 2 entries, and has 1",
    },
)


def _split(running, waiting, budget):
    tokens = dict.fromkeys(running[:budget], 1)
    for request, left in waiting:
        n = min(left, budget - sum(tokens.values()))
        if n:
            tokens[request] = n
    return tokens


def _split_nothing(running, waiting, budget):
    tokens = dict.fromkeys(running, 1)
    for request, left in waiting:
        if left <= budget - sum(tokens.values()):
            tokens[request] = left
    return tokens


def _split_and_name_all(running, waiting, budget):
    tokens = dict.fromkeys(running, 1)
    for request, left in waiting:
        tokens[request] = min(left, budget - sum(tokens.values()))
    return tokens


def _split_prompts_first(running, waiting, budget):
    tokens: dict[str, int] = {}
    for request, left in waiting:
        n = min(left, budget - sum(tokens.values()))
        if n:
            tokens[request] = n
    return tokens | dict.fromkeys(running[: budget - sum(tokens.values())], 1)


def _split_all_running(running, waiting, budget):
    tokens = dict.fromkeys(running, 1)
    for request, left in waiting:
        if n := max(0, min(left, budget - sum(tokens.values()))):
            tokens[request] = n
    return tokens


def _splitting(game: Game) -> None:
    left, free = {"a": 5, "b": 13, "c": 6}, list(range(1, 9))
    held = {"a": 0, "b": 0, "c": 0}
    for number, budget in enumerate((8, 8, 8, 1)):
        running = [r for r in left if left[r] == 0]
        waiting = [(r, n) for r, n in left.items() if n]
        game.step(
            f"budget {budget}; decoding: {' '.join(running) or 'nobody'}; waiting: {' '.join(f'{r} {n}' for r, n in waiting) or 'nobody'}"
        )
        if number == 0:
            for request, tokens in left.items():
                game.enter(request, tokens)
        tokens = game.ask(running=running, waiting=waiting, budget=budget)["answer"]
        for request, n in tokens.items():
            new = -(-(held[request] + n) // 4) - -(-held[request] // 4)
            game.take(request, free[:new])
            free, held[request] = free[new:], held[request] + n
            left[request] -= min(n, left[request])
        game.tell("schedule", dict(tokens))
        game.tell("update", 0.0, {request: (0,) for request in tokens if left[request] == 0})


split = Puzzle(
    "split",
    "how many tokens each gets: one for each of `running`, the rest of `budget` for the prompts in `waiting`.",
    _splitting,
    _split,
    {
        _split_nothing: "step 1 (budget 8; decoding: nobody; waiting: a 5 b 13 c 6): the answer should have 'b'",
        _split_and_name_all: "step 1 (budget 8; decoding: nobody; waiting: a 5 b 13 c 6): the answer should not have 'c'",
        _split_prompts_first: "step 2 (budget 8; decoding: a; waiting: b 10 c 6): the answer should have 'a'",
        _split_all_running: "step 4 (budget 1; decoding: a b; waiting: c",
    },
)


def _admit(waiting, num_free, size):
    names = []
    for request, tokens in waiting:
        num_free -= -(-tokens // size)
        if num_free < 0:
            break
        names.append(request)
    return names


def _admit_whoever_fits(waiting, num_free, size):
    names = []
    for request, tokens in waiting:
        blocks = -(-tokens // size)
        if blocks <= num_free:
            num_free -= blocks
            names.append(request)
    return names


def _admit_rounded_down(waiting, num_free, size):
    names = []
    for request, tokens in waiting:
        num_free -= tokens // size
        if num_free < 0:
            break
        names.append(request)
    return names


def _admissions(game: Game) -> None:
    waiting, free = [("a", 9), ("b", 8), ("c", 17), ("d", 3)], list(range(1, 9))
    gone = None
    for _ in range(3):
        game.step(
            (f"{gone} has ended; " if gone else "")
            + f"waiting: {' '.join(f'{r} {n}' for r, n in waiting)}; free: {len(free)} blocks"
        )
        if gone:
            game.leave(gone, game.fold.now.requests[gone].tables[0][::-1])
        for request in game.ask(waiting=waiting, num_free=len(free), size=4)["answer"]:
            tokens = dict(waiting)[request]
            needed = -(-tokens // 4)
            game.enter(request, tokens, free[:needed])
            waiting, free = [w for w in waiting if w[0] != request], free[needed:]
        gone = next(iter(game.fold.now.requests))
        free = [*game.fold.now.requests[gone].tables[0], *free]


admit = Puzzle(
    "admit",
    "the names of those who are admitted: in order, until one needs more blocks than are free.",
    _admissions,
    _admit,
    {
        _admit_whoever_fits: "the answer should have 2 entries, and has 3",
        _admit_rounded_down: "the answer should have 2 entries, and has 4",
    },
)

PUZZLES = (slot, allocate, give_back, share, release, write, names, find, evict, slide, make_room, split, admit)
