"""Draft tokens: in the budget, verified, rolled back, never cached when rejected, and the same answers as without them."""

import random
from dataclasses import fields

import pytest
from scheduling import Driver, fake_model

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler, Swap
from minivllm.core.speculative import SpeculativeConfig
from minivllm.core.trace import Trace
from minivllm.lab import Constant, replay, simulate
from minivllm.lab.executor import FakeExecutor
from minivllm.lab.simulation import Session, make_settings
from minivllm.lab.workload import poisson, shared_prefix


class Drafting(FakeExecutor):
    """Guesses the next tokens of each answer: each right with a chance of `right`."""

    def __init__(self, most=4, right=0.6, seed=0):
        super().__init__()
        self.most, self.right, self.random = most, right, random.Random(seed)
        self.given, self.accepted = 0, 0

    def execute_model(self, output):
        result = super().execute_model(output)
        for name, drafts in output.scheduled_spec_decode_tokens.items():
            self.given += len(drafts)
            self.accepted += len(result.sampled_token_ids[name]) - 1
        for name in result.sampled_token_ids:
            said = self._rows[name][2]
            truth = list(self._answers[name][said : said + self.random.randint(0, self.most)])
            result.draft_token_ids[name] = [t if self.random.random() < self.right else -1 for t in truth]
        return result


def answers(run):
    tokens = run.trace.to_pandas()["tokens"]
    return {name: list(group.token_id) for name, group in tokens.groupby("request_id")}


CROWDED = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_gpu_blocks": 24, "max_model_len": 300}


@pytest.mark.parametrize("preemption", [None, Swap(30)])
@pytest.mark.parametrize("workload", [poisson(400, 40, (4, 60), (2, 60), seed=1), shared_prefix(400, 40, 3, 40, (3, 30), (2, 50), seed=2)])  # fmt: skip
def test_answers_are_the_same_and_steps_are_fewer(workload, preemption, tmp_path):
    plain = simulate(workload, config=CROWDED, cost_model=Constant(), preemption=preemption)
    drafting = Drafting()
    run = simulate(workload, config=CROWDED, cost_model=Constant(), executor=drafting, preemption=preemption)
    run.trace.check()
    assert plain.meter.num_preemptions and run.meter.num_preemptions
    assert answers(run) == answers(plain)
    assert drafting.accepted > 100 and drafting.given - drafting.accepted > 100
    assert run.meter.num_steps < 0.8 * plain.meter.num_steps
    kinds = {event[0] for event in run.trace.events}
    assert {"draft", "rollback"} <= kinds and not {"draft", "rollback"} & {e[0] for e in plain.trace.events}
    run.trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert again == run.trace and replay(again).trace.events == run.trace.events


def test_drafts_count_in_the_budget():
    run = simulate(poisson(500, 20, 8, 60, seed=3), config=CROWDED, cost_model=Constant(), executor=Drafting(8, 1.0))
    assert max(sum(e[1].values()) for e in run.trace.events if e[0] == "schedule") == 48
    assert any(e[0] == "chunk" and e[4] == "budget" for e in run.trace.events)
    lengths = [n for _, n in answers(run).items()]
    assert {len(n) for n in lengths} == {60}


def test_rejected_tokens_are_never_in_the_prefix_cache():
    """Every registered block holds tokens that were known, whatever was computed in its place before."""
    workload = shared_prefix(40, 60, 2, 24, (2, 20), (2, 60), seed=4)
    known = {r.request_id: [*r.prompt_token_ids(), *r.output] for r in workload}

    class Checks(Drafting):
        def execute_model(self, output):
            for name in output.num_scheduled_tokens:
                request = self.scheduler.requests[name]
                assert request.all_token_ids == known[name][: request.num_tokens]
                assert len(request.block_hashes) <= request.num_tokens // 16
            return super().execute_model(output)

    drafting = Checks(6, 0.3)
    session = Session(make_settings(CROWDED), cost_model=Constant(), executor=drafting)
    drafting.scheduler = session.scheduler
    trace = session.scheduler.record()
    session.expect(workload)
    session.run()
    trace.check()
    length = {name: 0 for name in known}
    for event in trace.events:
        if event[0] == "add":
            length[event[1]] = event[2]
        elif event[0] == "update":
            for name, new in event[2].items():
                length[name] += len(new)
        elif event[0] == "cache":
            assert (max(event[3]) + 1) * 16 <= length[event[1]], event


def make(**config):
    return Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, **config), CacheConfig(4, 33)
    )


def test_a_step_with_drafts_by_hand():
    s = make()
    trace = s.record()
    request = Request("a", [1, 2, 3, 4, 5], max_tokens=8)
    s.add_request(request)
    output = s.schedule()
    s.update_from_output(output, ModelRunnerOutput({"a": [6]}, draft_token_ids={"a": [7, 8, 9]}))
    output = s.schedule()
    assert output.num_scheduled_tokens == {"a": 4} and output.scheduled_spec_decode_tokens == {"a": [7, 8, 9]}
    assert output.total_num_scheduled_tokens == 4 and request.num_computed_tokens == 9
    [out] = s.update_from_output(output, ModelRunnerOutput({"a": [7, 11]}))  # 7 is right, 8 should have been 11
    assert out.new_token_ids == [7, 11] and request.all_token_ids[5:] == [6, 7, 11]
    assert request.num_computed_tokens == 7 == request.num_tokens - 1
    assert [e for e in trace.events if e[0] in ("draft", "rollback")] == [
        ("draft", {"a": (7, 8, 9)}),
        ("rollback", {"a": 2}),
    ]
    trace.check()
    assert trace.at(-1) == s.state()
    output = s.schedule()
    assert output.num_scheduled_tokens == {"a": 1} and not output.scheduled_spec_decode_tokens


def test_drafts_end_where_the_answer_may_end():
    s = make()
    s.add_request(Request("a", [1, 2, 3], max_tokens=3))
    s.update_from_output(s.schedule(), ModelRunnerOutput({"a": [4]}, draft_token_ids={"a": [5, 6, 7, 8]}))
    output = s.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [5]}
    [out] = s.update_from_output(output, ModelRunnerOutput({"a": [5, 6]}))
    assert str(out.finish_reason) == "length" and s.kv_cache_manager.block_pool.usage == 0


def test_a_stop_token_among_accepted_drafts_ends_the_request():
    driver = Driver(make())
    s = driver.scheduler
    s.add_request(Request("a", [1, 2, 3], max_tokens=9, eos_token_id=5))
    s.update_from_output(s.schedule(), ModelRunnerOutput({"a": [4]}, draft_token_ids={"a": [5, 6, 7]}))
    [out] = s.update_from_output(s.schedule(), ModelRunnerOutput({"a": [5, 6, 7, 8]}))
    assert out.new_token_ids == [5] and str(out.finish_reason) == "stop" and not s.requests
    assert s.spec_stats.num_accepted_tokens == 1
    driver.check()


@pytest.mark.parametrize("accepted", [0, 1])
def test_the_executor_says_how_many_drafts_were_accepted(accepted):
    """It may stop at an accepted stop token, which looks like a token of its own behind no accepted draft."""
    s = make()
    s.add_request(Request("a", [1, 2, 3], max_tokens=9, eos_token_id=5))
    s.update_from_output(s.schedule(), ModelRunnerOutput({"a": [4]}, draft_token_ids={"a": [5 if accepted else 6, 7]}))
    s.update_from_output(s.schedule(), ModelRunnerOutput({"a": [5]}, num_accepted_tokens={"a": accepted}))
    assert s.spec_stats.num_accepted_tokens == accepted and s.spec_stats.num_draft_tokens == 2 and not s.requests


SYNTHETIC = {"method": "synthetic", "num_speculative_tokens": 2, "synthetic_acceptance_rate": 0.5}


def test_null_in_a_speculative_config_is_unset():
    names = [f.name for f in fields(SpeculativeConfig)]
    given = dict.fromkeys(names) | {"method": "ngram", "num_speculative_tokens": 4}
    assert SpeculativeConfig.from_dict(given) == SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    with pytest.raises(ValueError, match="needs 'method'"):
        SpeculativeConfig.from_dict({"method": None, "num_speculative_tokens": 4})


def test_a_class_is_no_proposer():
    class Drafts:
        def propose(self, requests, view):
            return [[] for _ in requests]

    assert SpeculativeConfig.from_dict({"method": Drafts(), "num_speculative_tokens": 4}).num_speculative_tokens == 4
    with pytest.raises(TypeError, match="must be a name or an object with propose.*, got <class"):
        SpeculativeConfig.from_dict({"method": Drafts, "num_speculative_tokens": 4})


def test_synthetic_acceptance_has_no_dynamic_length():
    assert not SpeculativeConfig.from_dict(SYNTHETIC).dynamic_length
    assert not SpeculativeConfig.from_dict(SYNTHETIC | {"dynamic_length": False}).dynamic_length
    for config in (SYNTHETIC, SYNTHETIC | {"method": "ngram", "rejection_sample_method": "synthetic"}):
        with pytest.raises(ValueError, match="dynamic_length cannot be true with synthetic acceptance"):
            SpeculativeConfig.from_dict(config | {"dynamic_length": True})


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({"a": [4, 5], "b": [6]}, "returned 2 tokens for request 'a' in step 0, which carried 0 draft tokens"),
        ({"b": [6]}, "returned no token for request 'a' in step 0, after which all its tokens are computed"),
    ],
)
def test_an_executor_that_miscounts_is_named(tokens, words):
    """And not the policy, a thousand steps later."""
    s = make()
    for name in "ab":
        s.add_request(Request(name, [1, 2, 3], max_tokens=3))
    output = s.schedule()
    with pytest.raises(ValueError, match=words):
        s.update_from_output(output, ModelRunnerOutput(tokens))
    s.update_from_output(output, fake_model(output, s))
    assert [r.num_tokens for r in s.running] == [4, 4]


def test_drafts_come_too_late_when_the_next_step_is_decided():
    s = make()
    s.add_request(Request("a", [1, 2, 3], max_tokens=3))
    first = s.schedule()
    s.schedule()
    with pytest.raises(ValueError, match="draft tokens came too late"):
        s.update_from_output(first, ModelRunnerOutput({"a": [4]}, draft_token_ids={"a": [5]}))
