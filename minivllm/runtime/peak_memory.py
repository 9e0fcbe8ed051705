"""Peak GPU memory of the largest possible step, and a rehearsal of the first ones."""

# Generated from nbs/runtime/peak_memory.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBatch
from minivllm.attention.numba_cuda import cuda_ops
from minivllm.attention.state import cache_layout
from minivllm.core.config import KVCacheConfig, SchedulerConfig
from minivllm.core.module import ModuleList
from minivllm.core.speculative import SpeculativeConfig
from minivllm.models.decoder import Decoder
from minivllm.sampling.transforms import draw, keep_from, top_p_threshold
from minivllm.spec_decode.rejection import choose_by_ratio


def prompts_batch(tokens: int, longest: int, block_size: int) -> AttentionBatch:
    """A step of `tokens` tokens: prompts of `longest` tokens each, the last one perhaps shorter, in separate blocks from block 1 on."""
    lens = np.full(-(-tokens // longest), longest, np.int32)
    lens[-1] = tokens - longest * (len(lens) - 1)
    blocks = -(-lens // block_size)
    first = np.cumsum(blocks) - blocks + 1
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    place = np.arange(tokens) - np.repeat(starts[:-1], lens)
    number = np.arange(blocks.max())
    table = np.where(number < blocks[:, None], first[:, None] + number, 0).astype(np.int32)
    slots = np.repeat(first, lens) * block_size + place
    return AttentionBatch(starts, lens, table, slots.astype(np.int64))


def _run(decoder: Decoder, kv: KVCacheConfig, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Run the layers for a batch of random tokens. Returns the hidden states, and the cache that was made for the batch."""
    device = decoder.device
    specs = decoder.attention_specs(kv.block_size)
    shape, dtype = cache_layout(decoder.backend, specs, int(batch.block_table.max()) + 1)
    cache = torch.zeros(shape, dtype=dtype, device=device)
    plans = [specs[group.layers[0]].planner(decoder.backend, device)(batch) for group in kv.groups]
    token_ids = torch.randint(decoder.spec.vocab_size, (batch.num_tokens,), device=device)
    positions = np.arange(batch.num_tokens) - np.repeat(batch.query_start_loc[:-1], batch.query_lens)
    positions = torch.from_numpy(positions).to(device)
    return decoder.forward(token_ids, positions, [cache] * kv.num_tensors, plans), cache


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, kv: KVCacheConfig, limits: SchedulerConfig, speculative: SpeculativeConfig | None = None
) -> int:
    """Run a step of `max_num_batched_tokens` random tokens in prompts of `max_model_len`, and sample after as many of them as a step may.

    A draft model, or a proposer of the user's own, may give probabilities for its draft tokens: then the rejection rule runs, too.
    Returns the bytes of the step's cache.
    """
    decoder.bind(kv)
    hidden, cache = _run(decoder, kv, prompts_batch(limits.max_num_batched_tokens, limits.max_model_len, kv.block_size))
    if not decoder.stage.is_last:
        return cache.numel() * cache.element_size()
    logits = decoder.compute_logits(hidden[: limits.max_sampled_rows(speculative)])
    rows = torch.full((len(logits),), 0.9, dtype=torch.float64, device=decoder.device)
    drawn, _ = draw(keep_from(logits, top_p_threshold(logits, rows)), rows)
    if speculative is not None and (not isinstance(speculative.method, str) or speculative.model is not None):
        given = torch.full_like(logits, 1 / logits.shape[1])
        choose_by_ratio(logits.clone(), torch.stack(list(given)), drawn, rows, rows)
    return cache.numel() * cache.element_size()


def peak_bytes(
    decoder: Decoder, kv: KVCacheConfig, limits: SchedulerConfig, speculative: SpeculativeConfig | None = None
) -> int:
    """Bytes of GPU memory that the largest step takes at its peak, besides weights and cache."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    cache = run_largest_step(decoder, kv, limits, speculative)
    torch.cuda.synchronize(decoder.device)
    peak = torch.cuda.max_memory_allocated(decoder.device) - before - cache
    torch.cuda.empty_cache()
    return peak


FIRST_STEPS = ((256, 2), (1, 1), (1, 64), (256, 1), (128, 1), (8, 1), (1, 16))
"""Steps of a rehearsal, as (tokens per request, requests). They use the kernels of a model's first steps: long and short prompts, and decoding."""


@torch.inference_mode()
def rehearse(decoder: Decoder, kv: KVCacheConfig, limits: SchedulerConfig, every_layer: bool = False) -> list[Any]:
    """Run `FIRST_STEPS` with our kernels noted instead of launched (`ops.rehearsal`), and let other processes compile those not in the cache.

    They begin after the first step. Meanwhile the engine goes on starting. The results mean nothing, so the weights need not be read yet. Of layers with equal specs one runs,
    or with `every_layer` all do. Returns the kernels, for `ops.load_rehearsed`.
    """
    decoder.bind(kv)
    layers, specs = decoder.layers, decoder.spec.layers
    kernels: dict[Any, None] = {}
    decoder.layers = ModuleList(x for i, x in enumerate(layers) if every_layer or specs[i] not in specs[:i])
    try:
        for tokens, requests in FIRST_STEPS:
            tokens = min(tokens, limits.max_model_len)
            with cuda_ops().rehearsal(decoder.device) as noted:
                hidden, _ = _run(decoder, kv, prompts_batch(tokens * requests, tokens, kv.block_size))
                if decoder.head is not None:
                    last = hidden[tokens - 1 :: tokens]
                    decoder.ops.argmax(decoder.compute_logits(last))
                    decoder.compute_argmax(last)
            kernels |= noted
    finally:
        decoder.layers = layers
    return list(kernels)
