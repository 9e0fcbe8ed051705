"""Several engines on one stream of requests: routers, and disaggregated prefill."""

# Generated from nbs/lab/replicas.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from minivllm.core.config import KVTransferConfig
from minivllm.core.kv_connector import Key, KVConnector
from minivllm.core.routing import Replica, RoundRobin, Router, route
from minivllm.lab.cost import CostModel, Roofline, known
from minivllm.lab.meter import Meter
from minivllm.lab.parallel import LINKS, Link, Transfers
from minivllm.lab.simulation import Session, Settings, make_settings
from minivllm.lab.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    import pandas as pd

Arrivals = list[tuple[float, int, WorkloadRequest]]


class _Engine(Session):
    """A session whose follow-ups go to the front, which chooses an engine for them."""

    def __init__(self, front: Arrivals, ticket: Callable[[], int], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.meter, self._front, self._next = Meter(), front, ticket
        self.scheduler.subscribe(self.meter.feed, blocks=False)

    def _follow(self, request_id: str) -> None:
        follow_up = self._follow_ups.pop(request_id, None)
        if follow_up is not None and (after := follow_up(self.clock.now())) is not None:
            heapq.heappush(self._front, (after.arrival_time, self._next(), after))

    def _moments(self) -> list[float]:
        return super()._moments() + [moment for moment, *_ in self._front[:1]]

    def take(self, request: WorkloadRequest, now: float) -> None:
        """A request comes at a moment that this engine's clock has reached, or at which it has nothing to do."""
        if not self.scheduler.requests:
            self.clock.advance_to(now)
        self.add(request)


@dataclass(repr=False)
class Fleet:
    """What came of several engines.

    Attributes:
        requests: one row per request, as `Run.requests`, and the number of its `replica`.
        decisions: each choice of the router, as an event (see `core.routing.route`).
        refused: ids of requests that an engine's scheduler would not take, with its reason.
    """

    name: str
    requests: pd.DataFrame
    decisions: list[Any] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were cached, as a share of all; NaN if there were none."""
        prompts = self.requests.num_prompt_tokens.sum()
        return float(self.requests.num_cached_tokens.sum() / prompts) if prompts else float("nan")

    def __repr__(self) -> str:
        r = self.requests
        text = (
            f"Fleet({self.name}: {len(r)} requests on {r.replica.nunique()} engines, hits {self.hit_rate:.1%}, "
            f"ttft median {r.ttft.median():.3f} s, p99 {r.ttft.quantile(0.99):.3f} s"
        )
        return text + (f", {len(self.refused)} refused)" if self.refused else ")")


def _run(
    engines: list[_Engine],
    front: Arrivals,
    place: Callable[[WorkloadRequest, float], None],
    ended: Callable[[_Engine, str], None] = lambda engine, name: None,
) -> None:
    """Step until no request is left. place: has an engine `take` a request. ended: is told of each end."""
    while True:
        busy = [e for e in engines if e.scheduler.requests]
        behind = min(busy, key=lambda e: e.clock.now(), default=None)
        if front and (behind is None or front[0][0] <= behind.clock.now()):
            now, _, request = heapq.heappop(front)
            place(request, now)
        elif behind is None:
            break
        else:
            for output in behind.step():
                if output.finish_reason is not None:
                    ended(behind, output.request_id)
                    behind._follow(output.request_id)
    for engine in engines:
        engine.drain()


def _arrivals(source: Iterable[WorkloadRequest]) -> tuple[Arrivals, Callable[[], int]]:
    ticket = count().__next__
    front = [(request.arrival_time, ticket(), request) for request in source]
    heapq.heapify(front)
    return front, ticket


def simulate_replicas(
    source: Workload, router: Router | None = None, num_replicas: int = 2, *, config: dict[str, Any] | Settings | None = None,
    cost_model: CostModel | None = None,
) -> Fleet:  # fmt: skip
    """What would have happened with several engines of the same kind behind a router.

    Args:
        source: the requests.
        router: see `core.routing`; None for `RoundRobin`.
        num_replicas: number of engines.
        config, cost_model: of each, see `simulate`.

    Raises:
        ValueError: no engine.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    router, cost = router or RoundRobin(), cost_model or Roofline()
    settings, (front, ticket) = make_settings(config, None, cost), _arrivals(source)
    engines = [_Engine(front, ticket, settings, None, cost) for _ in range(num_replicas)]
    decisions: list[Any] = []

    def place(request: WorkloadRequest, now: float) -> None:
        held = [engine.scheduler.requests.values() for engine in engines]
        replicas = [Replica(i, len(all_), sum(r.num_prompt_tokens for r in all_)) for i, all_ in enumerate(held)]
        decisions.append(route(router, request.to_request(), replicas, now))
        engines[decisions[-1].replica].take(request, now)

    _run(engines, front, place)
    return Fleet(type(router).__name__, _table(engines), decisions, [one for e in engines for one in e.refused])


def _table(engines: list[_Engine]) -> pd.DataFrame:
    import pandas as pd

    tables = [engine.meter.to_pandas().assign(replica=i) for i, engine in enumerate(engines)]
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


class SharedBlocks(KVConnector):
    """The scheduler side of a connector over a store of unlimited size, which several engines of a simulation share.

    Args:
        held: names of the blocks in the store.
        producer: leaves blocks there, and fetches none; otherwise the other way round.
        load_async: blocks are fetched beside the steps.
    """

    def __init__(
        self, held: set[Key], producer: bool, block_size: int, num_groups: int = 1, load_async: bool = False
    ) -> None:
        role, extra = "kv_producer" if producer else "kv_consumer", {"load_async": load_async}
        wanted = KVTransferConfig(kv_connector="SharedBlocks", kv_role=role, kv_connector_extra_config=extra)
        super().__init__(wanted, block_size, num_groups, "")
        self._held = held

    def holds(self, key: Key) -> bool:
        return key in self._held

    def place_to_load(self, key: Key) -> tuple[Any, ...]:
        return (key,)

    def place_to_save(self, key: Key) -> tuple[Any, ...] | None:
        if key in self._held:
            return None
        self._held.add(key)
        return (key,)

    def forget(self, key: Key) -> None:
        self._held.discard(key)

    def clear(self) -> None:
        self._held.clear()


def simulate_pd(
    source: Workload, *, link: str | Link = "nvlink", prefill: CostModel | None = None, decode: CostModel | None = None,
    block_bytes: int | None = None, config: dict[str, Any] | Settings | None = None, load_async: bool = False,
) -> Fleet:  # fmt: skip
    """What would have happened with one engine that computes prompts, and one that decodes.

    Args:
        source: the requests.
        link: over which blocks come; a name in `LINKS`, or a `Link`.
        prefill, decode: cost models of the two engines.
        block_bytes: of a KV block, over all layers; None for the model of a `Roofline`.
        config: of both, see `simulate`.
        load_async: requests wait for their blocks beside the steps of the decoding engine; otherwise its steps wait.

    Returns:
        Requests as the decoding engine saw them, but with `arrival`, `queue_time`, `ttft` and `e2e` from the moment of their arrival at the
        first one. Replica 1 is the one that decodes.

    Raises:
        ValueError: the size of a block is not known.
    """
    first, second, wire = prefill or Roofline(), decode or Roofline(), known(link, LINKS, "link")
    settings, (front, ticket) = make_settings(config, None, second), _arrivals(source)
    size = settings.cache.block_size
    if block_bytes is None:
        model = getattr(second, "model", None)
        if model is None:
            raise ValueError(f"block_bytes is not known for {second!r}: give it")
        block_bytes = model.kv_bytes_per_token * size
    held: set[Key] = set()
    p = _Engine(front, ticket, settings, None, first, connector=SharedBlocks(held, True, size))
    store = SharedBlocks(held, False, size, load_async=load_async)
    d = _Engine(front, ticket, settings, None, Transfers(second, wire, block_bytes), connector=store)
    asked: dict[str, WorkloadRequest] = {}
    arrived: dict[str, float] = {}

    def place(request: WorkloadRequest, now: float) -> None:
        name = request.request_id
        if name in asked:  # its prompt has been computed
            d.take(asked.pop(name), now)
        else:
            asked[name], arrived[name] = request, now
            p.take(
                replace(request, output=request.output[:1], max_tokens=None, ends_with_stop=None, follow_up=None), now
            )

    def ended(engine: _Engine, name: str) -> None:
        if engine is p:
            heapq.heappush(front, (p.clock.now(), ticket(), asked[name]))

    _run([p, d], front, place, ended)
    table = _table([p, d])
    table = table[table.replica == 1].reset_index(drop=True)
    late = table.arrival - table.request_id.map(arrived)
    table["arrival"] -= late
    for name in ("queue_time", "ttft", "e2e"):
        table[name] += late
    return Fleet("P and D", table, refused=p.refused + d.refused)
