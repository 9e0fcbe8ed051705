"""A small paged KV cache in NumPy and exact attention over it, for kernels that run in the simulator."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minivllm_kernels.cuda.planning import AttentionShape, DecodePlan
from minivllm_kernels.cuda.simt import LOG2E, CudaKernel

NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}
FP8_NAN = 0x7F


def to_half(x: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit patterns of floats, rounded to nearest even."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(u16: np.ndarray, dtype: str) -> np.ndarray:
    """float64 of 16-bit patterns."""
    if dtype == "float16":
        return u16.view(np.float16).astype(np.float64)
    return (u16.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def words(u16: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(u16).reshape(-1).view(np.uint32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def to_fp8(x: np.ndarray) -> np.ndarray:
    """e4m3 patterns of floats, as torch rounds them."""
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def from_fp8(u8: np.ndarray) -> np.ndarray:
    """float64 of e4m3 patterns."""
    return torch.from_numpy(u8).view(torch.float8_e4m3fn).double().numpy()


def to_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers and the scales of the rows x [..., D]: the largest number of a row becomes +-127."""
    scales = (np.abs(x).max(-1) / 127).astype(np.float32)
    return np.rint(x / scales[..., None]).astype(np.int8), scales


class PagedCase:
    """Requests whose last `query_lens` tokens are queries; NaN wherever a kernel must not look."""

    def __init__(
        self,
        shape: AttentionShape,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        kv_heads: int = 1,
        first_key: Any = None,
        cap: float | None = None,
        seed: int = 0,
        scales: tuple[float, float] = (1.0, 1.0),
    ):
        rng = np.random.default_rng(seed)
        self.shape, self.kv_heads, self.cap, self.scales = shape, kv_heads, cap, scales
        self.query_lens, self.seq_lens = np.array(query_lens), np.array(seq_lens)
        self.rows = np.cumsum([0, *query_lens])[:-1]
        self.scale = shape.head_dim**-0.5
        dims, block = shape.head_dim, shape.block_size
        need = -(-self.seq_lens // block)
        blocks = iter(rng.permutation(np.arange(1, need.sum() + 1)))
        self.table = np.zeros((len(need), need.max()), np.int32)
        for s, n in enumerate(need):
            self.table[s, :n] = [next(blocks) for _ in range(n)]
        size = (need.sum() + 1, block, kv_heads, dims)
        numbers = [rng.standard_normal(size) for _ in range(2)]
        self.token_scales: list[Any] = [None, None]
        if shape.int8_kv:
            (self.k, k_scales), (self.v, v_scales) = map(to_int8, numbers)
            self.token_scales = [x.transpose(0, 2, 1).copy() for x in (k_scales, v_scales)]
        else:
            self.k, self.v = (
                to_fp8(x / s) if shape.fp8_kv else to_half(x, shape.dtype) for x, s in zip(numbers, scales)
            )
        self.q = to_half(2 * rng.standard_normal((sum(query_lens), kv_heads * shape.group, dims)), shape.dtype)
        self.first_key = first_key or (lambda position: 0)
        self.want = self._exact()
        for s, n in enumerate(self.seq_lens):
            oldest = int(self.first_key(n - self.query_lens[s])) // block
            self.table[s, :oldest] = 0  # freed: the null block
            nan = FP8_NAN if shape.fp8_kv else NAN[shape.dtype]
            for cache, token_scales in zip((self.k, self.v), self.token_scales):
                cache, nan = (cache, nan) if token_scales is None else (token_scales.swapaxes(1, 2), np.nan)
                cache[0] = nan
                if n % block:
                    cache[self.table[s, n // block], n % block :] = nan

    def _exact(self) -> np.ndarray:
        want = np.zeros(self.q.shape)
        row = 0
        for s, (new, n) in enumerate(zip(self.query_lens, self.seq_lens)):
            pages = self.table[s, : -(-n // self.shape.block_size)]
            stored = zip((self.k, self.v), self.scales, self.token_scales)
            k, v = (
                self._floats(c[pages], s, t if t is None else t[pages]).reshape(-1, *c.shape[2:])[:n]
                for c, s, t in stored
            )
            k, v = (np.repeat(x, self.shape.group, axis=1) for x in (k, v))
            for position in range(n - new, n):
                low = int(self.first_key(position))
                score = (
                    np.einsum("hd,nhd->hn", to_float(self.q[row], self.shape.dtype), k[low : position + 1]) * self.scale
                )
                if self.cap is not None:
                    score = self.cap * np.tanh(score / self.cap)
                p = np.exp(score - score.max(1, keepdims=True))
                want[row] = np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), v[low : position + 1])
                row += 1
        return want

    def _floats(self, stored: np.ndarray, scale: float, token_scales: np.ndarray | None) -> np.ndarray:
        if token_scales is not None:
            return stored.astype(np.float64) * token_scales.swapaxes(1, 2)[..., None]
        return from_fp8(stored) * scale if self.shape.fp8_kv else to_float(stored, self.shape.dtype)

    def _common(self) -> tuple:
        dims, heads = self.shape.head_dim, self.q.shape[1]
        w, kv_w = dims // 2, dims * self.k.itemsize // 4
        self.out = np.full(self.q.size // 2, NAN[self.shape.dtype] * 0x10001, np.uint32)
        block_words = self.shape.block_size * self.kv_heads * (kv_w + self.shape.int8_kv)
        strides = (self.table.shape[1], heads * w, heads * w, block_words, self.kv_heads * kv_w, kv_w)
        pointers = (self.out, words(self.q), *map(self._memory, (self.k, self.v), self.token_scales), self.table)
        scale, cap = self.scale * self.scales[0] * LOG2E, 0.0
        if self.cap is not None:
            scale, cap = 2 * scale / self.cap, self.cap * LOG2E
        return pointers, (scale, cap, self.scales[1]), strides

    @staticmethod
    def _memory(stored: np.ndarray, token_scales: np.ndarray | None) -> np.ndarray:
        """Scales lie behind the numbers of their block."""
        if token_scales is None:
            return words(stored)
        return words(np.hstack([x.reshape(len(x), -1).view(np.uint8) for x in (stored, token_scales)]))

    def _error(self) -> float:
        return relative_error(to_float(self.out.view(np.uint16), self.shape.dtype).reshape(self.q.shape), self.want)

    def decode_error(self, rung: CudaKernel, grid_x: int, plan: DecodePlan) -> float:
        """Relative error of a decode rung."""
        pointers, scales, strides = self._common()
        heads = self.q.shape[1]
        slots = max(1, plan.slots)
        partial = [np.full(slots * heads * n, np.nan, np.float32) for n in (self.shape.head_dim, 2)]
        arrivals = np.zeros(slots * grid_x, np.int32)
        arguments = (*pointers, plan.items, *partial, arrivals, *scales, *strides)
        rung.simulate((grid_x, len(plan.items)), *arguments)
        assert not arrivals.any(), "counters must be ready for the next launch"
        return self._error()

    def prefill_error(self, rung: CudaKernel, tiles: np.ndarray, window: int) -> float:
        """Relative error of a prefill rung."""
        pointers, scales, strides = self._common()
        rung.simulate((self.kv_heads, len(tiles)), *pointers, tiles, *scales, window, *strides)
        return self._error()
