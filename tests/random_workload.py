"""Random engines with random requests, of which every token is checked: see `block_memory`."""

import random
from collections import deque
from typing import Any

from block_memory import Memory, Row
from scheduling import GROUPS, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.kv_connector import KVConnector
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.policy import FCFS, LFU, DeepestFirst, LongestPrefixMatch, Policy, PolicyError, Priority
from minivllm.core.prefix import extend_block_hashes
from minivllm.core.request import Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap


class Flaky(Policy):
    """A policy with odd tastes that fails now and then."""

    def __init__(self, rng: random.Random, fails: float) -> None:
        self.rng, self.fails = rng, fails

    def _maybe(self) -> None:
        if self.rng.random() < self.fails:
            raise RuntimeError("a bad day")

    def order(self, waiting, view):
        self._maybe()
        return self.rng.sample(waiting, len(waiting))

    def chunk(self, request, budget_left, view):
        self._maybe()
        return self.rng.randrange(budget_left + 1)

    def victim(self, running, view):
        self._maybe()
        return self.rng.choice(running)

    def evict(self, free_blocks, view):
        self._maybe()
        return self.rng.choice(list(free_blocks))


def policies(rng: random.Random) -> Policy:
    kind = rng.randrange(8)
    if kind < 4:
        return Flaky(rng, rng.choice([0.0, 0.05, 0.2]))
    return (FCFS, Priority, LFU, LongestPrefixMatch)[kind - 4]() if rng.random() < 0.9 else DeepestFirst()


class Workload:
    """One random engine with random requests. Every random number comes from `rng`."""

    LONGEST = 16
    KINDS = ("full", "full", *sorted(GROUPS))

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        size = rng.choice([1, 2, 2, 3, 4])
        kind = rng.choice(self.KINDS)
        kv = kv_config(kind, size, 2, window=rng.choice([2, 3, 5, 8]))
        least = sum(max(-(-self.LONGEST // size), g.spec.rules.num_blocks(g.spec, 1)) for g in kv.groups) + 1
        seqs = rng.randint(1, 5)
        chunked = rng.random() < 0.9
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.randint(max(seqs, 4), 24) if chunked else 24,
            max_model_len=self.LONGEST,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 3, 5]),
            max_num_partial_prefills=rng.choice([None, None, 1, 2]),
            scheduler_reserve_full_isl=rng.random() < 0.5,
            starvation_limit=rng.choice([2, 5, 1000]),
        )
        cache = CacheConfig(
            block_size=size,
            num_gpu_blocks=rng.randint(least, least + least // 3),
            prefix_cache_index=rng.choice(["hash", "radix"]),
            watermark=rng.choice([0.0, 0.2]),
        )
        preemption = rng.choice([Recompute(), Swap(rng.choice([3, 8, 60]))])
        self.scheduler = Scheduler(
            config, cache, kv, policy=policies(rng), preemption=preemption, policy_timeout=0,
            connector=self.make_connector(size),
        )  # fmt: skip
        self.memory = self.make_memory()
        self.depth = rng.choice([1, 1, 2])
        # such states cannot take back drafts
        states = any(g.spec.rules.is_state and "ring" not in dict(g.spec.options) for g in kv.groups)
        if self.depth == 1 and not states and rng.random() < 0.6:
            self.memory.guess = self.guess
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.truth: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.hashes: dict[bytes, list[int]] = {}
        self.live: dict[str, Request] = {}
        self.added = 0
        self.preemptions = self.hits = self.errors = self.drafted = 0

    def make_connector(self, block_size: int) -> KVConnector | None:
        return None

    def make_memory(self) -> Memory:
        return Memory(self.scheduler)

    def guess(self, row: Row) -> list[int]:
        """Draft tokens, most of them right: what the request is going to say, with mistakes."""
        tokens, guesses = list(row.tokens), []
        for _ in range(self.rng.randint(0, 4)):
            right = sum(tokens) % 3
            guesses.append(right if self.rng.random() < 0.7 else (right + 1) % 3)
            tokens.append(guesses[-1])
        return guesses

    def add(self) -> None:
        rng = self.rng
        self.added += 1
        length = rng.randint(1, self.LONGEST - 2)
        prompt = [0, 1, 2, 0][: rng.randint(0, 4)] * 4 + [rng.randrange(3) for _ in range(length)]
        request = Request(
            str(self.added), prompt[:length], max_tokens=rng.randint(1, 8), priority=rng.randrange(3),
            cache_salt=rng.choice([None, None, None, "s"]), stop_token_ids=frozenset(rng.choice([(), (), (1,)])),
            skip_reading_prefix_cache=rng.random() < 0.1,
        )  # fmt: skip
        self.scheduler.add_request(request)
        tokens = list(request.all_token_ids)
        while len(tokens) < request.max_total_tokens:
            tokens.append(sum(tokens) % 3)
            if tokens[-1] in request.end_token_ids:
                break
        name = request.request_id
        self.truth[name], self.said[name], self.live[name] = tokens[request.num_prompt_tokens :], [], request
        row = Row(tokens, self.memory.root(request), 0, [])
        prefixes, size = self.memory.prefixes(row, len(tokens)), self.scheduler.cache.block_size
        full = Request("", tokens, max_tokens=1, cache_salt=request.cache_salt)
        for i, name_of_block in enumerate(extend_block_hashes(full, size)):
            self.hashes[name_of_block] = prefixes[i * size : (i + 1) * size]

    def end(self, name: str) -> None:
        """The truth of a request that was ended from outside is what it has said."""
        self.truth[name] = self.truth[name][: len(self.said[name])]

    def step(self) -> None:
        try:
            output = self.scheduler.schedule()
        except PolicyError:
            self.errors += 1
            self.memory.check_hashes(self.hashes)
            if self.rng.random() < 0.5:
                self.scheduler.set_policy(policies(self.rng))
            return
        self.drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self.hits += sum(new.num_computed_tokens for new in output.new_requests)
        self.preemptions += len(output.preempted)
        fails = self.rng.random() < 0.01
        result = self.memory.execute(output, fails)
        if fails:
            outputs = [*(o for o, _ in self.flying), output]
            self.flying.clear()
            for gone in {n for o in outputs for n in (*o.num_scheduled_tokens, *o.preempted)} & set(
                self.scheduler.requests
            ):
                self.end(gone)
            self.scheduler.abandon(outputs)
        else:
            self.flying.append((output, result))
        self.memory.check_hashes(self.hashes)
        while len(self.flying) >= self.depth:
            self.land()

    def land(self) -> None:
        for out in self.scheduler.update_from_output(*self.flying.popleft()):
            self.said[out.request_id] += out.new_token_ids

    def act(self) -> None:
        """Something that happens between two steps."""
        rng, scheduler = self.rng, self.scheduler
        kind = rng.random()
        if kind < 0.25 and self.added < 8:
            self.add()
        elif kind < 0.30 and scheduler.requests:
            name = rng.choice(sorted(scheduler.requests))
            scheduler.finish_requests([name])
            self.end(name)
        elif kind < 0.34:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        elif kind < 0.37:
            scheduler.set_policy(policies(rng))
        elif kind < 0.40 and self.flying:
            self.land()

    def is_busy(self) -> bool:
        return self.scheduler.has_requests()

    def run(self) -> None:
        for _ in range(self.rng.randint(2, 4)):
            self.add()
        for _ in range(self.rng.randint(5, 25)):
            self.act()
            self.step()
        self.scheduler.set_policy(self.rng.choice([FCFS, Priority])())
        for _ in range(400):
            if not self.is_busy():
                break
            self.step()
        while self.flying:
            self.land()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.scheduler.requests, "not finished"
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        assert self.said == self.truth


def run_random(kind: type[Workload], seed: int) -> Any:
    """A workload that has been run. Raises AssertionError that names the seed."""
    workload = kind(random.Random(seed))
    try:
        workload.run()
    except BaseException as error:
        raise AssertionError(f"workload {seed}: {error}") from error
    return workload
