"""Routers: which replica of an engine gets a request."""

# Generated from nbs/core/routing.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.core.events import EVENTS, Event
from minivllm.core.prefix import extend_block_hashes
from minivllm.core.request import Request


@dataclass(slots=True)
class Replica:
    """One of several engines behind a front.

    Attributes:
        index: its number.
        num_requests: sent to it, and not ended.
        num_tokens: prompt tokens of those.
    """

    index: int
    num_requests: int = 0
    num_tokens: int = 0


class Router(Protocol):
    """Chooses a replica for every request.

    Two optional attributes explain its last choice: `reason`, in words, and `scores`, {replica: the number that was compared}.
    """

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """The number of a replica. Called once for each request, in the order of arrival."""
        ...


def route(router: Router, request: Request, replicas: Sequence[Replica], now: float) -> Event:
    """Have a router choose.

    Args:
        now: seconds on the engines' clock.

    Returns:
        The event `route`, see `core.events`; it has the requests, prompt tokens, and score (or None) of each candidate.

    Raises:
        ValueError: it chose a number that no replica has.
    """
    chosen = router.choose(request, replicas)
    if not 0 <= chosen < len(replicas):
        raise ValueError(f"router {type(router).__name__} chose replica {chosen!r}; there are 0 to {len(replicas) - 1}")
    scores = getattr(router, "scores", {})
    about = ((r.num_requests, r.num_tokens, scores.get(r.index)) for r in replicas)
    candidates = tuple((n, tokens, None if score is None else float(score)) for n, tokens, score in about)
    event: Event = EVENTS["route"](
        "route", request.request_id, now, int(chosen), candidates, getattr(router, "reason", "")
    )
    return event


class RoundRobin:
    """One after the other."""

    reason = "its turn"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        self._next += 1
        return (self._next - 1) % len(replicas)


class LeastLoaded:
    """The replica with the fewest requests that have not ended; of equals the one with fewer prompt tokens, then the first."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        best = min(replicas, key=lambda r: (r.num_requests, r.num_tokens, r.index))
        self.scores = {r.index: r.num_requests for r in replicas}
        self.reason = f"{best.num_requests} requests there, no replica has fewer"
        return best.index


class PrefixAware:
    """The replica that was sent the longest beginning of the prompt, unless it is too busy.

    Args:
        block_size: tokens per block.
        slack: how many more requests than the least loaded replica it may have.
        blocks: hashes kept for each replica.
    """

    def __init__(self, block_size: int = 16, slack: int = 4, blocks: int = 100_000) -> None:
        for name, value in {"block_size": block_size, "slack": slack, "blocks": blocks}.items():
            if value < (name != "slack"):
                raise ValueError(f"PrefixAware: {name} must be at least {int(name != 'slack')}, got {value}")
        self.block_size, self.slack, self.blocks = block_size, slack, blocks
        self._known: dict[int, OrderedDict[bytes, None]] = {}

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        names = list(extend_block_hashes(request, self.block_size))
        least = min(r.num_requests for r in replicas)
        open_to = [r for r in replicas if r.num_requests <= least + self.slack]
        found = self.scores = {r.index: self._matches(r.index, names) for r in replicas}
        best = min(open_to, key=lambda r: (-found[r.index], r.num_requests, r.num_tokens, r.index))
        self.reason = f"{found[best.index]} of {len(names)} blocks were sent there; {best.num_requests} requests, the least loaded has {least}"
        if (most := max(found.values())) > found[best.index]:
            self.reason += f"; {most} blocks elsewhere, but too many requests"
        self._remember(best.index, names)
        return best.index

    def _matches(self, replica: int, names: Sequence[bytes]) -> int:
        known = self._known.get(replica, ())
        return next((i for i, name in enumerate(names) if name not in known), len(names))

    def _remember(self, replica: int, names: Sequence[bytes]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for name in names:
            known[name] = None
            known.move_to_end(name)
        while len(known) > self.blocks:
            known.popitem(last=False)


ROUTERS: dict[str, type[RoundRobin | LeastLoaded | PrefixAware]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}
