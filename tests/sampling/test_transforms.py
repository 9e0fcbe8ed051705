"""Every transform against transformers where it has one, and against brute force or the definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_batches import make_batch, processed, spread
from torch import Tensor
from transformers import generation

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.transforms import (
    apply_bitmask,
    bitmask_costs,
    chunk_sums,
    draw,
    keep_from,
    min_p_threshold,
    standard_stages,
    top_k_threshold,
    top_p_threshold,
    top_values,
    with_transforms,
)

NEVER = -math.inf
VOCABULARY = 517  # neither a multiple of 32 nor of 128


# ---- transformers' own processors as oracles --------------------------------------------------------------------


def warped(warper: generation.LogitsProcessor, logits: Tensor, input_ids: list[list[int]] | None = None) -> Tensor:
    ids = torch.tensor(input_ids if input_ids is not None else [[0]] * len(logits))
    return warper(ids, logits.clone())


@pytest.mark.parametrize("k", [1, 2, 50, 200, 516, 517, 10_000])
def test_top_k(k: int) -> None:
    logits = spread(6, VOCABULARY)
    want = warped(generation.TopKLogitsWarper(min(k, VOCABULARY)), logits)
    assert torch.equal(processed(logits, SamplingParams(top_k=k)), want)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_top_p(p: float, scale: float) -> None:
    logits = spread(6, VOCABULARY, scale=scale or 1.0)
    if scale == 0:  # nearly flat, without ties
        logits = logits * 1e-3
    want = warped(generation.TopPLogitsWarper(p), logits)
    assert torch.equal(processed(logits, SamplingParams(top_p=p)), want)


@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.5, 1.0])
def test_min_p(min_p: float) -> None:
    logits = spread(6, VOCABULARY)
    assert torch.equal(
        processed(logits, SamplingParams(min_p=min_p)), warped(generation.MinPLogitsWarper(min_p), logits)
    )


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 1.9])
def test_temperature(temperature: float) -> None:
    logits = spread(6, VOCABULARY)
    want = warped(generation.TemperatureLogitsWarper(temperature), logits)
    torch.testing.assert_close(processed(logits, SamplingParams(temperature=temperature)), want)


@pytest.mark.parametrize("penalty", [0.3, 1.3, 5.0])
def test_repetition_penalty(penalty: float) -> None:
    logits = spread(3, VOCABULARY)
    prompts, outputs = [[1, 2, 2, 9], [5], [516, 0, 1, 2]], [[3, 1], [5, 5], []]
    want = torch.cat(
        [
            warped(generation.RepetitionPenaltyLogitsProcessor(penalty), logits[i : i + 1], [prompts[i] + outputs[i]])
            for i in range(3)
        ]
    )
    got = processed(logits, SamplingParams(repetition_penalty=penalty), prompts=prompts, outputs=outputs)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("produced", "active"), [(0, True), (2, True), (3, False), (7, False)])
def test_min_tokens(produced: int, active: bool) -> None:
    logits, output = spread(1, VOCABULARY), [4] * produced
    params = SamplingParams(min_tokens=3, stop_token_ids=[7, 11])
    params.update_from_generation_config({"eos_token_id": [2]}, eos_token_id=2)
    oracle = generation.MinNewTokensLengthLogitsProcessor(1, 3, [2, 7, 11])
    want = warped(oracle, logits, [[1, *output]])
    assert torch.equal(processed(logits, params, prompts=[[1]], outputs=[output]), want)
    assert bool(want[0, 7] == NEVER) == active


def test_min_tokens_with_an_end_token_beyond_the_logits() -> None:
    params = SamplingParams(min_tokens=3)
    params.update_from_generation_config({}, eos_token_id=VOCABULARY + 5)
    logits = spread(1, VOCABULARY)
    assert torch.equal(processed(logits, params), logits)


@pytest.mark.parametrize("output", [[], [3], [3, 4], [4, 3], [9, 3, 4], [3, 4, 5], [3, 4, 4]])
def test_bad_words(output: list[int]) -> None:
    words = [[5], [3, 6], [3, 4, 7]]
    params = SamplingParams(bad_words=["given as ids"])
    params.bad_words_token_ids = words
    logits = spread(1, VOCABULARY)
    want = warped(generation.NoBadWordsLogitsProcessor(words), logits, [[100, *output]])
    assert torch.equal(processed(logits, params, prompts=[[100]], outputs=[output]), want)


def test_bad_words_look_at_the_output_only() -> None:
    params = SamplingParams(bad_words=["given as ids"])
    params.bad_words_token_ids = [[3, 6]]
    logits = spread(1, VOCABULARY)
    assert torch.equal(processed(logits, params, prompts=[[1, 3]], outputs=[[]]), logits)


def test_logit_bias() -> None:
    logits, bias = spread(2, VOCABULARY), {3: 2.5, 516: -100.0}
    want = warped(generation.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]), logits, [[1], [1]])
    assert torch.equal(processed(logits, SamplingParams(logit_bias=bias)), want)


def test_allowed_token_ids() -> None:
    logits = spread(3, VOCABULARY)
    got = processed(logits, [SamplingParams(), SamplingParams(allowed_token_ids=[5, 9]), SamplingParams()])
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    want = torch.full_like(logits[1], NEVER)
    want[[5, 9]] = logits[1, [5, 9]]
    assert torch.equal(got[1], want)


def test_a_chain_equals_transformers_chain() -> None:
    logits = spread(5, VOCABULARY)
    chain = generation.LogitsProcessorList(
        [
            generation.RepetitionPenaltyLogitsProcessor(1.2),
            generation.TemperatureLogitsWarper(0.7),
            generation.MinPLogitsWarper(0.01),
            generation.TopKLogitsWarper(40),
            generation.TopPLogitsWarper(0.9),
        ]
    )
    ids = [[1, 2, 3]] * 5
    params = SamplingParams(repetition_penalty=1.2, temperature=0.7, min_p=0.01, top_k=40, top_p=0.9)
    torch.testing.assert_close(processed(logits, params, prompts=ids), chain(torch.tensor(ids), logits.clone()))


# ---- vLLM's definitions, in plain Python ------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=12),
    st.lists(st.integers(0, 19), max_size=12),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.1, 3),
)
def test_penalties_as_vllm_defines_them(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    logits = spread(2, 20)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    got = processed(logits, params, prompts=[prompt, [0]], outputs=[output, []])[0]
    for token in range(20):
        x, count = float(logits[0, token]), output.count(token)
        if token in prompt or count:
            x = x / repetition if x > 0 else x * repetition
        x -= frequency * count + presence * (count > 0)
        assert float(got[token]) == pytest.approx(x, rel=1e-5, abs=1e-5)


def test_penalties_follow_the_output_as_it_grows() -> None:
    """Incremental counts equal counts from scratch, also when the tables have to grow."""
    rng = np.random.default_rng(0)
    params = [SamplingParams(frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1), SamplingParams()] * 5
    prompts = [rng.integers(0, 2000, 300).tolist() for _ in params]
    outputs: list[list[int]] = [[] for _ in params]
    batch, logits = make_batch(params, 2000, prompts=prompts), spread(10, 2000)
    for step in range(60):
        for i, output in enumerate(outputs):
            output.append(int(rng.integers(0, 2000)))
            batch.state.append(str(i), output[-1])
        if step % 20 == 0:
            seen: list[Tensor] = []
            Sampler()(logits.clone(), batch, lambda name, x, seen=seen: seen.append(x.clone()))
            torch.testing.assert_close(seen[-1], processed(logits, params, prompts=prompts, outputs=outputs))


def test_a_penalised_row_may_hold_forbidden_tokens() -> None:
    params = SamplingParams(allowed_token_ids=[1, 2], repetition_penalty=2.0, frequency_penalty=1.0)
    got = processed(torch.tensor([[1.0, 2.0, -3.0, 4.0]]), params, prompts=[[0, 1, 2]], outputs=[[0, 2]])
    assert got.tolist() == [[NEVER, 1.0, -7.0, NEVER]]


# ---- brute force ------------------------------------------------------------------------------------------------

ROWS = st.lists(st.integers(-40, 40), min_size=1, max_size=150)  # tenths: many ties


def brute_top_p(x: Tensor, p: float) -> tuple[Tensor, bool]:
    """The mask, and whether rounding could decide it (the mass is within 1e-9 of p)."""
    weights = x.double().exp()
    weights /= weights.sum()
    total, close = 0.0, False
    for token in weights.argsort(descending=True).tolist():
        total += float(weights[token])
        close |= abs(total - p) < 1e-6
        if total >= p:
            break
    return x >= x[token], close


@given(ROWS, st.integers(1, 200))
def test_top_k_brute_force(row: list[int], k: int) -> None:
    x = torch.tensor([row]) / 10
    k = min(k, len(row))
    want = x[0] >= sorted(x[0].tolist(), reverse=True)[k - 1]
    assert torch.equal(keep_from(x.clone(), top_k_threshold(x, torch.tensor([k]), k))[0] > NEVER, want)


@given(ROWS, st.floats(0.001, 0.999))
def test_top_p_brute_force(row: list[int], p: float) -> None:
    x = torch.tensor([row]) / 10
    want, close = brute_top_p(x[0], p)
    got = keep_from(x.clone(), top_p_threshold(x, torch.tensor([p], dtype=torch.float64)))[0] > NEVER
    assert close or torch.equal(got, want)


@given(ROWS, st.floats(0.001, 0.999))
def test_min_p_brute_force(row: list[int], m: float) -> None:
    x = torch.tensor([row]) / 10
    weights = x[0].double().exp()
    ratio = weights / weights.max()
    got = keep_from(x.clone(), min_p_threshold(x, torch.tensor([m])))[0] > NEVER
    assert torch.equal(got | ((ratio - m).abs() < 1e-6), (ratio >= m) | ((ratio - m).abs() < 1e-6))


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(0, 5))
def test_top_values_brute_force(width: int, k: int, seed: int) -> None:
    x = spread(3, width, seed).round()
    k = min(k, width)
    assert torch.equal(top_values(x, k), x.sort(-1, descending=True).values[:, :k])


@pytest.mark.parametrize("vocabulary", [129, 1500, 12_345])
@pytest.mark.parametrize("p", [0.3, 0.95, 0.9999])
def test_top_p_of_wide_rows(vocabulary: int, p: float) -> None:
    """Rows that need one token, some, thousands and all, and two with ties, side by side."""
    scales = torch.tensor([100.0, 3.0, 0.7, 0.001, 1.0, 0.0])
    logits = spread(6, vocabulary, scale=1.0) * scales[:, None]
    logits[4] = logits[4].round(decimals=1)
    logits[3, ::7] = NEVER
    p = torch.full((6,), p, dtype=torch.float64)
    together = top_p_threshold(logits, p)
    for i in range(6):
        want, _ = brute_top_p(logits[i], float(p[0]))
        differ = (logits[i] >= together[i]) ^ want
        assert float(torch.softmax(logits[i].double(), -1)[differ].sum()) < 2e-6  # rounding at the line
        assert torch.equal(top_p_threshold(logits[i : i + 1], p[:1])[0], together[i])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.integers(0, 31))
def test_bitmask(words: list[int], missing: int) -> None:
    size = 32 * len(words) - missing
    allowed = [(words[i // 32] & 0xFFFFFFFF) >> (i % 32) & 1 == 1 for i in range(size)]
    bitmask = torch.tensor([words], dtype=torch.int32)
    assert bitmask_costs(bitmask, size).tolist() == [[0.0 if flag else math.inf for flag in allowed]]
    logits = spread(3, size)
    want = logits.clone()
    want[1, [i for i in range(size) if not allowed[i]]] = NEVER
    assert torch.equal(apply_bitmask(logits, torch.tensor([1]), bitmask), want)


# ---- the draw ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=400), st.floats(0, 1, exclude_max=True))
def test_draw_is_the_inverse_cdf(weights: list[int], u: float) -> None:
    if sum(weights) == 0:
        weights = [*weights, 1]
    token, alive = draw(torch.tensor([weights]).float().log(), torch.tensor([u], dtype=torch.float64))
    cumulative = np.cumsum(weights) / sum(weights)
    want = int(np.searchsorted(cumulative, u, side="right"))
    assert bool(alive)
    assert weights[int(token)] > 0
    assert int(token) == want or np.abs(cumulative - u).min() < 1e-6


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_draw_never_takes_an_impossible_token(u: float) -> None:
    for place in (0, 1, 127, 128, 300):
        logits = torch.full((1, 301), NEVER)
        logits[0, place] = -50.0
        assert int(draw(logits, torch.tensor([u], dtype=torch.float64))[0]) == place


@pytest.mark.parametrize("row", [[NEVER, NEVER], [1.0, math.nan], [1.0, math.inf]])
def test_draw_reports_rows_without_a_distribution(row: list[float]) -> None:
    tokens, alive = draw(torch.tensor([[0.0, 1.0], row, [1.0, 0.0]]), torch.tensor([0.1, 0.1, 0.1]).double())
    assert alive.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == [0, 0]


@given(st.integers(1, 600))
def test_chunk_sums(width: int) -> None:
    x = spread(2, width).exp()
    got = chunk_sums(x)
    assert got.shape == (2, -(-width // 128))
    torch.testing.assert_close(got.sum(-1), x.double().sum(-1), rtol=1e-6, atol=0)


# ---- the list ---------------------------------------------------------------------------------------------------


def test_order_and_print() -> None:
    names = [stage.name for stage in standard_stages()]
    assert names == [
        "grammar", "allowed_token_ids", "logit_bias", "bad_words", "min_tokens",
        "penalties", "temperature", "min_p", "top_k", "top_p",
    ]  # fmt: skip
    printed = repr(Sampler())
    assert [printed.index(name) for name in names] == sorted(printed.index(name) for name in names)


def test_stages_that_nobody_needs_are_skipped() -> None:
    def ran(*params: SamplingParams) -> list[str]:
        seen: list[str] = []
        Sampler()(spread(len(params), 20), make_batch(params, 20), lambda name, x: seen.append(name))
        return seen

    assert ran(SamplingParams(), SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5)) == ["model"]
    assert ran(SamplingParams(temperature=0.5), SamplingParams(top_k=3)) == ["model", "temperature", "top_k"]
    assert ran(SamplingParams(top_k=20)) == ["model"]


def test_engine_transforms_go_to_their_places() -> None:
    def first(logits: Tensor, batch: object) -> Tensor:
        return logits

    def second(logits: Tensor, batch: object) -> Tensor:
        return logits

    def late(logits: Tensor, batch: object) -> Tensor:
        return logits

    late.after = "top_p"  # type: ignore[attr-defined]
    names = [stage.name for stage in with_transforms(standard_stages(), [first, second, late])]
    assert names[5:9] == ["penalties", "first", "second", "temperature"]
    assert names[-1] == "late"
    late.after = "nowhere"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'nowhere'"):
        Sampler(transforms=[late])
