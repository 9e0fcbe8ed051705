"""Acceptance of drafts: the same tokens as without, or the same distribution; and a wrong rule is caught."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import SamplingState
from minivllm.spec_decode.rejection import Draft, RejectionSampler, Verified

V = 11
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 2  # logits behind each token


def model(prefix: list[int]) -> torch.Tensor:
    """Logits that depend on the last two tokens."""
    return TABLE[prefix[-1]] + TABLE[prefix[-2]].flip(0) / 2


def no_repeat(logits, view):
    """A transform of a request's own, which looks back."""
    for token in view.output_token_ids[-2:]:
        logits[token] = -torch.inf
    return logits


class EvenAndOdd:
    """A grammar: an even token, then an odd one, and so on; a 10 ends it."""

    def __init__(self) -> None:
        self.odd, self.ended = 0, False

    def fill(self, bitmask_row) -> None:
        assert not self.ended, "a grammar that has ended was asked again"
        bitmask_row[:] = 0
        for token in range(self.odd, V, 2):
            bitmask_row[token // 32] |= 1 << token % 32

    def accept(self, token_id: int) -> bool:
        if token_id % 2 != self.odd:
            return False
        self.odd, self.ended = 1 - self.odd, token_id == 10
        return True


def parameters(draw) -> dict:
    """All that a request may ask of the sampler."""
    options = {"temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])), "seed": draw(st.integers(0, 2**40))}
    extras = {
        "top_k": st.integers(1, V), "top_p": st.floats(0.3, 1.0), "min_p": st.floats(0.0, 0.3),
        "presence_penalty": st.floats(-1, 1), "frequency_penalty": st.floats(-1, 1),
        "repetition_penalty": st.floats(0.7, 1.6), "logit_bias": st.just({3: 1.5, 7: -2.0}),
        "allowed_token_ids": st.just([0, 1, 2, 3, 4, 5, 8, 10]), "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.just([4, 10]), "logprobs": st.integers(0, 3), "logits_processors": st.just([no_repeat]),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(extras)), unique=True, max_size=5)):
        options[name] = draw(extras[name])
    return options


def add(state: SamplingState, name: str, options: dict, grammar: bool) -> None:
    params = SamplingParams(**options, max_tokens=24)
    state.add(name, params, [1, 2], [], None, EvenAndOdd() if grammar else None)


class OneByOne:
    """The oracle: the plain sampler, one token a step."""

    def verify(self, logits, batch, drafts):
        out = Sampler()(logits, batch)
        for view, token_id in zip(batch.requests, out.token_ids.tolist(), strict=True):
            if view.request_id not in out.errors:
                batch.state.append(view.request_id, token_id)
        return [
            Verified([token_id], 0, None if report is None else [report], out.errors.get(view.request_id))
            for view, token_id, report in zip(batch.requests, out.token_ids.tolist(), out.logprobs, strict=True)
        ]


def say(options: list[dict], grammars: list[bool], drafts, sampler, steps: int = 16) -> list | None:
    """What requests say: tokens and the log-probability of each, up to a stop token; None if the oracle has no token to choose from.

    drafts(text, request): the guesses.
    """
    state, names = SamplingState(len(options), V), [str(i) for i in range(len(options))]
    for name, option, grammar in zip(names, options, grammars, strict=True):
        add(state, name, option, grammar)
    texts = {name: [1, 2] for name in names}
    reports: dict[str, list] = {name: [] for name in names}
    alive = list(names)
    while alive := [n for n in alive if len(texts[n]) < steps + 2]:
        given = [Draft(*drafts(texts[n], n)) for n in alive]
        rows = [model(texts[n] + list(d.token_ids[:k])) for n, d in zip(alive, given, strict=True) for k in range(len(d.token_ids) + 1)]  # fmt: skip
        for name, got in zip(alive, sampler.verify(torch.stack(rows), state.batch(alive), given), strict=True):
            if got.error is not None and isinstance(sampler, OneByOne):
                return None
            assert got.error is None
            texts[name] += got.token_ids
            reports[name] += [round(r[t].logprob, 4) for r, t in zip(got.logprobs or (), got.token_ids, strict=False)]
            stops = state.requests[name].params.all_stop_token_ids
            if ends := [i for i, t in enumerate(texts[name][2:], 3) if t in stops]:
                texts[name], reports[name] = texts[name][: ends[0]], reports[name][: ends[0] - 2]
        for name in [n for n in alive if texts[n][-1] in state.requests[n].params.all_stop_token_ids]:
            alive.remove(name)
    return [(texts[n][: steps + 2], reports[n][:steps]) for n in names]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_text_is_the_one_without_drafts_whatever_a_request_asks_for(data):
    options = [parameters(data.draw) for _ in range(data.draw(st.integers(1, 3)))]
    grammars = [data.draw(st.booleans()) for _ in options]
    for option, grammar in zip(options, grammars, strict=True):
        if grammar:
            option.pop("allowed_token_ids", None)
            option.pop("logits_processors", None)
            option["min_tokens"] = 0
            option["structured_outputs"] = {"regex": "not asked: the matcher is given"}
            option["stop_token_ids"] = [10]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sampler = RejectionSampler(Sampler())

    def some(text, name):
        guesses, ids = rng.integers(0, 5), list(text)
        for _ in range(guesses):
            ids.append(int(model(ids).argmax()) if rng.random() < 0.7 else int(rng.integers(0, V)))
        return (ids[len(text) :],)

    plain = say(options, grammars, lambda text, name: ((),), OneByOne())
    assume(plain is not None)  # else these parameters leave no token at all
    assert say(options, grammars, some, sampler) == plain


def chi2(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of the observed counts; what is impossible must not come."""
    assert not counts[probs == 0].any()
    keep = probs > 0
    return float(chisquare(counts[keep], counts.sum() * probs[keep] / probs[keep].sum()).pvalue)


class Forgetful(RejectionSampler):
    """A wrong rule: after a rejection it draws from p and not from the residual."""

    def _by_ratio(self, logits, token_ids, batch, rows):
        said = super()._by_ratio(logits, token_ids, batch, rows)
        drafts = torch.from_numpy(batch.draft_ids)
        return torch.where(said == drafts, said, token_ids)


QS = ["none", "flat", "peaked"]
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 2.0, 8: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 4, 5, 8]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [4, 10]},
    "logits_processors": {"logits_processors": [no_repeat]},
    "grammar": {"structured_outputs": {"regex": "not asked: the matcher is given"}, "stop_token_ids": [10]},
}
BATCH = 1_000
SAID = [4, 3]  # what each request has said before: penalties, grammars and transforms look back at it


@pytest.mark.parametrize("q", ["none", "flat", pytest.param("peaked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIONS)
def test_chi_squared(name, q):
    check_distribution(q, name, 4_000)


@pytest.mark.slow
def test_chi_squared_over_200_000_draws():
    check_distribution("flat", "plain", 200_000)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("q", QS)
@pytest.mark.parametrize("name", OPTIONS)
def test_chi_squared_over_200_000_draws_of_each_parameter(name, q):
    check_distribution(q, name, 200_000)


def check_distribution(q, name, draws):
    """First tokens of requests that carry one draft token each come as often as those without; by a wrong rule they do not."""
    rng, logits = np.random.default_rng(5), model([*SAID[-2:]])
    params = SamplingParams(**{"temperature": 1.0} | OPTIONS[name])
    drawn_from = {"none": None, "flat": torch.full((V,), 1 / V), "peaked": torch.softmax(logits * 2, -1)}[q]
    chances = np.full(V, 1 / V) if drawn_from is None else drawn_from.double().numpy()

    def state_of(names) -> SamplingState:
        state = SamplingState(len(names), V)
        for each, seed in zip(names, rng.integers(2**60, size=len(names)).tolist(), strict=True):
            state.add(each, params, [1, 2], SAID, seed, EvenAndOdd() if name == "grammar" else None)
        return state

    seen: list[torch.Tensor] = []
    Sampler()(logits.clone()[None], state_of(["a"]).batch(["a"]), lambda stage, x: seen.append(x.clone()))
    p, names = torch.softmax(seen[-1][0].double(), -1).numpy(), [str(i) for i in range(BATCH)]

    def counts(sampler: RejectionSampler, draws: int) -> np.ndarray:
        total = np.zeros(V)
        for _ in range(draws // BATCH):
            drawn = rng.choice(V, BATCH, p=chances / chances.sum()).tolist()
            given = [Draft([t], None if drawn_from is None else drawn_from[None]) for t in drawn]
            said = sampler.verify(logits.repeat(2 * BATCH, 1), state_of(names).batch(names), given)
            total += np.bincount([got.token_ids[0] for got in said], minlength=V)
        return total

    assert chi2(counts(RejectionSampler(Sampler()), draws), p) > 1e-4
    if q != "peaked":  # so near to p that the wrong rule makes little difference
        wrong = counts(RejectionSampler(Sampler(), 0.5) if q == "none" else Forgetful(Sampler()), 4 * BATCH)
        assert wrong[p == 0].any() or chi2(wrong, p) < 1e-6


def test_a_draft_from_the_model_itself_is_always_accepted():
    state = SamplingState(1, V)
    state.add("a", SamplingParams(seed=1, temperature=1.0), [1, 2], [], None)
    rows = torch.stack([model([1, 2]), model([2, 5])])
    probs = torch.softmax(rows[:1], -1)
    [got] = RejectionSampler(Sampler()).verify(rows, state.batch(["a"]), [Draft([5], probs)])
    assert got.token_ids[0] == 5 and got.num_accepted == 1 and len(got.token_ids) == 2


def test_a_failure_behind_a_rejected_draft_has_no_effect():
    state = SamplingState(2, V)
    for name in "ab":
        state.add(name, SamplingParams(temperature=0, seed=0), [1, 2], [], None)
    good, bad = model([1, 2]), torch.full((V,), torch.nan)
    best = int(good.argmax())
    rows = torch.stack([good, bad, good, bad])
    drafts = [Draft([best]), Draft([(best + 1) % V])]
    right, wrong = RejectionSampler(Sampler()).verify(rows, state.batch(["a", "b"]), drafts)
    assert wrong.token_ids == [best] and wrong.error is None
    assert right.token_ids == [best] and "no token can be drawn" in right.error


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_synthetic_acceptance_has_the_rate_that_was_asked_for(rate):
    n = 3_000
    state, names = SamplingState(n, V), [str(i) for i in range(n)]
    for i, name in enumerate(names):
        state.add(name, SamplingParams(seed=i), [1], [], None)
    rows = TABLE[0].repeat(2 * n, 1)
    said = RejectionSampler(Sampler(), rate).verify(rows, state.batch(names), [Draft([5])] * n)
    share = sum(got.num_accepted for got in said) / n
    assert abs(share - rate) < 0.04 and all(len(got.token_ids) == 1 + got.num_accepted for got in said)


def test_a_number_of_rows_that_does_not_fit_is_refused():
    state = SamplingState(1, V)
    state.add("a", SamplingParams(temperature=0, seed=0), [1], [], None)
    with pytest.raises(ValueError, match="the drafts need 3 rows of logits, got 2"):
        RejectionSampler(Sampler()).verify(TABLE[:2].clone(), state.batch(["a"]), [Draft([1, 2])])
