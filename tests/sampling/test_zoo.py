"""The zoo: transformers where it has the animal, the published definition else."""

import math

import pytest
import torch
from sampling_batches import make_batch, processed, sample, spread
from torch import Tensor
from transformers import TypicalLogitsWarper
from transformers.generation import TopKLogitsWarper

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.zoo import DRY, XTC, Mirostat, TopNSigma, TypicalP

V = 300


def kept_by(transform: object, logits: Tensor, **batch: list) -> Tensor:
    params = SamplingParams(temperature=1.0, seed=3, logits_processors=[transform])
    return processed(logits, params, **batch) > -math.inf


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9])
def test_typical(mass: float) -> None:
    logits = spread(1, V)
    assert torch.equal(kept_by(TypicalP(mass), logits), TypicalLogitsWarper(mass)(None, logits.clone()).isfinite())


def test_typical_after_a_filter() -> None:
    logits = TopKLogitsWarper(20)(None, spread(1, V))
    assert torch.equal(kept_by(TypicalP(0.6), logits), TypicalLogitsWarper(0.6)(None, logits.clone()).isfinite())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_n_sigma_does_not_depend_on_the_temperature(temperature: float) -> None:
    logits = spread(1, V)
    params = SamplingParams(temperature=temperature, logits_processors=[TopNSigma(1.5)])
    got = processed(logits, params) > -math.inf
    assert torch.equal(got, logits >= logits.max() - 1.5 * logits.std(correction=0))
    assert 1 <= int(got.sum()) < V


def test_xtc_keeps_the_least_likely_of_the_top_choices() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    assert kept_by(XTC(0.1, probability=1.0), logits).tolist() == [[False, False, True, True, True]]
    assert kept_by(XTC(0.1, probability=0.0), logits).all()
    assert kept_by(XTC(0.35, probability=1.0), logits).all()


def test_xtc_acts_as_often_as_it_should() -> None:
    logits = torch.tensor([[0.6, 0.4]]).log().repeat(2000, 1)
    params = [SamplingParams(seed=i, logits_processors=[XTC(0.1, probability=0.25)]) for i in range(2000)]
    acted = (processed(logits, params)[:, 0] == -math.inf).float().mean()
    assert abs(float(acted) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
    assert torch.equal(sample(logits, params).token_ids, sample(logits, params).token_ids)


def dry_by_definition(ids: list[int], token: int, breakers: set[int]) -> int:
    """The longest n such that the last n tokens occurred before, followed by `token`, without a breaker."""
    best = 0
    for n in range(1, len(ids)):
        tail = ids[-n:]
        found = any(ids[i : i + n] == tail and ids[i + n] == token for i in range(len(ids) - n))
        if found and not breakers & set(tail):
            best = n
    return best


@pytest.mark.parametrize("breakers", [set(), {3}])
def test_dry(breakers: set[int]) -> None:
    prompt, output = [1, 2, 3, 4, 9, 2, 3, 4, 7], [1, 2, 3, 4]
    logits = spread(1, 12)
    params = SamplingParams(logits_processors=[DRY(0.5, 2.0, 2, breakers)], seed=1)
    got = processed(logits, params, prompts=[prompt], outputs=[output])[0]
    for token in range(12):
        n = dry_by_definition(prompt + output, token, breakers)
        want = float(logits[0, token]) - (0.5 * 2.0 ** (n - 2) if n >= 2 else 0.0)
        assert float(got[token]) == pytest.approx(want, abs=1e-5)


def test_mirostat_holds_the_surprise() -> None:
    def mean_surprise(transforms: list) -> float:
        batch, sampler, total = make_batch([SamplingParams(seed=5, logits_processors=transforms)], V), Sampler(), 0.0
        for step in range(300):
            seen: list[Tensor] = []
            out = sampler(spread(1, V, seed=step, scale=1.0), batch, lambda name, x, seen=seen: seen.append(x.clone()))
            token = int(out.token_ids)
            batch.state.append("0", token)
            total -= float(torch.log_softmax(seen[-1][0], -1)[token]) / math.log(2)
        return total / 300

    assert mean_surprise([]) > 7
    assert mean_surprise([Mirostat(tau=4.0)]) == pytest.approx(4.0, abs=0.3)


def test_mirostat_keeps_requests_apart() -> None:
    shared = Mirostat(tau=3.0)
    batch = make_batch([SamplingParams(seed=i, logits_processors=[shared]) for i in range(2)], V)
    alone = make_batch([SamplingParams(seed=1, logits_processors=[Mirostat(tau=3.0)])], V, names=["1"])
    for step in range(30):
        logits = spread(2, V, seed=step)
        pair = Sampler()(logits.clone(), batch).token_ids.tolist()
        single = Sampler()(logits[1:].clone(), alone).token_ids.tolist()
        assert pair[1] == single[0]
        for name, token in zip("01", pair, strict=True):
            batch.state.append(name, token)
        alone.state.append("1", single[0])
