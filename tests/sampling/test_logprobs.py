"""Log probabilities of given tokens."""

import pytest
import torch
from sampling_batches import spread

from minivllm.sampling.logprobs import Logprob, compute_logprobs, gather_logprobs


@pytest.mark.parametrize("top", [0, 3, -1, 999])
def test_prompt_logprobs(top: int) -> None:
    logits, ids = spread(40, 100), torch.arange(40)
    before = logits.clone()
    reports = compute_logprobs(logits, ids, top)
    exact = torch.log_softmax(logits.double(), -1)
    assert torch.equal(logits, before)
    for t, report in enumerate(reports):
        want = {t, *exact[t].topk(100 if top in (-1, 999) else top).indices.tolist()}
        assert set(report) == want
        for token, entry in report.items():
            assert entry.logprob == pytest.approx(float(exact[t, token]), abs=1e-5)
            assert entry.rank == int((exact[t] > exact[t, token]).sum()) + 1


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids = spread(40, 100), list(range(40))
    want = compute_logprobs(logits, ids, 2)
    monkeypatch.setattr("minivllm.sampling.logprobs._SLICE", 300)
    assert compute_logprobs(logits, ids, 2) == want


def test_order_and_ranks_with_ties() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    [report] = gather_logprobs(values, torch.tensor([0]), [2])
    assert next(iter(report)) == 0
    assert report[0] == Logprob(1.0, 3)
    [tied] = gather_logprobs(values, torch.tensor([2]), [0])
    assert tied == {2: Logprob(3.0, 1)}


def test_no_rows() -> None:
    assert compute_logprobs(torch.zeros(0, 5), [], 3) == []


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="logits have 3 rows, token_ids 2"):
        compute_logprobs(torch.zeros(3, 5), [1, 2], 0)
