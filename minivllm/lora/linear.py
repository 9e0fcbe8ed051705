"""LoRA as a wrapper of linear methods: slots, rows grouped by adapter."""

# Generated from nbs/lora/linear.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.config import WEIGHT_BITS
from minivllm.lora.adapter import Adapter, LoRAWeights, lora_targets
from minivllm.models.decoder import Decoder
from minivllm.models.linear.base import LinearMethod
from minivllm.models.linear.layer import Linear

__all__ = ["CHUNK", "LONG_RUN", "RANKS", "LoRABatch", "LoRALinear", "LoRAModel"]

LONG_RUN = 128
"""Runs of at least this many rows of one adapter (a prompt) go to torch, which is faster there. More rows than are captured."""


class LoRABatch:
    """The slots of the rows that are computed next. Shared by all layers of a model.

    Args:
        max_rows: most rows of a step.
        invariant: no runs: a row's result must have the same bits in any batch.

    Attributes:
        active: whether any row has an adapter.
        runs: (slot, first row, end) of neighbouring rows of one adapter, at least `LONG_RUN` of them; torch multiplies those.
        order: int64 [max_rows], the other rows that have one, sorted by slot; `used[0]` of them.
        slots: int64 [max_rows], the slot of each of those.
    """

    def __init__(self, max_rows: int, device: torch.device, invariant: bool = False) -> None:
        self.order, self.slots, self.used = (np.zeros(n, np.int64) for n in (max_rows, max_rows, 1))
        self.active, self.device, self._has_runs = False, device, not invariant
        self.runs: list[tuple[int, int, int]] = []
        self._of_rows = np.zeros(0, np.int64)
        self._groups: list[tuple[int, Tensor]] | None = None

    def set(self, slots: npt.NDArray[np.int64]) -> None:
        """slots: of each row, -1 for no adapter."""
        self.active = bool((slots >= 0).any())
        self.runs, self._groups, self._of_rows = [], None, slots
        if not self.active:
            return
        if self._has_runs and len(slots) >= LONG_RUN:
            ends = [*(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
            spans = zip([0, *ends[:-1]], ends, strict=True)
            self.runs = [(int(slots[a]), a, b) for a, b in spans if slots[a] >= 0 and b - a >= LONG_RUN]
            slots = slots.copy()
            for _, start, end in self.runs:
                slots[start:end] = -1
        order = _sorted_by_slot(slots)
        self.used[0] = len(order)
        self.order[: len(order)], self.slots[: len(order)] = order, slots[order]

    @property
    def groups(self) -> list[tuple[int, Tensor]]:
        """(slot, its rows, int64) of each slot in use, runs among them."""
        if self._groups is None:
            order = _sorted_by_slot(self._of_rows)
            slots, starts = np.unique(self._of_rows[order], return_index=True)
            sizes = np.diff([*starts, len(order)]).tolist()
            rows = torch.from_numpy(order).to(self.device).split(sizes)
            self._groups = list(zip(slots.tolist(), rows, strict=True))
        return self._groups


def _sorted_by_slot(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows that have a slot."""
    return np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]


_BITS = {torch.float32: 32, torch.bfloat16: 16}
_KERNELS = ("cpu", "cpu_invariant", *WEIGHT_BITS)
"""Methods of numba's CPU kernels; what adapters add to the output of another method, torch computes too."""
RANKS = 8
"""Ranks are padded to a multiple of this: what the kernels multiply at once."""


def _of_base(name: str) -> Any:
    """What a layer says of its weight is what the base method says."""

    def get(self: Any) -> Any:
        return getattr(self.base, name)

    def put(self: Any, value: Any) -> None:
        setattr(self.base, name, value)

    return property(get, put, doc=f"The base method's `{name}`.")


class LoRALinear(LinearMethod):
    """Another method, and what the adapters add to it.

    Args:
        linear: the layer whose method is wrapped.
        batch: which row has which adapter.
        max_loras, max_rank: slots, whose memory is allocated now, and the largest rank of one.
        invariant: a row's result must have the same bits in any batch.
    """

    capturable = True
    weights, weight, bias, memory, out_dtype, dims = map(
        _of_base, ("weights", "weight", "bias", "memory", "out_dtype", "dims")
    )

    def __init__(self, linear: Linear, batch: LoRABatch, max_loras: int, max_rank: int, invariant: bool) -> None:
        self.base, self._batch, self._invariant = linear.method, batch, invariant
        self._parts, self._inputs, self._outputs = linear.parts, linear.in_features, linear.out_features
        self._share = linear.share
        self._spans = list(itertools.pairwise(np.cumsum([0, *linear.parts.values()]).tolist()))
        parts, rank = len(self._parts), -(-max_rank // RANKS) * RANKS
        how = dict[str, Any](dtype=linear.dtype, device=linear.device)
        self._a = torch.zeros(max_loras, parts, rank, self._inputs, **how)
        self._b = torch.zeros(max_loras, rank, self._outputs, **how)
        self._ranks = np.zeros((max_loras, parts), np.int64)
        self._used = False
        self._kernels: _CPUKernels | None = None
        if linear.method_name in _KERNELS:
            sizes = (self._inputs, self._outputs, rank)
            self._kernels = _CPUKernels(batch, self._a, self._b, self._ranks, self._spans, sizes)

    def problem(self, *about: Any) -> str | None:
        """See `LinearMethod`."""
        return self.base.problem(*about)

    def create_weights(self, *sizes: Any, **how: Any) -> None:
        """See `LinearMethod`."""
        self.base.create_weights(*sizes, **how)

    def process_weights_after_loading(self) -> None:
        """See `LinearMethod`."""
        self.base.process_weights_after_loading()

    def replaced(self, method: LinearMethod) -> LinearMethod:
        """See `LinearMethod`: the adapters stay."""
        self.base = method
        return self

    @property
    def innermost(self) -> LinearMethod:
        return self.base

    def set_slot(self, slot: int, weights: Mapping[str, LoRAWeights]) -> None:
        """Put an adapter's weights, by the names of the parts, into a slot, in place of what it held."""
        if weights and not self._used:
            self._used = True  # an attribute: steps that were captured without adapters are thrown away
        self._ranks[slot] = 0
        for i, (part, (start, end)) in enumerate(zip(self._parts, self._spans, strict=True)):
            if (new := weights.get(part)) is not None:
                rank, (a, b) = len(new.a), self._cut(part, new)
                self._a[slot, i].zero_()[:rank] = a
                self._b[slot, :, start:end].zero_()[:rank, : len(b)] = b.T
                self._ranks[slot, i] = -(-rank // RANKS) * RANKS

    def _cut(self, part: str, new: LoRAWeights) -> tuple[Tensor, Tensor]:
        """What this rank multiplies with: the columns of A for its inputs, or the rows of B for its outputs."""
        if self._share is None:
            return new.a, new.b
        if self._share.by == "inputs":
            return self._share.cut(part, new.a, 1), new.b
        return new.a, self._share.cut(part, new.b, 0)

    def apply(self, x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        out = self.base.apply(x)
        if not self._used or not self._batch.active:
            return out
        if self._kernels is not None:
            for slot, start, end in self._batch.runs:
                self._add_run(slot, x[start:end], out[start:end])
            if self._batch.used[0]:
                self._kernels.add(x, out)
            return out
        for slot, rows in self._batch.groups:
            self._add(slot, rows, x, out)
        return out

    def _add_run(self, slot: int, x: Tensor, out: Tensor) -> None:
        """What one adapter adds to rows that lie next to each other."""
        rank = int(self._ranks[slot].max())
        if not rank:
            return
        shrunk = F.linear(x, self._a[slot, :, :rank].reshape(-1, self._inputs)).view(len(x), -1, rank)
        for i, (start, end) in enumerate(self._spans):
            if self._ranks[slot, i]:
                b = self._b[slot, :rank, start:end]
                if out.dtype == b.dtype:
                    out[:, start:end].addmm_(shrunk[:, i], b)
                else:
                    out[:, start:end] += shrunk[:, i] @ b

    def _add(self, slot: int, rows: Tensor, x: Tensor, out: Tensor) -> None:
        """What the adapter of one slot adds to its rows: torch, and easy to read."""
        rank = int(self._ranks[slot].max())
        if not rank:
            return
        size = 16 if self._invariant else len(rows)  # every matmul of one shape: see `BatchInvariantLinear`
        for some in rows.split(size):
            picked = F.pad(x[some], (0, 0, 0, size - len(some)))
            shrunk = F.linear(picked, self._a[slot, :, :rank].reshape(-1, self._inputs)).view(size, -1, rank)
            for i, (start, end) in enumerate(self._spans):
                if self._ranks[slot, i]:
                    more = (shrunk[:, i] @ self._b[slot, :rank, start:end])[: len(some)]
                    out[:, start:end].index_add_(0, some, more.to(out.dtype))


CHUNK = 128
"""Outputs of a work item of `expand`."""


class _CPUKernels:
    """Shrink and expand for the slots of one layer. sizes: inputs, outputs, room for ranks."""

    def __init__(
        self,
        batch: LoRABatch,
        a: Tensor,
        b: Tensor,
        ranks: npt.NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        sizes: tuple[int, int, int],
    ) -> None:
        from minivllm_kernels.cpu.compile import host_lanes

        (self._inputs, self._outputs, rank), lanes = sizes, host_lanes()
        self._bits, self._width = _BITS[a.dtype], len(spans) * rank
        self._chunks = np.array(
            [(n, min(n + CHUNK, end), i) for i, (start, end) in enumerate(spans) for n in range(start, end, CHUNK)]
        )
        self._lanes = math.gcd(lanes, self._inputs), math.gcd(lanes, *(n for span in spans for n in span))
        arrays = (batch.order, batch.slots, batch.used, ranks)
        self._shared = (*(array.ctypes.data for array in arrays), len(spans), rank)
        self._where, self._alive = (a.data_ptr(), b.data_ptr()), (a, b, arrays)

    def add(self, x: Tensor, out: Tensor) -> None:
        """out += what each row's adapter makes of x, in place."""
        from minivllm_kernels.cpu.compile import kernel, pack
        from minivllm_kernels.cpu.lora import AT_ONCE
        from minivllm_kernels.cpu.program import LAUNCHER

        x, rows, threads, (a, b) = x.contiguous(), len(x), torch.get_num_threads(), self._where
        h = x.new_empty(rows, self._width, dtype=torch.float32)
        first = kernel("minivllm_kernels.cpu.lora:shrink", self._bits, _BITS[x.dtype], self._lanes[0])
        items = -(-rows // AT_ONCE) * (self._width // RANKS)
        LAUNCHER.run(first, pack(items, *self._shared, x.data_ptr(), a, h.data_ptr(), self._inputs), threads)
        second = kernel("minivllm_kernels.cpu.lora:expand", self._bits, _BITS[out.dtype], self._lanes[1])
        where = (h.data_ptr(), b, out.data_ptr(), self._outputs, self._chunks.ctypes.data)
        LAUNCHER.run(second, pack(len(self._chunks), *self._shared, *where), threads)


class LoRAModel:
    """The adapter slots of a model. Making one wraps the method of every linear layer that may have an adapter.

    Args:
        model: loaded.
        max_loras, max_rank: slots, and the largest rank.
        max_rows: most tokens of a step.
    """

    def __init__(self, model: Decoder, max_loras: int, max_rank: int, max_rows: int) -> None:
        self._invariant, targets = model.backend.batch_invariant, lora_targets(model.spec)
        self.batch = LoRABatch(max_rows, model.device, self._invariant)
        layers = [("", [model.head])]
        for i, layer in enumerate(model.layers):
            layers.append((model.spec.names.layer.format(i), [*layer.mixer.linears(), *layer.mlp.linears()]))
        self._methods: list[tuple[str, Linear, LoRALinear]] = []
        for prefix, linears in layers:
            for linear in linears:
                if any(prefix + part in targets for part in linear.parts):
                    linear.method = LoRALinear(linear, self.batch, max_loras, max_rank, self._invariant)
                    self._methods.append((prefix, linear, linear.method))
        self._embedding, how = next(iter(targets)), dict[str, Any](dtype=model.dtype, device=model.device)
        self._a = torch.zeros(max_loras, model.spec.vocab_size, max_rank, **how)
        self._b = torch.zeros(max_loras, max_rank, model.spec.hidden_size, **how)
        self._ranks: dict[int, int] = {}
        model.lora = self

    def set_slot(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot, in place of what it held."""
        for prefix, linear, wrapped in self._methods:
            found = {part: adapter.modules.get(prefix + part) for part in linear.parts}
            wrapped.set_slot(slot, {part: weights for part, weights in found.items() if weights is not None})
        self._ranks.pop(slot, None)
        if (weights := adapter.modules.get(self._embedding)) is not None:
            rank = self._ranks[slot] = len(weights.a)
            self._a[slot, :, :rank], self._b[slot, :rank] = weights.a.T, weights.b.T

    @property
    def active(self) -> bool:
        """Whether a row of what is computed next has an adapter."""
        return self.batch.active

    def embed(self, token_ids: Tensor, x: Tensor) -> None:
        """Add to the embeddings x [T, hidden_size] of tokens what the rows' adapters add, in place."""
        if not self._ranks or not self.batch.active:
            return
        for slot, rows in self.batch.groups:
            if (rank := self._ranks.get(slot)) is not None:
                a, b = self._a[slot, :, :rank], self._b[slot, :rank]
                size = 16 if self._invariant else len(rows)
                for some in rows.split(size):
                    picked = F.pad(a[token_ids[some]], (0, 0, 0, size - len(some)))
                    x.index_add_(0, some, (picked @ b)[: len(some)])
