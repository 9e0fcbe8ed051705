"""Waiting requests by arrival or by a policy's key."""

# Generated from nbs/core/request_queue.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from minivllm.core.policy import PolicyGuard
from minivllm.core.request import Request

__all__: list[str] = []


class WaitingQueue:
    """Requests that wait, in order of arrival, preempted ones in front; and, if a policy has a key, in the order of that key.

    Attributes:
        requests: {request id: request}, in order of arrival.
    """

    def __init__(self, guard: PolicyGuard | None = None) -> None:
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self._guard = guard
        self._heap: list[tuple[Any, int, Request]] | None = []
        self._ticket = 0
        self._held: set[str] = set()
        self._line: list[Request] = []  # without keys, while requests are held: the queue, the first one last
        self._aside: list[tuple[Any, int, Request]] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self.requests

    def add(self, request: Request, front: bool = False) -> None:
        """Join at the end, or in front after a preemption."""
        self.requests[request.request_id] = request
        if front:
            self.requests.move_to_end(request.request_id, last=False)
        self._ticket += 1
        if self._guard is not None and self._heap is not None:
            try:
                heapq.heappush(self._heap, (self._guard.key(request), self._ticket, request))
            except Exception:  # noqa: BLE001 - a key may raise anything; `first` reports it, within a step as for all hooks
                self._heap = None

    def remove(self, request: Request) -> None:
        """Leave, from any place."""
        del self.requests[request.request_id]

    def hold(self, request: Request) -> None:
        """Let the others pass this one until `release`: `first` and `open` leave it out. It keeps its place."""
        if not self._held and self._guard is None:
            self._line = list(reversed(self.requests.values()))
        self._held.add(request.request_id)

    def release(self) -> None:
        """No request is held any more."""
        self._held.clear()
        self._line.clear()
        while self._aside and self._heap is not None:
            heapq.heappush(self._heap, self._aside.pop())
        self._aside.clear()

    @property
    def open(self) -> int:
        """How many requests are not held."""
        return len(self.requests) - len(self._held)

    def is_open(self, request: Request) -> bool:
        """Whether the request waits here and is not held."""
        return request.request_id in self.requests and request.request_id not in self._held

    def first(self) -> Request:
        """The first in line, or the one with the smallest key. Raises PolicyError if a key fails or keys cannot be compared."""
        if self._guard is None:
            if not self._held:
                return next(iter(self.requests.values()))
            while not self.is_open(self._line[-1]):
                self._line.pop()
            return self._line[-1]
        heap = self._heap = self._rank(self._guard) if self._heap is None else self._heap
        while not self.is_open(heap[0][2]) or self.requests[heap[0][2].request_id] is not heap[0][2]:
            entry = heapq.heappop(heap)
            if entry[2].request_id in self._held:
                self._aside.append(entry)
        return heap[0][2]

    def _rank(self, guard: PolicyGuard) -> list[tuple[Any, int, Request]]:
        """Build the heap again, after a key failed."""
        heap = [(guard.key(request), i - len(self), request) for i, request in enumerate(self)]
        try:
            heapq.heapify(heap)
        except Exception as error:  # noqa: BLE001 - comparing keys may raise anything
            guard.fail("key", f"returned values that cannot be compared: {error}", error)
        return heap
