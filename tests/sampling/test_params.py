"""SamplingParams: every range, every contradiction, every spelling."""

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from minivllm.sampling.params import (
    _CHANGEABLE,
    ALLOWED,
    BeamSearchParams,
    InvalidParameter,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    best_indices,
)

NAN, INF = math.nan, math.inf

BAD = {
    "n": [0, -1, 1.5, True, "2", None, 16385],
    "best_of": [0, -3, 2.0, True, 16385],
    "presence_penalty": [-2.01, 2.01, NAN, INF, "1", None],
    "frequency_penalty": [-2.01, 2.01, NAN, -INF, "1", None],
    "repetition_penalty": [0, -1.0, NAN, INF, "1", None],
    "temperature": [-0.01, 2.01, NAN, INF, "hot", None, True],
    "top_p": [0, -0.1, 1.0001, NAN, None],
    "top_k": [-2, 1.5, True, "40", None],
    "min_p": [-0.1, 1.1, NAN, None],
    "seed": [1.5, "7", 2**64, -(2**63) - 1, True],
    "stop": [[""], [1], 5, ["ok", ""]],
    "stop_token_ids": [[-1], ["2"], [1.0], 7],
    "bad_words": [[""], ["  "], [3], 4],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [0, None],
    "max_tokens": [0, -1, 1.5, True],
    "min_tokens": [-1, 2.5, None],
    "logprobs": [-2, 1.5, "5"],
    "prompt_logprobs": [-2, 0.5],
    "logprobs_mode": ["raw", "logprobs", 1],
    "detokenize": [1, None],
    "skip_special_tokens": ["no", None],
    "spaces_between_special_tokens": [0],
    "logits_processors": [[1], len, ["f"]],
    "truncate_prompt_tokens": [0, -2, 1.5],
    "output_kind": [0, "delta", None],
    "structured_outputs": ["json", 1],
    "logit_bias": [{1: 100.5}, {1: NAN}, {-1: 1.0}, {"1": 1.0}, [1], {1: None}],
    "allowed_token_ids": [[], [-1], ["a"], [True]],
    "repetition_detection": [3, "yes"],
    "extra_args": [[1], {1: 2}],
}

GOOD = {
    "n": [1, 5, np.int64(3)],
    "best_of": [None, 1, 3],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 1, 50.0],
    "temperature": [0, 1e-6, 2.0, np.float32(0.5)],
    "top_p": [1e-9, 1],
    "top_k": [0, -1, 1, 10**9],
    "min_p": [0, 1],
    "seed": [None, 0, -5, 2**64 - 1, -1],
    "stop": [None, [], "x", ["x", "y"], ("x",)],
    "stop_token_ids": [None, [], [0, 2], {3}],
    "bad_words": [None, "no", ["no", " way"]],
    "max_tokens": [None, 1, 10**6],
    "logprobs": [None, 0, -1, 5, True],
    "prompt_logprobs": [None, 0, -1],
    "logprobs_mode": [None, "raw_logprobs", "processed_logits"],
    "logits_processors": [None, [], [len]],
    "truncate_prompt_tokens": [None, -1, 1],
    "output_kind": list(RequestOutputKind),
    "structured_outputs": [None, {"regex": "a+"}, StructuredOutputsParams(choice=["a"])],
    "logit_bias": [None, {}, {0: -100, 7: 100.0}],
    "allowed_token_ids": [None, [1], (2, 3)],
    "repetition_detection": [None, {"max_pattern_size": 3, "min_count": 2}],
    "extra_args": [None, {}, {"a": object()}],
}


def test_every_field_is_listed() -> None:
    assert set(BAD) == set(ALLOWED)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, InvalidParameter)
    assert caught.value.parameter.startswith(name)
    message = str(caught.value)
    assert caught.value.allowed in message
    assert repr(caught.value.value) in message
    assert ALLOWED[name].text in message


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_value(name: str, value: object) -> None:
    SamplingParams(**{"n": 1, name: value})


CONTRADICTIONS = [
    ({"min_tokens": 17}, "min_tokens", "max_tokens=16"),
    ({"stop": "a", "detokenize": False}, "stop", "detokenize=False"),
    ({"n": 3, "best_of": 2}, "best_of", "n=3"),
    ({"n": 2, "temperature": 0}, "n", "temperature=0"),
    ({"best_of": 2, "temperature": 0}, "best_of", "temperature=0"),
    ({"n": 1, "best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of", "DELTA"),
]


@pytest.mark.parametrize(("given", "name", "mentions"), CONTRADICTIONS)
def test_contradictions(given: dict, name: str, mentions: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**given)
    assert caught.value.parameter == name
    assert mentions in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"), [("topp", "top_p"), ("max_token", "max_tokens"), ("Temperature", "temperature")]
)
def test_unknown_name(name: str, nearest: str) -> None:
    for make in (SamplingParams, SamplingParams.from_optional, SamplingParams().clone):
        with pytest.raises(TypeError, match=f"'{name}'; did you mean '{nearest}'"):
            make(**{name: 1})


def test_unknown_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(TypeError, match=r"'zzz'; known: n, best_of, .*extra_args"):
        SamplingParams(zzz=1)


def test_assignment_is_checked_and_undone() -> None:
    params = SamplingParams(min_tokens=3)
    params.max_tokens = 5
    with pytest.raises(InvalidParameter, match="top_p must be"):
        params.top_p = 0
    with pytest.raises(InvalidParameter, match="min_tokens must be at most max_tokens=2"):
        params.max_tokens = 2
    with pytest.raises(AttributeError, match="did you mean 'top_k'"):
        params.topk = 5
    assert (params.top_p, params.max_tokens) == (1.0, 5)


def test_spellings() -> None:
    params = SamplingParams(stop="x", top_k=-1, seed=-1, logprobs=True, prompt_logprobs=False, stop_token_ids=(5, 5, 2))
    assert (params.stop, params.top_k, params.seed, params.logprobs, params.prompt_logprobs, params.stop_token_ids) == (
        ["x"], 0, None, 1, None, [5, 2],
    )  # fmt: skip
    assert SamplingParams(stop=None, bad_words=None).stop == []
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs.kind == "regex"


def test_repr_makes_an_equal_object() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"], logit_bias={3: 1.0}, top_k=4, seed=9)
    assert repr(params) == "SamplingParams(temperature=0.5, top_k=4, seed=9, stop=['a', 'b'], logit_bias={3: 1.0})"
    assert eval(repr(params)) == params
    assert repr(SamplingParams()) == "SamplingParams()"


def test_copies_are_equal_and_independent() -> None:
    def transform(logits, view):
        return logits

    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, logits_processors=[transform])
    twin = params.clone()
    assert twin == params == copy.deepcopy(params)
    twin.logit_bias[1] = 5.0
    assert params.logit_bias == {1: 2.0}
    assert twin.logits_processors[0] is transform and twin.logits_processors is not params.logits_processors
    plain = SamplingParams(temperature=0.2, structured_outputs={"json": {"type": "object"}})
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_nothing_that_can_be_changed_is_shared_with_a_copy() -> None:
    def parts(value: Any) -> list[Any]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [value, *(part for each in inner for part in parts(each))]

    params = SamplingParams(
        stop=["a"], stop_token_ids=[1], bad_words=["b"], logit_bias={1: 2.0}, allowed_token_ids=[3],
        logits_processors=[print], extra_args={"x": {"y": [1]}}, structured_outputs={"regex": "a"},
    )  # fmt: skip
    params.bad_words_token_ids = [[4], [5]]
    mine, theirs = (
        {id(part) for part in parts(vars(given)) if isinstance(part, (list, dict))}
        for given in (params, params.clone())
    )
    assert len(mine) == 13 and not mine & theirs and params.clone() == params
    kinds = {f.name: str(f.type) for f in dataclasses.fields(SamplingParams)}
    assert {name for name, kind in kinds.items() if "list[" in kind or "dict[" in kind} == set(_CHANGEABLE)


def test_errors_survive_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameter("top_p", 0, "in (0, 1]")))
    assert (error.parameter, error.value, str(error)) == ("top_p", 0, "top_p must be in (0, 1], got 0")


def test_clone_with_changes_is_checked_and_keeps_what_was_learnt() -> None:
    params = SamplingParams(stop_token_ids=[7])
    params.update_from_generation_config({"eos_token_id": [1, 2]}, eos_token_id=1)
    twin = params.clone(top_p=0.5)
    assert (twin.top_p, twin.eos_token_id, twin.all_stop_token_ids) == (0.5, 1, frozenset({1, 2, 7}))
    with pytest.raises(InvalidParameter):
        params.clone(top_p=7)


def test_from_optional() -> None:
    params = SamplingParams.from_optional(
        temperature=None, top_k=None, max_tokens=None, logit_bias={"17": 5}, stop=None
    )
    assert params == SamplingParams(max_tokens=None, logit_bias={17: 5})
    with pytest.raises(InvalidParameter, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"a": 1})


def test_children() -> None:
    parent = SamplingParams(n=2, best_of=4, seed=2**64 - 2, temperature=0.5)
    children = [parent.child(i) for i in range(parent.num_children)]
    assert [child.seed for child in children] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert all((c.n, c.best_of, c.logprobs, c.temperature) == (1, None, 0, 0.5) for c in children)
    assert SamplingParams(n=2).child(1).seed is None
    assert SamplingParams(n=2).child(1).logprobs is None
    with pytest.raises(IndexError):
        parent.child(4)


def test_best_indices_ranks_by_logprob_per_token() -> None:
    assert best_indices([-10.0, -3.0, -4.0, -8.0], [10, 1, 4, 8], 3) == [0, 2, 3]
    assert best_indices([-1.0, 0.0], [1, 0], 1) == [1]


def test_generation_config_adds_end_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [3, 2, 1]}, eos_token_id=2)
    assert params.eos_token_id == 2
    assert params.stop_token_ids == [9, 1, 3]
    assert params.all_stop_token_ids == {1, 2, 3, 9}
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": [3, 2]}, eos_token_id=2)
    assert (ignoring.eos_token_id, ignoring.stop_token_ids, ignoring.all_stop_token_ids) == (None, [], {2, 3})


class Words:
    """Tokens are words; a leading space makes another token."""

    vocabulary = ("no", " no", "way", " way", "x")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            word = next((w for w in self.vocabulary if text.startswith(w)), None)
            if word is None:
                return []
            ids, text = [*ids, self.vocabulary.index(word)], text[len(word) :]
        return ids


def test_bad_words_with_and_without_space() -> None:
    params = SamplingParams(bad_words=["no", " no way", "x"])
    params.update_from_tokenizer(Words())
    assert params.bad_words_token_ids == [[0], [1], [0, 3], [1, 3], [4]]
    params.bad_words = ["way"]
    assert params.bad_words_token_ids is None
    with pytest.raises(InvalidParameter, match="bad_words"):
        SamplingParams(bad_words=["unknown"]).update_from_tokenizer(Words())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"allowed_token_ids": [1, 50]}, "allowed_token_ids"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_verify(given: dict, name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        SamplingParams(**given).verify(vocab_size=50, max_logprobs=20)


def test_verify_accepts_what_exists() -> None:
    params = SamplingParams(allowed_token_ids=[49], logprobs=20, prompt_logprobs=0)
    params.verify(vocab_size=50, max_logprobs=20)
    SamplingParams(logprobs=-1).verify(vocab_size=50, max_logprobs=-1)


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"json": "{not json"}, "json"),
        ({"json": 5}, "json"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"regex": ""}, "regex"),
        ({"json_object": False}, "json_object"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_structured_outputs(given: dict, mentions: str) -> None:
    with pytest.raises(InvalidParameter, match=mentions):
        StructuredOutputsParams(**given)
    with pytest.raises(InvalidParameter, match=mentions):
        SamplingParams(structured_outputs=given)


def test_structured_outputs_names_unknown_fields() -> None:
    with pytest.raises(TypeError, match="'schema'"):
        StructuredOutputsParams(schema={})
    assert StructuredOutputsParams(json={"a": 1}).key == StructuredOutputsParams(json={"a": 1}).key
    assert StructuredOutputsParams(json={"a": 1}).key != StructuredOutputsParams(json={"a": 2}).key


@pytest.mark.parametrize(
    "given",
    [
        {"max_pattern_size": -1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2.5, "min_count": 2},
    ],
)
def test_repetition_detection(given: dict) -> None:
    with pytest.raises(InvalidParameter, match="repetition_detection"):
        RepetitionDetectionParams(**given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width"),
        ({"beam_width": 1, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 1, "max_tokens": 1, "length_penalty": NAN}, "length_penalty"),
        ({"beam_width": 1, "max_tokens": 1, "temperature": -1}, "temperature"),
    ],
)
def test_beam_search_params(given: dict, name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        BeamSearchParams(**given)
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams(beamwidth=2, max_tokens=1)


HUGE = (10**400, Fraction(10**400), np.float64("inf"), 10**5000)


@pytest.mark.parametrize("value", HUGE, ids=["int", "fraction", "inf", "digits"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
def test_huge_numbers_are_refused_as_others_are(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name) as caught:
        SamplingParams(**{name: {3: value} if name == "logit_bias" else value})
    assert ALLOWED[name].text in str(caught.value)


def test_numpy_numbers_become_pythons_everywhere() -> None:
    params = SamplingParams(
        logprobs=np.int64(3), prompt_logprobs=np.int32(2), stop_token_ids=[np.int64(5), 5, np.int64(7)],
        allowed_token_ids=[np.int64(1)], logit_bias={np.int64(4): np.float32(0.5)}, max_tokens=np.int64(4),
    )  # fmt: skip
    assert params.stop_token_ids == [5, 7] and params.logit_bias == {4: 0.5}
    numbers = [
        params.logprobs,
        params.prompt_logprobs,
        *params.stop_token_ids,
        *params.allowed_token_ids,
        *params.logit_bias,
    ]
    assert {type(n) for n in numbers} == {int} and type(params.logit_bias[4]) is float


@pytest.mark.parametrize("value", [[1, True], [True, 1], [0, False], [[1]], [1, {}]])
def test_a_list_with_something_that_is_no_token_id(value: list) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(InvalidParameter, match=name):
            SamplingParams(**{name: value})


def test_a_temperature_close_to_zero_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0.01 and "raised to 0.01" in caplog.text
    assert SamplingParams(temperature=0.0).is_greedy and not SamplingParams(temperature=1e-6).is_greedy


def test_import_needs_no_torch() -> None:
    code = "import sys, minivllm.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
