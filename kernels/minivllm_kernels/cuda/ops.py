"""CUDA kernels as checked functions of torch tensors."""

# Generated from nbs/numba_kernels/cuda/ops.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm_kernels.cuda import cache, decode, drafts, lora, pointwise, prefill, prefill_hopper, quantized, scan
from minivllm_kernels.cuda.all_reduce import (
    MOST_RANKS,
    PeerMemory,
    buffer_bytes,
    one_shot,
    region_pieces,
    split_pieces,
)
from minivllm_kernels.cuda.gemv import MMA_ROWS, choose_gemv
from minivllm_kernels.cuda.launch import compile_ahead, compiler_missing, launcher, load_compiled, ptx_target
from minivllm_kernels.cuda.matmul_hopper import (
    STEP,
    MatmulTile,
    choose_tile,
    matmul_maps,
    wgmma_matmul,
)
from minivllm_kernels.cuda.planning import (
    FIELDS,
    AttentionShape,
    DecodePlan,
    item_rungs,
    plan_decode,
    plan_prefill,
    split_at_chunks,
)
from minivllm_kernels.cuda.prefill_hopper import HopperTile, attention_maps, hopper_unsupported, query_map
from minivllm_kernels.cuda.quantized import Format, choose_tiling
from minivllm_kernels.cuda.simt import LOG2E, CudaKernel

OLDEST_FP8 = (8, 9)
"""Compute capability of the first cards that convert e4m3 by themselves: Ada."""
FP8 = torch.float8_e4m3fn
HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
FLOATS = HALF | {torch.float32: "float32"}
DTYPES = {name: dtype for dtype, name in HALF.items()}


def check(name: str, x: Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor that is not on `device`, or not of this dtype and shape (None matches any size)."""
    if x.device != device or x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} on {device}, not {x.dtype} on {x.device}")
    if x.shape == shape:  # the usual case, made fast: a prefill step checks hundreds of tensors
        return
    if x.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{sizes}], not {list(x.shape)}")


def check_rows(name: str, x: Tensor) -> None:
    """Refuse rows that 16-byte loads cannot read: all but the first dimension must be contiguous, rows aligned."""
    if not x.is_contiguous() and not x[:1].is_contiguous():
        raise ValueError(f"{name} must be contiguous within a row, but has strides {x.stride()} for {list(x.shape)}")
    if (x.stride(0) * x.element_size()) % 16 or x.data_ptr() % 16:
        raise ValueError(f"the rows of {name} must start at multiples of 16 bytes (stride {x.stride(0)} elements)")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Refuse tensors that are not contiguous."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, but has strides {x.stride()} for {list(x.shape)}")


def half_name(name: str, x: Tensor) -> str:
    """ "bfloat16" or "float16"."""
    if x.dtype not in HALF:
        raise ValueError(f"{name} must be torch.bfloat16 or torch.float16, not {x.dtype}")
    return HALF[x.dtype]


@functools.cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors) of CUDA device `index`."""
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _multiprocessors(device: torch.device) -> int:
    return _properties(_index(device))[1]


def uses_wgmma(shape: AttentionShape, device: torch.device) -> bool:
    """Whether prefill of this shape is computed by rung 4 on a device; else rung 3 computes it."""
    return hopper_unsupported(shape, _properties(_index(device))[0]) is None


def prefill_kernel(shape: AttentionShape, device: torch.device) -> CudaKernel:
    """The kernel for queries of several tokens."""
    if uses_wgmma(shape, device):
        return prefill_hopper.wgmma_tiles(shape)
    return prefill.mma_tiles(shape, prefill.best_warps(shape))


@functools.cache
def device_unsupported(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, in words; None if they can."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the device is {device}"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU (torch.cuda.is_available() is False)"
    if (missing := compiler_missing()) is not None:
        return missing
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 (Ampere) or later, and {device} has {major}.{minor}"
    return None


def fp8_unsupported(device: torch.device) -> str | None:
    """Why kernels cannot keep K and V as e4m3 on this GPU, in words; None if they can."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= OLDEST_FP8:
        return None
    return f"an fp8 KV cache needs compute capability 8.9 (Ada, Hopper) or later, and {device} has {major}.{minor}"


class Rehearsal(threading.local):
    """The state of a thread that rehearses, see `rehearsal`: the kernels noted so far. None outside of a rehearsal."""

    kernels: dict[CudaKernel, None] | None = None


_rehearsal = Rehearsal()


@contextmanager
def rehearsal(device: torch.device) -> Iterator[dict[CudaKernel, None]]:
    """Rehearse: inside this context `run` launches none of this thread's kernels, but notes them in the dict that the context gives.

    At its end, other processes begin to compile those that are not in the cache (`compile_ahead`). Torch's operations run as always.
    """
    kernels: dict[CudaKernel, None] = {}
    _rehearsal.kernels = kernels
    try:
        yield kernels
    finally:
        _rehearsal.kernels = None
    compile_ahead(list(kernels), ptx_target(_properties(_index(device))[0]))


def compile_attention(shapes: Iterable[AttentionShape], device: torch.device) -> None:
    """Let other processes compile the kernels of attention for prompts, and for few and for many sequences. No others take as long to compile."""
    kernels: list[CudaKernel] = []
    for shape in shapes:
        widths = decode.max_warps(shape), 2
        kernels += [prefill_kernel(shape, device), *(decode.mma_split_kv(shape, warps) for warps in widths)]
    compile_ahead(kernels, ptx_target(_properties(_index(device))[0]))


def load_rehearsed(kernels: Sequence[CudaKernel], device: torch.device) -> None:
    """Load the kernels of a rehearsal that other processes compile, as they are compiled (`load_compiled`)."""
    load_compiled(kernels, _index(device), _properties(_index(device))[0])


def run(kernel: CudaKernel, device: torch.device, grid: tuple[int, int], *numbers: Any) -> None:
    """Launch on torch's current stream of a device."""
    if _rehearsal.kernels is not None:
        _rehearsal.kernels[kernel] = None
        return
    index = _index(device)
    if grid[0] and grid[1]:
        launch = launcher(kernel, index, _properties(index)[0])
        launch(*grid, torch._C._cuda_getCurrentRawStream(index), *numbers)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def check_cache(kv_cache: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    """Refuse anything but a contiguous cache [2, blocks, block_size, kv_heads, head_dim] whose heads are multiples of 16 bytes.

    Also refuse scales that are not above 0, and scales for a cache that has none. A cache of int8: see `minivllm.attention.backend.int8_parts`."""
    if kv_cache.dim() != 5 or kv_cache.shape[0] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "kv_cache must be contiguous [2, blocks, block_size, kv_heads, head_dim], "
            f"not {list(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    if _head_dim(kv_cache) * kv_cache.element_size() % 16:
        raise ValueError(f"a head of {_head_dim(kv_cache)} {kv_cache.dtype} is not a whole number of 16-byte pieces")
    if not (k_scale > 0 and v_scale > 0) or (kv_cache.dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0)):
        raise ValueError(
            f"k_scale and v_scale must be above 0, and 1 unless the cache is {FP8}: got {k_scale:g} and {v_scale:g}, the"
            f" cache is {kv_cache.dtype}"
        )


def _head_dim(kv_cache: Tensor) -> int:
    """Numbers of a head: the last dimension of the cache, in an int8 cache without the 4 bytes of the scale."""
    return kv_cache.shape[4] - (4 if kv_cache.dtype == torch.int8 else 0)


def _cache_strides(kv_cache: Tensor) -> list[int]:
    """Words from one block, token, head to the next."""
    head = _head_dim(kv_cache)
    return [n * kv_cache.element_size() // 4 for n in (kv_cache.stride(1), kv_cache.shape[3] * head, head)]


def _cache_halves(kv_cache: Tensor) -> tuple[int, int]:
    """Addresses of the K and the V half."""
    start = kv_cache.data_ptr()
    return start, start + kv_cache.stride(0) * kv_cache.element_size()


def reshape_and_cache(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Write k, v [T, kv_heads, head_dim] to the slots int64 [T] of a cache; a slot below 0 is skipped.

    The cache has their dtype, or is float8_e4m3fn: then it gets k / k_scale and v / v_scale, at most +-448; or is int8 with scales.
    """
    check_cache(kv_cache, k_scale, v_scale)
    narrow = kv_cache.dtype in (FP8, torch.int8)
    to_fp8 = half_name("k", k) if kv_cache.dtype == FP8 else None
    for name, x in (("k", k), ("v", v)):
        dtype = k.dtype if narrow else kv_cache.dtype
        check(name, x, (slot_mapping.shape[0], kv_cache.shape[3], _head_dim(kv_cache)), dtype, kv_cache.device)
        check_rows(name, x)
    check("slot_mapping", slot_mapping, (None,), torch.int64, kv_cache.device)
    check_contiguous(slot_mapping=slot_mapping)
    size, pointers = k.element_size(), (k.data_ptr(), v.data_ptr(), *_cache_halves(kv_cache), slot_mapping.data_ptr())
    if kv_cache.dtype == torch.int8:
        block_size, heads = kv_cache.shape[2:4]
        writer = cache.reshape_and_cache_int8(half_name("k", k), heads, _head_dim(kv_cache), block_size)
        lanes = 2 * heads * cache.head_lanes(_head_dim(kv_cache))
        grid = slot_mapping.shape[0], -(-lanes // cache.INT8_THREADS)
        return run(writer, kv_cache.device, grid, *pointers, k.stride(0) // 2, v.stride(0) // 2)
    head_words = kv_cache.shape[4] * size // 4
    words = kv_cache.shape[3] * head_words
    pieces = words // (8 if to_fp8 else 4)
    kernel = cache.reshape_and_cache(kv_cache.shape[2], min(256, max(32, 1 << (pieces - 1).bit_length())), to_fp8)
    strides = (k.stride(0) * size // 4, v.stride(0) * size // 4, words, head_words, *_cache_strides(kv_cache))
    return run(kernel, kv_cache.device, (slot_mapping.shape[0], 1), *pointers, 1 / k_scale, 1 / v_scale, *strides)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy blocks pairs int64 [n, 2] (source block, target block) between caches, on the GPU's current stream.

    At least one cache is on a GPU; the other may be the same, or pinned host memory. No block may be both read and
    written, and none written twice.
    """
    check_cache(source)
    check_cache(target)
    if source.shape[2:] != target.shape[2:] or source.dtype != target.dtype:
        raise ValueError(
            f"blocks differ: {list(source.shape[2:])} {source.dtype}, {list(target.shape[2:])} {target.dtype}"
        )
    device = next((x.device for x in (source, target) if x.is_cuda), None)
    if device is None:
        raise ValueError("copy_blocks moves blocks on a GPU or between it and the host: no cache is on a GPU")
    for name, x in (("source", source), ("target", target)):
        if not x.is_cuda and not x.is_pinned():
            raise ValueError(
                f"{name} is in ordinary host memory, which the GPU cannot reach: allocate with pin_memory=True"
            )
    check("pairs", pairs, (None, 2), torch.int64, device)
    size = source.element_size()
    words = source.stride(1) * size // 4
    grid = (max(1, min(32, words // 4096)), pairs.shape[0])
    pointers = (source.data_ptr(), target.data_ptr(), pairs.contiguous().data_ptr())
    run(cache.copy_blocks(), device, grid, *pointers, source.stride(0) * size // 4, target.stride(0) * size // 4, words)


def copy_peer_blocks(address: int, count: int, target: Tensor, pairs: Tensor) -> None:
    """Copy blocks pairs int64 [n, 2] to a cache from a cache of the same layout, with `count` blocks, at an address that may be on another GPU."""
    check_cache(target)
    check("pairs", pairs, (None, 2), torch.int64, target.device)
    words = target.stride(1) * target.element_size() // 4
    grid, halves = (max(1, min(32, words // 4096)), pairs.shape[0]), (words * count, words * target.shape[1])
    run(
        cache.copy_blocks(),
        target.device,
        grid,
        address,
        target.data_ptr(),
        pairs.contiguous().data_ptr(),
        *halves,
        words,
    )


@dataclass
class AttentionPlan:
    """One step of one group of layers on the device. Made by `plan_attention`, used by `paged_attention`.

    Attributes:
        scale, cap: as the kernels take them (see `score_factors`).
        table: int32 [sequences, blocks]. items, tiles: work of the two kernels, int32 [n, 8] (see `planning`);
            after the tiles of rung 4 comes a row of zeros to count in.
        warps: per block of the decode kernel. slots: partial results of decode.
    """

    shape: AttentionShape
    kv_heads: int
    scale: float
    cap: float
    window: int
    slot_mapping: Tensor
    table: Tensor
    items: Tensor
    tiles: Tensor
    warps: int
    slots: int
    decode_kernel: CudaKernel | None = field(init=False, default=None)
    prefill_kernel: CudaKernel | None = field(init=False, default=None)
    partials: tuple[Tensor, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        shape, device, heads = self.shape, self.slot_mapping.device, self.kv_heads * self.shape.group
        if len(self.items):
            self.decode_kernel = decode.mma_split_kv(shape, self.warps)
        if len(self.tiles):
            self.prefill_kernel = prefill_kernel(shape, device)
        if self.slots:  # outputs; (max, sum); counts of arrivals, which are zero here and after every launch
            floats = [torch.empty(self.slots * heads * n, device=device) for n in (shape.head_dim, 2)]
            self.partials = (*floats, torch.zeros(self.slots * self.decode_blocks, dtype=torch.int32, device=device))

    @property
    def decode_blocks(self) -> int:
        """Blocks of the decode kernel that share a work item."""
        return self.kv_heads * decode.mma_parts(self.shape)


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Scale and cap as the kernels take them: their exponentials are powers of two."""
    return (scale * LOG2E, 0.0) if soft_cap is None else (scale * 2 * LOG2E / soft_cap, soft_cap * LOG2E)


def decode_work(
    shape: AttentionShape,
    kv_heads: int,
    ends: np.ndarray,
    rows: np.ndarray | None,
    seqs: np.ndarray | None,
    device: torch.device,
    window: int | None = None,
    chunk: int | None = None,
) -> DecodePlan:
    """Work items for one query token each in sequences of `ends` tokens; `rows` of q, `seqs` of the block table (None: 0, 1, 2 ...)."""
    first = None
    if window is not None:
        first = np.maximum(np.asarray(ends, np.int64) - window, 0)
    elif chunk is not None:
        first = (np.asarray(ends, np.int64) - 1) // chunk * chunk
    return plan_decode(
        ends,
        heads=kv_heads * decode.mma_parts(shape),
        rows=rows,
        seqs=seqs,
        first=first,
        multiprocessors=_multiprocessors(device),
        max_warps=decode.max_warps(shape),
    )


def decode_rungs(shape: AttentionShape, kv_heads: int, num_rows: int, device: torch.device) -> tuple[int, ...]:
    """Numbers of work items to launch for up to `num_rows` single-token rows; the last is enough whatever their lengths."""
    blocks = kv_heads * decode.mma_parts(shape)
    return item_rungs(num_rows, blocks, _multiprocessors(device), decode.max_warps(shape))


def fixed_decode_plan(
    shape: AttentionShape,
    *,
    kv_heads: int,
    scale: float,
    soft_cap: float | None,
    slot_mapping: Tensor,
    items: Tensor,
    warps: int,
    words: Tensor,
) -> AttentionPlan:
    """A plan whose launches depend on nothing but sizes, for a CUDA graph: what changes is the contents of its tensors.

    slot_mapping: int64 [rows]. items: int32 [n, 8] as of `plan_decode`, but `seq` is where the sequence's row of the
    block table begins in `words`, int32 [m]; -1 for no work.
    """
    factors = score_factors(scale, soft_cap)
    table, tiles, slots = words[:, None], items[:0], len(items)
    return AttentionPlan(shape, kv_heads, *factors, prefill.NO_WINDOW, slot_mapping, table, items, tiles, warps, slots)


def place_tokens(
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    places: Tensor,
    rows: Tensor,
    items: Tensor,
    words: Tensor,
    ids: Tensor,
    counts: Tensor,
    guesses: Tensor,
    block_size: int,
) -> None:
    """Correct tokens of a fixed decode plan that the device knows and the host does not; see `drafts.place_tokens`.

    token_ids, positions, slot_mapping, rows: int64 [T]. places: int32 [T]. items, words: of `fixed_decode_plan`.
    ids: int32 [rows, longest], counts: int64 [rows], guesses: int32 [rows, k]: what the device knows of each row.
    """
    check_contiguous(ids=ids, guesses=guesses, items=items)
    arrays = token_ids, positions, slot_mapping, places, rows, items, words, ids, counts, guesses
    grid = -(-len(items) // drafts.THREADS), 1
    sizes = len(items), ids.shape[1], guesses.shape[1]
    run(drafts.place_tokens(block_size), token_ids.device, grid, *(x.data_ptr() for x in arrays), *sizes)


def verify_drafts(
    token_ids: Tensor,
    compared: Tensor,
    requests: Tensor,
    ids: Tensor,
    counts: Tensor,
    guesses: Tensor,
    luck: Tensor | None,
    *,
    vocab_size: int,
    lookup: tuple[int, int] | None,
) -> None:
    """Verify the guesses of `place_tokens`, append what is accepted, and guess again; see `drafts.verify_drafts`.

    token_ids, compared: int64 [T]. requests: int32 [B, 3]. luck: int32 [rows, longest], None for exact acceptance.
    lookup: shortest and longest n-gram that is looked up; None to repeat the newest token.
    """
    check_contiguous(token_ids=token_ids, compared=compared, requests=requests, ids=ids, guesses=guesses, luck=luck)
    arrays = token_ids, compared, requests, ids, counts, guesses
    sizes = ids.shape[1], guesses.shape[1], int(luck is not None), vocab_size
    grid = len(requests), 1
    run(drafts.verify_drafts(lookup), token_ids.device, grid, *(x.data_ptr() for x in arrays), _address(luck), *sizes)


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy int64 and int32 arrays to the device in one transfer from pinned memory."""
    sizes = [-(-a.nbytes // 16) * 16 for a in arrays]
    host = torch.empty(max(16, sum(sizes)), dtype=torch.uint8, pin_memory=True)
    starts = np.cumsum([0, *sizes])
    for array, at in zip(arrays, starts):
        host.numpy()[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    dtypes = [torch.int64 if array.dtype == np.int64 else torch.int32 for array in arrays]
    return [there[at : at + a.nbytes].view(t).view(a.shape) for a, at, t in zip(arrays, starts, dtypes)]


def plan_attention(
    shape: AttentionShape,
    *,
    kv_heads: int,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_table: np.ndarray,
    slot_mapping: np.ndarray,
    scale: float,
    device: torch.device,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    batch_invariant: bool = False,
    put: Callable[[np.ndarray], Tensor] | None = None,
) -> AttentionPlan:
    """Plan a step: host arrays as in `minivllm.attention.backend.AttentionBatch`; `window` or `chunk` limit what is seen.

    put: takes a host array, gives the tensor that will hold it when the kernels run; None: they are copied at once.
    """
    if scale <= 0:
        raise ValueError(f"scale must be above 0, not {scale}")
    if shape.soft_cap != (soft_cap is not None):
        built = "with" if shape.soft_cap else "without"
        raise ValueError(f"the shape is built {built} a soft cap, but soft_cap={soft_cap}")
    lens, ends = np.diff(query_start_loc).astype(np.int64), np.asarray(seq_lens, np.int64)
    single = np.zeros(len(lens), bool) if batch_invariant else lens == 1
    seqs, rows = np.arange(len(lens)), np.asarray(query_start_loc[:-1], np.int64)
    work = DecodePlan(np.zeros((0, FIELDS), np.int32), 0, 4)
    tiles = work.items
    if single.any():
        work = decode_work(shape, kv_heads, ends[single], rows[single], seqs[single], device, window, chunk)
    if not single.all():
        lens, ends, rows, seqs = lens[~single], ends[~single], rows[~single], seqs[~single]
        floor: np.ndarray | int = 0
        if chunk is not None:
            lens, ends, rows, which, floor = split_at_chunks(lens, ends, rows, chunk)
            seqs = seqs[which]
        wgmma = uses_wgmma(shape, device)
        tile_rows = HopperTile(shape).rows if wgmma else prefill.best_warps(shape) * prefill.warp_rows(shape)
        tiles = plan_prefill(lens, ends, rows=rows, seqs=seqs, group=shape.group, tile_rows=tile_rows, floor=floor)
        tiles = np.pad(tiles, ((0, 1), (0, 0))) if wgmma else tiles
    arrays: list[np.ndarray] = [
        np.asarray(slot_mapping, np.int64),
        np.asarray(block_table, np.int32),
        work.items,
        tiles,
    ]
    slots, table, items, tiles_there = upload(arrays, device) if put is None else [put(array) for array in arrays]
    width = prefill.NO_WINDOW if window is None else window
    factors = score_factors(scale, soft_cap)
    return AttentionPlan(
        shape, kv_heads, *factors, width, slots, table, items, tiles_there, warps=work.warps, slots=work.slots
    )


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    out: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over a paged cache; the same shape. q may be a view with longer rows.

    k_scale, v_scale: what the numbers of an fp8 cache are to be multiplied by.
    """
    shape, device = plan.shape, kv_cache.device
    check_cache(kv_cache, k_scale, v_scale)
    want = (len(plan.slot_mapping), plan.kv_heads * shape.group, shape.head_dim)
    dtype = DTYPES[shape.dtype]
    kv_dtype = FP8 if shape.fp8_kv else torch.int8 if shape.int8_kv else dtype
    found = (*kv_cache.shape[2:4], _head_dim(kv_cache))
    if found != (shape.block_size, plan.kv_heads, shape.head_dim) or kv_cache.dtype != kv_dtype:
        raise ValueError(
            f"the plan is for blocks of {shape.block_size} tokens, {plan.kv_heads} KV heads of {shape.head_dim}, "
            f"{kv_dtype}; the cache has {list(found)}, {kv_cache.dtype}"
        )
    out = torch.empty(want, dtype=q.dtype, device=device) if out is None else out
    for name, x in (("q", q), ("out", out)):
        check(name, x, want, dtype, device)
        check_rows(name, x)
    pointers = (out.data_ptr(), q.data_ptr(), *_cache_halves(kv_cache), plan.table.data_ptr())
    strides = (plan.table.shape[1], q.stride(0) // 2, out.stride(0) // 2, *_cache_strides(kv_cache))
    scales = (plan.scale * k_scale, plan.cap, v_scale)
    if plan.decode_kernel is not None:
        partials = [x.data_ptr() for x in plan.partials] or [0, 0, 0]
        grid = plan.decode_blocks, len(plan.items)
        run(plan.decode_kernel, device, grid, *pointers, plan.items.data_ptr(), *partials, *scales, *strides)
    if plan.prefill_kernel is not None and plan.prefill_kernel.hopper_only:
        _prefill_by_wgmma(plan.prefill_kernel, q, kv_cache, plan, out)
    elif plan.prefill_kernel is not None:
        grid = plan.kv_heads, len(plan.tiles)
        run(plan.prefill_kernel, device, grid, *pointers, plan.tiles.data_ptr(), *scales, plan.window, *strides)
    return out


def _prefill_by_wgmma(kernel: CudaKernel, q: Tensor, kv_cache: Tensor, plan: AttentionPlan, out: Tensor) -> None:
    """Launch rung 4: one block per multiprocessor, which takes work items until none is left."""
    shape, heads, device = plan.shape, plan.kv_heads, kv_cache.device
    work = (len(plan.tiles) - 1) * heads
    maps = (
        query_map(shape, q.data_ptr(), q.shape[0], heads, q.stride(0) * 2),
        *attention_maps(shape, *_cache_halves(kv_cache), kv_cache.shape[1], heads),
    )
    pointers = (out.data_ptr(), *maps, plan.table.data_ptr(), plan.tiles.data_ptr())
    numbers = (plan.scale, plan.cap, plan.window, plan.table.shape[1], out.stride(0) // 2, heads, work)
    run(kernel, device, (min(work, _multiprocessors(device)), 1), *pointers, *numbers)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """rms_norm(x) * weight for x [T, hidden]; with a residual [T, hidden], first residual += x in place."""
    dtype = half_name("x", x)
    hidden = x.shape[-1]
    check("x", x, (None, hidden), x.dtype, x.device)
    check("weight", weight, (hidden,), x.dtype, x.device)
    check_rows("x", x)
    check_rows("weight", weight[None])
    if residual is not None:
        check("residual", residual, tuple(x.shape), x.dtype, x.device)
        check_contiguous(residual=residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pointers = (out.data_ptr(), _address(residual), x.data_ptr(), weight.data_ptr())
    numbers = (eps, residual is not None, x.stride(0) // 2, hidden // 2)
    run(pointwise.add_rms_norm(dtype, hidden), x.device, (x.shape[0], 1), *pointers, *numbers)
    return out


def silu_mul(x: Tensor) -> Tensor:
    """silu(x[:, :n]) * x[:, n:] for contiguous x [T, 2 n]."""
    dtype = half_name("x", x)
    check("x", x, (None, None), x.dtype, x.device)
    if not x.is_contiguous() or x.shape[1] % 16:
        raise ValueError(
            f"x must be contiguous [T, 2 n] with n a multiple of 8, not {list(x.shape)} strides {x.stride()}"
        )
    size = x.shape[1] // 2
    out = torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device)
    grid = (x.shape[0], -(-size // (8 * pointwise.SILU_THREADS)))
    run(pointwise.silu_mul(dtype, size), x.device, grid, out.data_ptr(), x.data_ptr())
    return out


def takes_largest(x: Tensor) -> bool:
    """Whether `first_largest` reads tensors like this one."""
    return x.dtype in FLOATS and x.dim() == 2 and 0 < x.shape[1] < 1 << 26 and x.shape[1] * x.element_size() % 16 == 0


def first_largest(x: Tensor) -> Tensor:
    """int64 [R]: the place of each row's largest number, the first of equals; -1 if that is infinite or the row has a NaN."""
    if not takes_largest(x):
        raise ValueError(
            f"x must be [R, n] of {', '.join(map(str, FLOATS))} in pieces of 16 bytes, not {x.dtype} {list(x.shape)}"
        )
    check_rows("x", x)
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    pieces = x.shape[1] * x.element_size() // 16
    numbers = pieces, x.stride(0) * x.element_size() // 4
    run(pointwise.first_largest(FLOATS[x.dtype]), x.device, (x.shape[0], 1), out.data_ptr(), x.data_ptr(), *numbers)
    return out


def rope_and_cache(
    qkv: Tensor,
    kv_cache: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Norm (if weights are given) and rotate q and k of qkv [T, (heads + 2 kv_heads) head_dim]; k and v go to the cache.

    table: float32 [positions, head_dim], half cosines, half sines. positions, slot_mapping: int64 [T]. The cache and its
    scales: as in `reshape_and_cache`.
    Returns q, a view [T, heads, head_dim] of qkv, rotated in place.
    """
    dtype = half_name("qkv", qkv)
    check_cache(kv_cache, k_scale, v_scale)
    narrow, head_dim = kv_cache.dtype in (FP8, torch.int8), _head_dim(kv_cache)
    block_size, kv_heads = kv_cache.shape[2:4]
    tokens, device, all_heads = qkv.shape[0], qkv.device, num_heads + 2 * kv_heads
    check("qkv", qkv, (tokens, all_heads * head_dim), qkv.dtype if narrow else kv_cache.dtype, kv_cache.device)
    check("table", table, (None, head_dim), torch.float32, device)
    check("positions", positions, (tokens,), torch.int64, device)
    check("slot_mapping", slot_mapping, (tokens,), torch.int64, device)
    if (q_weight is None) != (k_weight is None):
        raise ValueError("give both q_weight and k_weight, or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check(name, weight, (head_dim,), qkv.dtype, device)
            check_rows(name, weight[None])
    check_rows("qkv", qkv)
    check_rows("table", table)
    check_contiguous(qkv=qkv, table=table, positions=positions, slot_mapping=slot_mapping)
    kind = {FP8: "fp8", torch.int8: "int8"}.get(kv_cache.dtype)
    kernel = pointwise.rope_and_cache(dtype, num_heads, kv_heads, head_dim, block_size, q_weight is not None, kind)
    pointers = (qkv.data_ptr(), *_cache_halves(kv_cache), _address(q_weight), _address(k_weight))
    places = (table.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr())
    grid, strides = pointwise.rope_grid(tokens, all_heads, head_dim), _cache_strides(kv_cache)
    run(kernel, device, grid, *pointers, *places, eps, 1 / k_scale, 1 / v_scale, *strides)
    return qkv[:, : num_heads * head_dim].view(tokens, num_heads, head_dim)


def tile_for(weight: Tensor, rows: int, gated: bool = False) -> MatmulTile | None:
    """How `gemv` deals out more than 16 rows with a weight [size, features] on its device; None if it does not."""
    return choose_tile(*weight.shape, gated, rows, *_properties(_index(weight.device)))


def takes_rows(weight: Tensor, rows: int, gated: bool = False) -> bool:
    """Whether `gemv` multiplies x of `rows` rows by a weight [size, features]."""
    return rows <= MMA_ROWS[-1] or tile_for(weight, rows, gated) is not None


def gemv(x: Tensor, weight: Tensor, gated: bool = False, kind: str = "auto") -> Tensor:
    """x [T, features] @ weight [size, features].T for T that `takes_rows` allows, by the kernel that `gemv.choose_gemv` names, or
    `matmul_hopper.choose_tile` for more than 16.

    gated: out [T, size / 2] = silu(the first half) * the second.
    """
    dtype, rows = half_name("x", x), x.shape[0]
    size, features = weight.shape
    check("x", x, (None, features), weight.dtype, weight.device)
    check_rows("x", x)
    fits = size % (4 if gated else 2) == 0 and features % 8 == 0 and weight.data_ptr() % 16 == 0
    if not weight.is_contiguous() or not fits or not rows:
        raise ValueError(
            f"weight must be contiguous [{'multiple of 4' if gated else 'even'}, multiple of 8], at an address that is a"
            f" multiple of 16, and x must have rows; got {list(weight.shape)} strides {weight.stride()} and {rows} rows"
        )
    width = size // 2 if gated else size
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    tile = tile_for(weight, rows, gated) if kind == "auto" and rows > MMA_ROWS[-1] else None
    if tile is not None:
        maps = matmul_maps(dtype, tile, x.data_ptr(), weight.data_ptr(), rows, size, features, 2 * x.stride(0))
        numbers = rows, width, width // 2, -(-features // STEP), tile.copied(rows)
        run(wgmma_matmul(dtype, tile), x.device, tile.grid(size, rows), out.data_ptr(), *maps, *numbers)
        return out
    chosen = choose_gemv(dtype, features, size, rows, _multiprocessors(weight.device), gated=gated, kind=kind)
    pointers = out.data_ptr(), x.data_ptr(), weight.data_ptr()
    run(chosen.kernel, x.device, (chosen.blocks, 1), *pointers, rows, width, x.stride(0) // 2, width // 2)
    return out


def check_packed(format: Format, words: Tensor, scales: Tensor, outputs: int) -> None:
    """Refuse arrays that do not hold a weight [outputs, format.features] in `format`, padded to a multiple of 32 outputs."""
    padded, bits = -(-outputs // 32) * 32, 4 if format.kind == "int4" else 8
    pairs = padded // 2 * (format.features // format.group) * format.scale_words
    for name, x, size in (("words", words, padded * format.features * bits // 32), ("scales", scales, pairs)):
        check(name, x.view(-1), (size,), torch.int32, words.device)
    if words.nbytes > quantized.MOST_BYTES:
        raise ValueError(f"the kernel takes less than 8 GiB of a weight; got {words.nbytes} bytes")


def quantized_gemv(x: Tensor, format: Format, words: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """x [T, format.features] @ weight [outputs, format.features].T for T up to 64 and an even number of outputs.

    words, scales: int32, the weight in the order of `minivllm_kernels.cuda.quantized`. The weight is read once per 16 rows.
    """
    device, rows = words.device, x.shape[0]
    check("x", x, (None, format.features), DTYPES[format.dtype], device)
    check_rows("x", x)
    check_packed(format, words, scales, outputs)
    if not 0 < rows <= 64 or outputs % 2:
        raise ValueError(f"the kernel takes 1 to 64 rows and an even number of outputs, not {rows} and {outputs}")
    processors, out = _multiprocessors(device), torch.empty(rows, outputs, dtype=x.dtype, device=device)
    tiling = choose_tiling(format, outputs, rows, processors, _properties(_index(device))[0])
    chosen, blocks = quantized.quantized_gemv(format, 8 if rows <= 8 else 16, tiling), tiling.grid(outputs, processors)
    for first in range(0, rows, 16):
        read = out[first:].data_ptr(), x[first:].data_ptr(), words.data_ptr(), scales.data_ptr()
        run(chosen, device, (blocks, 1), *read, min(16, rows - first), outputs, x.stride(0) // 2, outputs // 2)
    return out


def dequantize(format: Format, words: Tensor, scales: Tensor, first: int, size: int) -> Tensor:
    """[size, format.features]: the weights of the outputs from `first` on, a multiple of 16. words, scales: see `quantized_gemv`."""
    if first % 16 or size < 0 or (first + size) * format.features > words.numel() * (8 if format.kind == "int4" else 4):
        raise ValueError(f"the weight has no {size} outputs from output {first}, a multiple of 16")
    out = torch.empty(size, format.features, dtype=DTYPES[format.dtype], device=words.device)
    grid = -(-size // 16), -(-format.features // (4 * format.step))
    pointers = out.data_ptr(), words.data_ptr(), scales.data_ptr()
    run(quantized.dequantize(format), words.device, grid, *pointers, first, size)
    return out


def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, work: Tensor, ranks: Tensor, part_of: Tensor) -> None:
    """out [T, outputs] += x [T, features] A^T B^T in place, for each row in `work` with the A and B of its slot.

    a: [slots, parts, room, features]. b: [slots, room, outputs]. work: int32 [1 + at least T, 2], how many pairs there are, at most T,
    then (row, slot) sorted by slot. ranks: int32 [slots, parts], multiples of 8. part_of: int32 [outputs / 8], the part of 8 outputs each.
    """
    dtype, (slots, parts, room, features), outputs = half_name("x", x), a.shape, b.shape[2]
    rows, device = x.shape[0], a.device
    for name, tensor, shape, kind in (
        ("x", x, (rows, features), a.dtype),
        ("out", out, (rows, outputs), a.dtype),
        ("b", b, (slots, room, outputs), a.dtype),
        ("work", work, (None, 2), torch.int32),
        ("ranks", ranks, (slots, parts), torch.int32),
        ("part_of", part_of, (outputs // 8,), torch.int32),
    ):
        check(name, tensor, shape, kind, device)
    check_rows("x", x)
    check_rows("out", out)
    check_contiguous(a=a, b=b, work=work, ranks=ranks, part_of=part_of)
    if features % 8 or outputs % 8 or room % 8 or len(work) <= rows:
        raise ValueError(
            f"the kernels take multiples of 8 and a pair of `work` for each row; got {features} features, {outputs} outputs,"
            f" room for rank {room}, {len(work) - 1} pairs and {rows} rows"
        )
    h = torch.empty(rows, parts * room, dtype=torch.float32, device=device)
    tiles, shared = -(-rows // lora.ROWS), (work.data_ptr(), ranks.data_ptr())
    pointers = (h.data_ptr(), x.data_ptr(), a.data_ptr(), *shared)
    grid = tiles, parts * room // lora.RANKS
    run(lora.lora_shrink(dtype, features), device, grid, *pointers, parts, room, x.stride(0) // 2)
    grid = tiles, -(-outputs // (8 * lora.EXPAND_THREADS))
    read = (out.data_ptr(), h.data_ptr(), b.data_ptr(), *shared, part_of.data_ptr())
    run(lora.lora_expand(dtype), device, grid, *read, parts, room, outputs, out.stride(0) // 2)


Cache = tuple[int, int]
"""Address of the states of block 0, float32, and numbers from one block to the next."""
Whose = tuple[Tensor, Tensor, Tensor]
"""int64: the blocks that each of S sequences reads (-1: none) and writes, and where it begins [S + 1]."""


def _recur(
    kernel: CudaKernel,
    blocks: int,
    inputs: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    cache: Cache,
    whose: Whose,
    shape: Any,
) -> Tensor:
    """Take sequences through their states by `blocks` blocks each."""
    out = torch.empty(shape, device=inputs[0].device)
    inputs = tuple(x.contiguous() for x in inputs)
    for i, x in enumerate(inputs):
        check(f"input {i} of {kernel.name}", x, tuple(x.shape), torch.float32, out.device)
    for name, x in zip(("read", "write", "begins"), whose, strict=True):
        check(name, x, (None,), torch.int64, out.device)
        check_contiguous(**{name: x})
    pointers = (x.data_ptr() for x in (out, *inputs))
    run(kernel, out.device, (len(whose[0]), blocks), *pointers, *sizes, *cache, *(x.data_ptr() for x in whose))
    return out


def conv(x: Tensor, weight: Tensor, bias: Tensor, cache: Cache, whose: Whose) -> Tensor:
    """A causal convolution of each channel; x [T, channels], weight [taps, channels]. All float32, here and in the functions below."""
    channels = x.shape[1]
    return _recur(
        scan.conv(len(weight)), -(-channels // scan.THREADS), (x, weight, bias), (channels,), cache, whose, x.shape
    )


def takes_ssd(head_dim: int, state_size: int) -> bool:
    """Whether there are kernels for SSD with states of these sizes."""
    return head_dim % 8 == 0 and state_size % 32 == 0 and max(head_dim, state_size) <= 256


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, cache: Cache, whose: Whose, in_chunks: bool
) -> Tensor:
    """SSD; x [T, heads, P], dt [T, heads], B and C [T, groups, N]. in_chunks: for sequences of many tokens."""
    heads, P, (groups, N) = *x.shape[1:], B.shape[1:]
    kernel = scan.ssd_chunks(P, N) if in_chunks else scan.ssd(P, N)
    return _recur(kernel, heads, (x, dt, A, B, C, D), (heads, groups), cache, whose, x.shape)


def selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, cache: Cache, whose: Whose) -> Tensor:
    """The selective scan; x and dt [T, channels], A [N, channels], B and C [T, N]."""
    channels, blocks = x.shape[1], -(-x.shape[1] // scan.THREADS)
    return _recur(scan.selective(len(A)), blocks, (x, dt, A, B, C, D), (channels,), cache, whose, x.shape)


def delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: Cache, whose: Whose) -> Tensor:
    """The gated delta rule; q and k [T, heads, K], v [T, heads, V], logarithms of decays and shares [T, heads]."""
    kernel = scan.delta(q.shape[2], v.shape[2])
    return _recur(kernel, v.shape[1], (q, k, v, decay, beta), (v.shape[1],), cache, whose, v.shape)


def most_summed_bytes(ranks: int) -> int:
    """The longest message, in bytes, that one shot takes: for two ranks the longest that was measured, where it still beats NCCL.

    For more ranks that is divided by `ranks - 1`: a guess from the bytes on a link.
    """
    return (8 << 20) // (ranks - 1)


def peers_unsupported(size: int, groups: int = 1) -> str | None:
    """Why groups of `size` GPUs each, one after the other, cannot add up in each other's memory, in words; None if they can."""
    if size > MOST_RANKS:
        return f"the kernel is for up to {MOST_RANKS} GPUs, not for {size}"
    if (there := torch.cuda.device_count()) < size * groups:
        return f"there are {there} GPUs, not {size * groups}"
    for first in range(0, size * groups, size):
        for one, other in itertools.permutations(range(first, first + size), 2):
            if not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} cannot read the memory of GPU {other}"
    return device_unsupported(torch.device("cuda", 0))


class PeerAllReduce:
    """Adds up tensors of the ranks' GPUs by one kernel; see `all_reduce`. Every rank makes one object and calls it with the same shapes.

    Args:
        rank, ranks: this one's number, and how many there are. The current device is this rank's.
        exchange: see `PeerMemory`.
        most_bytes: size of the largest tensor.
    """

    def __init__(
        self, rank: int, ranks: int, exchange: Callable[[bytes], list[bytes]], most_bytes: int | None = None
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", torch.cuda.current_device())
        self.most_bytes = most_summed_bytes(ranks) if most_bytes is None else most_bytes
        self.room = region_pieces(self.most_bytes)
        torch.zeros(1, device=self.device)  # makes the CUDA context
        self.memory = PeerMemory(rank, buffer_bytes(self.room), exchange)
        self.addresses = torch.tensor(self.memory.addresses, dtype=torch.int64, device=self.device)

    def takes(self, x: Tensor) -> bool:
        """Whether it can add up tensors like this one."""
        pieces = x.nbytes % 16 == 0 and 0 < x.nbytes <= self.most_bytes
        return pieces and x.dtype in FLOATS and x.is_contiguous() and x.data_ptr() % 16 == 0

    def __call__(self, x: Tensor) -> None:
        """x becomes the sum of the ranks' tensors, on the current stream. The same bits on every rank."""
        if not self.takes(x) or x.device != self.device:
            raise ValueError(
                f"x must be contiguous {', '.join(map(str, FLOATS))} on {self.device}, at most {self.most_bytes} bytes in"
                f" whole pieces of 16, not {x.dtype} {list(x.shape)} on {x.device} with strides {x.stride()}"
            )
        pieces = x.nbytes // 16
        blocks, each = split_pieces(pieces)
        pointers = x.data_ptr(), self.addresses.data_ptr()
        run(one_shot(FLOATS[x.dtype], self.ranks), x.device, (blocks, 1), *pointers, self.rank, pieces, each, self.room)
