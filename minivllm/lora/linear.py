"""LoRA as a wrapper of linear methods: slots, rows grouped by adapter."""

# Generated from nbs/lora/linear.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.config import INTEGER_BITS
from minivllm.lora.adapter import Adapter, LoRAWeights, lora_targets
from minivllm.models.decoder import Decoder
from minivllm.models.linear.base import HUGE_PAGE, LinearMethod, empty_weight
from minivllm.models.linear.layer import Linear

FEW_ROWS = 256
"""Steps of up to this many rows use our GPU kernels, which a CUDA graph can replay; larger ones use a grouped matmul of torch."""
GROUP = 16
"""How many rows of one adapter the CPU's tile unit (AMX) multiplies at once."""
LONG_RUN = 128
"""Runs of at least this many rows of one adapter (a prompt) go to torch, which is faster there. Captured steps have fewer rows."""


class SlotMemory:
    """Zeros for the slots of all layers. On a CPU they come from few large mappings, so that Linux can use pages of 2 MiB: fewer TLB misses."""

    BYTES = 32 * HUGE_PAGE

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.zeros`. On a CPU memory is committed when a page is first written."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // 64) * 64
        if room > len(self._left):
            self._left = empty_weight(1, max(room, self.BYTES), torch.uint8, device).flatten()
        mine, self._left = self._left[:size], self._left[room:]
        return mine.view(dtype).view(shape)


class LoRABatch:
    """The slots of the rows that are computed next. Shared by all layers of a model.

    Args:
        max_rows: most rows in a step.
        invariant: a row's result must have the same bits in any batch, so there are no runs.

    Attributes:
        active: whether any row has an adapter.
        runs: (slot, first row, end) of neighbouring rows of one adapter, at least `LONG_RUN` of them; torch multiplies those.
        has_runs: whether there may be any.
        order: int64 [max_rows], the rows that have an adapter and are in no run, sorted by slot; the first `used[0]` are valid.
        slots: int64 [max_rows], the slot of each of those.
        starts: int64 [max_rows + 1]. `order` is cut into groups of one slot and at most `GROUP` rows; these are the places where each of
            the `used[1]` groups begins, and the end of the last.
        memory: allocates the slots.
        work: on a GPU, what its kernels read, int32 [1 + FEW_ROWS, 2]: the number of pairs, then pairs (row, slot), sorted by slot.
    """

    def __init__(self, max_rows: int, device: torch.device, invariant: bool = False) -> None:
        self.memory = SlotMemory()
        self.order, self.slots, self.starts = (np.zeros(n, np.int64) for n in (max_rows, max_rows, max_rows + 1))
        self.used = np.zeros(2, np.int64)
        self.active, self.device, self.has_runs = False, device, not invariant and device.type == "cpu"
        self.runs: list[tuple[int, int, int]] = []
        self._of_rows = np.zeros(0, np.int64)
        self._groups: list[tuple[int, Tensor]] | None = None
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}
        self.work: Tensor | None = None
        if device.type == "cuda":
            self.work = torch.zeros(1 + FEW_ROWS, 2, dtype=torch.int32, device=device)

    def set(self, slots: npt.NDArray[np.int64]) -> None:
        """Say which slot each row uses, -1 for no adapter. Nothing changes if they are those of the last call."""
        if np.array_equal(slots, self._of_rows):
            return
        self.active = bool((slots >= 0).any())
        self.runs, self._groups, self._of_rows, self._ends = [], None, slots.copy(), {}
        if not self.active:
            return
        if self.has_runs and len(slots) >= LONG_RUN:
            ends = [*(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
            spans = zip([0, *ends[:-1]], ends, strict=True)
            self.runs = [(int(slots[a]), a, b) for a, b in spans if slots[a] >= 0 and b - a >= LONG_RUN]
            slots = slots.copy()
            for _, start, end in self.runs:
                slots[start:end] = -1
        order = _sorted_by_slot(slots)
        self.used[0] = len(order)
        self.order[: len(order)], self.slots[: len(order)] = order, slots[order]
        runs = np.flatnonzero(np.diff(slots[order], prepend=-1))
        within = np.arange(len(order)) - np.repeat(runs, np.diff(runs, append=len(order)))
        starts = np.flatnonzero(within % GROUP == 0)
        self.used[1], self.starts[: len(starts)], self.starts[len(starts)] = len(starts), starts, len(order)
        if self.work is not None and len(slots) <= FEW_ROWS:
            pairs = np.array([(len(order), 0), *zip(order, slots[order], strict=True)], np.int32)
            self.work[: len(pairs)] = _sent(pairs, self.device)

    def ends(self, max_loras: int) -> tuple[Tensor, Tensor]:
        """The rows that have an adapter, sorted by slot, int64; and where among them the rows of each slot end, int32 [max_loras]."""
        if max_loras not in self._ends:
            order = _sorted_by_slot(self._of_rows)
            counts = np.bincount(self._of_rows[order], minlength=max_loras)
            ends = np.cumsum(counts).astype(np.int32)
            self._ends[max_loras] = _sent(order, self.device), _sent(ends, self.device)
        return self._ends[max_loras]

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


def _sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On the device. The host does not wait: the allocator of pinned memory keeps the copy until a GPU has fetched it."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


_BITS = {torch.float32: 32, torch.bfloat16: 16}
_KERNELS = ("cpu", "cpu_invariant", *INTEGER_BITS)
"""Methods of numba's CPU kernels; what adapters add to the output of another method, torch computes too."""
_CUDA_KERNELS = ("gemv", "fp8")
"""The same for a GPU."""
RANKS = 8
"""Ranks are padded to a multiple of this: what the kernels multiply at once."""


def _of_base(name: str) -> Any:
    """A property that reads and sets the base method's attribute of this name."""

    def get(self: Any) -> Any:
        return getattr(self.base, name)

    def put(self: Any, value: Any) -> None:
        setattr(self.base, name, value)

    return property(get, put, doc=f"The base method's `{name}`.")


class Prepared(NamedTuple):
    """An adapter of one layer, in the order of a slot, float32 or the bits of 16-bit numbers: a [parts, rank, inputs], b [rank, outputs],
    and the rank of each part, a multiple of `RANKS`."""

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    ranks: npt.NDArray[np.int64]


def _numbers(x: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor as an array; of 16-bit numbers, their bits."""
    return (x if x.dtype == torch.float32 else x.view(torch.int16)).numpy()


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
        self._tiles = _by_tiles(linear)
        self._step = GROUP if self._tiles else RANKS
        parts, rank = len(self._parts), -(-max_rank // self._step) * self._step
        how = dict[str, Any](dtype=linear.dtype, device=linear.device)
        self._a = batch.memory.zeros(max_loras, parts, rank, self._inputs, **how)
        self._b = batch.memory.zeros(max_loras, rank, self._outputs, **how)
        self._ranks = np.zeros((max_loras, parts), np.int64)
        self._used = False
        self._kernels: _CPUKernels | _CUDAKernels | None = None
        if linear.method_name in _KERNELS:
            make = _TileKernels if self._tiles else _CPUKernels
            self._kernels = make(batch, self._a, self._b, self._ranks, self._spans)
        elif linear.method_name in _CUDA_KERNELS and linear.device.type == "cuda" and not invariant:
            self._kernels = _CUDAKernels.make(batch, self._a, self._b, self._spans)

    def problem(self, *about: Any) -> str | None:
        return self.base.problem(*about)

    def create_weights(self, *sizes: Any, **how: Any) -> None:
        self.base.create_weights(*sizes, **how)

    def process_weights_after_loading(self) -> None:
        self.base.process_weights_after_loading()

    def replaced(self, method: LinearMethod) -> LinearMethod:
        """See `LinearMethod`: the adapters stay."""
        self.base = method
        return self

    @property
    def innermost(self) -> LinearMethod:
        return self.base

    @property
    def in_graphs(self) -> bool:
        """Whether what it launches for few rows is the same for every mix of adapters on a GPU."""
        return not self._used or isinstance(self._kernels, _CUDAKernels)

    def set_slot(self, slot: int, weights: Mapping[str, LoRAWeights]) -> None:
        """Put an adapter's weights, by the names of the parts, into a slot, in place of what it held."""
        self.put(slot, self.prepare(weights))

    def prepare(self, weights: Mapping[str, LoRAWeights]) -> Prepared | None:
        """An adapter's weights as they will lie in a slot; None for no adapter. Any thread may call it; the one that reads adapters
        does, so that a step need not."""
        if not weights:
            return None
        rank = -(-max(len(new.a) for new in weights.values()) // self._step) * self._step
        dtype = np.float32 if self._a.dtype == torch.float32 else np.int16  # numpy knows no bfloat16
        a, b = np.zeros((len(self._parts), rank, self._inputs), dtype), np.zeros((rank, self._outputs), dtype)
        ranks = np.zeros(len(self._parts), np.int64)
        for i, (part, (start, _)) in enumerate(zip(self._parts, self._spans, strict=True)):
            if (new := weights.get(part)) is not None:
                new_a, new_b = (_numbers(x.to(self._a.dtype)) for x in self._cut(part, new))
                a[i, : len(new_a)], b[: new_b.shape[1], start : start + len(new_b)] = new_a, new_b.T
                ranks[i] = -(-len(new_a) // RANKS) * RANKS
        if self._tiles:
            a, b = pack_tiles(a, b)
        return Prepared(a, b, ranks)

    def put(self, slot: int, new: Prepared | None) -> None:
        """Copy what was prepared into a slot, in place of what it held: no more than a copy of memory on a CPU."""
        if new is None:
            if self._ranks[slot].any():
                self._ranks[slot] = 0
                self._tell(slot)
            return
        if not self._used:
            self._used = True  # an attribute: steps that were captured without adapters are thrown away
        rank, self._ranks[slot] = len(new.b), new.ranks
        if self._a.device.type == "cpu":
            into_a, into_b = _numbers(self._a[slot]), _numbers(self._b[slot])
            into_a[:, :rank] = new.a
            if self._tiles:
                tiles = self._outputs // GROUP
                into_b.reshape(tiles, -1)[:, : rank * GROUP] = new.b.reshape(tiles, -1)
            else:
                into_b[:rank] = new.b
            return
        self._a[slot, :, :rank] = torch.from_numpy(new.a).view(self._a.dtype).to(self._a.device)
        self._b[slot, :rank] = torch.from_numpy(new.b).view(self._b.dtype).to(self._b.device)
        self._a[slot, :, rank:], self._b[slot, rank:] = 0, 0
        self._tell(slot)

    def _tell(self, slot: int) -> None:
        """Tell a GPU's kernels the new ranks of a slot."""
        if isinstance(self._kernels, _CUDAKernels):
            self._kernels.set_ranks(slot, self._ranks[slot])

    def _cut(self, part: str, new: LoRAWeights) -> tuple[Tensor, Tensor]:
        """This rank's part: the columns of A for its inputs, or the rows of B for its outputs."""
        if self._share is None:
            return new.a, new.b
        if self._share.by == "inputs":
            return self._share.cut(part, new.a, 1), new.b
        return new.a, self._share.cut(part, new.b, 0)

    def apply(self, x: Tensor) -> Tensor:
        out = self.base.apply(x)
        if not self._used or not self._batch.active:
            return out
        if self._kernels is not None and self._kernels.takes(x, out):
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
    """Shrink and expand for the slots of one layer."""

    def __init__(
        self, batch: LoRABatch, a: Tensor, b: Tensor, ranks: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]
    ) -> None:
        from minivllm_kernels.cpu.compile import host_lanes

        (rank, self._inputs), self._outputs, lanes = a.shape[2:], b.shape[2], host_lanes()
        self._bits, self._width = _BITS[a.dtype], len(spans) * rank
        self._chunks = np.array(
            [(n, min(n + CHUNK, end), i) for i, (start, end) in enumerate(spans) for n in range(start, end, CHUNK)]
        )
        self._lanes = math.gcd(lanes, self._inputs), math.gcd(lanes, *(n for span in spans for n in span))
        arrays = (batch.order, batch.slots, batch.used, ranks)
        self._shared = (*(array.ctypes.data for array in arrays), len(spans), rank)
        self._where, self._alive = (a.data_ptr(), b.data_ptr()), (a, b, arrays)

    def takes(self, x: Tensor, out: Tensor) -> bool:
        """Whether `add` can be called: always."""
        return True

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


def _by_tiles(linear: Linear) -> bool:
    """Whether the CPU's tile unit multiplies with the adapters of a layer."""
    if linear.method_name not in _KERNELS or linear.dtype != torch.bfloat16:
        return False
    from minivllm_kernels.cpu.matmul.layout import TILE, host_tiles

    return host_tiles() and not linear.in_features % (4 * TILE) and not any(n % TILE for n in linear.parts.values())


def pack_tiles(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A [parts, rank, inputs] and B [rank, outputs] of one adapter in the order of the tile unit.

    Of A, [parts * rank / 16][inputs / 32][16][16][2]: pairs of inputs for 16 ranks; of B, [outputs / 16][rank / 2][16][2]. Shapes stay.
    """
    tiles = a.reshape(-1, 16, a.shape[2] // 32, 16, 2).transpose(0, 2, 3, 1, 4)
    pairs = b.reshape(len(b) // 2, 2, -1, 16).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(tiles).reshape(a.shape), np.ascontiguousarray(pairs).reshape(b.shape)


class _TileKernels(_CPUKernels):
    """The same by the tile unit (AMX). Long runs are not worth torch here."""

    def __init__(self, batch: LoRABatch, *about: Any) -> None:
        from minivllm_kernels.cpu.lora import lora_configs

        super().__init__(batch, *about)
        batch.has_runs = False
        self._starts, self._configs = batch.starts, [lora_configs(width) for width in (64, 32)]

    def add(self, x: Tensor, out: Tensor) -> None:
        from minivllm_kernels.cpu.compile import kernel, pack
        from minivllm_kernels.cpu.program import LAUNCHER

        x, threads, (a, b) = x.contiguous(), torch.get_num_threads(), self._where
        size = 2 * GROUP * (self._inputs + self._width + 128)  # rows of x, of h, and sums
        configs = (config.ctypes.data for config in self._configs)
        where = (x.data_ptr(), a, self._inputs, b, out.data_ptr(), self._outputs)
        chunks = (self._chunks.ctypes.data, len(self._chunks))
        more = (self._starts.ctypes.data, *configs, LAUNCHER.scratch(threads * size), size)
        compiled = kernel("minivllm_kernels.cpu.lora:tile_lora", _BITS[out.dtype])
        LAUNCHER.run(compiled, pack(len(x), *self._shared, *where, *chunks, *more), threads)


def add_grouped(x: Tensor, out: Tensor, a: Tensor, b: Tensor, spans: Sequence[tuple[int, int]], ends: Any) -> None:
    """out += x A^T B^T for many rows, by one grouped matmul for all A and one for each part's B. All are bfloat16 but out.

    Args:
        a, b: [slots, parts, rank, inputs] and [slots, rank, outputs]; zeros where an adapter has nothing.
        spans: outputs of each part.
        ends: see `LoRABatch.ends`.
    """
    rows, offsets = ends
    slots, parts, rank, inputs = a.shape
    h = F.grouped_mm(x[rows], a.view(slots, parts * rank, inputs).transpose(1, 2), offs=offsets)
    for i, (start, end) in enumerate(spans):
        more = F.grouped_mm(h[:, i * rank : (i + 1) * rank], b[:, :, start:end], offs=offsets)
        out[:, start:end].index_add_(0, rows, more.to(out.dtype))


class _CUDAKernels:
    """Shrink and expand on a GPU: two launches for few rows, grouped matmuls for many."""

    def __init__(self, batch: LoRABatch, a: Tensor, b: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        self._batch, self._a, self._b, self._spans = batch, a, b, spans
        self._ranks = torch.zeros(a.shape[:2], dtype=torch.int32, device=a.device)
        parts = np.repeat(np.arange(len(spans), dtype=np.int32), [(end - start) // 8 for start, end in spans])
        self._part_of = torch.from_numpy(parts).to(a.device)

    @classmethod
    def make(cls, batch: LoRABatch, a: Tensor, b: Tensor, spans: Sequence[tuple[int, int]]) -> "_CUDAKernels | None":
        """None for numbers and widths that the kernels are not built for."""
        fits = a.shape[3] % 8 == 0 and all(n % 8 == 0 for span in spans for n in span)
        return cls(batch, a, b, spans) if fits and a.dtype in (torch.bfloat16, torch.float16) else None

    def set_ranks(self, slot: int, ranks: npt.NDArray[np.int64]) -> None:
        """Set the ranks of a slot's parts. The B of those that its adapter leaves alone becomes zeros, for the grouped matmuls."""
        for i in np.flatnonzero(ranks == 0).tolist():
            self._b[slot, :, slice(*self._spans[i])] = 0
        self._ranks[slot] = torch.from_numpy(ranks.astype(np.int32))

    def takes(self, x: Tensor, out: Tensor) -> bool:
        """Whether `add` can be called. `grouped_mm` is for bfloat16."""
        return out.dtype == x.dtype and (len(x) <= FEW_ROWS or x.dtype == torch.bfloat16)

    def add(self, x: Tensor, out: Tensor) -> None:
        """out += what each row's adapter makes of x, in place."""
        if len(x) > FEW_ROWS:
            add_grouped(x, out, self._a, self._b, self._spans, self._batch.ends(len(self._a)))
            return
        from minivllm_kernels.cuda.ops import add_lora

        assert self._batch.work is not None
        add_lora(out, x, self._a, self._b, self._batch.work, self._ranks, self._part_of)


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter as its slots take it: for each layer that may have one, and for the embedding."""

    layers: list[Prepared | None]
    embedding: LoRAWeights | None


class LoRAModel:
    """The adapter slots of a model. Making one wraps the method of every linear layer that may have an adapter.

    Args:
        model: loaded.
        max_loras, max_rank: slots, and the largest rank.
        max_rows: most tokens in a step.
    """

    def __init__(self, model: Decoder, max_loras: int, max_rank: int, max_rows: int) -> None:
        self._invariant, targets = model.backend.batch_invariant, lora_targets(model.spec)
        self.batch = LoRABatch(max_rows, model.device, self._invariant)
        layers = [("", [] if model.head is None else [model.head])]
        for i, layer in model.numbered_layers():
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
        self._by_kernels = True
        model.lora = self

    @property
    def active(self) -> bool:
        """Whether a row of what is computed next has an adapter."""
        return self.batch.active

    def can_replay(self, rows: int) -> bool:
        """Whether a CUDA graph of a step of this many rows serves every mix of adapters: no adapter of the embedding, kernels for all else."""
        return self._by_kernels and rows <= FEW_ROWS

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

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        """What `set_slot` copies. Any thread may call it."""
        layers = []
        for prefix, linear, wrapped in self._methods:
            found = {part: adapter.modules.get(prefix + part) for part in linear.parts}
            layers.append(wrapped.prepare({part: weights for part, weights in found.items() if weights is not None}))
        return PreparedAdapter(layers, adapter.modules.get(self._embedding))

    def set_slot(self, slot: int, adapter: PreparedAdapter) -> None:
        """Copy an adapter into a slot, in place of what it held."""
        for (_, _, wrapped), new in zip(self._methods, adapter.layers, strict=True):
            wrapped.put(slot, new)
        self._ranks.pop(slot, None)
        if (weights := adapter.embedding) is not None:
            rank = self._ranks[slot] = len(weights.a)
            self._a[slot, :, :rank], self._b[slot, :rank] = weights.a.T, weights.b.T
        self._by_kernels = not self._ranks and all(wrapped.in_graphs for _, _, wrapped in self._methods)
