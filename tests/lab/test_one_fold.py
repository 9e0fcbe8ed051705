"""Whatever reads a trace gives the figures of the state that the one fold rebuilds, also where drafts are rejected and ids come again."""

import random

import pytest
from viz_runs import kind_of

from minivllm.core.events import read
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.scheduler import Swap
from minivllm.lab.comparison import decisions
from minivllm.lab.cost import Constant, timed_steps
from minivllm.lab.executor import FakeExecutor
from minivllm.lab.metrics import occupancy, requests
from minivllm.lab.simulation import Session, make_settings
from minivllm.lab.workload import WorkloadRequest, text
from minivllm.viz.timeline import Timeline
from minivllm.viz.timeline_data import DECODE, PREEMPTED, PREFILL, SWAPPED, WAITING
from minivllm.viz.waste import WasteReader

SMALL = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_gpu_blocks": 20, "block_size": 4, "max_model_len": 70}


class Drafting(FakeExecutor):
    """Proposes drafts of which some are wrong, and keeps what each step really consisted of."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(SMALL["block_size"])
        self.rng, self.works = rng, []

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute_model(output)
        self.works.append(self.work)
        for name in result.sampled_token_ids:
            said = self._rows[name][2]
            truth = self._answers[name][said : said + self.rng.randint(0, 4)]
            result.draft_token_ids[name] = [t if self.rng.random() < 0.6 else 1 << 20 for t in truth]
        return result


def random_run(seed: int):
    """A run in which requests are drafted for, preempted, aborted, and come again under the same id; and the live states."""
    rng = random.Random(seed)
    drafting = Drafting(rng)
    preemption = Swap(20) if seed % 2 else None
    session = Session(make_settings(SMALL), cost_model=Constant(), executor=drafting, preemption=preemption)
    trace, states, lengths, lives = session.scheduler.record(), [], [], {}
    for _ in range(200):  # a recorded step reaches up to the next one
        session.step()
        name = f"r{rng.randrange(8)}"
        if name not in session.scheduler.requests and rng.random() < 0.6:
            size = rng.randint(1, 30)
            session.add(
                WorkloadRequest(name, session.clock.now(), (text(rng.randrange(3), size),), range(rng.randint(1, 30)))
            )
            lives[name] = session.scheduler.requests[name]
        if rng.random() < 0.05 and session.scheduler.requests:
            session.end(rng.choice(list(session.scheduler.requests)))
        states.append(session.scheduler.state())
        # the requests themselves: they grow until they end
        lengths.append([lives[name] for name in states[-1].running])
    return trace, drafting, states, lengths


@pytest.mark.parametrize("seed", range(6))
def test_every_reader_tells_what_was_live(seed):
    trace, drafting, states, lives = random_run(seed)
    kinds = {event[0] for event in trace.events}
    assert {"rollback", "preempt", "finish", "hit"} <= kinds and ("swap_out" in kinds) == bool(seed % 2)
    assert [state for _, state in trace.states()] == states

    found = {at.step: at for at in occupancy(trace)}
    for step, state in enumerate(states):
        running = [state.requests[name] for name in state.running]
        assert (step in found) == bool(running)
        if running:
            at = found[step]
            assert at.stored == sum(r.num_computed_tokens for r in running)
            assert at.reserved["paged"] == 4 * sum(len(r.tables[0]) for r in running)
            assert at.reserved["oracle"] == sum(r.num_tokens for r in lives[step])

    works = [work for work in drafting.works if work.num_tokens]
    timed = [work for work, _, _ in timed_steps(trace) if work.num_tokens]
    for read_, done in zip(timed, works, strict=True):
        read_.swapped_tokens = done.swapped_tokens  # copies of a request that ended before the step are not made
        assert read_ == done

    frames, table = trace.to_pandas(), requests(trace)
    assert frames["requests"].equals(table) and len(table) == sum(event[0] == "add" for event in trace.events)
    assert frames["steps"].num_running.tolist() == [len(state.running) for state in states]
    assert frames["steps"].used_blocks.tolist() == [sum(map(bool, state.ref_cnt)) for state in states]
    assert table.num_output_tokens.sum() == len(frames["tokens"])
    assert (
        frames["tokens"].groupby(["request_id", "step"]).position.apply(lambda p: (p.diff().dropna() == 1).all()).all()
    )

    scheduled = frames["decisions"].query("decision in ('prefill', 'decode')")
    for decision in decisions(trace):
        mine = scheduled[scheduled.step == decision.step]
        assert dict(zip(mine.request_id, mine.num_tokens, strict=True)) == decision.scheduled

    waste = WasteReader()
    read(trace, waste)
    assert waste.data().running.tolist() == [len(state.running) for state in states]
    assert waste.data().reserved[0].tolist() == [4 * sum(map(bool, state.ref_cnt)) for state in states]
    lanes = Timeline(trace).lanes
    assert lanes.running.tolist() == [len(state.running) for state in states]
    assert lanes.waiting.tolist() == [len(state.waiting) for state in states]
    last = {name: row for row, name in enumerate(lanes.request_ids)}
    words = {"WAITING": WAITING, "PREEMPTED": PREEMPTED, "SWAPPED": SWAPPED}
    for name, its in states[-1].requests.items():
        kind = kind_of(lanes, last[name], len(states) - 1)
        assert kind in (PREFILL, DECODE) or its.status != "RUNNING" or name not in decision.scheduled
        assert its.status == "RUNNING" or kind == words[its.status]
