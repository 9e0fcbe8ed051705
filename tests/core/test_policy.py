"""What policies see and hear: read-only views, events, the tree of blocks, the eviction heap, and fairness as published."""

import random
import threading
import time
from collections import defaultdict

import pytest
from scheduling import Driver

from minivllm.core.block_pool import BlockPool
from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import FCFS, LFU, DeepestFirst, FairShare, Policy, PolicyError, View, Watchdog, combine
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, VirtualClock
from minivllm.lab import Constant, simulate
from minivllm.lab.hits import real_hits
from minivllm.lab.simulation import policy_of
from minivllm.lab.workload import Workload, WorkloadRequest, shared_prefix, text


def make(policy, blocks=33, seqs=8, length=64, budget=64):
    limits = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length)
    return Scheduler(limits, CacheConfig(4, blocks), policy=policy, clock=VirtualClock())


def test_views_are_read_only_all_the_way_down():
    request = Request("a", [1, 2], max_tokens=3, sampling_params={"stop": ["x"], "more": [{"deep": 1}]})
    view = View(request)
    assert view.all_token_ids == (1, 2) and view.status is request.status and view == View(request)
    assert view != View(Request("a", [1, 2], max_tokens=3)) and len({view, View(request)}) == 1
    assert view.sampling_params["stop"] == ("x",)
    block = View(BlockPool(4).blocks[1])
    writes = [
        lambda: setattr(view, "priority", 1),
        lambda: delattr(view, "priority"),
        lambda: view.sampling_params.update(a=1),
        lambda: view.sampling_params["more"][0].__setitem__("deep", 2),
        lambda: setattr(block.next, "ref_cnt", 7),
        lambda: setattr(block.next.next, "block_hash", b""),
        lambda: view.append_output_token(5),
    ]
    for write in writes:
        with pytest.raises((AttributeError, TypeError)):
            write()
    assert request.sampling_params == {"stop": ["x"], "more": [{"deep": 1}]} and request.num_tokens == 2


def test_the_view_of_the_scheduler_is_read_only_and_knows_who_runs():
    class Looks(FCFS):
        def order(self, waiting, view):
            seen.append((view.num_running, [r.request_id for r in view.running], view.needed_by))
            for name in ("budget", "now", "served"):
                with pytest.raises(AttributeError):
                    setattr(view, name, 1)
            for request in view.running:
                with pytest.raises(AttributeError):
                    request.num_tokens = 1
            return waiting

        def evict(self, free_blocks, view):
            needed.add(view.needed_by.request_id)
            return next(free_blocks)

    seen, needed = [], set()
    driver = Driver(make(Looks(), blocks=9))
    for i in range(3):
        driver.scheduler.add_request(Request(str(i), [i] * 8, max_tokens=6))
        if i:
            driver.step()
        else:
            driver.scheduler.set_policy(FCFS())
            driver.step()
            driver.scheduler.set_policy(Looks())
    driver.drain()
    assert seen[0] == (1, ["0"], None)
    for i in range(4):
        driver.scheduler.add_request(Request(f"more{i}", [50 + i] * 12, max_tokens=2))
        driver.drain()
    assert needed and needed <= {*"012", "more0", "more1", "more2", "more3"}


class Counts(FCFS):
    """Counts all that it hears."""

    def __init__(self):
        self.alive, self.tokens = {}, defaultdict(lambda: [0, 0])
        self.heard = defaultdict(list)

    def on_add(self, request):
        self.alive[request.request_id] = "waiting"

    def on_admit(self, request):
        assert self.alive[request.request_id] == "waiting"
        self.alive[request.request_id] = "running"

    def on_preempt(self, request):
        assert self.alive[request.request_id] == "running"
        self.alive[request.request_id] = "waiting"
        self.heard["preempt"].append(request.request_id)

    def on_tokens(self, request, prompt, output):
        self.tokens[request.request_id][0] += prompt
        self.tokens[request.request_id][1] += output

    def on_hit(self, request, blocks):
        self.heard["hit"] += [(request.request_id, block.block_id) for block in blocks]

    def on_free(self, request, blocks):
        self.heard["free"] += [(request.request_id, block.block_id) for block in blocks]

    def on_finish(self, request):
        del self.alive[request.request_id]
        self.heard["finish"].append(request.request_id)


def test_events_tell_what_the_trace_tells():
    policy = Counts()
    driver = Driver(make(policy, blocks=12, length=40, budget=12))
    rng = random.Random(3)
    requests = [Request(str(i), [i % 3] * rng.randint(4, 20), max_tokens=rng.randint(2, 14)) for i in range(30)]
    for i, request in enumerate(requests):
        driver.scheduler.add_request(request)
        if i % 5 == 4:
            driver.step()
        if i == 20:
            driver.scheduler.finish_requests(["7", "20"])
    driver.drain()
    events = driver.trace.events
    assert not policy.alive and len(policy.heard["preempt"]) == driver.scheduler.num_preemptions > 2
    assert policy.heard["finish"] == [e[1] for e in events if e[0] == "finish"]
    for kind in ("hit", "free"):
        assert policy.heard[kind] == [(e[1], block) for e in events if e[0] == kind for block in e[3]] != []
    for request in requests:
        prompt, output = policy.tokens[request.request_id]
        assert output == request.num_output_tokens
        if not request.num_preemptions and str(request.finish_reason) != "abort":
            assert prompt == request.num_prompt_tokens - request.num_cached_tokens


def test_a_policy_that_takes_over_is_told_who_is_there():
    for policy in (Counts(), FairShare()):
        driver = Driver(make(FCFS(), blocks=12, length=40, budget=12))
        for i in range(8):
            driver.scheduler.add_request(Request(str(i), [i] * 9, max_tokens=6, user="ann" if i % 2 else "bob"))
        for _ in range(6):
            driver.step()
        driver.scheduler.set_policy(policy)
        assert driver.scheduler.running and driver.scheduler.waiting
        driver.drain()
        if isinstance(policy, Counts):
            assert not policy.alive and len(policy.heard["finish"]) < 9
        else:
            assert set(policy.counters) == {"ann", "bob"}


def test_what_happens_in_the_last_step_is_heard_without_another():
    policy = Counts()
    simulate([WorkloadRequest("a", 0.0, (text(0, 5),), text(1, 3))], policy=policy, cost_model=Constant())
    assert policy.tokens["a"] == [5, 3] and policy.heard["finish"] == ["a"]


def test_a_policy_that_only_listens_hears_without_a_recording():
    quiet, loud = Counts(), Counts()
    workload = shared_prefix(50.0, 40, 3, (32, 64), seed=4)
    for policy, record in ((quiet, False), (loud, True)):
        run = simulate(workload, policy=policy, cost_model=Constant(), record=record, config={"num_gpu_blocks": 300})
        assert run.meter.num_tokens > 0
    assert quiet.heard == loud.heard and quiet.heard["hit"] and quiet.tokens == loud.tokens


def test_a_policy_in_two_parts_listens_with_both():
    fair, counts = FairShare(), Counts()
    driver = Driver(make(combine(order=fair, evict=LFU(), victim=counts), blocks=12, length=40))
    for i in range(8):
        driver.scheduler.add_request(Request(str(i), [i] * 9, max_tokens=4, user="ann" if i % 2 else "bob"))
    driver.drain()
    assert fair.counters == {"ann": 4 * (9 + 2 * 4), "bob": 4 * (9 + 2 * 4)} and len(counts.heard["finish"]) == 8
    assert driver.scheduler.kv_cache_manager.block_pool.heap is not None


def test_order_is_asked_once_a_step_or_after_each_admission():
    class Asked(FCFS):
        asked = 0

        def order(self, waiting, view):
            self.asked += 1
            return waiting

    for often, expected in ((False, 1), (True, 5)):
        policy = Asked()
        policy.order_per_admission = often
        driver = Driver(make(policy))
        for i in range(5):
            driver.scheduler.add_request(Request(str(i), [i] * 4, max_tokens=2))
        driver.step()
        assert policy.asked == expected and len(driver.scheduler.running) == 5


# ---- blocks -----------------------------------------------------------------------------------------------------


def test_blocks_know_their_place_in_the_tree():
    class Looks(FCFS):
        track_blocks = True

        def on_free(self, request, blocks):
            self.blocks = blocks

    policy = Looks()
    driver = Driver(make(policy))
    base = list(range(8))
    for name, more in (("a", [20, 21, 22, 23]), ("b", [30, 31, 32, 33]), ("c", [30, 31, 32, 33])):
        driver.scheduler.add_request(Request(name, [*base, *more, 9], max_tokens=1, user=name))
        driver.drain()
    leaf, middle, root = (
        sorted(policy.blocks, key=lambda b: -b.depth)[:3]
        if len(policy.blocks) == 3
        else ([b for b in sorted(policy.blocks, key=lambda b: -b.depth) if b.block_hash][:3])
    )
    assert (root.token_ids, middle.token_ids, leaf.token_ids) == ((0, 1, 2, 3), (4, 5, 6, 7), (30, 31, 32, 33))
    assert root.parent is None and leaf.parent == middle and middle.parent == root and root.children == (middle,)
    assert {child.owner for child in middle.children} == {"a", "b"} and leaf in middle.children
    with pytest.raises(AttributeError, match="read-only"):
        leaf.parent.children[0].ref_cnt = 1
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.add_request(Request("d", base, max_tokens=1))
    driver.drain()
    assert leaf.parent is None and leaf.token_ids is None and middle.children == ()


class Smallest(Policy):
    """The same choice as with a heap, by looking at every block."""

    def __init__(self, key):
        self.choose = key

    def evict(self, free_blocks, view):
        return min(free_blocks, key=self.choose)


@pytest.mark.parametrize("policy", [LFU(), DeepestFirst()])
def test_the_heap_chooses_as_looking_at_every_block(policy):
    workload = shared_prefix(1.0, 300, 12, (16, 160), (1, 80), 1, skew=0.7, seed=2)
    looked = real_hits(workload, 16, 40, Smallest(policy.evict_key))
    assert real_hits(workload, 16, 40, policy) == looked > 100


def test_the_heap_chooses_right_whatever_happens_in_between():
    rng = random.Random(5)
    pool, key = BlockPool(30), {}
    pool.evict_by(lambda block: key[block.block_hash])
    for step in range(3000):
        free = list(pool.cached_free_blocks())
        if free and rng.random() < 0.3:
            pool.touch([rng.choice(free)])
        elif pool.num_free and rng.random() < 0.5:
            expected = min((key[b.block_hash] for b in free), default=None)
            before = {b.block_hash for b in free}
            pool.get_new_blocks(1)
            gone = before - {b.block_hash for b in pool.cached_free_blocks()}
            assert not gone or key[gone.pop()] == expected
        held = [b for b in pool.blocks[1:] if b.ref_cnt]
        if held and rng.random() < 0.6:
            block = rng.choice(held)
            if block.block_hash is None:
                block.block_hash = str(step).encode()
                key[block.block_hash] = rng.randint(0, 5)
            pool.free([block])
    assert len(pool.heap._heap) < 200


# ---- fairness (Sheng et al. 2024) -------------------------------------------------------------------------------

SEQS, PROMPT, ANSWER = 6, 40, 60


def users(arrivals, seed=0):
    """Requests of users: by name, how many, and when they all arrive."""
    rng = random.Random(seed)
    requests = [
        WorkloadRequest(
            f"{user}-{i}", moment, (text(hash_of, rng.randint(1, PROMPT)),), text(1, rng.randint(1, ANSWER)), user=user
        )
        for user, (number, moment) in arrivals.items()
        for i in range(number)
        for hash_of in [2 + i + 1000 * list(arrivals).index(user)]
    ]
    return Workload.of(requests)


def service(run):
    """After each step: the time, and what each user has got by the paper's measure; and until when a request of each user waited."""
    got, length, user_of, waits, rows = defaultdict(float), {}, {}, defaultdict(set), []
    for event in run.trace.events:
        if event[0] == "add":
            length[event[1]], user_of[event[1]] = event[2], event[6]
            waits[event[6]].add(event[1])
        elif event[0] == "admit":
            got[user_of[event[1]]] += length[event[1]]
            waits[user_of[event[1]]].discard(event[1])
        elif event[0] == "update":
            for name, tokens in event[2].items():
                got[user_of[name]] += 2 * len(tokens)
            rows.append((event[1], dict(got), {user for user, names in waits.items() if names}))
    return rows


def widest(rows, a, b):
    """By how much the service of two users grew apart while both had requests in the queue."""
    both = [got.get(a, 0) - got.get(b, 0) for _, got, waiting in rows if {a, b} <= waiting]
    return max(both) - min(both)


def run_of(policy, arrivals):
    config = {"max_num_seqs": SEQS, "max_num_batched_tokens": 256, "num_gpu_blocks": 400, "max_model_len": 128}
    return simulate(users(arrivals), policy=policy, config=config, cost_model=Constant(0.02))


class NeverLifts(FairShare):
    """As before: a counter without the lift."""

    def on_add(self, request):
        self.counters.setdefault(request.user, 0.0)
        self._waiting.setdefault(request.user, set()).add(request.request_id)


def test_users_who_wait_get_the_same_up_to_the_published_bound():
    """Theorem 4.4: while two users are backlogged, their service differs by at most 2 max(w_p L_input, w_q M)."""
    bound = 2 * max(PROMPT, 2 * SEQS * (PROMPT + ANSWER))
    rows = service(run_of(FairShare(), {"ann": (150, 0.0), "bob": (400, 0.0), "newcomer": (150, 15.0)}))
    for a, b in (("ann", "bob"), ("ann", "newcomer"), ("bob", "newcomer")):
        assert widest(rows, a, b) <= bound, (a, b)
    without = service(run_of(NeverLifts(), {"ann": (150, 0.0), "bob": (400, 0.0), "newcomer": (150, 15.0)}))
    assert widest(without, "bob", "newcomer") > bound


def test_a_newcomer_starves_nobody():
    """In the seconds after 15, each of the three who wait gets a third of the service."""
    for policy, fair in ((FairShare(), True), (NeverLifts(), False)):
        rows = service(run_of(policy, {"ann": (300, 0.0), "bob": (300, 0.0), "newcomer": (300, 15.0)}))
        at = {moment: next(got for time, got, _ in rows if time >= moment) for moment in (15.5, 24.5)}
        shares = {user: at[24.5][user] - at[15.5].get(user, 0) for user in ("ann", "bob", "newcomer")}
        assert (min(shares.values()) > 0.25 * sum(shares.values())) == fair, shares


def test_one_who_sends_little_is_served_at_once():
    """A user below the fair share waits for no other user's backlog."""
    run = run_of(FairShare(), {"flood": (500, 0.0), "small": (3, 5.0)})
    waits = run.requests.groupby("user").ttft
    assert waits.get_group("small").max() < 2.0 and waits.get_group("flood").median() > 10.0


def test_fair_share_comes_back_with_its_weights_and_forgets_another_run():
    policy = FairShare(1.0, 5.0)
    first = run_of(policy, {"ann": (10, 0.0), "bob": (10, 0.0)})
    again = policy_of(first.trace)
    assert (again.input_weight, again.output_weight) == (1.0, 5.0)
    assert run_of(policy, {"ann": (10, 0.0), "bob": (10, 0.0)}).trace == first.trace


# ---- notes ------------------------------------------------------------------------------------------------------


class Notes(FCFS):
    def __init__(self, value):
        self.value = value

    def order(self, waiting, view):
        view.note("queue", self.value(waiting))
        return waiting


def test_one_thread_watches_all_policies():
    """However many policies there were, and whatever runs in another thread or inside a policy."""

    def watchers():
        return [t for t in threading.enumerate() if t.name == "minivllm-policy-watchdog"]

    for _ in range(5):
        scheduler = Scheduler(SchedulerConfig(), CacheConfig(num_gpu_blocks=20))
        scheduler.add_request(Request("0", [1, 2, 3], max_tokens=2))
        for policy in (FairShare(), LFU(), FairShare()):
            scheduler.set_policy(policy)
            scheduler.schedule()
    assert len(watchers()) == 1


def test_watched_blocks_do_not_disturb_each_other():
    caught = []

    def spin(seconds, limit):
        try:
            with Watchdog(limit).watch():
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    pass
        except BaseException as error:  # noqa: BLE001 - the watchdog's own class is private
            caught.append((limit, type(error).__name__))

    threads = [threading.Thread(target=spin, args=(10, limit)) for limit in (0.3, 0.1)]
    threads.append(threading.Thread(target=spin, args=(0.2, 20.0)))  # in time
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(9)
    assert caught == [(0.1, "_TimeOut"), (0.3, "_TimeOut")]
    with Watchdog(20.0).watch():
        spin(10, 0.1)
    with Watchdog(0.1).watch():  # a block inside another one ends with that
        spin(10, 20.0)
    assert caught[2:] == [(0.1, "_TimeOut"), (20.0, "_TimeOut")]


def test_a_note_stands_in_the_trace_and_in_its_file(tmp_path):
    run = run_of(Notes(lambda waiting: {"length": len(waiting), "first": waiting[0].request_id}), {"ann": (30, 0.0)})
    run.trace.check()
    notes = [event for event in run.trace.events if event[0] == "note"]
    assert notes[0] == ("note", "queue", {"length": 30, "first": "ann-0"}, "Notes") and len(notes) > 10
    run.trace.save(tmp_path / "run.jsonl")
    assert type(run.trace).load(tmp_path / "run.jsonl") == run.trace
    with pytest.raises(PolicyError, match=r"Notes.order raised TypeError: a note has a text and a number"):
        run_of(Notes(lambda waiting: waiting), {"ann": (3, 0.0)})


def test_subscribers_of_a_simulation_get_every_event():
    for record in (True, False):
        seen = []
        run = simulate(
            shared_prefix(20.0, 20, 2, seed=1), cost_model=Constant(), record=record, subscribers=[seen.append]
        )
        assert {"add", "alloc", "hit", "finish"} <= {event[0] for event in seen}
        assert not record or seen == run.trace.events
