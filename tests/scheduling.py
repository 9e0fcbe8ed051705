"""A scheduler without a model: deterministic tokens, and a driver that checks the laws after every step."""

from collections import deque

from block_memory import Memory

from minivllm.core.config import KVCacheConfig, KVCacheSpec, make_kv_cache_groups
from minivllm.core.events import Fold, State
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace, find_fault

GROUPS = {
    "full": ["full"],
    "window": ["sliding_window"],
    "chunked": ["chunked_local"],
    "hybrid": ["full", "sliding_window"],
    "gemma": ["sliding_window"] * 5 + ["full"],
    "all": ["full", "sliding_window", "chunked_local"],
    "state": ["state"],
    "checkpoints": ["state_all"],
    "aligned": ["state_align"],
    "aligned hybrid": ["full", "state_align", "sliding_window"],
    "ring": ["state_ring"],
    "ring hybrid": ["full", "state_ring", "state_ring"],
    "state hybrid": ["full", "state", "state"],
    "checkpoint hybrid": ["state_all", "full", "state_all"],
}


def kv_config(kind: str, block_size: int, num_blocks: int, window: int = 8) -> KVCacheConfig:
    windows = {"sliding_window": window, "chunked_local": window}
    options = {"state_ring": (("ring", 5),)}
    specs = [
        KVCacheSpec(k.removesuffix("_ring"), block_size, 1, 4, window=windows.get(k), options=options.get(k, ()))
        for k in GROUPS[kind]
    ]
    return KVCacheConfig(num_blocks, block_size, make_kv_cache_groups(specs))


def fake_model(output: SchedulerOutput, scheduler: Scheduler) -> ModelRunnerOutput:
    """Samples a token that depends on the request's tokens alone, from a small alphabet, so that texts meet again."""
    sampled = {}
    for request_id in output.num_scheduled_tokens:
        request = scheduler.requests.get(request_id)
        if request is not None and request.num_computed_tokens == request.num_tokens:
            sampled[request_id] = [sum(request.all_token_ids) % 3]
    return ModelRunnerOutput(sampled)


class Driver:
    """Runs steps and checks every law after each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.trace: Trace = scheduler.record()
        self.fold = Fold(self.trace.start)
        self.done = 0
        self.runner = Memory(scheduler)
        self.outputs: dict[str, list[int]] = {}

    def check(self, ahead: int = 0) -> State:
        for event in self.trace.events[self.done :]:
            self.fold.apply(event)
        self.done = len(self.trace.events)
        folded, live = self.fold.state(), self.scheduler.state()
        assert folded == live
        assert self.fold.num_cached_free == sum(live.hashes[block] is not None for block in live.free)
        fault = find_fault(live, ahead)
        assert fault is None, fault
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_cached_free == sum(block.block_hash is not None for block in pool.free_queue)
        return live

    def step(self) -> SchedulerOutput:
        output = self.decide()
        self.check()
        self.take_in(output, fake_model(output, self.scheduler))
        return output

    def take_in(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for out in self.scheduler.update_from_output(output, result):
            self.outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
        self.check()

    def decide(self, may_wait: bool = False) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        assert output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs
        assert all(n > 0 for n in output.num_scheduled_tokens.values())
        if self.scheduler.requests and not may_wait:
            assert output.num_scheduled_tokens, "a step without progress"
        self.runner.execute(output)
        self._compare_rows(output)
        return output

    def _compare_rows(self, output: SchedulerOutput) -> None:
        """The runner's rows equal the scheduler's, except for blocks that a window has left behind meanwhile."""
        assert set(self.runner.rows) == {r.request_id for r in self.scheduler.running}
        for request_id, row in self.runner.rows.items():
            assert row.computed == self.scheduler.requests[request_id].num_computed_tokens
            for mine, theirs in zip(row.tables, self.scheduler.kv_cache_manager.get_block_ids(request_id), strict=True):
                assert len(mine) == len(theirs)
                assert all(a == b or b == 0 for a, b in zip(mine, theirs, strict=True))

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"not finished after {limit} steps")
        pool, cpu = self.scheduler.kv_cache_manager.block_pool, self.scheduler.kv_cache_manager.cpu_pool
        assert pool.num_free == pool.num_blocks
        assert cpu is None or cpu.num_free == cpu.num_blocks
        self.trace.check()


class LateDriver(Driver):
    """Decides every step before it hands over the result of the one before, as async scheduling does."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.flying: deque[tuple[SchedulerOutput, list[Request]]] = deque()

    def step(self) -> SchedulerOutput:
        output = self.decide(may_wait=bool(self.flying))
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        self.flying.append((output, [r for r in requests if r.num_computed_tokens >= r.num_tokens]))
        self.check(ahead=len(self.flying) - 1)
        if len(self.flying) == 2:
            self.land()
        return output

    def land(self) -> None:
        """Hand over the oldest result. It has tokens for requests that ended meanwhile, too."""
        output, sampling = self.flying.popleft()
        tokens = {request.request_id: [sum(request.all_token_ids) % 3] for request in sampling}
        self.take_in(output, ModelRunnerOutput(tokens))

    def drain(self, limit: int = 10_000) -> None:
        while self.scheduler.has_requests():
            self.step()
        while self.flying:
            self.land()
        super().drain(limit)
