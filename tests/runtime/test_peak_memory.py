"""The largest step: what it is, and that a model can run it. No GPU needed."""

import numpy as np
import pytest
import torch
from paged import make_decoder
from tiny_models import hf_model

from minivllm.core.config import KVCacheConfig, SchedulerConfig, make_kv_cache_groups
from minivllm.core.speculative import SpeculativeConfig
from minivllm.runtime import peak_memory
from minivllm.runtime.peak_memory import prompts_batch, run_largest_step
from minivllm.spec_decode.proposers import NgramProposer


@pytest.mark.parametrize(("budget", "longest", "lens"), [(40, 16, [16, 16, 8]), (32, 16, [16, 16]), (10, 64, [10])])
def test_the_largest_step_is_the_whole_budget_in_the_longest_prompts(budget, longest, lens):
    batch = prompts_batch(budget, longest, 8)
    batch.check(8)
    assert batch.seq_lens.tolist() == lens and batch.num_tokens == budget
    assert len(set(batch.slot_mapping.tolist())) == budget and batch.slot_mapping.min() == 8
    assert np.array_equal(
        batch.block_table[-1, -(-lens[-1] // 8) :], np.zeros(batch.block_table.shape[1] - -(-lens[-1] // 8))
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_runs_it(name):
    decoder = make_decoder(hf_model(name), "sdpa")
    kv = KVCacheConfig(50, 8, make_kv_cache_groups(decoder.spec.kv_cache_specs(8, 4)))
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=16)
    block = torch.empty(decoder.backend.kv_cache_shape(1, decoder.spec.attention_specs(8, torch.float32)[0])).nbytes
    assert run_largest_step(decoder, kv, limits) == 6 * block


@pytest.mark.parametrize("method", ["ngram", NgramProposer(1, 2)])
@pytest.mark.parametrize(("most", "rows"), [(4, 20), (30, 40)])
def test_every_draft_token_has_a_row_of_logits(monkeypatch, method, most, rows):
    """As many as the token budget allows; and of those of a proposer of the user's own, which may give probabilities, some copies."""
    decoder, by_ratio = make_decoder(hf_model("llama"), "sdpa"), []
    kv = KVCacheConfig(50, 8, make_kv_cache_groups(decoder.spec.kv_cache_specs(8, 4)))
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=16)
    sizes, compute = [], decoder.compute_logits
    monkeypatch.setattr(decoder, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    choose = peak_memory.choose_by_ratio
    monkeypatch.setattr(
        peak_memory, "choose_by_ratio", lambda p, q, *more: by_ratio.append(q.shape) or choose(p, q, *more)
    )
    speculative = SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": most})
    run_largest_step(decoder, kv, limits, speculative)
    assert sizes == [rows]
    assert by_ratio == ([] if method == "ngram" else [(rows, decoder.spec.vocab_size)])
