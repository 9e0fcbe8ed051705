"""Texts, reasons, deltas, several answers: fed with outputs of the core made by hand."""

import random
from itertools import pairwise

import pytest
from tiny_models import tiny_tokenizer

from minivllm.core.output import EngineCoreOutput
from minivllm.core.request import FinishReason
from minivllm.engine.output_processor import OutputProcessor
from minivllm.sampling.logprobs import Logprob
from minivllm.sampling.params import RequestOutputKind, SamplingParams

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = tiny_tokenizer()  # one token a byte
EOS = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def start(tokenizer=TOKENIZER, **params):
    processor = OutputProcessor(tokenizer)
    given = SamplingParams(**{"max_tokens": 100} | params)
    children = (
        {"r": given} if given.num_children == 1 else {f"{i}_r": given.child(i) for i in range(given.num_children)}
    )
    processor.add_request("r", None, [1, 2], given, children, arrival_time=1.0)
    return processor


def feed(processor, tokens, last=None, stop_reason=None, name="r", **more):
    """One token a step; gives the outputs and what the core was told to abort."""
    outputs, aborts = [], []
    for i, token in enumerate(tokens):
        end = i == len(tokens) - 1
        core = EngineCoreOutput(name, [token], last if end else None, stop_reason if end else None, **more)
        done = processor.process_outputs([core], now=2.0 + i)
        outputs += done.request_outputs
        aborts += done.reqs_to_abort
        if aborts:
            break
    return outputs, aborts


def final(outputs):
    assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1].outputs[0]


def test_length():
    outputs, aborts = feed(start(), ids("abc"), LENGTH)
    got = final(outputs)
    assert (got.text, got.token_ids, got.finish_reason, got.stop_reason) == ("abc", ids("abc"), "length", None)
    assert aborts == []


def test_end_of_sequence_is_a_token_but_no_text():
    for params in ({}, {"skip_special_tokens": False}):
        outputs, _ = feed(start(**params), [*ids("ab"), EOS], STOP)
        got = final(outputs)
        assert (got.text, got.token_ids, got.finish_reason, got.stop_reason) == ("ab", [*ids("ab"), EOS], "stop", None)


def test_end_of_sequence_shown_when_asked_for():
    outputs, _ = feed(start(skip_special_tokens=False, include_stop_str_in_output=True), [*ids("ab"), EOS], STOP)
    assert final(outputs).text == "ab</s>"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a.")])
def test_stop_token_id(include, text):
    dot = ids(".")[0]
    outputs, _ = feed(start(stop_token_ids=[dot], include_stop_str_in_output=include), ids("a."), STOP, stop_reason=dot)
    got = final(outputs)
    assert (got.text, got.token_ids, got.stop_reason) == (text, ids("a."), dot)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_stop_string_across_tokens(include, text):
    outputs, aborts = feed(start(stop="two", include_stop_str_in_output=include), ids("one two three"), LENGTH)
    got = final(outputs)
    assert (got.text, got.finish_reason, got.stop_reason) == (text, "stop", "two")
    assert got.token_ids == ids("one two"), "tokens after the stop string are not part of the answer"
    assert aborts == ["r"]


def test_a_stop_string_wins_over_the_length():
    outputs, aborts = feed(start(stop="b"), ids("ab"), LENGTH)
    got = final(outputs)
    assert (got.text, got.finish_reason, got.stop_reason) == ("a", "stop", "b")
    assert aborts == [], "the core has ended it already"


def test_text_held_back_comes_out_at_the_end():
    outputs, _ = feed(start(stop="xyz", output_kind=DELTA), ids("axy"), LENGTH)
    assert [out.outputs[0].text for out in outputs] == ["a", "", "xy"]


def test_nothing_is_held_back_when_the_stop_string_is_shown_anyway():
    outputs, _ = feed(start(stop="xyz", output_kind=DELTA, include_stop_str_in_output=True), ids("axy"), LENGTH)
    assert [out.outputs[0].text for out in outputs] == ["a", "x", "y"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "abcb"), (3, "abc"), (4, "abcbd")])
def test_stop_strings_before_min_tokens_do_not_count(min_tokens, text):
    want_stop = text in ("a", "abc")
    outputs, _ = feed(start(stop="b", min_tokens=min_tokens), ids("abcbd"), LENGTH)
    got = final(outputs)
    if min_tokens == 2:
        assert (got.text, got.stop_reason) == ("abc", "b")  # the second b is the fourth token
    else:
        assert (got.text, got.stop_reason) == (text, "b" if want_stop else None)


def test_unfinished_character_at_the_end():
    outputs, _ = feed(start(output_kind=DELTA), ids("é")[:1], LENGTH)
    assert outputs[0].outputs[0].text == "\ufffd"


def test_without_text():
    outputs, _ = feed(start(tokenizer=None, detokenize=False), [5, 6], LENGTH)
    got = final(outputs)
    assert (got.text, got.token_ids) == ("", [5, 6])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        start(tokenizer=None)


def test_kinds_of_output():
    tokens = ids("héllo")
    whole, parts = {}, {}
    for kind in RequestOutputKind:
        outputs, _ = feed(start(output_kind=kind, stop="zz"), tokens, LENGTH)
        parts[kind] = [out.outputs[0] for out in outputs]
        whole[kind] = outputs[-1].outputs[0]
    assert len(parts[FINAL_ONLY]) == 1 and len(parts[CUMULATIVE]) == len(parts[DELTA]) == len(tokens)
    assert whole[FINAL_ONLY] == whole[CUMULATIVE]
    assert "".join(p.text for p in parts[DELTA]) == whole[FINAL_ONLY].text == "héllo"
    assert [t for p in parts[DELTA] for t in p.token_ids] == tokens
    assert all(b.text.startswith(a.text) for a, b in pairwise(parts[CUMULATIVE]))


def test_deltas_add_up_for_random_tokens_and_stop_strings():
    rng = random.Random(0)
    for _ in range(500):
        tokens = [rng.choice(ids("ab é👋")) for _ in range(rng.randrange(1, 15))]
        stops = ["".join(rng.choices("abé ", k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        texts = []
        for kind in (DELTA, FINAL_ONLY):
            outputs, _ = feed(start(output_kind=kind, stop=stops), tokens, LENGTH)
            assert outputs[-1].finished
            texts.append("".join(out.outputs[0].text for out in outputs))
        whole = TOKENIZER.decode(tokens)
        assert texts[0] == texts[1]
        assert whole.startswith(texts[0]) and not any(stop in texts[0] for stop in stops)
        if not any(stop in whole for stop in stops):
            assert texts[0] == whole


def report(token, logprob):
    return {token: Logprob(logprob, 1), 200: Logprob(-9.0, 2)}


def test_logprobs_offsets_and_their_sum():
    processor = start(logprobs=1, output_kind=DELTA)
    seen = []
    for i, token in enumerate(ids("éa")):
        core = EngineCoreOutput("r", [token], LENGTH if i == 2 else None, logprobs=[report(token, -1.5)])
        seen.append(processor.process_outputs([core], now=0.0).request_outputs[0].outputs[0])
    assert [len(s.logprobs) for s in seen] == [1, 1, 1]
    assert [s.cumulative_logprob for s in seen] == [-1.5, -3.0, -4.5]
    assert [s.text_offsets for s in seen] == [[0], [0], [1]]  # both bytes of é begin where é begins
    assert seen[2].logprobs[0][ids("a")[0]].decoded_token == "a"
    assert seen[0].logprobs[0][200].decoded_token == TOKENIZER.decode([200])


def test_logprobs_end_with_the_stop_string():
    processor = start(stop="b", logprobs=0)
    # three tokens in a step
    core = EngineCoreOutput("r", ids("abc"), None, logprobs=[report(t, -1.0) for t in ids("abc")])
    got = processor.process_outputs([core], now=0.0).request_outputs[0].outputs[0]
    assert (got.text, got.token_ids, len(got.logprobs), got.cumulative_logprob) == ("a", ids("ab"), 2, -2.0)


def test_prompt_logprobs_come_in_pieces():
    processor = start(prompt_logprobs=1, max_tokens=1)
    first = EngineCoreOutput("r", [], prompt_logprobs=[report(7, -1.0)])
    second = EngineCoreOutput("r", ids("a"), LENGTH, prompt_logprobs=[report(8, -2.0), report(9, -3.0)])
    processor.process_outputs([first], now=0.0)
    got = processor.process_outputs([second], now=0.0).request_outputs[0].prompt_logprobs
    assert got[0] is None and [next(iter(entry)) for entry in got[1:]] == [7, 8, 9]


def test_several_answers_are_one_output():
    processor = start(n=3, temperature=1.0)
    step = [EngineCoreOutput(f"{i}_r", ids("abc"[i])) for i in range(3)]
    (merged,) = processor.process_outputs(step, now=0.0).request_outputs
    assert [(c.index, c.text) for c in merged.outputs] == [(0, "a"), (1, "b"), (2, "c")] and not merged.finished
    processor.process_outputs([EngineCoreOutput("1_r", ids("x"), LENGTH)], now=0.0)
    last = [EngineCoreOutput(f"{i}_r", ids("y"), LENGTH) for i in (0, 2)]
    (merged,) = processor.process_outputs(last, now=0.0).request_outputs
    assert [c.text for c in merged.outputs] == ["ay", "bx", "cy"] and merged.finished
    assert not processor.has_unfinished_requests() and not processor.parent_of


def test_deltas_of_several_answers_hold_those_with_news():
    processor = start(n=2, temperature=1.0, output_kind=DELTA)
    (both,) = processor.process_outputs([EngineCoreOutput(f"{i}_r", ids("a")) for i in range(2)], 0.0).request_outputs
    (one,) = processor.process_outputs([EngineCoreOutput("1_r", ids("b"))], 0.0).request_outputs
    assert [c.index for c in both.outputs] == [0, 1]
    assert [(c.index, c.text) for c in one.outputs] == [(1, "b")]


@pytest.mark.parametrize("wanted", [None, 0])
def test_best_of_returns_the_best_first(wanted):
    processor = start(n=2, best_of=4, temperature=1.0, logprobs=wanted)
    per_token = {0: -3.0, 1: -1.0, 2: -2.0, 3: -0.5}
    for i, logprob in per_token.items():
        length = i + 1  # longer answers have a lower sum; the mean counts
        tokens = ids("abcd"[i] * length)
        core = EngineCoreOutput(f"{i}_r", tokens, LENGTH, logprobs=[report(t, logprob) for t in tokens])
        outputs = processor.process_outputs([core], now=0.0).request_outputs
        assert bool(outputs) == (i == 3), "nothing is known before all have ended"
    assert [(c.index, c.text) for c in outputs[0].outputs] == [(0, "dddd"), (1, "bb")]
    assert [c.cumulative_logprob for c in outputs[0].outputs] == ([None, None] if wanted is None else [-2.0, -2.0])


def test_abort_gives_what_there_is():
    processor = start(n=2, temperature=1.0, output_kind=FINAL_ONLY)
    processor.process_outputs([EngineCoreOutput("0_r", ids("ab"), LENGTH), EngineCoreOutput("1_r", ids("c"))], 0.0)
    outputs, core_ids = processor.abort_requests(["unknown", "r"], now=0.0)
    assert core_ids == ["1_r"] and outputs[0].finished
    assert [(c.text, c.finish_reason) for c in outputs[0].outputs] == [("ab", "length"), ("c", "abort")]
    late = processor.process_outputs([EngineCoreOutput("1_r", ids("d"))], 0.0)
    assert late.request_outputs == [] and not processor.has_unfinished_requests()


def test_error():
    outputs, _ = feed(start(), ids("a"), ERROR, error="it broke")
    assert outputs[-1].error == "it broke" and final(outputs).finish_reason == "error"


def test_an_id_in_use():
    processor = start(n=2, temperature=1.0)
    plain = SamplingParams()
    for name in ("r", "1_r"):
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            processor.add_request(name, None, [1], plain, {name: plain}, 0.0)
    with pytest.raises(ValueError, match="'0_r' is in use"):
        processor.add_request("x", None, [1], plain, {"0_r": plain}, 0.0)
    feed(processor, ids("a"), LENGTH, name="0_r")
    feed(processor, ids("a"), LENGTH, name="1_r")
    processor.add_request("r", None, [1], plain, {"r": plain}, 0.0)


def test_times():
    outputs, _ = feed(start(), ids("abc"), LENGTH, num_cached_tokens=1)
    metrics = outputs[-1].metrics
    assert (metrics.arrival_time, metrics.first_token_time) == (1.0, 2.0)
    assert (metrics.last_token_time, metrics.finished_time) == (4.0, 4.0)
    assert outputs[0].metrics.finished_time is None and outputs[0].num_cached_tokens == 1
