"""Routers: what they choose, and what they keep."""

import json
import random

import pytest

from minivllm.core.events import TraceHeader
from minivllm.core.prefix import extend_block_hashes
from minivllm.core.request import Request
from minivllm.core.routing import ROUTERS, LeastLoaded, PrefixAware, Replica, RoundRobin, route
from minivllm.core.trace import Trace
from minivllm.core.trace_files import perfetto_events, save_perfetto


def request(tokens, name="r", **more) -> Request:
    return Request(name, tokens, max_tokens=1, **more)


def test_round_robin_and_least_loaded():
    replicas = [Replica(0, 2, 10), Replica(1, 1, 90), Replica(2, 1, 30)]
    router = RoundRobin()
    assert [router.choose(request([1]), replicas) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert LeastLoaded().choose(request([1]), replicas) == 2


def test_prefix_aware_against_brute_force():
    """Of the replicas that are not too busy, the one that was sent the longest beginning."""
    rng, router, sent = random.Random(0), PrefixAware(block_size=4, slack=2), [[], [], []]
    replicas = [Replica(i) for i in range(3)]
    begins = [[rng.randrange(9) for _ in range(24)] for _ in range(5)]
    for step in range(300):
        begin = rng.choice(begins)
        tokens = begin[: rng.randrange(1, 25)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        for replica in replicas:
            replica.num_requests = rng.randrange(5)
            replica.num_tokens = rng.randrange(50)

        def known(i, tokens=tokens):
            full = len(tokens) // 4
            return max(
                (n for n in range(full + 1) if n == 0 or any(s[: 4 * n] == tokens[: 4 * n] for s in sent[i])), default=0
            )

        least = min(r.num_requests for r in replicas)
        allowed = [r for r in replicas if r.num_requests <= least + 2]
        want = min(allowed, key=lambda r: (-known(r.index), r.num_requests, r.num_tokens, r.index)).index
        assert router.choose(request(tokens, str(step)), replicas) == want
        sent[want].append(tokens)


def test_prefix_aware_forgets_the_least_recent_and_tells_adapters_apart():
    replicas = [Replica(0, 1), Replica(1, 0)]
    router = PrefixAware(block_size=2, slack=5, blocks=3)
    assert router.choose(request([1, 2, 3, 4]), replicas) == 1
    replicas[1].num_requests = 2
    assert router.choose(request([1, 2, 3, 4, 5]), replicas) == 1
    assert router.choose(request([1, 2, 3, 4, 5], lora_name="x"), replicas) == 0  # another adapter, other blocks
    assert router.choose(request([1, 2, 3, 4], cache_salt="s"), replicas) == 0
    replicas[0].num_requests = 9
    assert router.choose(request([7, 8, 9, 10]), replicas) == 1  # 0 is too busy; now 1 has sent 4 blocks, one too many
    replicas[0].num_requests, replicas[1].num_requests = 0, 2
    assert router.choose(request([1, 2, 3, 4]), replicas) == 0
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        PrefixAware(block_size=0)


def test_names_are_those_of_the_blocks():
    r = request(list(range(40)))
    PrefixAware(block_size=16).choose(r, [Replica(0)])
    assert r.block_hashes == extend_block_hashes(request(list(range(40))), 16)
    assert set(ROUTERS) == {"round_robin", "least_loaded", "prefix_aware"}


@pytest.mark.parametrize("name", [*ROUTERS, "of a cell"])
def test_each_decision_is_an_event_with_what_the_router_saw(name, tmp_path):
    """In a trace, its file, its table, its story and Perfetto; two traces of two replicas have one router."""

    class Last:
        def choose(self, request, replicas):
            return len(replicas) - 1

    router, traces = ROUTERS.get(name, Last)(), [Trace(TraceHeader()) for _ in range(2)]
    replicas, rng, seen = [Replica(0), Replica(1)], random.Random(3), []
    for i in range(12):
        for replica in replicas:
            replica.num_requests, replica.num_tokens = rng.randrange(4), rng.randrange(90)
        given = request([rng.randrange(2)] * 40, f"r{i}")
        event = route(router, given, replicas, i / 10)
        held = [(r.num_requests, r.num_tokens) for r in replicas]
        assert [about[:2] for about in event.candidates] == held and event.time == i / 10
        scores = [about[2] for about in event.candidates]
        if name == "least_loaded":
            assert scores == [n for n, _ in held]
        elif name == "prefix_aware":
            names = extend_block_hashes(given, 16)
            assert scores == [sum(e.replica == r and e.request[0] in names for e in seen) and 2.0 for r in (0, 1)]
            seen.append(event._replace(request=names))
        else:
            assert scores == [None, None]
        traces[event.replica].events += [event, ("step", i, i / 10)]
    trace = traces[1]
    trace.save(tmp_path / "one.jsonl")
    assert Trace.load(tmp_path / "one.jsonl").events == trace.events
    trace.check()
    rows = trace.to_pandas()["routes"]
    mine = [event for event in trace.events if event[0] == "route"]
    assert len(rows) == 2 * len(mine) and set(rows[rows.chosen].replica) == {1}
    assert list(rows[rows.chosen].reason) == [event.reason for event in mine]
    assert list(zip(rows.num_requests, rows.num_tokens, strict=True)) == [a[:2] for e in mine for a in e.candidates]
    save_perfetto(traces, tmp_path / "all.json")
    found = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    marks = [e for e in found if e["ph"] == "i"]
    assert sorted(e["name"] for e in marks) == sorted(f"r{i}" for i in range(12)) and {e["pid"] for e in marks} == {3}
    assert {e["name"]: e["tid"] - 1 for e in marks} == {
        e.request: e.replica for t in traces for e in t.events if e[0] == "route"
    }
    called = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert {"router", "replica 1: engine"} <= set(called.values())
    (first,) = [e for e in perfetto_events(trace) if e["name"] == mine[0].request]
    assert (
        first["args"]["why"] == mine[0].reason and f"{mine[0].candidates[0][0]} requests" in first["args"]["replica 0"]
    )


def test_a_router_that_names_no_replica_is_told_so():
    class Wrong:
        def choose(self, request, replicas):
            return 2

    with pytest.raises(ValueError, match="router Wrong chose replica 2; there are 0 to 1"):
        route(Wrong(), request([1]), [Replica(0), Replica(1)], 0.0)
