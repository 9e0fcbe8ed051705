"""What is refused, and how; what reaches the core."""

import sys

import numpy as np
import pytest
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

from minivllm.core.config import EngineArgs, KVCacheSpec, MachineFacts, ModelFacts, choose_dtype, resolve
from minivllm.engine.input_processor import InputProcessor, parse_prompt
from minivllm.sampling.params import SamplingParams


def make(tokenizer=None, generation_config=None, **settings):
    args = EngineArgs(dtype="float32", **{"num_gpu_blocks": 9, "block_size": 4} | settings)
    facts = ModelFacts("tiny", "", VOCAB_SIZE, 1, 256, (KVCacheSpec("full", args.block_size, 1, 8),), 0)
    machine = MachineFacts("cpu", 2**30, 2**30, False, "none", "no model")
    config = resolve(args, facts, machine, choose_dtype("float32", "float32", "cpu", False))
    return InputProcessor(config, tokenizer or tiny_tokenizer(), generation_config)


@pytest.fixture(scope="module")
def processor():
    return make()


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("", ValueError, "the prompt is empty"),
        ([], ValueError, "the prompt is empty"),
        (
            [1, 2, VOCAB_SIZE],
            ValueError,
            rf"prompt_token_ids\[2\] is {VOCAB_SIZE}; token ids of this model are 0..{VOCAB_SIZE - 1}",
        ),
        ([1, -1], ValueError, r"prompt_token_ids\[1\] is -1"),
        ([1, 2, 2**32], ValueError, rf"prompt_token_ids\[2\] is {2**32}"),
        ([1, 2**31, -(2**70)], ValueError, rf"prompt_token_ids\[1\] is {2**31}"),
        (
            "x" * 32,
            ValueError,
            r"has 32 tokens, but at most 31 are allowed: max_model_len=32 \(all that the KV cache can hold",
        ),
        (3.5, TypeError, "a prompt is a string, a list of token ids, or a dict .*got float 3.5"),
        (None, TypeError, "got NoneType None"),
        (["a"], TypeError, r"got list \['a'\]"),
        ([1, True], TypeError, "got list"),
        ([1, np.True_], TypeError, "got list"),
        (np.array([[1]]), TypeError, "got ndarray"),
        (np.array([1.0]), TypeError, "got ndarray"),
        (np.ma.masked_array([1, 2], [False, True]), TypeError, "got MaskedArray"),
        ({"prompt": "a", "token_type_ids": []}, TypeError, r"'token_type_ids' must be a list .*got list \[\]"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [0]}, TypeError, r"'token_type_ids' must be .*got list \[0\]"),
        ([1.0], TypeError, "got list"),
        ({}, ValueError, "needs 'prompt' .*, 'prompt_token_ids' .* or 'prompt_embeds'"),
        ({"promt": "a"}, ValueError, "unknown field 'promt' in a prompt; did you mean 'prompt'"),
        ({"prompt": "a", "multi_modal_data": 1}, ValueError, "multi_modal_data: tiny reads text alone"),
        ({"prompt": 5}, TypeError, "'prompt' must be a string, got int 5"),
        ({"prompt_token_ids": "a"}, TypeError, "'prompt_token_ids' must be a list of token ids, got str 'a'"),
        ({"prompt": "a", "cache_salt": ""}, TypeError, "'cache_salt' must be a non-empty string"),
    ],
)
def test_bad_prompts(processor, prompt, error, says):
    with pytest.raises(error, match=says):
        processor.process("r", prompt, SamplingParams())


def test_the_reason_for_the_limit_is_the_user():
    with pytest.raises(ValueError, match=r"max_model_len=8 \(asked for\)"):
        make(max_model_len=8).process("r", "x" * 8, SamplingParams())


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SamplingParams(min_tokens=14), "min_tokens is 14, but after 20 prompt tokens only 12 fit"),
        (SamplingParams(logprobs=21), "logprobs must be at most max_logprobs=20, got 21"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs must be at most max_logprobs=20, got -1"),
        (
            SamplingParams(allowed_token_ids=[VOCAB_SIZE]),
            "allowed_token_ids must be token ids below the vocabulary size",
        ),
        (SamplingParams(stop_token_ids=[9999]), "stop_token_ids must be"),
        (SamplingParams(logit_bias={9999: 1.0}), "logit_bias must be"),
    ],
)
def test_bad_parameters(processor, params, says):
    with pytest.raises(ValueError, match=says):
        processor.process("r", "x" * 20, params)


def test_wrong_types(processor):
    for request_id, params, priority, says in (
        (7, SamplingParams(), 0, "request_id must be a string, got int 7"),
        ("r", {"temperature": 0}, 0, "params must be SamplingParams or PoolingParams, got dict"),
        ("r", SamplingParams(), "high", "priority must be a whole number .*got str 'high'"),
    ):
        with pytest.raises(TypeError, match=says):
            processor.process(request_id, "a", params, priority=priority)


def test_without_a_tokenizer():
    processor = make()
    processor.tokenizer = None
    assert processor.process("r", [1, 2], SamplingParams()).prompt_token_ids == [1, 2]
    with pytest.raises(ValueError, match="no tokenizer: give the prompt as a list of token ids"):
        processor.process("r", "text", SamplingParams())
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        processor.process("r", [1], SamplingParams(bad_words=["x"]))


@pytest.mark.parametrize(
    "prompt", [[5, 6], (5, 6), np.array([5, 6]), [5, np.int32(6)], range(5, 7), {"prompt_token_ids": [5, 6]}]
)
def test_forms_of_token_ids(processor, prompt):
    given = processor.process("r", prompt, SamplingParams())
    assert given.prompt_token_ids == [5, 6] and given.prompt is None
    assert all(type(token) is int for token in given.prompt_token_ids)


def test_python_does_not_go_over_the_ids_one_by_one():
    def calls(length):
        processor, count = make(num_gpu_blocks=1000), 0

        def see(*_):
            nonlocal count
            count += 1

        ids = list(range(length))
        sys.setprofile(see)
        try:
            processor.process("r", {"prompt_token_ids": ids}, SamplingParams(allowed_token_ids=ids, stop_token_ids=ids))
        finally:
            sys.setprofile(None)
        return count

    assert calls(2) == calls(250)


def test_text_beside_token_ids_is_only_for_showing(processor):
    given = processor.process("r", {"prompt": "shown", "prompt_token_ids": [5]}, SamplingParams())
    assert (given.prompt, given.prompt_token_ids) == ("shown", [5])


def test_a_salt_reaches_the_core(processor):
    assert parse_prompt({"prompt": "a", "cache_salt": "s"}).cache_salt == "s"
    given = processor.process(
        "r", {"prompt": "a", "cache_salt": "s"}, SamplingParams(), priority=3, user="u", arrival_time=2.5
    )
    (child,) = given.children
    assert (child.cache_salt, child.priority, child.user, child.arrival_time) == ("s", 3, "u", 2.5)


@pytest.mark.parametrize(("asked", "got"), [(5, 5), (12, 12), (100, 12), (None, 12)])
def test_max_tokens_is_cut_at_the_limit(processor, asked, got):
    assert processor.process("r", "x" * 20, SamplingParams(max_tokens=asked)).children[0].max_tokens == got


@pytest.mark.parametrize(("k", "length"), [(3, 3), (31, 31), (-1, 31)])
def test_truncation_keeps_the_end(processor, k, length):
    text = "".join(chr(97 + i % 26) for i in range(40))
    given = processor.process("r", text, SamplingParams(truncate_prompt_tokens=k))
    assert given.prompt_token_ids == tiny_tokenizer().encode(text)[-length:]


def test_end_tokens_of_the_model():
    params = SamplingParams(stop_token_ids=[3])
    (child,) = make(generation_config={"eos_token_id": [EOS_TOKEN_ID, 5]}).process("r", "a", params).children
    assert child.eos_token_id == EOS_TOKEN_ID and child.stop_token_ids == {3, 5}
    assert params == SamplingParams(stop_token_ids=[3]), "the caller's parameters were changed"
    ignoring = make(generation_config={"eos_token_id": [EOS_TOKEN_ID, 5]}).process(
        "r", "a", SamplingParams(ignore_eos=True)
    )
    assert ignoring.children[0].eos_token_id is None and ignoring.children[0].stop_token_ids == set()


def test_a_list_that_was_changed_in_place_is_checked_again(processor):
    params = SamplingParams(stop_token_ids=[3])
    params.stop_token_ids.append(4)
    completed = processor.process("r", "a", params).params
    assert completed.stop_token_ids == [3, 4] and completed.all_stop_token_ids == {3, 4, EOS_TOKEN_ID}
    params.stop_token_ids.append(-1)
    with pytest.raises(ValueError, match="stop_token_ids must be a list"):
        processor.process("r", "a", params)


def test_children(processor):
    given = processor.process("r", "ab", SamplingParams(n=2, best_of=3, seed=7, prompt_logprobs=1))
    assert [child.request_id for child in given.children] == ["0_r", "1_r", "2_r"]
    assert [child.sampling_params.seed for child in given.children] == [7, 8, 9]
    assert [child.skip_reading_prefix_cache for child in given.children] == [True, False, False]
    assert [child.sampling_params.logprobs for child in given.children] == [0, 0, 0]


def test_seeds_follow_the_engine_seed_and_the_order_of_arrival():
    def seeds(engine_seed):
        processor = make(seed=engine_seed)
        with pytest.raises(ValueError, match="empty"):
            processor.process("bad", "", SamplingParams())  # takes no seed
        return [processor.process("r", "a", SamplingParams()).children[0].sampling_params.seed for _ in range(5)]

    assert seeds(0) == seeds(0) != seeds(1) and len(set(seeds(0))) == 5
