"""Ranks of tensor parallelism that are threads of one process."""

import threading

import torch

from minivllm.models.parallel import Share, TensorGroup


class Board:
    """Where ranks that are threads put what they have, and read what the others have."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=120), [None] * size

    def exchange(self, rank: int, x) -> list:
        self.parts[rank] = x
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadGroup(TensorGroup):
    def __init__(self, share: Share, board: Board) -> None:
        super().__init__(share)
        self.board = board

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x)
        return x.copy_(sum(self.board.exchange(self.share.rank, x.clone())))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x)
        return torch.cat(self.board.exchange(self.share.rank, x.clone()), -1)

    def all_to_all(self, x: torch.Tensor, there, here) -> torch.Tensor:
        self._count(x)
        assert sum(there) == len(x)
        rank = self.share.rank
        parts = [
            rows.split(lengths)[rank]
            for rows, lengths in self.board.exchange(self.share.rank, (x.clone(), list(there)))
        ]
        assert [len(part) for part in parts] == list(here)
        return torch.cat(parts)


def on_ranks(size: int, run, by_expert: bool = False, all_to_all: bool = False) -> list:
    """What `run(group)` gives on each rank."""
    board, results = Board(size), [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = run(ThreadGroup(Share(rank, size, by_expert, all_to_all), board))
        except BaseException as error:  # noqa: BLE001 - raised below
            results[rank] = error
            board.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted(results, key=lambda r: isinstance(r, threading.BrokenBarrierError)):
        if isinstance(result, BaseException):
            raise result
    return results
