"""The teaching automaton against `re`, and its masks against trying every token."""

import random
import re
from typing import Any

import numpy as np
import pytest
from chapter import chapter_cells
from hypothesis import given
from hypothesis import strategies as st
from sampling_wishes import random_regex

chapter = chapter_cells(
    "sampling/automaton",
    "code-5e575e",
    "one_of",
    "then",
    "nullable",
    "_Reader",
    "_Reader-alternatives",
    "_Reader-sequence",
    "_Reader-repeated",
    "_Reader-bounds",
    "_Reader-atom",
    "parse",
    "TokenTrie",
    "RegexMatcher",
)
NOTHING, RegexMatcher, TokenTrie = chapter.NOTHING, chapter.RegexMatcher, chapter.TokenTrie
derivative, matches, nullable, parse = chapter.derivative, chapter.matches, chapter.nullable, chapter.parse
TEXTS = [
    "",
    None,
    "a",
    "b",
    "ab",
    "xyz",
    "x",
    "yz",
    "yes",
    "no",
    "ye",
    "s",
    "0",
    "12",
    ".",
    "-",
    " ",
    "A_",
    "日本",
    "é",
    "ab0",
]
END = 0


@given(st.integers(0, 10**6), st.lists(st.sampled_from([t for t in TEXTS if t]), max_size=6))
def test_matches_as_re_does(seed: int, pieces: list[str]) -> None:
    pattern, text = random_regex(random.Random(seed)), "".join(pieces)
    assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("", [""], ["a"]),
        ("a|", ["", "a"], ["b"]),
        ("(ab|a)(c|bcd)(d*)", ["abcd", "abcddd", "acd", "ac"], ["ab"]),
        ("(a*)*b", ["b", "aaab"], ["a"]),
        ("a{2}b{0,2}", ["aa", "aabb"], ["a", "aabbb"]),
        ("[^a-c]\\d\\w\\s", ["d5_ "], ["a5_ "]),
        ("\\.\\[x\\]", [".[x]"], ["a[x]"]),
        ("[a-]+[-b]", ["a-a-b", "--"], ["b"]),
        (".", ["x", "日"], ["\n", ""]),
    ],
)
def test_by_hand(pattern: str, good: list[str], bad: list[str]) -> None:
    for text in good + bad:
        assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None) == (text in good)


@pytest.mark.parametrize(
    "pattern", ["(", "a)", "[a", "*a", "a{2", "a{3,2}", "a{x}", "a{1,2,3}", "\\", "\\b", "^a", "a$", "(?=a)", "a|*"]
)
def test_what_it_cannot_read_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse(pattern)


def allowed(matcher: Any) -> list[int]:
    row = np.zeros(1, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@given(st.integers(0, 10**6))
def test_masks_on_a_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    pattern = random_regex(rng)
    matcher, text = RegexMatcher(pattern, TokenTrie(TEXTS), END, TEXTS.__getitem__), ""
    for _ in range(8):
        want = [END] if re.fullmatch(pattern, text) else []
        for token, piece in enumerate(TEXTS):
            if piece:
                state = parse(pattern)
                for c in text + piece:
                    state = derivative(state, c)
                want += [token] if state != NOTHING else []
        assert allowed(matcher) == want
        if not want or (token := rng.choice(want)) == END:
            break
        assert matcher.accept(token)
        text += TEXTS[token] or ""


def test_a_token_that_does_not_fit() -> None:
    matcher = RegexMatcher("ab", TokenTrie(TEXTS), END, TEXTS.__getitem__)
    assert not matcher.accept(END)
    assert not matcher.accept(TEXTS.index("x"))
    assert allowed(matcher) == []


def test_the_number_of_states_is_finite() -> None:
    todo, found = [parse("(a|b)*a(a|b){3}((ab)*|b+)*")], set()
    while todo:
        state = todo.pop()
        if state not in found:
            found.add(state)
            todo += [derivative(state, c) for c in "abc"]
    assert len(found) < 200
    assert any(map(nullable, found))
