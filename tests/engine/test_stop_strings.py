"""Stop strings against the definition: read character by character, the first complete one wins, the longest of equals."""

from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.engine.stop_strings import StopStrings

letters = st.text("ab", max_size=20)
stops_of = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def by_definition(text, stops):
    """(text before the stop string, the stop string) or (text, None)."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@st.composite
def cut_texts(draw):
    text = draw(letters)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=cut_texts(), stops=stops_of)
@example(pieces=["ab", "a", "b"], stops=["bab", "ab", "abab"])
def test_however_the_text_is_cut(pieces, stops):
    finder, text, shown = StopStrings(stops), "", 0
    want = by_definition("".join(pieces), stops)
    for piece in pieces:
        before, text = len(text), text + piece
        if match := finder.find(text, before):
            assert (text[: match.start], match.stop) == want
            assert shown <= match.start, "a part of the stop string was shown"
            return
        shown = len(text) - finder.held_back(text)
    assert want == (text, None)


@given(text=letters, stops=stops_of)
def test_no_more_is_held_back_than_needed(text, stops):
    held = StopStrings(stops).held_back(text)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    assert held == max((n for n in range(1, len(text) + 1) if text[-n:] in beginnings), default=0)
