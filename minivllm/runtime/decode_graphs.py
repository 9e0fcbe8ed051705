"""CUDA graphs of decode steps, captured for a ladder of batch sizes."""

# Generated from nbs/runtime/decode_graphs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import bisect
import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from tqdm import tqdm

Tensors = tuple[Tensor, ...]
logger = logging.getLogger("minivllm.runtime")


def graph_ladder(largest: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, then multiples of 8, and `largest`."""
    if largest < 1:
        raise ValueError(f"graph_ladder needs at least one row, got {largest}")
    return tuple(n for n in (1, 2, 4, *range(8, largest, 8)) if n < largest) + (largest,)


def rung(ladder: tuple[int, ...], rows: int) -> int | None:
    """The smallest rung that holds `rows`, or None if none does."""
    at = bisect.bisect_left(ladder, rows)
    return ladder[at] if at < len(ladder) else None


class DecodeGraphs:
    """Recordings of decode steps, one for each key, made when first wanted.

    Args:
        device: a CUDA device.
        memory_limit: bytes that the recordings may take together; when they have, new keys run without one.
        progress: show a bar that counts them.
        agree: gives the largest of a number among the ranks that hold the layers together. All of them must record, or none, since
            NCCL may talk to the other ranks when a collective is recorded.

    Attributes:
        used_bytes: what they take.
    """

    def __init__(
        self,
        device: torch.device,
        memory_limit: int,
        progress: bool = False,
        agree: Callable[[int], int] = int,
    ) -> None:
        self.device, self.memory_limit, self.used_bytes = device, memory_limit, 0
        self._agree = agree
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensors, object]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._full = False
        self._bar = tqdm(desc="CUDA graphs", unit=" graphs", leave=False, disable=not progress)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def clear(self) -> None:
        """Forget all recordings: the model that was recorded is another one now."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one ends with its last graph
        self.used_bytes, self._full = 0, False

    def run(self, key: Hashable, make: Callable[[], tuple[Callable[[], Tensors], object]]) -> Tensors:
        """The step's results, which the next step overwrites.

        Args:
            key: all that the launches depend on.
            make: gives the step as a function, and what must stay alive as long as a recording of it.
        """
        if key not in self._graphs:
            step, owned = make()
            if self._full:
                return step()
            return self._capture(key, step, owned)
        return self.replay(key)

    def replay(self, key: Hashable) -> Tensors:
        """As `run`, for a step that was recorded."""
        graph, result, _ = self._graphs[key]
        graph.replay()
        return result

    def _capture(self, key: Hashable, step: Callable[[], Tensors], owned: object) -> Tensors:
        before = torch.cuda.memory_reserved(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            first = step()  # compiles kernels; its result is this step's
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        for tensor in first:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        self._graphs[key] = graph, result, owned
        self._bar.update()
        self.used_bytes += self._agree(max(0, torch.cuda.memory_reserved(self.device) - before))
        if self.used_bytes > self.memory_limit:
            self._full = True
            logger.warning(
                "%d CUDA graphs take %.1f GiB, more than their limit of %.1f: steps of other sizes run without one",
                len(self), self.used_bytes / 2**30, self.memory_limit / 2**30,
            )  # fmt: skip
        return first
