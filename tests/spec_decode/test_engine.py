"""Speculation in the whole engine: the same answers as without it, in fewer steps, whatever the proposer says."""

import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from async_workload import summary, workload
from tiny_models import EOS_TOKEN_ID, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Recompute, Swap
from minivllm.runtime.model_runner import StepClock
from minivllm.spec_decode.drafter import StepCost
from minivllm.spec_decode.rejection import Draft

MOST = 3


class Guesses:
    """Knows the answers, and says them with mistakes. Without answers it guesses at random."""

    def __init__(self, answers: dict[str, list[int]], right: float, seed: int = 0) -> None:
        self.answers, self.right, self.random = answers, right, random.Random(seed)

    def propose(self, requests, view):
        return [self.guess(r) for r in requests]

    def guess(self, request):
        said = len(request.token_ids) - request.num_prompt_tokens
        truth = self.answers.get(request.request_id, [])[said : said + self.random.randint(0, MOST)]
        return [t if self.random.random() < self.right else self.random.randrange(250) for t in truth]


def run(path: Any, prompts, params, *, proposer: Any = None, **options: Any):
    """Outputs, core answers by request id, number of steps, and counters."""
    config = None if proposer is None else {"method": proposer, "num_speculative_tokens": MOST, "dynamic_length": False}
    given = {"dtype": "float32", "max_model_len": 128, "attention_backend": "numba_cpu_invariant"} | options
    with LLM(path, speculative_config=config, **given) as llm:
        scheduler = llm.llm_engine.core.scheduler
        with llm.record() as trace:
            outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        trace.check()
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.num_free == pool.num_blocks
        said: dict[str, list[int]] = {}
        for event in trace.events:
            if event[0] == "update":
                for name, new in event[2].items():
                    said.setdefault(name, []).extend(new)
        return outs, said, scheduler.step, scheduler


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("backend", ["numba_cpu_invariant", "reference"])
def test_all_params_get_the_same_answer_to_the_bit(tiny_model_path, model, backend):  # noqa: F811
    """Greedy, sampled with seeds, penalties, stop strings inside drafts, bad words, grammars, log-probabilities, own transforms."""
    if backend == "reference" and model == "gemma3":
        pytest.skip("the invariant kernels cover windows")
    path = tiny_model_path(model)
    prompts, params = workload(7, 12)
    options: dict[str, Any] = {"attention_backend": backend, "num_gpu_blocks": 120}
    plain, said, steps, _ = run(path, prompts, params, **options)
    got, _, fewer, scheduler = run(path, prompts, params, proposer=Guesses(said, 0.8), **options)
    assert summary(got) == summary(plain)
    assert fewer <= steps and scheduler.spec_stats.num_accepted_tokens > 30
    assert scheduler.spec_stats.num_draft_tokens - scheduler.spec_stats.num_accepted_tokens > 10


WAYS: dict[str, dict[str, Any]] = {
    "small-budget": {"max_num_batched_tokens": 9, "max_num_seqs": 5, "num_gpu_blocks": 400},
    "block-4": {"block_size": 4, "num_gpu_blocks": 400},
    "recompute": {"preemption": Recompute(), "num_gpu_blocks": 14},
    "swap": {"preemption": Swap(60), "num_gpu_blocks": 14},
    "no-prefix-cache": {"enable_prefix_caching": False, "num_gpu_blocks": 400},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_never_change(tiny_model_path, way):  # noqa: F811
    path, rng = tiny_model_path("llama"), random.Random(1)
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [shared[: 8 * (i % 6)] + [rng.randrange(250) for _ in range(rng.randrange(1, 40))] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    plain, said, _, _ = run(path, prompts, params, num_gpu_blocks=400, block_size=WAYS[way].get("block_size", 16))
    for seed in range(2):
        got, _, _, scheduler = run(path, prompts, params, proposer=Guesses(said, 0.7, seed), **WAYS[way])
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in plain]
        logprobs = [[[lp.logprob for lp in r.values()] for r in o.outputs[0].logprobs] for o in got]
        assert logprobs == [[[lp.logprob for lp in r.values()] for r in o.outputs[0].logprobs] for o in plain]
        assert scheduler.spec_stats.num_accepted_tokens > 10
        if "preemption" in WAYS[way]:
            assert scheduler.num_preemptions


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_text_that_repeats_itself_takes_fewer_steps(tiny_model_path, method):  # noqa: F811
    """A tiny random model with a choice of three tokens falls into a loop."""
    path = tiny_model_path("llama")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=[5, 6, 7])
    config = {"method": method, "num_speculative_tokens": 4, "dynamic_length": False}
    with LLM(path, dtype="float32", attention_backend="numba_cpu_invariant", num_gpu_blocks=40) as llm:
        plain = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(path, dtype="float32", attention_backend="numba_cpu_invariant", num_gpu_blocks=40, speculative_config=config) as llm:  # fmt: skip
        got = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids
        stats = llm.llm_engine.core.scheduler.spec_stats
        assert got == plain and llm.llm_engine.core.scheduler.step < 50
        assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) > 10
        assert llm.get_metrics()["spec_decode_num_drafts"] == stats.num_drafts


def test_synthetic_acceptance_makes_steps_fewer(tiny_model_path):  # noqa: F811
    config = {"method": "synthetic", "num_speculative_tokens": 4, "synthetic_acceptance_rate": 0.7}
    with LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=40, speculative_config=config) as llm:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
        stats = llm.llm_engine.core.scheduler.spec_stats
        expected = sum(0.7**i for i in range(5))
        assert abs(stats.mean_acceptance_length - expected) < 0.8
        assert llm.llm_engine.core.scheduler.step < 80


class Raises:
    def propose(self, requests, view):
        raise ZeroDivisionError("made up")


class TooFew:
    def propose(self, requests, view):
        return []


class OutOfRange:
    def propose(self, requests, view):
        return [[10**6] for _ in requests]


class WithProbs:
    def __init__(self, probs):
        self.probs = probs

    def propose(self, requests, view):
        return [Draft([1, 2, 3], self.probs) for _ in requests]


class FailsAtTheEnd:
    def __init__(self):
        self.calls = 0

    def propose(self, requests, view):
        return [[] for _ in requests]

    def finish(self, request_id, token_ids):
        self.calls += 1
        raise ZeroDivisionError("made up")


@pytest.mark.parametrize(
    ("proposer", "words"),
    [(Raises(), "made up"), (TooFew(), "a draft for each of 1 requests, returned 0 drafts"), (OutOfRange(), "drafted token 1000000"),
     (WithProbs(torch.full((1, 264), 1 / 264)), "probs of shape [1, 264] for 3 tokens, not [3, 264]"),
     (WithProbs(torch.full((264,), 1 / 264)), "probs of shape [264] for 3 tokens, not [3, 264]"),
     (WithProbs(torch.full((3, 9), 1 / 9)), "probs of shape [3, 9] for 3 tokens, not [3, 264]"),
     (WithProbs(torch.ones(3, 264, dtype=torch.int64)), "probs of torch.int64, not a torch tensor of floats"),
     (WithProbs(np.full((3, 264), 1 / 264, np.float32)), "probs of ndarray, not a torch tensor of floats")],
)  # fmt: skip
def test_a_broken_proposer_costs_no_request(tiny_model_path, proposer, words, caplog):  # noqa: F811
    outs, *_ = run(
        tiny_model_path("llama"), [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), proposer=proposer
    )  # fmt: skip
    assert len(outs[0].outputs[0].token_ids) == 8
    assert words in caplog.text and "the engine goes on without drafts" in caplog.text


def test_a_proposer_that_failed_is_not_called_again_and_the_metrics_say_so(tiny_model_path, caplog):  # noqa: F811
    proposer = FailsAtTheEnd()
    config = {"method": proposer, "num_speculative_tokens": MOST, "dynamic_length": False}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=40, speculative_config=config) as llm:
        failed = [llm.get_metrics()["spec_decode_proposer_failed"]]
        for _ in range(3):
            llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 4, params, use_tqdm=False)
            failed.append(llm.get_metrics()["spec_decode_proposer_failed"])
        assert llm.llm_engine.core.scheduler.spec_stats.error == "ZeroDivisionError: made up"
    assert failed[0] == 0 and failed[-1] == 1 and proposer.calls == 1
    assert caplog.text.count("has failed") == 1


def test_a_proposer_learns_whole_answers(tiny_model_path):  # noqa: F811
    """A stop token and the tokens of the last step are in them. A stop token that was drafted counts as accepted, everywhere, and an
    end token that is ignored, which is the second one here, ends no draft."""
    path, heard = tiny_model_path("llama"), {}
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    _, said, *_ = run(path, prompts, params)
    assert said["0"][1] == EOS_TOKEN_ID
    stop = said["0"][5]

    class Listens(Guesses):
        def guess(self, request):
            return self.answers.get(request.request_id, [])[len(request.token_ids) - request.num_prompt_tokens :]

        def finish(self, request_id, token_ids):
            heard[request_id] = token_ids

    params = params.clone(stop_token_ids=[stop])
    config = {"method": Listens(said, 1.0), "num_speculative_tokens": 8, "dynamic_length": False}
    with LLM(path, dtype="float32", attention_backend="numba_cpu_invariant", num_gpu_blocks=40, speculative_config=config) as llm:  # fmt: skip
        drafter, told = llm.llm_engine.core.executor.runner.drafter, []
        drafter.acceptance.observe = lambda *about: told.append(about)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        llm.generate({"prompt_token_ids": [9]}, params, use_tqdm=False)
        stats = llm.llm_engine.core.scheduler.spec_stats
    assert stats.num_accepted_tokens == sum(accepted for _, _, accepted in told)
    assert ("0", said["0"].index(stop)) in [(name, accepted) for name, _, accepted in told]
    assert heard["0"] == outs[0].outputs[0].token_ids == said["0"][: said["0"].index(stop) + 1]
    assert heard["1"] == outs[1].outputs[0].token_ids


def test_by_default_drafts_are_made_where_they_pay(tiny_model_path):  # noqa: F811
    """`dynamic_length` with steps of invented times, the same answers, and a proposer that takes too long for what it knows."""

    class Slow(Guesses):
        calls = 0

        def propose(self, requests, view):
            self.calls += 1
            time.sleep(0.05)
            return super().propose(requests, view)

    path, params = tiny_model_path("llama"), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    plain, said, *_ = run(path, [[1, 2, 3]], params, num_gpu_blocks=40)
    for proposer, pays in ((Guesses(said, 1.0), True), (Slow(said, 0.0), False)):
        config = {"method": proposer, "num_speculative_tokens": MOST}
        with LLM(path, dtype="float32", attention_backend="numba_cpu_invariant", num_gpu_blocks=40, speculative_config=config) as llm:  # fmt: skip
            runner, scheduler = llm.llm_engine.core.executor.runner, llm.llm_engine.core.scheduler
            cost = runner.drafter.length.cost
            cost.observe = lambda tokens, seconds, cost=cost: StepCost.observe(cost, tokens, 0.01)
            [got] = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
            assert got.outputs[0].token_ids == plain[0].outputs[0].token_ids
            if pays:
                assert scheduler.step < 60 and scheduler.spec_stats.num_accepted_tokens > 40
            else:
                assert scheduler.step > 90 and proposer.calls < 10


def test_a_sampled_token_is_explained_where_it_was_drafted(tiny_model_path):  # noqa: F811
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    path = tiny_model_path("llama")
    _, said, *_ = run(path, [[1, 2, 3]], params)
    config = {"method": Guesses(said, 0.8), "num_speculative_tokens": MOST, "dynamic_length": False}
    with LLM(path, dtype="float32", attention_backend="numba_cpu_invariant", num_gpu_blocks=40, speculative_config=config) as llm:  # fmt: skip
        with llm.record(samples=True) as trace:
            [out] = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        tokens = out.outputs[0].token_ids
        assert sorted(place for _, place in trace.samples) == list(range(len(tokens)))
        runner = llm.llm_engine.core.executor.runner
        for (_, place), record in trace.samples.items():
            assert int(record.explain(runner.sampler)["token_id"].iloc[-1]) == tokens[place]


def test_a_slow_caller_does_not_make_steps_dearer(tiny_model_path, monkeypatch):  # noqa: F811
    """As `step_drafting` on a GPU: what the caller does between the launch of a step and its result is not its cost."""
    now, seen = [0.0], []
    monkeypatch.setattr("minivllm.runtime.model_runner.time", SimpleNamespace(perf_counter=lambda: now[0]))
    config = {"method": Guesses({}, 1.0), "num_speculative_tokens": MOST}
    options = {"dtype": "float32", "attention_backend": "sdpa", "num_gpu_blocks": 40, "speculative_config": config}
    with LLM(tiny_model_path("llama"), **options) as llm:
        executor = llm.llm_engine.core.executor
        runner, cost = executor.runner, executor.runner.drafter.length.cost
        forward = runner.model.forward
        monkeypatch.setattr(runner.model, "forward", lambda *args: now.append(now.pop() + 2.0) or forward(*args))
        monkeypatch.setattr(cost, "observe", lambda tokens, seconds: seen.append(seconds))

        def execute(output):
            pending = runner.launch(output)
            now[0] += 100.0
            return pending.result()

        monkeypatch.setattr(executor, "execute_model", execute)
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert seen[1:] == [2.0] * len(seen[1:]) and len(seen) > 3


def test_steps_on_a_gpu_are_timed_by_its_events(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.did = []

        def record(self):
            self.did.append("record")

        def synchronize(self):
            self.did.append("synchronize")

        def elapsed_time(self, end):
            assert self.did == ["record"] and end.did == ["record", "synchronize"]
            return 30.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    assert clock.seconds() == 0.0
    clock.stop()
    assert clock.seconds() == 0.03
