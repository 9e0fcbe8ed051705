"""Attention of encoders: both ways, within the prompts of one step, without a cache."""

# Generated from nbs/attention/encoder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, Plan
from minivllm.attention.sdpa import alike


class Rectangle(NamedTuple):
    """Prompts of similar length. rows: int64 [n, width], the rows of their tokens in the step; positions: int64 [n, width]; padded: whether any is."""

    rows: Tensor
    positions: Tensor
    padded: bool


@dataclass
class EncoderPlan(Plan):
    """The calls of a step."""

    rectangles: list[Rectangle]


def plan_rectangle(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Rectangle:
    """starts, lengths: int [n], where each prompt begins among the step's tokens, and its tokens."""
    positions = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1).astype(np.int64)
    rows = positions + starts[:, None]
    padded = bool((lengths != lengths[0]).any())
    return Rectangle(torch.as_tensor(rows, device=device), torch.as_tensor(positions, device=device), padded)


class EncoderBackend(AttentionBackend):
    """Attention of every token to all tokens of its prompt, by torch's `scaled_dot_product_attention`.

    Attributes:
        window: a token sees this many tokens on either side; None for all.
    """

    name: ClassVar[str] = "encoder"
    window: int | None = None

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Refuses attention that is causal."""
        return "it keeps no cache, and causal attention reads one" if spec.causal else None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> EncoderPlan:
        """See `AttentionBackend.plan`.

        Raises:
            ValueError: a prompt is not in the step as a whole.
        """
        lengths, starts = batch.query_lens, batch.query_start_loc[:-1].astype(np.int64)
        if (lengths != batch.seq_lens).any():
            raise ValueError(f"an encoder computes prompts as a whole: {lengths} tokens in a step, of {batch.seq_lens}")
        parts = [plan_rectangle(starts[part], lengths[part], device) for part in alike(lengths)]
        return EncoderPlan(spec, torch.as_tensor(batch.slot_mapping, device=device), parts)

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Put the step's keys and values where `attend` reads them, in the order of its tokens."""
        torch.stack((k, v), out=kv_cache)

    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        """See `AttentionBackend.attend`. kv_cache: the step's own keys and values, [2, T, num_kv_heads, head_dim]."""
        assert isinstance(plan, EncoderPlan)
        out = torch.empty_like(q)
        for rows, positions, padded in plan.rectangles:
            mask = None
            if padded:  # a repeated position is padding
                valid = torch.ones_like(positions, dtype=torch.bool)
                valid[:, 1:] = positions[:, 1:] != positions[:, :-1]
                mask = valid[:, None, None, :]
            if self.window is not None:
                near = (positions[:, None, :, None] - positions[:, None, None, :]).abs() <= self.window
                mask = near if mask is None else near & mask
            queries, keys, values = (x[rows].transpose(1, 2) for x in (q, *kv_cache))
            gqa = plan.spec.group_size > 1
            found = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=plan.spec.scale, enable_gqa=gqa
            )
            out[rows] = found.transpose(1, 2)
        return out
