"""Attention backend that gathers pages and calls torch's scaled_dot_product_attention."""

# Generated from nbs/attention/sdpa.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.backend import FP8, AttentionBackend, AttentionBatch, AttentionSpec, Plan, as_bytes, int8_parts

__all__ = ["Pages", "SDPABackend", "alike"]


@dataclass
class DecodeCall:
    """Rows with one query each whose visible lengths are alike, as one rectangle.

    Attributes:
        rows: int64 [n], token rows of the batch; None if they are all of them, in order.
        slots: int64 [n * width], the cache slots to read, row by row. Padding repeats the row's own last slot.
        mask: bool [n, 1, 1, width], False on the padding; None if there is none.
        width: keys per row.
    """

    rows: Tensor | None
    slots: Tensor
    mask: Tensor | None
    width: int


@dataclass
class PrefillCall:
    """One request with several queries.

    Attributes:
        start, end: its token rows.
        slots: int64 [n], the cache slots of the keys that any of the queries sees.
        mask: bool [end - start, n]; None if plain causal masking of a square does it.
    """

    start: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass
class SDPAPlan(Plan):
    """The calls of a step."""

    decodes: list[DecodeCall]
    prefills: list[PrefillCall]


def slots_of(block_table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Cache slots of `positions` [n, width] in the requests whose rows are `block_table` [n, max_blocks]: int64."""
    blocks = np.take_along_axis(block_table, positions // block_size, axis=1).astype(np.int64)
    return blocks * block_size + positions % block_size


def plan_decode(batch: AttentionBatch, rows: np.ndarray, spec: AttentionSpec, device: torch.device) -> DecodeCall:
    """One call for the requests `rows` [n], all with a single query."""
    last = batch.seq_lens[rows].astype(np.int64) - 1
    first = spec.first_key(last)
    width = int((last - first).max()) + 1
    positions = first[:, None] + np.arange(width)
    valid = positions <= last[:, None]
    slots = slots_of(batch.block_table[rows], np.minimum(positions, last[:, None]), spec.block_size)
    tokens = batch.query_start_loc[rows].astype(np.int64)
    return DecodeCall(
        rows=None if len(rows) == len(batch.slot_mapping) else torch.as_tensor(tokens, device=device),
        slots=torch.as_tensor(slots.reshape(-1), device=device),
        mask=None if valid.all() else torch.as_tensor(valid[:, None, None, :], device=device),
        width=width,
    )


def plan_prefill(batch: AttentionBatch, r: int, spec: AttentionSpec, device: torch.device) -> PrefillCall:
    """The call for request `r`."""
    start, end, length = int(batch.query_start_loc[r]), int(batch.query_start_loc[r + 1]), int(batch.seq_lens[r])
    queries = np.arange(length - (end - start), length)
    first = spec.first_key(queries)
    keys = np.arange(first[0], length)
    slots = slots_of(batch.block_table[r : r + 1], keys[None], spec.block_size)[0]
    mask, last = None, queries if batch.last_key is None else batch.last_key[start:end]
    if first[-1] > first[0] or len(keys) > len(queries) or last is not queries:
        mask = torch.as_tensor((keys >= first[:, None]) & (keys <= last[:, None]), device=device)
    return PrefillCall(start, end, torch.as_tensor(slots, device=device), mask)


def alike(lengths: np.ndarray, ratio: float = 1.5, least: int = 64) -> list[np.ndarray]:
    """Split rows so that in each part the longest is at most `ratio` times the shortest (or `least` more).

    Args:
        lengths: int [n].

    Returns:
        Index arrays, each in ascending order, that together hold 0 .. n - 1. One part if all are alike.
    """
    order = np.argsort(lengths, kind="stable")
    parts, begin = [], 0
    for i in range(1, len(order) + 1):
        shortest = lengths[order[begin]] if begin < len(order) else 0
        if i == len(order) or lengths[order[i]] > max(ratio * shortest, shortest + least):
            parts.append(np.sort(order[begin:i]))
            begin = i
    return [part for part in parts if len(part)]


class SDPABackend(AttentionBackend):
    """Attention by `torch.nn.functional.scaled_dot_product_attention` over gathered pages."""

    name: ClassVar[str] = "sdpa"

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """It computes whatever is causal, but for a soft cap, which torch's kernel lacks."""
        if not spec.causal:
            return spec.beyond_kernels
        if spec.soft_cap is not None:
            return f"scaled_dot_product_attention has no soft cap on the scores (soft_cap={spec.soft_cap})"
        return None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> SDPAPlan:
        batch.check(spec.block_size)
        single = np.diff(batch.query_start_loc) == 1
        rows = np.flatnonzero(single)
        last = batch.seq_lens[rows].astype(np.int64) - 1
        return SDPAPlan(
            spec=spec,
            slot_mapping=torch.as_tensor(batch.slot_mapping, device=device),
            decodes=[plan_decode(batch, rows[p], spec, device) for p in alike(last - spec.first_key(last) + 1)],
            prefills=[plan_prefill(batch, int(r), spec, device) for r in np.flatnonzero(~single)],
        )

    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, SDPAPlan)
        spec = plan.spec
        if self.scales.k != 1.0:
            spec = replace(spec, scale=spec.scale * self.scales.k)
        keys: Pages
        values: Pages
        if kv_cache.dtype == torch.int8:
            keys, values = zip(*int8_parts(kv_cache), strict=True)
        else:
            pages = as_bytes(kv_cache) if kv_cache.dtype == FP8 else kv_cache
            parts = pages.view(len(pages), -1, spec.num_kv_heads * spec.head_dim)
            keys, values = parts[0], parts[-1]
        sinks = None if self.sinks is None else self.sinks.to(q.dtype)
        if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            out = _decode(q, keys, values, plan.decodes[0], spec, sinks)
        else:
            out = q.new_empty(*q.shape[:2], spec.out_dim)
            for decode in plan.decodes:
                out[decode.rows] = _decode(q[decode.rows], keys, values, decode, spec, sinks)
            for call in plan.prefills:
                out[call.start : call.end] = _prefill(q[call.start : call.end], keys, values, call, spec, sinks)
        return out if self.scales.v == 1.0 else out * self.scales.v


Pages = Tensor | tuple[Tensor, Tensor]
"""Keys, or values, of a cache: rows [slots, heads * head_dim], as bytes if it is fp8; or a half of what `int8_parts` gives."""


def _pick(cache: Pages, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the cache as `dtype`."""
    if isinstance(cache, tuple):
        numbers, scales = cache
        block, offset = slots // numbers.shape[1], slots % numbers.shape[1]
        return (numbers[block, offset] * scales[block, :, offset][..., None]).to(dtype)
    rows = cache.index_select(0, slots)
    return rows if rows.dtype == dtype else rows.view(FP8).to(dtype)


def _add_sink(k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key of zeros, whose score is the sink, and a value of zeros.

    k, v: [n, heads, keys, D]; mask: bool [..., keys]; sinks: [1, ..., 1]. Both broadcast to the scores.
    """
    scores = torch.zeros(mask.shape, dtype=k.dtype, device=k.device).masked_fill_(~mask, -torch.inf)
    shape = torch.broadcast_shapes(scores.shape[:-1], sinks.shape[:-1])
    zeros = torch.zeros_like(k[:, :, :1])
    mask = torch.cat((scores.expand(*shape, -1), sinks.expand(*shape, 1)), -1)
    return torch.cat((k, zeros), 2), torch.cat((v, zeros[..., : v.shape[-1]]), 2), mask


def _decode(
    q: Tensor, keys: Pages, values: Pages, call: DecodeCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The query heads that share a key-value head become its queries, so nothing is repeated. q: [n, H, D]."""
    n, heads, dim = q.shape
    shape = (n, call.width, spec.num_kv_heads, dim)
    k = _pick(keys, call.slots, q.dtype).view(shape).transpose(1, 2)
    if spec.value_dim is None:
        v = _pick(values, call.slots, q.dtype).view(shape).transpose(1, 2)
    else:  # a latent is key and value
        v = k[..., : spec.value_dim]
    grouped, mask = q.reshape(n, spec.num_kv_heads, heads // spec.num_kv_heads, dim), call.mask
    if sinks is not None:
        seen = torch.ones(n, 1, 1, call.width, dtype=torch.bool, device=q.device) if mask is None else mask
        k, v, mask = _add_sink(k, v, seen, sinks.view(1, spec.num_kv_heads, -1, 1))
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.scale).reshape(n, heads, -1)


def _prefill(
    q: Tensor, keys: Pages, values: Pages, call: PrefillCall, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """One request, q: [n, H, D]."""
    shape = (1, len(call.slots), spec.num_kv_heads, spec.head_dim)
    k = _pick(keys, call.slots, q.dtype).view(shape).transpose(1, 2)
    if spec.value_dim is None:
        v = _pick(values, call.slots, q.dtype).view(shape).transpose(1, 2)
    else:  # a latent is key and value
        v = k[..., : spec.value_dim]
    mask = call.mask
    if sinks is not None:
        seen = torch.ones(len(q), len(call.slots), dtype=torch.bool, device=q.device).tril_() if mask is None else mask
        k, v, mask = _add_sink(k, v, seen[None, None], sinks.view(1, -1, 1, 1))
    out = F.scaled_dot_product_attention(
        q[None].transpose(1, 2),
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=spec.group_size > 1,
    )
    return out[0].transpose(0, 1)
