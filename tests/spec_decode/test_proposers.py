"""What proposers find, against a search of every place."""

from collections import Counter

import numpy as np
import pytest

from minivllm.spec_decode.proposers import AnswerIndex, DraftRequest, DraftView, SuffixProposer, find_matches

VIEW = DraftView(0, 1, {})


def request(ids, most=4, prompt=1):
    return DraftRequest("a", np.array(ids, np.int32), prompt, most, None)


def longest_by_hand(text, tail, longest):
    """The longest end of `tail` that stands in `text` with something behind it, and where."""
    for size in range(min(longest, len(tail)), 0, -1):
        ends = [i for i in range(size - 1, len(text) - 1) if text[i - size + 1 : i + 1] == tail[-size:]]
        if ends:
            return size, ends
    return 0, []


@pytest.mark.parametrize("seed", range(10))
def test_an_index_of_answers_finds_what_a_search_of_all_of_them_finds(seed):
    """With answers that come and go: of 4 tokens, so that matches are long."""
    rng, index, kept = np.random.default_rng(seed), AnswerIndex(5), []
    for _ in range(40):
        answer = rng.integers(0, 4, int(rng.integers(1, 30))).tolist()
        index.add(answer)
        kept = [*kept, answer][-5:]
        text = [token for each in kept for token in (*each, -1)]
        assert index.text.tolist() == text
        tail = rng.integers(0, 5, int(rng.integers(1, 12))).tolist()
        places = index.places(*[-2, *tail][-2:])
        size, ends = find_matches(index.text, np.array(tail), 8, places)
        assert (size, ends.tolist()) == longest_by_hand(text, tail, 8)
    assert all(len(places) == len(before) for places, before in index._places.values())
    assert sum(len(places) for places, _ in index._places.values()) == sum(map(len, kept))


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_proposer_follows_the_majority(seed):
    rng, proposer = np.random.default_rng(seed), SuffixProposer(24, 1.0, 0.0, 10)
    answers = [rng.integers(0, 3, 40).tolist() for _ in range(8)]
    for answer in answers:
        proposer.finish("", answer)
    text = [token for each in answers for token in (*each, -1)]
    tail = [9, *rng.permutation(3).tolist()]  # without a match in itself
    _, ends = longest_by_hand(text, tail, 23)
    following = Counter(text[i + 1] for i in ends)
    [draft] = proposer.propose([request(tail)], VIEW)
    assert draft and following[draft[0]] == max(following.values())


def test_the_end_of_an_answer_is_known():
    proposer = SuffixProposer(24, 1.0, 0.1, 10)
    [draft] = proposer.propose([request([9, 1, 2])], VIEW)
    assert draft == []
    proposer.finish("a", [1, 2, 3, 4, 5])
    assert proposer.propose([request([9, 1, 2])], VIEW) == [[3, 4]]
    assert proposer.propose([request([9, 1, 2, 3, 4])], VIEW) == [[5]]
    assert proposer.propose([request([9, 4, 5])], VIEW) == [[]]


@pytest.mark.parametrize("cached", [0, 1])
def test_as_many_answers_as_are_allowed_are_remembered(cached):
    proposer = SuffixProposer(24, 1.0, 0.1, cached)
    for first in (10, 20):
        proposer.finish("a", [first, first + 1, first + 2])
    drafts = [proposer.propose([request([9, first])], VIEW)[0] for first in (10, 20)]
    assert drafts == ([[], [21]] if cached else [[], []])
