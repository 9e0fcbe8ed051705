"""The runner on a tiny random model: whatever the batch, a request's tokens are its own."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm.core.config import EngineArgs, KVCacheConfig, KVCacheGroup, KVCacheSpec
from minivllm.core.output import NewRequestData, SchedulerOutput
from minivllm.runtime.executor import UniProcExecutor, plan_engine
from minivllm.runtime.executors.select import load_first, make_executor
from minivllm.runtime.model_runner import FutureTokens, chooses_ahead, group_attention_specs, zeros_on_demand
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.pooling import PoolingParams

PROMPT = [7, 3, 99, 42, 42, 8, 200, 1, 5]


@pytest.fixture(scope="module")
def plan(tiny_model_path):  # noqa: F811
    return plan_engine(
        EngineArgs(
            model=str(tiny_model_path("llama")),
            dtype="float32",
            block_size=4,
            num_gpu_blocks=64,
            max_num_seqs=8,
            num_cpu_blocks=4,
            preemption_mode="swap",
        )
    )


@pytest.fixture
def runner(plan):
    return UniProcExecutor(plan).runner


def new(name, prompt, blocks, output=(), computed=0, **params):
    given = SamplingParams(**{"temperature": 0, "seed": 0} | params)
    return NewRequestData(name, list(prompt), list(output), given, (list(blocks),), computed)


def step(number, scheduled, **more):
    return SchedulerOutput(number, scheduled, sum(scheduled.values()), **more)


def test_a_negative_token_stands_for_the_newest_of_a_row():
    future = FutureTokens(vocab_size=100, num_rows=8, device=torch.device("cpu"))
    future.put(torch.tensor([0, 7, 8, 3]), torch.tensor([99, 5, 42, -1]))  # row 8 is no request's; row 3 has failed
    assert future.resolve(torch.tensor([0, 99, ~0, ~7, ~3, ~1, 7])).tolist() == [0, 99, 99, 5, 0, 0, 7]


def test_a_model_that_pools_has_no_table_of_tokens(plan):
    """The ids of its prompts may lie beyond the vocabulary: they tell which of two texts a token belongs to."""
    config = replace(plan.config, async_scheduling=True)
    pools = replace(config.model, pooling=replace(config.model.pooling, generates=False))
    assert chooses_ahead(config) and not chooses_ahead(replace(config, model=pools))
    assert not chooses_ahead(replace(config, async_scheduling=False))


@pytest.fixture(scope="module")
def answer():
    """Six greedy tokens after PROMPT, from transformers."""
    model = hf_model("llama")
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        return model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()


def decode(runner, name, first_step, count):
    tokens = []
    for i in range(count):
        blocks = {name: ([10 + i],)} if (len(PROMPT) + i) % 4 == 0 else {}
        tokens += runner.execute_model(step(first_step + i, {name: 1}, new_block_ids=blocks)).sampled_token_ids[name]
    return tokens


def test_one_request(runner, answer):
    first = runner.execute_model(step(0, {"a": 9}, new_requests=(new("a", PROMPT, [1, 2, 3]),)))
    assert first.sampled_token_ids["a"] + decode(runner, "a", 1, 5) == answer


def test_chunks_sample_at_the_end_only(runner, answer):
    chunks = [runner.execute_model(step(0, {"a": 4}, new_requests=(new("a", PROMPT, [6]),)))]
    chunks.append(runner.execute_model(step(1, {"a": 2}, new_block_ids={"a": ([2],)})))
    chunks.append(runner.execute_model(step(2, {"a": 3}, new_block_ids={"a": ([9],)})))
    assert [c.sampled_token_ids for c in chunks] == [{}, {}, {"a": answer[:1]}]


def test_resumed_after_a_preemption(runner, answer):
    """The row comes back with its output as known tokens, in other blocks."""
    runner.execute_model(step(0, {"a": 9}, new_requests=(new("a", PROMPT, [1, 2, 3]),)))
    runner.execute_model(step(1, {"a": 1}))
    assert "a" in runner.batch
    assert runner.execute_model(SchedulerOutput(2, {}, 0, preempted=("a",))).sampled_token_ids == {}
    assert "a" not in runner.batch and not runner.sampling.requests
    again = runner.execute_model(step(3, {"a": 11}, new_requests=(new("a", PROMPT, [20, 21, 22], answer[:2]),)))
    assert again.sampled_token_ids["a"] == answer[2:3]


def test_swapped_out_and_in(runner, answer):
    runner.execute_model(step(0, {"a": 9}, new_requests=(new("a", PROMPT, [1, 2, 3]),)))
    out = step(
        1, {"b": 3}, new_requests=(new("b", [1, 2, 3], [1]),), preempted=("a",), swap_out=((1, 2), (2, 1), (3, 4))
    )
    runner.execute_model(out)  # b overwrites block 1 in the same step
    back = step(
        2,
        {"a": 1},
        new_requests=(new("a", PROMPT, [30, 31, 32], answer[:1], computed=9),),
        finished=("b",),
        swap_in=((2, 30), (1, 31), (4, 32)),
    )
    assert runner.execute_model(back).sampled_token_ids == {"a": answer[1:2]}


def test_a_request_fails_alone(runner, answer):
    def broken(logits, view):
        raise KeyError("made up")

    requests = (new("bad", PROMPT, [4, 5, 6], logits_processors=[broken]), new("good", PROMPT, [1, 2, 3]))
    result = runner.execute_model(step(0, {"bad": 9, "good": 9}, new_requests=requests))
    assert result.sampled_token_ids == {"good": answer[:1]}
    assert list(result.errors) == ["bad"] and "KeyError" in result.errors["bad"]
    after = runner.execute_model(step(1, {"good": 1}, finished=("bad",)))
    assert after.sampled_token_ids == {"good": answer[1:2]} and not after.errors


def test_a_request_that_cannot_be_set_up_fails_alone(runner, answer):
    bad = new("bad", PROMPT, [4, 5, 6], bad_words=["x"])  # its token ids were never looked up
    result = runner.execute_model(step(0, {"bad": 9, "good": 9}, new_requests=(bad, new("good", PROMPT, [1, 2, 3]))))
    assert result.sampled_token_ids == {"good": answer[:1]} and "bad_words" in result.errors["bad"]
    assert runner.execute_model(step(1, {"good": 1}, finished=("bad",))).sampled_token_ids == {"good": answer[1:2]}


@pytest.mark.parametrize("other", ["fails when it is added", "wants a vector"])
def test_requests_that_draw_no_token_leave_the_others_their_own_random_numbers(runner, other):
    def draws(first_step, *before):
        """Five tokens each of two requests that were added behind `before`."""
        pair = {"x": ([1, 2, 3], [13]), "y": ([4, 5, 6], [14])}
        added = [new(name, PROMPT, blocks[0], temperature=1.5, seed=ord(name)) for name, blocks in pair.items()]
        scheduled = {request.request_id: 9 for request in (*before, *added)}
        steps = [step(first_step, scheduled, new_requests=(*before, *added))]
        steps += [step(first_step + i, {"x": 1, "y": 1}) for i in range(1, 5)]
        steps[3].new_block_ids.update({name: (blocks[1],) for name, blocks in pair.items()})
        results = [runner.execute_model(decided).sampled_token_ids for decided in steps]
        runner.execute_model(SchedulerOutput(first_step + 5, {}, 0, finished=tuple(scheduled)))
        return [(result["x"], result["y"]) for result in results]

    alone = draws(0)
    assert len({x for (x,), _ in alone}) > 2
    if other == "wants a vector":
        silent = NewRequestData("z", PROMPT, [], PoolingParams(), ([7, 8, 9],), 0)
    else:
        silent = new("z", PROMPT, [7, 8, 9], bad_words=["x"])
    assert draws(10, silent) == alone
    assert draws(20) == alone  # its row went back to another place of the free ones


def test_finished_before_it_had_a_row(runner):
    assert runner.execute_model(SchedulerOutput(0, {}, 0, finished=("never",))).sampled_token_ids == {}


def test_many_requests_take_turns_in_few_rows(runner, answer):
    for i in range(30):
        names = [f"{i}-{k}" for k in range(8)]
        requests = tuple(new(name, PROMPT, [1 + 3 * k, 2 + 3 * k, 3 + 3 * k]) for k, name in enumerate(names))
        before = tuple(f"{i - 1}-{k}" for k in range(8)) if i else ()
        result = runner.execute_model(step(i, dict.fromkeys(names, 9), new_requests=requests, finished=before))
        assert result.sampled_token_ids == dict.fromkeys(names, answer[:1])


@pytest.mark.parametrize("chunks", [[9], [1, 5, 3], [1] * 9, [8, 1]])
def test_prompt_logprobs_in_chunks(runner, chunks):
    runner.PROMPT_SLICE = 3
    with torch.inference_mode():
        want = torch.log_softmax(hf_model("llama")(torch.tensor([PROMPT])).logits[0], -1)
    got = []
    for i, n in enumerate(chunks):
        requests = (new("a", PROMPT, [1, 2, 3], prompt_logprobs=2),) if i == 0 else ()
        got += runner.execute_model(step(i, {"a": n}, new_requests=requests)).prompt_logprobs.get("a", [])
    assert len(got) == len(PROMPT) - 1
    for i, entry in enumerate(got):
        assert abs(entry[PROMPT[i + 1]].logprob - want[i, PROMPT[i + 1]]) < 1e-4
        assert set(want[i].topk(2).indices.tolist()) <= set(entry)


def test_prompt_logprobs_are_told_once_across_a_preemption(runner):
    first = runner.execute_model(step(0, {"a": 5}, new_requests=(new("a", PROMPT, [1, 2, 3], prompt_logprobs=0),)))
    runner.execute_model(SchedulerOutput(1, {}, 0, preempted=("a",)))
    again = runner.execute_model(step(2, {"a": 9}, new_requests=(new("a", PROMPT, [4, 5, 6], prompt_logprobs=0),)))
    assert len(first.prompt_logprobs["a"]) == 5 and len(again.prompt_logprobs["a"]) == 3
    runner.execute_model(step(3, {"a": 1}, finished=()))
    runner.execute_model(SchedulerOutput(4, {}, 0, finished=("a",)))
    assert not runner._prompt_done


def test_logits_are_computed_for_sampling_rows_only(runner, monkeypatch):
    seen = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: seen.append(len(hidden)) or compute(hidden))
    requests = (new("a", PROMPT, [1, 2, 3]), new("b", PROMPT, [4, 5, 6]), new("c", [1], [7]))
    runner.execute_model(step(0, {"a": 5, "b": 9, "c": 1}, new_requests=requests))
    assert seen == [2]


def test_a_plan_serves_layers_of_equal_attention_only(plan):
    spec = KVCacheSpec("full", 4, 2, 16)
    one, other = (plan.model.spec.attention_specs(4, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    config = KVCacheConfig(8, 4, (KVCacheGroup(spec, (0, 1)),))
    assert group_attention_specs(config, [one, one]) == [one]
    with pytest.raises(ValueError, match="differ in attention"):
        group_attention_specs(config, [one, other])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_no_memory_until_they_are_touched():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    zeros = zeros_on_demand((2, 1 << 24, 16), torch.bfloat16, torch.device("cpu"))  # 1 GiB
    assert resident() - before < 1 << 26
    assert zeros.shape == (2, 1 << 24, 16) and zeros.dtype == torch.bfloat16
    assert not zeros[1, -1].any()
    assert zeros.data_ptr() % 64 == 0  # no load of a kernel reads two cache lines


def test_executors(plan):
    threads = replace(plan, config=replace(plan.config, args=EngineArgs(distributed_executor_backend="threads")))
    with pytest.raises(ValueError, match="must be one of uni, mp.*; got 'threads'"):
        make_executor(threads)
    assert load_first(threads) is threads  # only this process's executor can be given a model
    loaded = load_first(plan)
    executor = make_executor(loaded)
    assert executor.kv_cache_config is plan.config.kv_cache and executor.runner.model is loaded.decoder is not None
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.execute_model(SchedulerOutput(0, {}, 0))


def test_rows_are_numpy_views_of_one_batch(runner):
    """The rows stay where they are while others come and go."""
    runner.execute_model(step(0, {"a": 9}, new_requests=(new("a", PROMPT, [1, 2, 3]),)))
    row = runner.batch.row_of["a"]
    runner.execute_model(step(1, {"a": 1, "b": 3}, new_requests=(new("b", [1, 2, 3], [5]),)))
    runner.execute_model(step(2, {"a": 1}, finished=("b",)))
    assert runner.batch.row_of == {"a": row}
    assert np.array_equal(runner.batch.token_ids[row, : len(PROMPT)], PROMPT)


def test_a_forked_child_is_told_that_it_cannot_run_the_engine(plan, monkeypatch):
    executor = make_executor(plan)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    for call in (executor.execute_model, executor.submit):
        with pytest.raises(RuntimeError, match="a forked child cannot run it"):
            call(SchedulerOutput(0, {}, 0))
    monkeypatch.undo()
    assert executor.execute_model(SchedulerOutput(0, {}, 0)).sampled_token_ids == {}
    assert len(executor.collective_rpc("get_sampler")) == 1
    executor.shutdown()
