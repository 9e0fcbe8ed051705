"""The sampler: distributions, determinism, independence of rows, failures that stay alone, reports, explain."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batches import make_batch, processed, sample, spread
from scipy import stats
from torch import Tensor

from minivllm.sampling import transforms
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import SamplingState

NEVER = -math.inf
DRAWS = 100_000


# ---- distributions ----------------------------------------------------------------------------------------------


def draws(logits: Tensor, params: SamplingParams, first_seed: int) -> np.ndarray:
    """Counts of the tokens that 100,000 requests draw from one row of logits; seeds count up."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    size = 10_000
    for start in range(0, DRAWS, size):
        state, names = SamplingState(size, len(logits)), [str(i) for i in range(size)]
        for i, name in enumerate(names):
            state.add(name, params, [0], [], seed=first_seed + start + i)
        tokens = Sampler()(logits.repeat(size, 1), state.batch(names)).token_ids
        counts += torch.bincount(tokens, minlength=len(logits))
    return counts.numpy()


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value; tokens expected fewer than five times make one class, as the test demands."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    classes = [(counts[~rare], expected[~rare]), ([counts[rare].sum()], [expected[rare].sum()])]
    classes = classes if expected[rare].sum() > 0 else classes[:1]
    observed, wanted = (np.concatenate(part) for part in zip(*classes, strict=True))
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2, temperature=1.3),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02, logit_bias={3: 2.0}),
    ],
    ids=repr,
)
def test_frequencies_pass_chi_squared(params: SamplingParams) -> None:
    logits = spread(1, 300, seed=5, scale=2.0)[0]
    exact = torch.softmax(processed(logits[None], params)[0].double(), -1).numpy()
    counts = draws(logits, params, first_seed=1_000_000)
    assert counts[exact == 0].sum() == 0
    assert chi_squared(counts, exact) > 1e-3


@pytest.mark.slow
def test_one_request_over_its_steps_passes_chi_squared() -> None:
    """The same seed, token after token: what one long output draws."""
    logits, steps = spread(1, 40, seed=2, scale=1.5)[0], 20_000
    state = SamplingState(1, 40)
    state.add("it", SamplingParams(seed=77), [0], [], None)
    sampler, counts = Sampler(), np.zeros(40)
    for _ in range(steps):
        token = int(sampler(logits.clone()[None], state.batch(["it"])).token_ids)
        state.append("it", token)
        counts[token] += 1
    assert chi_squared(counts, torch.softmax(logits.double(), -1).numpy()) > 1e-3


# ---- determinism ------------------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=5),
    SamplingParams(temperature=0.7, top_k=40, seed=6),
    SamplingParams(temperature=1.4, top_p=0.9, seed=7),
    SamplingParams(min_p=0.05, seed=8),
    SamplingParams(top_k=300, top_p=0.99, frequency_penalty=0.5, repetition_penalty=1.2, seed=9),
    SamplingParams(presence_penalty=1.0, logit_bias={3: 5.0}, seed=10),
    SamplingParams(allowed_token_ids=list(range(50)), min_tokens=3, stop_token_ids=[1], seed=11),
]


def fake_model(prompt: list[int], output: list[int], vocab_size: int) -> Tensor:
    """Logits that depend on the whole context of one request and on nothing else."""
    seed = hash((*prompt, -1, *output)) % 2**31
    return spread(1, vocab_size, seed=seed)[0]


def generate(
    names: list[str], steps: int, preempt_at: int | None = None, vocab_size: int = 1003
) -> dict[str, list[int]]:
    """Run the named requests together. At `preempt_at`, all rows are dropped and come back in another order."""
    state, sampler = SamplingState(len(MIXED), vocab_size), Sampler()
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        state.add(name, MIXED[int(name)], [int(name), 1], [], None if MIXED[int(name)].seed else 0)
    for step in range(steps):
        if step == preempt_at:
            for name in names:
                state.remove(name)
            for name in reversed(names):
                state.add(name, MIXED[int(name)], [int(name), 1], outputs[name], None if MIXED[int(name)].seed else 0)
        logits = torch.stack([fake_model([int(name), 1], outputs[name], vocab_size) for name in names])
        for name, token in zip(names, sampler(logits, state.batch(names)).token_ids.tolist(), strict=True):
            state.append(name, token)
            outputs[name].append(token)
    return outputs


def test_same_tokens_alone_in_any_batch_in_any_order_after_preemption_and_again() -> None:
    names = [str(i) for i in range(len(MIXED))]
    want = generate(names, steps=12)
    assert generate(names, steps=12) == want
    assert generate(names[::-1], steps=12) == want
    assert generate(names[2:5] + names[:1], steps=12) == {name: want[name] for name in ["2", "3", "4", "0"]}
    for name in names:
        assert generate([name], steps=12) == {name: want[name]}
    for at in (1, 5, 11):
        assert generate(names, steps=12, preempt_at=at) == want


def test_seeds_differ() -> None:
    logits = spread(1, 1000, scale=1.0).repeat(50, 1)
    assert len(set(sample(logits, [SamplingParams(seed=i) for i in range(50)]).token_ids.tolist())) > 10
    assert len(set(sample(logits, [SamplingParams(seed=4)] * 50).token_ids.tolist())) == 1


@settings(max_examples=40)
@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 3))
def test_a_row_does_not_depend_on_the_others(order: list[int], size: int, width: int) -> None:
    vocab_size = [50, 517, 4096, 5000][width]
    logits, params = spread(12, vocab_size, seed=1), [MIXED[i % 8] for i in range(12)]
    params = [p.clone(seed=i) for i, p in enumerate(params)]
    everyone = sample(logits, params).token_ids
    chosen = order[:size]
    assert torch.equal(sample(logits[chosen], [params[i] for i in chosen]).token_ids, everyone[chosen])


def test_processed_logits_of_a_row_are_bit_identical_in_any_batch() -> None:
    logits, params = spread(16, 3001, seed=3), [MIXED[i % 8] for i in range(16)]
    together = processed(logits, params)
    for i in range(16):
        assert torch.equal(processed(logits[i : i + 1], params[i]), together[i : i + 1])


def test_greedy_is_argmax_whatever_the_filters() -> None:
    logits = spread(20, 777)
    params = [SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=0.9, seed=i) for i in range(20)]
    assert torch.equal(sample(logits, params).token_ids, logits.argmax(-1))
    mixed = [p if i % 2 else SamplingParams(temperature=1.9, seed=i) for i, p in enumerate(params)]
    assert torch.equal(sample(logits, mixed).token_ids[1::2], logits.argmax(-1)[1::2])


@pytest.mark.parametrize("size", [3, 16, 1024, 1027])
def test_the_largest_is_the_first_of_equals_or_none(size: int) -> None:
    logits = spread(9, size).round(decimals=1)
    logits[0] = NEVER
    logits[1] = -0.0
    for row, odd in ((2, math.nan), (3, -math.nan), (4, math.inf)):
        logits[row, size - 1] = odd
    logits[5, 1:] = NEVER
    want = torch.from_numpy(logits.numpy().argmax(-1))
    want[torch.tensor([0, 2, 3, 4])] = -1
    assert torch.equal(transforms.take_largest(logits), want)
    assert len(transforms.take_largest(logits.t().contiguous().t()[:0])) == 0


def test_greedy_rows_go_to_the_argmax_that_was_given() -> None:
    seen = []
    sampler = Sampler(argmax=lambda logits: seen.append(len(logits)) or transforms.take_largest(logits))
    params = [SamplingParams(temperature=temperature) for temperature in (0, 1, 0)]
    assert len(sampler(spread(3, 50), make_batch(params, 50)).token_ids) == 3 and seen == [2]


def test_greedy_obeys_what_is_not_chance() -> None:
    row = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    assert sample(row, [SamplingParams(temperature=0, logit_bias={0: -10})]).token_ids.tolist() == [1]
    assert sample(row, [SamplingParams(temperature=0, allowed_token_ids=[3])]).token_ids.tolist() == [3]
    penalised = SamplingParams(temperature=0, presence_penalty=2.0)
    assert sample(row, [penalised], outputs=[[0]]).token_ids.tolist() == [1]


# ---- failures stay alone ----------------------------------------------------------------------------------------


def raising(logits: Tensor, view: object) -> Tensor:
    logits.fill_(7.0)
    raise KeyError("oops")


def wrong_shape(logits: Tensor, view: object) -> Tensor:
    return logits[:3]


def no_tensor(logits: Tensor, view: object) -> None:
    return None


def all_nan(logits: Tensor, view: object) -> Tensor:
    return logits * math.nan


def all_forbidden(logits: Tensor, view: object) -> Tensor:
    return torch.full_like(logits, NEVER)


def lost(logits: Tensor, view: object) -> Tensor:
    return logits


lost.after = "nowhere"  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (raising, "transform raising raised KeyError: 'oops'"),
        (wrong_shape, r"transform wrong_shape must return logits \[50\], returned \[3\]"),
        (no_tensor, "returned NoneType"),
        (all_nan, "no token can be drawn"),
        (all_forbidden, "no token can be drawn"),
        (lost, "wants to run after 'nowhere'"),
    ],
)
def test_a_bad_transform_fails_its_own_request(transform: object, reason: str, temperature: float) -> None:
    logits, others = spread(5, 50), [SamplingParams(seed=i, logprobs=1) for i in range(5)]
    want = sample(logits, others)
    params = list(others)
    params[2] = SamplingParams(temperature=temperature, logits_processors=[transform], logprobs=1)
    got = sample(logits, params)
    assert list(got.errors) == ["2"]
    assert re.search(reason, got.errors["2"])
    assert got.token_ids[2] == -1
    assert got.logprobs[2] is None
    keep = [0, 1, 3, 4]
    assert torch.equal(got.token_ids[keep], want.token_ids[keep])
    assert [got.logprobs[i] for i in keep] == [want.logprobs[i] for i in keep]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"repetition_penalty": 1.5}])
def test_bad_logits_fail_their_own_row(value: float, filters: dict) -> None:
    logits = spread(3, 500, scale=0.1)
    params = [SamplingParams(temperature=0), SamplingParams(seed=1, **filters), SamplingParams(seed=2, **filters)]
    want = sample(logits, params).token_ids
    for bad in range(3):
        broken = logits.clone()
        broken[bad, 7] = value
        got = sample(broken, params)
        assert list(got.errors) == [str(bad)]
        assert all(got.token_ids[i] == want[i] for i in range(3) if i != bad)


def test_wrong_logits_are_refused() -> None:
    batch = make_batch([SamplingParams()] * 2, 50)
    for logits in (torch.zeros(2, 49), torch.zeros(3, 50), torch.zeros(2, 50, dtype=torch.float64), torch.zeros(100)):
        with pytest.raises(ValueError, match=r"logits must be float32 \[2, 50\]"):
            Sampler()(logits, batch)


# ---- users' transforms ------------------------------------------------------------------------------------------


def test_a_request_transform_sees_its_own_row_and_view() -> None:
    seen = []

    def spy(logits: Tensor, view) -> Tensor:
        seen.append(
            (logits.clone(), view.request_id, view.params.extra_args, view.prompt_token_ids, view.output_token_ids)
        )
        return logits

    logits = spread(3, 50)
    mine = SamplingParams(logits_processors=[spy], extra_args={"a": 1}, temperature=0.5)
    sample(logits, [SamplingParams(), mine, SamplingParams()], prompts=[[1], [2, 3], [4]], outputs=[[], [9], []])
    [(row, *rest)] = seen
    assert torch.equal(row, logits[1])  # before the temperature
    assert rest == ["1", {"a": 1}, [2, 3], [9]]


def test_the_place_of_a_request_transform() -> None:
    def late(logits: Tensor, view) -> Tensor:
        late.kept = int(logits.isfinite().sum())  # type: ignore[attr-defined]
        return logits

    late.after = "top_k"  # type: ignore[attr-defined]
    sample(spread(2, 50), [SamplingParams(top_k=4, logits_processors=[late]), SamplingParams()])
    assert late.kept == 4  # type: ignore[attr-defined]


def test_an_engine_transform_sees_the_batch() -> None:
    def only_row_1_may_say_7(logits: Tensor, batch) -> Tensor:
        for i, request in enumerate(batch.requests):
            if request.request_id != "1":
                logits[i, 7] = NEVER
        return logits

    row = torch.zeros(3, 20)
    row[:, 7] = 50.0
    got = Sampler(transforms=[only_row_1_may_say_7])(row, make_batch([SamplingParams(temperature=0)] * 3, 20))
    assert [token == 7 for token in got.token_ids.tolist()] == [False, True, False]


# ---- the state --------------------------------------------------------------------------------------------------


def test_rows_are_reused_and_limits_are_kept() -> None:
    state = SamplingState(2, 10)
    state.add("a", SamplingParams(seed=1), [1], [], None)
    state.add("b", SamplingParams(frequency_penalty=1.0, seed=2), [1], [3], None)
    with pytest.raises(ValueError, match="max_num_seqs"):
        state.add("c", SamplingParams(seed=1), [1], [], None)
    with pytest.raises(ValueError, match="already"):
        state.add("a", SamplingParams(seed=1), [1], [], None)
    state.remove("b")
    state.add("c", SamplingParams(presence_penalty=1.0, seed=2), [4], [], None)
    assert state.requests["c"].row == 1
    assert list(state.counts.slot) == [1]
    with pytest.raises(KeyError):
        state.batch(["b"])
    with pytest.raises(KeyError):
        state.remove("b")


def test_a_request_must_bring_what_it_needs() -> None:
    state = SamplingState(2, 10)
    with pytest.raises(ValueError, match="seed"):
        state.add("a", SamplingParams(), [1], [], None)
    with pytest.raises(ValueError, match="bad_words"):
        state.add("a", SamplingParams(bad_words=["x"]), [1], [], 1)
    with pytest.raises(ValueError, match="structured_outputs"):
        state.add("a", SamplingParams(structured_outputs={"regex": "a"}), [1], [], 1)
    assert not state.requests
    state.add("a", SamplingParams(), [1], [], 1)
    state.add("b", SamplingParams(), [1], [], 1)


def test_the_batch_is_kept_while_nothing_changes() -> None:
    state = SamplingState(3, 10)
    for name in "abc":
        state.add(name, SamplingParams(seed=1), [1], [], None)
    first = state.batch(["a", "b"])
    state.append("a", 3)
    assert state.batch(["a", "b"]) is first
    assert first.column("num_output_tokens").tolist() == [1, 0]
    assert state.batch(["b", "a"]) is not first
    second = state.batch(["a", "b"])
    state.remove("c")
    assert state.batch(["a", "b"]) is not second


# ---- reports ----------------------------------------------------------------------------------------------------


def test_logprobs_modes() -> None:
    logits = spread(4, 30)
    modes = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
    params = [SamplingParams(temperature=0.5, top_k=3, logprobs=4, logprobs_mode=mode, seed=1) for mode in modes]
    out = sample(logits, params)
    final = processed(logits, params)
    values = [torch.log_softmax(logits, -1), logits, torch.log_softmax(final, -1), final]
    for i, report in enumerate(out.logprobs):
        assert report is not None
        chosen = int(out.token_ids[i])
        assert next(iter(report)) == chosen
        for token, entry in report.items():
            assert entry.logprob == pytest.approx(float(values[i][i, token]), abs=1e-6)
        assert {t for t, e in report.items() if e.logprob > NEVER} <= set(values[i][i].topk(4).indices.tolist()) | {
            chosen
        }
        assert report[chosen].rank == int((values[i][i] > values[i][i, chosen]).sum()) + 1


def test_number_of_logprobs() -> None:
    logits = spread(5, 30)
    out = sample(logits, [SamplingParams(seed=i, logprobs=n) for i, n in enumerate([None, 0, 2, -1, 30])])
    sizes = [None if report is None else len(report) for report in out.logprobs]
    assert sizes[0] is None
    assert sizes[1] == 1
    assert sizes[2] in (2, 3)
    assert sizes[3:] == [30, 30]
    assert out.logprobs[3] is not None
    assert sorted(entry.rank for entry in out.logprobs[3].values()) == list(range(1, 31))


def test_reports_do_not_depend_on_the_others() -> None:
    logits = spread(6, 500)
    params = [SamplingParams(seed=i, logprobs=i, temperature=0.8) for i in range(6)]
    together = sample(logits, params)
    for i in range(6):
        assert sample(logits[i : i + 1], [params[i]]).logprobs[0] == together.logprobs[i]


def test_default_mode_of_the_engine() -> None:
    with pytest.raises(ValueError, match="logprobs_mode"):
        Sampler(logprobs_mode="raw")
    logits = spread(1, 30)
    out = Sampler(logprobs_mode="raw_logits")(logits.clone(), make_batch([SamplingParams(logprobs=0, seed=0)], 30))
    token = int(out.token_ids)
    assert out.logprobs[0] is not None
    assert out.logprobs[0][token].logprob == pytest.approx(float(logits[0, token]))


# ---- explain ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", MIXED, ids=repr)
def test_explain_tells_what_the_sampler_does(params: SamplingParams) -> None:
    logits = spread(1, 400, seed=4)
    prompts, outputs = [[1, 2, 3]], [[5, 5]]
    want = int(sample(logits, [params], prompts=prompts, outputs=outputs).token_ids)
    before = logits.clone()
    table = Sampler().explain(logits[0], params, prompt_token_ids=prompts[0], output_token_ids=outputs[0], seed=0)
    assert torch.equal(logits, before)
    assert table.token_id.iloc[-1] == want
    assert table.stage.iloc[0] == "model"
    final = processed(logits, params, prompts=prompts, outputs=outputs)[0]
    assert table.kept.iloc[-2] == int(final.isfinite().sum())
    assert table.tokens.iloc[-2] == final.topk(min(5, table.kept.iloc[-2])).indices.tolist()


def test_explain_places_u_inside_the_chosen_piece() -> None:
    logits = spread(1, 30)[0]
    table = Sampler().explain(logits, SamplingParams(temperature=0.7), seed=12)
    p = torch.softmax(logits.double() / 0.7, -1)
    token, u = int(table.token_id.iloc[-1]), float(table.u.iloc[-1])
    assert float(p[:token].sum()) <= u < float(p[: token + 1].sum())


def test_explain_gives_the_reason_when_no_token_comes_out() -> None:
    with pytest.raises(ValueError, match="raised KeyError"):
        Sampler().explain(torch.zeros(5), SamplingParams(logits_processors=[raising]), seed=0)


@pytest.mark.parametrize("where", ["column_values", "counts"])
def test_a_request_that_cannot_be_added_gives_its_row_back(where, monkeypatch):
    from minivllm.sampling import state as module

    def fails(*args):
        raise OverflowError("made up")

    state = module.SamplingState(2, 10)
    with monkeypatch.context() as patch:
        if where == "column_values":
            patch.setattr(module, "column_values", fails)
        else:
            patch.setattr(state.counts, "add", fails)
        for i in range(5):
            with pytest.raises(OverflowError, match="made up"):
                state.add(str(i), SamplingParams(presence_penalty=1.0), [1], [], 0)
    for i in range(2):
        state.add(str(i), SamplingParams(top_k=2**63), [1], [], 0)
    assert len(state.requests) == 2
