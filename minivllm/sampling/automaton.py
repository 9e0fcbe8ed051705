"""Regular expressions as token automata, by derivatives."""

# Generated from nbs/sampling/automaton.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "EMPTY", "NOTHING", "Expression", "RegexMatcher", "TokenTrie", "derivative", "matches", "nullable",
    "one_of", "parse",
]  # fmt: skip

Expression = tuple[Any, ...]

NOTHING: Expression = ("none",)  # matches no text at all
EMPTY: Expression = ("empty",)  # matches the empty text


def one_of(characters: frozenset[str], negated: bool = False) -> Expression:
    """One character of a set, or one that is not in it."""
    return ("set", characters, negated)


def then(first: Expression, second: Expression) -> Expression:
    """First, followed by second."""
    if NOTHING in (first, second):
        return NOTHING
    if first == EMPTY:
        return second
    if second == EMPTY:
        return first
    if first[0] == "then":  # lean to the right: (ab)c is written a(bc)
        return then(first[1], then(first[2], second))
    return ("then", first, second)


def either(*options: Expression) -> Expression:
    """Any of the options: flat, without repetitions, in a fixed order."""
    flat = {inner for option in options for inner in (option[1] if option[0] == "either" else (option,))}
    flat -= {NOTHING}
    if not flat:
        return NOTHING
    return flat.pop() if len(flat) == 1 else ("either", frozenset(flat))


def repeat(inner: Expression) -> Expression:
    """Any number of times, also none."""
    return EMPTY if inner in (NOTHING, EMPTY) else inner if inner[0] == "repeat" else ("repeat", inner)


@lru_cache(maxsize=100_000)
def nullable(e: Expression) -> bool:
    """Whether the expression matches the empty text."""
    match e[0]:
        case "empty" | "repeat":
            return True
        case "then":
            return nullable(e[1]) and nullable(e[2])
        case "either":
            return any(map(nullable, e[1]))
        case _:
            return False


@lru_cache(maxsize=100_000)
def derivative(e: Expression, c: str) -> Expression:
    """What must still come after the character c."""
    match e[0]:
        case "set":
            return EMPTY if (c in e[1]) != e[2] else NOTHING
        case "then":
            rest = then(derivative(e[1], c), e[2])
            return either(rest, derivative(e[2], c)) if nullable(e[1]) else rest
        case "either":
            return either(*(derivative(option, c) for option in e[1]))
        case "repeat":
            return then(derivative(e[1], c), e)
        case _:
            return NOTHING


_CLASSES = {
    "d": "0123456789",
    "w": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_",
    "s": " \t\n\r\f\v",
    "n": "\n",
    "t": "\t",
}


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self) -> str:
        if self.at == len(self.pattern):
            raise ValueError(f"the expression {self.pattern!r} ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"expected {character!r} at {self.at} of {self.pattern!r}")
        self.at += 1

    def alternatives(self) -> Expression:
        options = [self.sequence()]
        while self.peek() == "|":
            self.take()
            options.append(self.sequence())
        return either(*options)

    def sequence(self) -> Expression:
        e = EMPTY
        while self.peek() and self.peek() not in "|)":
            e = then(e, self.repeated(self.atom()))
        return e

    def repeated(self, e: Expression) -> Expression:
        while self.peek() and self.peek() in "*+?{":
            sign = self.take()
            if sign == "{":
                low, high = self.bounds()
                optional = EMPTY
                for _ in range(high - low):
                    optional = either(EMPTY, then(e, optional))
                for _ in range(low):
                    optional = then(e, optional)
                e = optional
            else:
                e = {"*": repeat(e), "+": then(e, repeat(e)), "?": either(EMPTY, e)}[sign]
        return e

    def bounds(self) -> tuple[int, int]:
        """The numbers of {m}, {m,n}; the brace is read already."""
        end = self.pattern.find("}", self.at)
        parts = self.pattern[self.at : end].split(",")
        if end < 0 or len(parts) > 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) > int(parts[-1]):
            raise ValueError(f"expected {{m}} or {{m,n}} at {self.at} of {self.pattern!r}")
        self.at = end + 1
        return int(parts[0]), int(parts[-1])

    def atom(self) -> Expression:
        c = self.take()
        match c:
            case "(":
                if self.pattern.startswith("?:", self.at):
                    self.at += 2
                e = self.alternatives()
                self.expect(")")
                return e
            case "[":
                return self.bracket()
            case ".":
                return one_of(frozenset("\n"), negated=True)
            case "\\":
                return one_of(self.escaped())
            case "*" | "+" | "?" | "{" | ")" | "^" | "$":
                raise ValueError(f"{c!r} at {self.at - 1} of {self.pattern!r} is not supported here")
            case _:
                return one_of(frozenset(c))

    def escaped(self) -> frozenset[str]:
        c = self.take()
        if c.isalnum() and c not in _CLASSES:
            raise ValueError(f"\\{c} in {self.pattern!r} is not supported")
        return frozenset(_CLASSES.get(c, c))

    def bracket(self) -> Expression:
        negated = self.peek() == "^"
        self.at += negated
        characters: set[str] = set()
        while self.peek() != "]":
            c = self.take()
            chosen = self.escaped() if c == "\\" else frozenset(c)
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] != "]" and len(chosen) == 1:
                self.take()
                chosen = frozenset(map(chr, range(ord(next(iter(chosen))), ord(self.take()) + 1)))
            characters |= chosen
        self.take()
        return one_of(frozenset(characters), negated)


def parse(pattern: str) -> Expression:
    """A regular expression: characters, . [...] [^...] | * + ? {m,n} (...) \\d \\w \\s. ValueError for anything else."""
    reader = _Reader(pattern)
    e = reader.alternatives()
    if reader.at < len(pattern):
        raise ValueError(f"unexpected {reader.peek()!r} at {reader.at} of {pattern!r}")
    return e


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches: take derivatives, look whether the rest may be empty."""
    e = parse(pattern)
    for c in text:
        e = derivative(e, c)
    return nullable(e)


class TokenTrie:
    """The vocabulary as a tree of characters. `texts[t]` is the text of token t; None or "" for tokens without one."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self.size = len(texts)
        self.root: dict[str, Any] = {}
        for token, text in enumerate(texts):
            if text:
                node = self.root
                for c in text:
                    node = node.setdefault(c, {})
                node.setdefault("", []).append(token)

    def allowed(self, state: Expression) -> list[int]:
        """The tokens that the automaton survives from this state."""
        found: list[int] = []
        stack = [(self.root, state)]
        while stack:
            node, e = stack.pop()
            for c, child in node.items():
                if c == "":
                    found += child
                elif (rest := derivative(e, c)) != NOTHING:
                    stack.append((child, rest))
        return found


class RegexMatcher:
    """A regular expression as a `Matcher` for SamplingState.add. A teaching model: see sampling.grammar for the real one."""

    def __init__(self, pattern: str, trie: TokenTrie, eos_token_id: int, text_of: Callable[[int], str | None]) -> None:
        self.state, self.trie, self.eos_token_id, self.text_of = parse(pattern), trie, eos_token_id, text_of
        self._masks: dict[Expression, npt.NDArray[np.int32]] = {}

    def fill(self, bitmask_row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the allowed next tokens, int32 [ceil(V / 32)]."""
        if self.state not in self._masks:
            flags = np.zeros(32 * len(bitmask_row), np.bool_)
            flags[self.trie.allowed(self.state)] = True
            flags[self.eos_token_id] = nullable(self.state)
            self._masks[self.state] = np.packbits(flags, bitorder="little").view(np.int32)
        bitmask_row[:] = self._masks[self.state]

    def accept(self, token_id: int) -> bool:
        """Move on; False (and nothing is allowed any more) if the token does not fit."""
        if token_id == self.eos_token_id:
            return nullable(self.state)
        text = self.text_of(token_id)
        if not text:
            self.state = NOTHING
        for c in text or "":
            self.state = derivative(self.state, c)
        return self.state != NOTHING
