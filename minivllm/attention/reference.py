"""Reference attention backend in plain torch, one token at a time: the oracle for the others."""

# Generated from nbs/attention/reference.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, Plan, as_bytes, int8_parts

__all__ = ["ReferenceBackend"]


def attend_one(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
    """Attention of one token to the keys that it sees.

    Args:
        q: [num_heads, head_dim].
        keys, values: [n, num_kv_heads, head_dim]; every one of them is seen.
        spec: for the scale, the soft cap and the grouping of heads.
        sinks: [num_heads], see `AttentionBackend`.

    Returns:
        [num_heads, head_dim].
    """
    grouped = q.view(spec.num_kv_heads, spec.group_size, spec.head_dim)
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = sinks.to(scores.dtype).view(spec.num_kv_heads, spec.group_size, 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), dim=-1)[..., :-1]
    return torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)


def gather(kv_cache: Tensor, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of one request, in order.

    Args:
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; 1 in the place of 2 if it holds keys only; or see `int8_parts`.
        block_ids: int64 [at least length / block_size].

    Returns:
        Two tensors [length, num_kv_heads, head_dim].
    """
    used = block_ids[: -(-length // kv_cache.shape[2])]
    if kv_cache.dtype == torch.int8:
        numbers, scales = (part[:, used] for part in int8_parts(kv_cache))
        pages = numbers * scales.transpose(-1, -2)[..., None]
    else:
        pages = as_bytes(kv_cache)[:, used].view(kv_cache.dtype)
    parts = pages.flatten(1, 2)[:, :length]
    return parts[0], parts[-1]


@dataclass
class ReferencePlan(Plan):
    """The batch as it came, the block table on the device."""

    batch: AttentionBatch
    block_table: Tensor


class ReferenceBackend(AttentionBackend):
    """Attention as its definition says it, request by request, token by token.

    A token's result depends on its own query and its own keys only, through operations whose shapes depend on nothing
    but its position: bit-identical in any batch, any chunking and any placement of blocks.

    Args:
        compute_dtype: float32, or float64 when the result serves as the truth.
    """

    name: ClassVar[str] = "reference"
    batch_invariant: ClassVar[bool] = True

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        if compute_dtype not in (torch.float32, torch.float64):
            raise ValueError(f"ReferenceBackend computes in torch.float32 or torch.float64, got {compute_dtype}")
        self.compute_dtype = compute_dtype

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """It computes whatever is causal."""
        return None if spec.causal else spec.beyond_kernels

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> ReferencePlan:
        batch.check(spec.block_size)
        return ReferencePlan(
            spec=spec,
            slot_mapping=torch.as_tensor(batch.slot_mapping, device=device),
            batch=batch,
            block_table=torch.as_tensor(batch.block_table, device=device).long(),
        )

    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, ReferencePlan)
        spec, batch = plan.spec, plan.batch
        out = q.new_empty(*q.shape[:2], spec.out_dim)
        for r in range(batch.num_reqs):
            start, end, length = (
                int(batch.query_start_loc[r]),
                int(batch.query_start_loc[r + 1]),
                int(batch.seq_lens[r]),
            )
            gathered = zip(gather(kv_cache, plan.block_table[r], length), self.scales, strict=True)
            keys, values = (x.to(self.compute_dtype) * scale for x, scale in gathered)
            for row in range(start, end):
                position = length - end + row
                seen = self.visible(spec, position)
                if batch.last_key is not None and batch.last_key[row] > position:
                    seen = slice(int(spec.first_key(np.asarray(position))), int(batch.last_key[row]) + 1)
                out[row] = attend_one(
                    q[row].to(self.compute_dtype), keys[seen], values[seen][..., : spec.out_dim], spec, self.sinks
                )
        return out

    def visible(self, spec: AttentionSpec, position: int) -> slice | Sequence[int]:
        """Which keys the token at a position sees: places in the text. Override it to try another mask.

        Keys are rotated for their own place, whatever else is left out.
        """
        return slice(int(spec.first_key(np.asarray(position))), position + 1)
