"""LLM and LLMEngine on a tiny random model: inputs, outputs, trouble."""

import gc
import signal
import weakref
from collections import UserDict
from itertools import permutations

import pytest
import torch
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, hf_model, tiny_model_path, tiny_tokenizer  # noqa: F401

from minivllm import LLM, EngineArgs, LLMEngine, SamplingParams
from minivllm.core.policy import FCFS
from minivllm.core.scheduler import Swap
from minivllm.sampling.params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [
    "Hello",
    "The quick brown fox jumps over",
    "é 你好",
    [7, 8, 9],
    {"prompt": "x"},
    {"prompt_token_ids": [1, 2]},
]
SMALL = {"dtype": "float32", "block_size": 4}


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


@pytest.fixture(scope="module")
def tiny(path):
    with LLM(path, num_gpu_blocks=128, max_num_batched_tokens=64, **SMALL) as llm:
        yield llm


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(llm, prompts, params=GREEDY):
    return [[c.token_ids for c in out.outputs] for out in generate(llm, prompts, params)]


def nothing_is_left(llm):
    """No request, no row, no block is held."""
    engine = llm.llm_engine
    while engine.core.has_requests():
        engine.step()
    scheduler, runner = engine.core.scheduler, engine.core.executor.runner
    assert not engine.has_unfinished_requests() and not scheduler.requests and not engine.output_processor.parent_of
    assert not len(runner.batch) and not runner.sampling.requests and not runner._prompt_done
    assert scheduler.kv_cache_manager.block_pool.usage == 0.0 and not scheduler.kv_cache_manager.swapped
    return True


# ---- inputs and outputs


def test_forms_of_prompts(tiny):
    outputs = generate(tiny, PROMPTS, GREEDY)
    assert [out.prompt for out in outputs] == ["Hello", PROMPTS[1], "é 你好", None, "x", None]
    assert outputs[3].prompt_token_ids == [7, 8, 9] and outputs[5].prompt_token_ids == [1, 2]
    assert all(out.finished and len(out.outputs) == 1 and len(out.outputs[0].token_ids) == 10 for out in outputs)
    for prompt, out in zip(PROMPTS, outputs, strict=True):
        (alone,) = generate(tiny, prompt, GREEDY)
        assert alone.outputs == out.outputs
    assert generate(tiny, [], GREEDY) == [] and nothing_is_left(tiny)


def test_requests_with_one_set_of_parameters_are_independent(path):
    given = {"stop_token_ids": [3], "bad_words": ["x"], "logit_bias": {5: 1.0}, "extra_args": {"tags": [1]}}
    with LLM(path, num_gpu_blocks=64, seed=1, logits_processors=[lambda logits, batch: logits], **SMALL) as llm:
        one, other = SamplingParams(**given), SamplingParams(seed=4)
        first, last, lone = (r.params for _, r in llm._process_all(["a", "b", "c"], [one, one, other]))
        one.stop_token_ids.append(6)
        later = llm._process_all(["a"], one)[0][1].params
    with LLM(path, num_gpu_blocks=64, seed=1, logits_processors=[lambda logits, batch: logits], **SMALL) as llm:
        engine, one = llm.llm_engine, SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)
        alone = [engine.process(str(i), "a", one).params for i in range(2)]
        assert [first, last] == alone and first.seed != last.seed and lone.seed == 4 and lone.bad_words == []
    first.stop_token_ids.append(9)
    first.bad_words_token_ids[0].append(9)
    first.logit_bias[9] = first.extra_args["tags"] = 0
    assert last == alone[1] and later.stop_token_ids == [*last.stop_token_ids, 6]


def test_a_parameter_is_refused_at_the_first_prompt_that_has_it(tiny):
    sound, many = SamplingParams(), SamplingParams(logprobs=21)
    with pytest.raises(ValueError, match=r"prompts\[1\]: logprobs must be at most max_logprobs=20, got 21"):
        generate(tiny, ["a", "b", ""], [sound, many, many])
    with pytest.raises(ValueError, match=r"prompts\[0\]: .*unknown field"):
        generate(tiny, [{"promt": "a"}, "b"], many)
    assert nothing_is_left(tiny)


def test_one_set_of_parameters_each(tiny):
    lengths = [7, 1, 12, 3]
    outputs = generate(tiny, ["a", "b", "c", "d"], [GREEDY.clone(max_tokens=n) for n in lengths])
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    assert [out.prompt for out in outputs] == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        generate(tiny, ["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
        tiny.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, or a list .* got {.temperature.: 0}"):
        generate(tiny, "a", {"temperature": 0})


def test_defaults_come_from_the_model(tiny, path, monkeypatch):
    assert tiny.get_default_sampling_params() == SamplingParams()
    monkeypatch.setattr(
        tiny.llm_engine, "generation_config", {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "do_sample": True}
    )
    monkeypatch.setattr(tiny.llm_engine, "default_sampling_params", tiny.llm_engine._defaults())
    assert tiny.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7, max_tokens=3)
    assert len(generate(tiny, "a", None)[0].outputs[0].token_ids) <= 3
    with LLM(path, num_gpu_blocks=8, generation_config="vllm", **SMALL) as neutral:
        monkeypatch.setattr(neutral.llm_engine, "generation_config", {"temperature": 0.25})
        assert neutral.get_default_sampling_params() == SamplingParams()


def test_as_many_tokens_as_fit(path):
    with LLM(path, num_gpu_blocks=9, **SMALL) as llm:  # 8 blocks of 4 tokens
        (out,) = generate(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 29 and out.outputs[0].finish_reason == "length"


def test_progress_bar(tiny, capsys):
    tiny.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "3/3" in shown and "output:" in shown and "tok/s" in shown
    tiny.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_stop_string_and_reasons(tiny):
    (plain,) = generate(tiny, "Hello", GREEDY)
    text, last = plain.outputs[0].text, plain.outputs[0].token_ids[-1]
    stop = text[3:5]
    (out,) = generate(tiny, "Hello", GREEDY.clone(stop=[stop]))
    assert (out.outputs[0].text, out.outputs[0].stop_reason) == (text[: text.index(stop)], stop)
    (out,) = generate(tiny, "Hello", GREEDY.clone(stop_token_ids=[last]))
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason, out.outputs[0].token_ids[-1]) == (
        "stop",
        last,
        last,
    )
    (out,) = generate(tiny, "Hello", SamplingParams(temperature=0, allowed_token_ids=[EOS_TOKEN_ID]))
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason, out.outputs[0].text) == ("stop", None, "")
    assert nothing_is_left(tiny)


def test_cached_tokens_and_salt(tiny):
    tiny.reset_prefix_cache()
    prompt = "A prompt that fills some blocks"
    first, second = generate(tiny, prompt, GREEDY), generate(tiny, prompt, GREEDY)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 28)
    salted = [generate(tiny, {"prompt": prompt, "cache_salt": salt}, GREEDY)[0] for salt in ("a", "b", "a")]
    assert [out.num_cached_tokens for out in salted] == [0, 0, 28]
    assert tiny.get_metrics()["prefix_cache_hits"] > 0 and tiny.reset_prefix_cache() is True
    assert generate(tiny, prompt, GREEDY)[0].num_cached_tokens == 0


# ---- chat


def test_chat_uses_the_template_of_the_model(tiny):
    hello = [{"role": "user", "content": "hello"}]
    (out,) = tiny.chat(hello, GREEDY, use_tqdm=False)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert out.prompt == text and out.prompt_token_ids == tiny_tokenizer().encode(text)
    both = tiny.chat(
        [hello, [*hello, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "x"}]],
        GREEDY,
        use_tqdm=False,
    )
    assert both[0].outputs == out.outputs and both[1].prompt.count("<|im_start|>") == 4
    (bare,) = tiny.chat(hello, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt == "<|im_start|>user\nhello<|im_end|>\n"
    (own,) = tiny.chat(
        hello,
        GREEDY,
        use_tqdm=False,
        chat_template="{{ messages[0]['content'] }}!{{ mark }}",
        chat_template_kwargs={"mark": "?"},
    )
    assert own.prompt == "hello!?"


def test_chat_goes_on_with_the_last_message(tiny):
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The answer is"}]
    (out,) = tiny.chat(talk, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert out.prompt.endswith("<|im_start|>assistant\nThe answer is")
    with pytest.raises(ValueError, match="exclude each other"):
        tiny.chat(talk, GREEDY, use_tqdm=False, continue_final_message=True)


def test_chat_joins_the_parts_of_a_text(tiny):
    def say(*parts, **options):
        return tiny.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False, **options)[0].prompt

    one, two = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}
    assert say(one, two) == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    reads_parts = "{% for part in messages[0]['content'] %}<{{ part['text'] }}>{% endfor %}"
    assert say(one, two, chat_template=reads_parts) == "<one><two>"
    with pytest.raises(ValueError, match="message 0: this model reads text alone, .*got .*image_url"):
        say(one, {"type": "image_url", "image_url": {"url": "x"}})
    with pytest.raises(ValueError, match="the chat template given refuses these messages: unexpected"):
        say(one, chat_template="{{ messages[0")


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}]])
def test_chat_refuses_what_is_no_conversation(tiny, messages):
    with pytest.raises((TypeError, ValueError), match=r"conversation|role"):
        tiny.chat([messages] if messages == [] else messages, GREEDY, use_tqdm=False)


# ---- trouble


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ("", ValueError, r"prompts\[1\]: the prompt is empty"),
        (
            [1, VOCAB_SIZE],
            ValueError,
            r"prompts\[1\]: prompt_token_ids\[1\] is 264; token ids of this model are 0..263",
        ),
        ("x" * 300, ValueError, r"prompts\[1\]: the prompt has 300 tokens, but at most 255"),
        ({"prompts": "x"}, ValueError, r"prompts\[1\]: unknown field 'prompts'"),
        (None, TypeError, r"prompts\[1\]: a prompt is"),
    ],
)
def test_a_bad_prompt_queues_nothing(tiny, bad, error, says):
    with pytest.raises(error, match=says):
        generate(tiny, ["fine", bad, "fine too"], GREEDY)
    assert not tiny.llm_engine.has_unfinished_requests() and nothing_is_left(tiny)


def test_what_is_no_list_of_prompts_or_one_for_each_is_refused(tiny):
    import pandas as pd

    for given in (b"Hello", pd.DataFrame({"prompt": ["Hello"]}), UserDict(input_ids=[1])):
        with pytest.raises(TypeError, match=f"prompts must be .*, got {type(given).__name__}"):
            generate(tiny, given, GREEDY)
    assert tokens_of(tiny, pd.Series(["a", "c"])) == tokens_of(tiny, ["a", "c"])
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, or a list .* got {'max_tokens': 1}"):
        generate(tiny, ["a"], {"max_tokens": 1})
    with pytest.raises(TypeError, match="lora_request must be LoRARequest, or a list .* got 'ab'"):
        tiny.generate(["a", "b"], GREEDY, lora_request="ab", use_tqdm=False)
    with pytest.raises(TypeError, match="priority must be int, or a list .* got 0.5"):
        tiny.generate("a", GREEDY, priority=0.5, use_tqdm=False)
    assert nothing_is_left(tiny)


def test_bad_parameters_say_value_and_range():
    for params, says in (
        ({"temperature": -1}, r"temperature must be a finite number in \[0, 2\], got -1"),
        ({"top_p": 0}, r"top_p must be a finite number in \(0, 1\], got 0"),
        ({"max_tokens": 0}, "max_tokens must be .*, got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            SamplingParams(**params)
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)


def test_bad_engine_arguments(path):
    with pytest.raises(TypeError, match="'max_num_sequences'; did you mean 'max_num_seqs'"):
        LLM(path, max_num_sequences=3)
    with pytest.raises(ValueError, match="unknown model 'no-such-model'"):
        LLM("no-such-model")
    with pytest.raises(ValueError, match="max_model_len=100 does not fit the KV cache"):
        LLM(path, max_model_len=100, num_gpu_blocks=9, **SMALL)
    with pytest.raises(ValueError, match="no attention backend 'fast'"):
        LLM(path, attention_backend="fast", **SMALL)
    with pytest.raises(ValueError, match="must be one of uni, mp.*; got 'rays'"):
        LLM(path, distributed_executor_backend="rays", num_gpu_blocks=9, **SMALL)
    with pytest.raises(TypeError, match=r"preemption must be Recompute\(\) or Swap\(num_cpu_blocks\), got 'swap'"):
        LLM(path, preemption="swap", num_gpu_blocks=9, max_model_len=32, **SMALL)


def test_a_bad_request_leaves_the_others_running(tiny):
    engine = tiny.llm_engine
    want = tokens_of(tiny, ["One", "Two"])
    engine.add_request("1", "One", GREEDY)
    engine.step()
    for prompt, params, error in (
        ("", GREEDY, ValueError),
        (5, GREEDY, TypeError),
        ("x", None, TypeError),
        ([999], GREEDY, ValueError),
    ):
        with pytest.raises(error):
            engine.add_request("bad", prompt, params)
    with pytest.raises(ValueError, match="'1' is in use"):
        engine.add_request("1", "x", GREEDY)
    engine.add_request("2", "Two", GREEDY)
    last = {}
    while engine.has_unfinished_requests():
        last |= {out.request_id: out for out in engine.step()}
    assert [[last[r].outputs[0].token_ids] for r in "12"] == want


def test_an_error_in_one_request_leaves_the_others(tiny):
    def breaks_at_the_third(logits, view):
        if len(view.output_token_ids) == 2:
            raise OverflowError("made up")
        return logits

    want = tokens_of(tiny, ["a", "c"])
    outputs = generate(tiny, ["a", "b", "c"], [GREEDY, GREEDY.clone(logits_processors=[breaks_at_the_third]), GREEDY])
    assert [[out.outputs[0].token_ids] for out in outputs[::2]] == want
    assert outputs[1].outputs[0].finish_reason == "error" and "OverflowError: made up" in outputs[1].error
    assert len(outputs[1].outputs[0].token_ids) == 2 and nothing_is_left(tiny)


def test_requests_of_the_engine_and_generate_do_not_mix(tiny):
    tiny.llm_engine.add_request("mine", "a", GREEDY)
    with pytest.raises(RuntimeError, match="1 requests that were added to llm.llm_engine are unfinished"):
        generate(tiny, "b", GREEDY)
    tiny.llm_engine.abort_request("mine")
    assert tokens_of(tiny, "b") and nothing_is_left(tiny)


@pytest.mark.parametrize("preemption", [None, Swap(40)], ids=["recompute", "swap"])
def test_abort_in_every_state(path, preemption):
    def build():
        return LLM(path, num_gpu_blocks=24, max_num_batched_tokens=16, max_num_seqs=3, preemption=preemption, **SMALL)

    with build() as llm:
        engine, seen = llm.llm_engine, set()
        for steps in range(14):
            for name in "abcd":
                engine.add_request(f"{name}{steps}", name * 20, GREEDY.clone(max_tokens=24))
            for _ in range(2 * steps):
                engine.step()
            scheduler = engine.core.scheduler
            for request in list(scheduler.requests.values()):
                computed = "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
                seen.add((request.status.name, computed))
            alive = sorted(engine.output_processor.requests)
            outputs = engine.abort_request([*alive, "unknown"])
            assert sorted(out.request_id for out in outputs) == alive
            assert all(out.finished and out.outputs[0].finish_reason == "abort" for out in outputs)
            assert nothing_is_left(llm)
        gone = "SWAPPED" if preemption else "PREEMPTED"
        assert {("WAITING", "prefill"), ("RUNNING", "prefill"), ("RUNNING", "decode")} <= seen
        assert gone in {status for status, _ in seen}
        with build() as fresh:
            assert tokens_of(llm, ["a" * 20, "b"]) == tokens_of(fresh, ["a" * 20, "b"])


def test_abort_keeps_what_there_was(tiny):
    engine = tiny.llm_engine
    engine.add_request("r", "Hello", GREEDY)
    for _ in range(4):
        engine.step()
    (out,) = engine.abort_request("r")
    assert len(out.outputs[0].token_ids) == 4 and engine.abort_request("r") == [] and nothing_is_left(tiny)


def test_ctrl_c_leaves_the_engine_usable(tiny):
    def press(logits, view):
        if len(view.output_token_ids) == 3:
            signal.raise_signal(signal.SIGINT)
        return logits

    want = tokens_of(tiny, ["a", "b"])
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, ["a", "b"], GREEDY.clone(logits_processors=[press]))
    assert signal.getsignal(signal.SIGINT) is handler
    assert nothing_is_left(tiny) and tokens_of(tiny, ["a", "b"]) == want


def test_an_exception_in_the_model_leaves_the_engine_usable(tiny, monkeypatch):
    want = tokens_of(tiny, ["a prompt of some length", "b"])
    tiny.reset_prefix_cache()
    runner = tiny.llm_engine.core.executor.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", lambda *_args, **_more: (_ for _ in ()).throw(MemoryError("made up")))
        with pytest.raises(MemoryError, match="made up"):
            generate(tiny, ["a prompt of some length", "b"], GREEDY)
    assert nothing_is_left(tiny) and tokens_of(tiny, ["a prompt of some length", "b"]) == want


def test_a_broken_policy_leaves_the_engine_usable(tiny):
    class Broken(FCFS):
        def order(self, waiting, view):
            raise LookupError("made up")

    tiny.set_policy(Broken())
    with pytest.raises(RuntimeError, match=r"Broken.order raised LookupError: made up"):
        generate(tiny, ["a", "b"], GREEDY)
    tiny.set_policy(FCFS())
    assert nothing_is_left(tiny) and tokens_of(tiny, "a")


def test_closed(path):
    llm = LLM(path, num_gpu_blocks=9, **SMALL)
    llm.llm_engine.add_request("r", "a", GREEDY)
    llm.close()
    llm.close()
    for call in (lambda: generate(llm, "a", GREEDY), llm.llm_engine.step):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# ---- determinism


def settings_that_must_not_matter():
    yield {"num_gpu_blocks": 128}
    yield {"num_gpu_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    yield {"num_gpu_blocks": 20, "max_num_batched_tokens": 32, "preemption": Swap(30), "max_num_seqs": 5}
    yield {"num_gpu_blocks": 128, "block_size": 7, "max_num_seqs": 2, "enable_prefix_caching": False}


def test_seeded_tokens_do_not_depend_on_batch_order_or_preemption(path):
    params = [SamplingParams(temperature=1.2, seed=i, max_tokens=20, ignore_eos=True, top_p=0.9) for i in range(6)]
    prompts = [f"{'story ' * (i % 3)} number {i}" for i in range(6)]
    want = None
    for settings in settings_that_must_not_matter():
        with LLM(path, **SMALL | settings) as llm:
            got = tokens_of(llm, prompts, params)
            want = want or got
            assert got == want, settings
            if "max_num_batched_tokens" in settings:
                assert llm.get_metrics()["num_preemptions"] > 0
    assert len({str(tokens) for tokens in want}) == 6
    with LLM(path, num_gpu_blocks=64, **SMALL) as llm:
        for order in list(permutations(range(4)))[5:20:7]:
            got = tokens_of(llm, [prompts[i] for i in order], [params[i] for i in order])
            assert got == [want[i] for i in order]
        assert [tokens_of(llm, p, s)[0] for p, s in zip(prompts, params, strict=True)] == want


def test_unseeded_tokens_follow_the_engine_seed(path):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed, settings in (
        (0, {"num_gpu_blocks": 128}),
        (0, {"num_gpu_blocks": 14, "max_num_seqs": 3}),
        (1, {"num_gpu_blocks": 128}),
    ):
        with LLM(path, seed=seed, **SMALL, **settings) as llm:
            runs.append((tokens_of(llm, ["a", "b", "a"], params), tokens_of(llm, "a", params)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0][0] != runs[0][0][2] != runs[0][1][0]


def test_children_are_requests_with_the_next_seeds(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=5, ignore_eos=True)
    (three,) = tokens_of(tiny, "Hello", params.clone(n=3))
    assert three == [tokens_of(tiny, "Hello", params.clone(seed=5 + i))[0][0] for i in range(3)]


def test_best_of_is_the_best_of_them(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=5, ignore_eos=True, logprobs=0)
    (every,) = generate(tiny, "Hello", params.clone(n=5))
    ranked = sorted(every.outputs, key=lambda c: -c.cumulative_logprob)
    (best,) = generate(tiny, "Hello", params.clone(n=2, best_of=5))
    assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best.outputs] == [0, 1] and best.outputs[0].logprobs is not None
    assert nothing_is_left(tiny)


# ---- log-probabilities


@torch.inference_mode()
def hf_logprobs(tokens):
    return torch.log_softmax(hf_model("llama")(torch.tensor([tokens])).logits[0], -1)


def test_logprobs(tiny):
    (out,) = generate(tiny, "Hello", SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, ignore_eos=True))
    completion, prompt = out.outputs[0], out.prompt_token_ids
    want = hf_logprobs(prompt + completion.token_ids)
    total = 0.0
    for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = want[len(prompt) - 1 + i]
        assert all(abs(e.logprob - row[t]) < 1e-3 for t, e in entry.items())
        assert set(row.topk(3).indices.tolist()) | {token} == set(entry)
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        total += float(row[token])
    assert abs(completion.cumulative_logprob - total) < 1e-3


@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_logprobs_with_chunks_and_prefix_hits(path, budget):
    text = "The quick brown fox jumps over the lazy dog"
    with LLM(path, num_gpu_blocks=64, max_num_batched_tokens=budget, **SMALL) as llm:
        tokens_of(llm, text)  # now its blocks are cached
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
        out, other = generate(llm, [text, text], [params, GREEDY])
        assert other.num_cached_tokens > 0 and out.num_cached_tokens == 0
        assert nothing_is_left(llm)
    want, prompt = hf_logprobs(out.prompt_token_ids), out.prompt_token_ids
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(out.prompt_logprobs[1:]):
        assert abs(entry[prompt[i + 1]].logprob - want[i, prompt[i + 1]]) < 1e-3
        assert entry[prompt[i + 1]].decoded_token == tiny_tokenizer().decode([prompt[i + 1]])
    (one,) = generate(tiny_of(path), [5], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert one.prompt_logprobs == [None]


def tiny_of(path):
    return LLM(path, num_gpu_blocks=9, **SMALL)


def test_prompt_logprobs_survive_a_preemption(path):
    prompts = [f"{i} bottles of beer on the wall" for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0, ignore_eos=True)
    with LLM(path, num_gpu_blocks=26, max_num_batched_tokens=24, **SMALL) as llm:
        outputs = generate(llm, prompts, params)
        assert llm.get_metrics()["num_preemptions"] > 0
    for out in outputs:
        want, prompt = hf_logprobs(out.prompt_token_ids), out.prompt_token_ids
        assert len(out.prompt_logprobs) == len(prompt)
        for i, entry in enumerate(out.prompt_logprobs[1:]):
            assert abs(entry[prompt[i + 1]].logprob - want[i, prompt[i + 1]]) < 1e-3


# ---- structured outputs


def test_structured_outputs_share_a_batch_and_fail_alone(tiny, caplog):
    def wish(regex):
        return SamplingParams(
            temperature=1.0, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=regex)
        )

    want = tokens_of(tiny, "free")
    outputs = generate(tiny, ["a", "b", "free"], [wish(r"(yes|no)!"), wish("(broken"), GREEDY])
    assert outputs[0].outputs[0].text in ("yes!", "no!") and outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[1].outputs[0].finish_reason == "error" and "unclosed group" in outputs[1].error
    assert "1 of 3 requests ended with an error, one of them: " + outputs[1].error in caplog.text
    assert [[outputs[2].outputs[0].token_ids]] == want and nothing_is_left(tiny)


def test_abort_while_a_grammar_is_compiled(tiny, monkeypatch):
    from minivllm.sampling.grammar import PendingGrammar

    monkeypatch.setattr(PendingGrammar, "done", lambda self: False)
    engine = tiny.llm_engine
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["x"]))
    engine.add_request("waits", "a", params)
    engine.add_request("runs", "b", GREEDY)
    assert engine.core.has_requests() and [out.request_id for out in engine.step()] == ["runs"]
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("waits", "a", GREEDY)
    (out,) = engine.abort_request("waits")
    assert out.outputs[0].finish_reason == "abort"
    engine.abort_request("runs")
    assert nothing_is_left(tiny)


# ---- the engine, step by step


def test_streaming_equals_the_final_output(tiny):
    (whole,) = generate(tiny, "Hello", GREEDY)
    engine = tiny.llm_engine
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        engine.add_request("s", "Hello", GREEDY.clone(output_kind=kind))
        parts = []
        while engine.has_unfinished_requests():
            parts += [out.outputs[0] for out in engine.step()]
        assert len(parts) == 10
        if kind is RequestOutputKind.DELTA:
            assert "".join(p.text for p in parts) == whole.outputs[0].text
        else:
            assert parts[-1] == whole.outputs[0]


def test_metrics_count(path):
    with LLM(path, num_gpu_blocks=64, **SMALL) as llm:
        generate(llm, ["abc", "de"], GREEDY)
        metrics = llm.get_metrics()
        assert (metrics["prompt_tokens"], metrics["generation_tokens"], metrics["num_preemptions"]) == (5, 20, 0)
        llm.llm_engine.add_request("r", "abcd", GREEDY)
        llm.llm_engine.step()
        metrics = llm.get_metrics()
        assert metrics["num_requests_running"] == 1 and metrics["kv_cache_usage_perc"] > 0


def test_record(tiny):
    with tiny.record() as trace:
        generate(tiny, ["a" * 30, "b"], GREEDY)
        with pytest.raises(RuntimeError, match="recording already"), tiny.record():
            pass
    trace.check()
    assert trace.num_steps == 10 and any(
        "sampled" in line for line in trace.why("r" if False else str(trace.events[1][1]))
    )
    before = len(trace.events)
    generate(tiny, "c", GREEDY)
    assert len(trace.events) == before


def test_a_policy_from_a_cell(path):
    class LongestFirst(FCFS):
        def order(self, waiting, view):
            return sorted(waiting, key=lambda r: -r.num_prompt_tokens)

    prompts = ["a", "bbb", "cc", "dddd"]
    with LLM(path, num_gpu_blocks=64, max_num_seqs=1, policy=LongestFirst(), **SMALL) as llm:
        with llm.record() as trace:
            outputs = generate(llm, prompts, GREEDY)
        assert [out.prompt for out in outputs] == prompts
        ends = [event[1] for event in trace.events if event[0] == "finish"]
        assert [outputs[int(r)].prompt for r in ends] == ["dddd", "bbb", "cc", "a"]


def test_priority_and_engine_transforms(path):
    def only_sevens(logits, batch):
        logits[:, :7] = logits[:, 8:] = -torch.inf
        return logits

    with LLM(
        path, num_gpu_blocks=64, max_num_seqs=1, scheduling_policy="priority", logits_processors=[only_sevens], **SMALL
    ) as llm:
        with llm.record() as trace:
            outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[3, 1, 2], use_tqdm=False)
        assert {t for out in outputs for t in out.outputs[0].token_ids} == {7}
        assert [event[1] for event in trace.events if event[0] == "finish"] == ["1", "2", "0"]


def test_llm_engine_without_a_model_knows_its_args(path):
    engine = LLMEngine.from_engine_args(EngineArgs(model=path, num_gpu_blocks=9, **SMALL))
    assert engine.config.args.model == path and engine.get_num_unfinished_requests() == 0
    engine.close()


# ---- beam search


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (4, 2.0), (3, -1.0)])
def test_beams_equal_those_of_transformers(name, width, penalty, tiny_model_path):  # noqa: F811
    model = hf_model(name)
    prompts = ["Hello there", "A", "The quick brown fox"]
    with LLM(str(tiny_model_path(name)), num_gpu_blocks=128, **SMALL) as llm:
        ends = likely_end_token(llm, prompts[0])
        llm.llm_engine.input_processor.eos_token_id = ends
        llm.llm_engine.generation_config = {"eos_token_id": ends}
        params = BeamSearchParams(
            beam_width=width, max_tokens=9, length_penalty=penalty, include_stop_str_in_output=True
        )
        found = llm.beam_search(prompts, params)
        metrics = llm.get_metrics()
    assert metrics["prefix_cache_hits"] > 0, "beams share the blocks of their beginnings"
    finished_early = 0
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([tiny_tokenizer().encode(prompt)])
        with torch.inference_mode():
            want = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=9,
                length_penalty=penalty,
                early_stopping=False,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = [strip(row.tolist(), ends, ids.shape[1]) for row in want.sequences]
        assert [s.tokens for s in output.sequences] == rows
        if width > 1:
            assert [s.score for s in output.sequences] == pytest.approx(
                want.sequences_scores.tolist(), rel=1e-5, abs=1e-4
            )
        finished_early += sum(s.finish_reason == "stop" for s in output.sequences)
    assert finished_early > 0 or penalty > 0, "short beams win when length is not rewarded"


def likely_end_token(llm, prompt):
    """A token that good beams meet: the last of the best of four."""
    (out,) = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True))
    return out.sequences[0].tokens[-1]


def strip(row, end, prompt_len):
    """A row of transformers without its padding."""
    if end in row[prompt_len:]:
        return row[: prompt_len + row[prompt_len:].index(end) + 1]
    return row


def test_beam_search_refuses(tiny):
    with pytest.raises(ValueError, match="beam_width=11 needs 22 log-probabilities a token; max_logprobs is 20"):
        tiny.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=3))
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny.beam_search("", BeamSearchParams(beam_width=2, max_tokens=3))


def test_beams_with_a_temperature_and_without_the_end_token(tiny):
    (out,) = tiny.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5, ignore_eos=True))
    prompt = tiny_tokenizer().encode("Hello")
    assert all(s.finish_reason == "length" and len(s.tokens) == len(prompt) + 4 for s in out.sequences)
    best = out.sequences[0]
    with torch.inference_mode():
        rows = torch.log_softmax(hf_model("llama")(torch.tensor([best.tokens])).logits[0] / 0.5, -1)
    total = sum(float(rows[len(prompt) - 1 + i, t]) for i, t in enumerate(best.tokens[len(prompt) :]))
    assert abs(best.cum_logprob - total) < 1e-3
    assert best.text == tiny_tokenizer().decode(best.tokens)


def test_an_end_that_only_the_config_names_ends_answers(path, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 97}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    with LLM(str(folder), dtype="float32", num_gpu_blocks=64) as llm:
        for form in (None, {"choice": ["ab"]}):
            params = SamplingParams(max_tokens=6, logit_bias={97: 100.0}, structured_outputs=form)
            (answer,) = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
            assert answer.finish_reason == "stop" and answer.token_ids[-1] == 97


@pytest.mark.parametrize(("key", "value"), [("temperature", "hot"), ("top_p", 7), ("max_new_tokens", -1)])
def test_a_default_that_is_out_of_range_is_the_models_fault(path, tmp_path, key, value):
    import json
    import shutil

    folder = shutil.copytree(path, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {key} must be"):
        LLM(str(folder), dtype="float32", num_gpu_blocks=64)
    LLM(str(folder), dtype="float32", num_gpu_blocks=64, generation_config="vllm").close()


def test_the_promise_of_a_seed_is_told_once_where_it_depends_on_the_batch(path, caplog):
    caplog.set_level("INFO", "minivllm.engine")
    for backend, told in (("sdpa", 1), ("reference", 0)):
        caplog.clear()
        with LLM(str(path), dtype="float32", num_gpu_blocks=64, attention_backend=backend) as llm:
            llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=1, temperature=0, seed=1), use_tqdm=False)
            assert "seeded" not in caplog.text
            for _ in range(2):
                llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=1, seed=1), use_tqdm=False)
        assert caplog.text.count("a seeded request") == told and caplog.text.count("numba_cpu_invariant") == told


def test_a_seed_gives_the_same_tokens_in_any_batch_with_an_invariant_backend(path):
    from minivllm.attention.select import make_backend

    backend = "numba_cpu_invariant"
    assert make_backend(backend).batch_invariant
    params = SamplingParams(max_tokens=24, seed=7, ignore_eos=True)
    others = [[i, i + 1, i + 2] for i in range(5)]
    with LLM(
        str(path), dtype="bfloat16", num_gpu_blocks=64, attention_backend=backend, enable_prefix_caching=False
    ) as llm:
        alone = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        crowd = llm.generate([[1, 2, 3], *others], params, use_tqdm=False)[0].outputs[0].token_ids
    assert alone == crowd


def test_the_collector_passes_over_modules_but_frees_engines(path):
    """The second engine is made while the first is there."""
    first, second = (LLM(path, num_gpu_blocks=64, **SMALL) for _ in range(2))
    assert gc.get_freeze_count() > 50_000 and gc.get_threshold()[0] >= 20_000
    cores = [weakref.ref(llm.llm_engine.core) for llm in (first, second)]
    del first, second
    gc.collect()
    assert [core() for core in cores] == [None, None]
