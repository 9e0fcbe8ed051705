"""Async scheduling: whatever happens, the tokens are those of an engine that waits for every step."""

import random

import pytest
import torch
from async_workload import summary, workload
from tiny_models import tiny_model_path  # noqa: F401

from minivllm import LLM, SamplingParams
from minivllm.attention.step_buffer import StepBuffer
from minivllm.runtime.model_runner import FutureTokens, step_bytes
from minivllm.sampling.params import RequestOutputKind
from minivllm.sampling.pooling import PoolingParams

SMALL = {"dtype": "float32", "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 96}
CROWDED = {"num_gpu_blocks": 30}  # three long requests fill it
SWAPPING = {**CROWDED, "num_cpu_blocks": 60, "preemption_mode": "swap"}
WAYS = ("thread", "device")


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


def load(path, way=None, **kwargs):
    """An engine that waits (None), runs steps in a thread, or launches them ahead and fills tokens in on the device."""
    llm = LLM(path, async_scheduling=way is not None, **{"num_gpu_blocks": 200, **SMALL, **kwargs})
    if way == "device":
        runner = llm.llm_engine.core.executor.runner
        runner.future = FutureTokens(
            runner.config.model.vocab_size, runner.config.scheduler.max_num_seqs, runner.device
        )
        runner.buffer = StepBuffer(step_bytes(runner.config), runner.device)
    return llm


def answers(llm, seed):
    prompts, params = workload(seed)
    return summary(llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False))


@pytest.mark.parametrize("pool", [{}, CROWDED, SWAPPING], ids=["roomy", "recompute", "swap"])
def test_the_tokens_are_those_of_an_engine_that_waits(path, pool):
    with load(path, **pool) as waiting:
        want = answers(waiting, 1)
    for way in WAYS:
        with load(path, way, **pool) as llm:
            core = llm.llm_engine.core
            with llm.record() as trace:
                assert answers(llm, 1) == want, way
            assert trace.at(-1) == core.scheduler.state()
            trace.check()
            assert (core.scheduler.num_preemptions > 0) == bool(pool)
            assert any(event[0] == "update" and len(event) == 4 for event in trace.events)
            nothing_is_left(llm)


def nothing_is_left(llm):
    core = llm.llm_engine.core
    while core.has_requests():
        llm.llm_engine.step()
    runner, scheduler = core.executor.runner, core.scheduler
    assert not core._in_flight and not scheduler.requests and not scheduler._ended_in_flight
    assert not len(runner.batch) and not runner.sampling.requests and not runner._prompt_done
    assert scheduler.kv_cache_manager.block_pool.usage == 0.0 and not scheduler.kv_cache_manager.swapped


@pytest.mark.parametrize("way", WAYS)
def test_aborted_at_any_moment(path, way):
    """A request that was aborted has said a beginning of its answer; its id serves another at once; no other request notices."""
    prompts, params = workload(5)
    params = [p.clone(n=1, stop=None, output_kind=RequestOutputKind.CUMULATIVE) for p in params]
    with load(path, **CROWDED) as waiting:
        want = {}
        for prompt, param in zip(prompts, params, strict=True):
            [out] = waiting.generate({"prompt_token_ids": prompt}, param, use_tqdm=False)
            want[len(want)] = list(out.outputs[0].token_ids)
    with load(path, way, **CROWDED) as llm:
        engine = llm.llm_engine
        for seed in range(3):
            rng, said, answer_of, aborted = random.Random(seed), {}, {}, 0
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(str(i), {"prompt_token_ids": prompt}, param)
                answer_of[str(i)] = i
            while engine.has_unfinished_requests():
                for out in engine.step():
                    tokens = list(out.outputs[0].token_ids)
                    assert tokens == want[answer_of[out.request_id]][: len(tokens)]
                    if out.finished:
                        said[out.request_id] = tokens
                if rng.random() < 0.3 and aborted < 20 and engine.output_processor.requests:
                    name = rng.choice(list(engine.output_processor.requests))
                    [last] = engine.abort_request(name)
                    assert last.outputs[0].finish_reason == "abort"
                    i = answer_of[name] = rng.randrange(len(prompts))
                    engine.add_request(name, {"prompt_token_ids": prompts[i]}, params[i])
                    aborted += 1
            assert aborted and said == {name: want[i] for name, i in answer_of.items()}
            nothing_is_left(llm)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_token_leaves_nothing_of_the_step_under_way(path, way):
    prompt = {"prompt_token_ids": [7, 8, 9]}
    with load(path) as waiting:
        [out] = waiting.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    tokens = list(out.outputs[0].token_ids)
    end = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    with load(path, way) as llm, llm.record() as trace:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[tokens[end]])
        [out] = llm.generate(prompt, params, use_tqdm=False)
        assert list(out.outputs[0].token_ids) == tokens[: end + 1] and out.outputs[0].stop_reason == tokens[end]
        nothing_is_left(llm)
        scheduled = trace.to_pandas()["steps"].num_tokens.sum()
        assert scheduled == 3 + end + 1  # one token more than were needed
        full = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate({"prompt_token_ids": [1, 2]}, full, use_tqdm=False)
        nothing_is_left(llm)
        assert trace.to_pandas()["steps"].num_tokens.sum() == scheduled + 2 + 11  # an end by length is foreseen


@pytest.mark.parametrize("way", WAYS)
def test_a_vector_and_a_request_that_fails_beside_others(path, way):
    def broken(logits, view):
        return logits * torch.nan if len(view.output_token_ids) == 2 else logits

    with load(path, way) as llm:
        engine, greedy = llm.llm_engine, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        want = [list(o.outputs[0].token_ids) for o in llm.generate(["abc", "de"], greedy, use_tqdm=False)]
        engine.add_request("0", "abc", greedy)
        engine.add_request("bad", "xy", greedy.clone(logits_processors=[broken]))
        engine.add_request("vector", "abc", PoolingParams())
        engine.add_request("1", "de", greedy)
        done = {}
        while engine.has_unfinished_requests():
            done |= {out.request_id: out for out in engine.step() if out.finished}
        assert [list(done[name].outputs[0].token_ids) for name in "01"] == want
        assert done["bad"].outputs[0].finish_reason == "error" and "no token can be drawn" in done["bad"].error
        assert len(done["bad"].outputs[0].token_ids) == 2 and len(done["vector"].pooled) > 0
        nothing_is_left(llm)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_raises_ends_the_requests_under_way_and_no_others(path, way, monkeypatch):
    with load(path, way, max_num_seqs=2) as llm:
        engine, greedy = llm.llm_engine, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        want = list(llm.generate("ghi", greedy, use_tqdm=False)[0].outputs[0].token_ids)
        nothing_is_left(llm)
        for name, prompt in (("a", "abc"), ("b", "def"), ("later", "ghi")):
            engine.add_request(name, prompt, greedy)
        for _ in range(4):
            engine.step()
        runner = engine.core.executor.runner
        with monkeypatch.context() as patch:
            patch.setattr(runner.model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("made up")))
            with pytest.raises(MemoryError, match="made up"):
                for _ in range(3):
                    engine.step()
        assert set(engine.core.scheduler.requests) == {"later"}
        engine.abort_request(["a", "b"])
        done = []
        while engine.has_unfinished_requests():
            done += [out for out in engine.step() if out.finished]
        assert [list(out.outputs[0].token_ids) for out in done] == [want]
        nothing_is_left(llm)


def test_the_first_step_brings_nothing_yet_and_a_record_holds_whole_steps(path):
    with load(path, "thread") as llm:
        engine = llm.llm_engine
        engine.add_request("a", "abc", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert engine.step() == [] and len(engine.core._in_flight) == 1
        with engine.record() as trace:  # waits for the step under way
            assert not engine.core._in_flight
            while engine.has_unfinished_requests():
                engine.step()
        tables = trace.to_pandas()
        assert len(tables["tokens"]) == 3 and tables["steps"].end[tables["steps"].num_tokens > 0].notna().all()
        steps = tables["tokens"].step.tolist()
        assert steps == tables["steps"].step[tables["steps"].num_tokens > 0].tolist()


def test_the_lab_says_that_it_cannot_run_such_a_recording_again(path):
    from minivllm.lab.cost import timed_steps
    from minivllm.lab.history import replay

    with load(path, "thread") as llm, llm.record() as trace:
        llm.generate(["abc", "de"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    for use in (replay, lambda t: list(timed_steps(t))):
        with pytest.raises(ValueError, match="async_scheduling"):
            use(trace)


def test_the_choice_is_explained(path):
    with load(path, "thread") as llm:
        [decision] = [d for d in llm.config.decisions if d.setting == "async_scheduling"]
        assert (decision.value, decision.why) == (True, "asked for")
    with load(path) as llm:
        assert llm.llm_engine.core.step.__name__ == "step" and not llm.config.async_scheduling
