"""Structured output: what is finished is valid, what does not compile fails alone, no request waits for it."""

import json
import random
import re
import threading
import time

import jsonschema
import numpy as np
import pytest
import torch
from sampling_batches import make_batch, sample
from sampling_wishes import random_regex, random_schema
from transformers import AutoTokenizer

from minivllm.sampling.grammar import (
    GrammarCompiler,
    GrammarError,
    PendingGrammar,
    grammar_text,
    without_additional_properties,
)
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import SamplingState

V = 49_152


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, V, cache_size=1000)
    yield compiler
    compiler.shutdown()


def allowed(matcher) -> list[int]:
    row = np.zeros((V + 31) // 32, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def follows(compiler, text: str, **wish) -> bool:
    """Whether the grammar allows this whole text."""
    matcher = compiler.matcher(StructuredOutputsParams(**wish))
    return all(matcher.accept(token) for token in compiler.tokenizer.encode(text)) and matcher.is_complete


# ---- every kind of wish -----------------------------------------------------------------------------------------

PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAGS = {
    "type": "structural_tag",
    "triggers": ["<function="],
    "structures": [
        {"begin": "<function=one>", "schema": PERSON, "end": "</function>"},
        {"begin": "<function=two>", "schema": {"type": "object"}, "end": "</function>"},
    ],
}
SPECIAL = {
    "type": "structural_tag",
    "triggers": ["<|im_start|>"],
    "structures": [{"begin": "<|im_start|>call ", "schema": PERSON, "end": ""}],
}
KINDS = [
    ({"json": PERSON}, ['{"a": 5}', '{"a":-1}', '{ "a" : 5 }'], ['{"a": "x"}', "{}", '{"a": 5, "b": 1}', '{"a": 5} ']),
    ({"json": json.dumps(PERSON)}, ['{"a": 5}'], ["5"]),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"a":5}'], ['{"a": 5}']),
    ({"json": PERSON, "whitespace_pattern": "[\\t]"}, ['{"a":\t5}'], ['{"a":  5}']),
    ({"json": {"type": "object", "properties": {"a": {}}}}, ['{"a": 1, "b": 2}'], ["[]"]),
    ({"json": {"type": "object", "properties": {"a": {}}}, "disable_additional_properties": True}, ['{"a": 1}'], ['{"b": 2}']),
    ({"json": True}, ["1", "[]", '{"x": null}'], ["nope"]),
    ({"json_object": True}, ["{}", '{"x": [1, {"y": "z"}]}'], ["[1]", '"a"']),
    ({"regex": "^[a-c]{2,3}$"}, ["ab", "abc"], ["a", "abcd", "xy"]),
    ({"regex": "a|bb"}, ["a", "bb"], ["ab", "b"]),
    ({"choice": ["yes", "no", "a\nb", 'q"\\']}, ["yes", "no", "a\nb", 'q"\\'], ["ye", "maybe", "yes "]),
    ({"grammar": 'start: "a" rest\nrest: /[0-9]+/ | "(" rest ")"'}, ["a1", "a((22))"], ["a", "a(1", "b"]),
    ({"grammar": 'root ::= "a" rest\nrest ::= [0-9]+ | "(" rest ")"'}, ["a1", "a((22))"], ["a", "a(1", "b"]),
    ({"structural_tag": TAGS}, ["free", 'x <function=one>{"a": 1}</function> y', '<function=two>{}</function>'], ['<function=one>{}']),
    ({"structural_tag": json.dumps(TAGS)}, ["free <func"], ["<function=three>"]),
    ({"structural_tag": SPECIAL}, ['hi <|im_start|>call {"a": 1}'], ["hi <|im_start|>other"]),
]  # fmt: skip


@pytest.mark.parametrize(("wish", "good", "bad"), KINDS, ids=[str(wish)[:50] for wish, _, _ in KINDS])
def test_kinds(compiler, wish: dict, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(compiler, text, **wish)] == []
    assert [text for text in bad if follows(compiler, text, **wish)] == []


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "["}, "unclosed"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"$ref": "#"}}, "no text of finite length satisfies it"),
        ({"json": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": {"type": "string", "format": "shoe-size"}}, "shoe-size"),
        ({"json": "false"}, "no value"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
        ({"structural_tag": {"type": "other"}}, "structural_tag"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "format"),
        ({"structural_tag": TAGS | {"triggers": ["<tool"]}}, "no trigger"),
        ({"structural_tag": TAGS | {"structures": [{"begin": "<function="}]}}, "begin, schema and end"),
    ],
)
def test_a_grammar_that_does_not_compile_says_why(compiler, wish: dict, reason: str) -> None:
    pending = compiler.submit(StructuredOutputsParams(**wish))
    with pytest.raises(GrammarError, match=reason) as caught:
        pending.result()
    assert pending.done()
    assert "<state>" not in str(caught.value)


def test_without_additional_properties() -> None:
    schema = {
        "properties": {"a": {"type": "object"}, "b": {"type": "object", "additionalProperties": True}},
        "anyOf": [{"type": "object"}, {"const": {"type": "object"}}],
    }
    assert without_additional_properties(schema) == {
        "properties": {
            "a": {"type": "object", "additionalProperties": False},
            "b": {"type": "object", "additionalProperties": True},
        },
        "anyOf": [{"type": "object", "additionalProperties": False}, {"const": {"type": "object"}}],
        "additionalProperties": False,
    }


# ---- the matcher ------------------------------------------------------------------------------------------------


def test_the_end_token_is_possible_exactly_when_the_text_is_complete(compiler, tokenizer) -> None:
    matcher = compiler.matcher(StructuredOutputsParams(regex="[0-9]{2,3}"))
    for token, complete in zip(tokenizer.encode("123"), [False, True, True], strict=True):
        assert matcher.accept(token)
        assert matcher.is_complete == complete
        assert (tokenizer.eos_token_id in allowed(matcher)) == complete
    assert allowed(matcher) == [tokenizer.eos_token_id]
    assert matcher.accept(tokenizer.eos_token_id)


def test_all_end_tokens_are_possible(tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, V + 64, eos_token_ids=[2, 0])
    matcher = compiler.matcher(StructuredOutputsParams(choice=["a"]))
    matcher.accept(tokenizer.encode("a")[0])
    row = np.zeros((V + 64) // 32, np.int32)
    matcher.fill(row)
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == [0, 2]
    compiler.shutdown()


def test_matchers_of_one_grammar_are_independent_and_roll_back(compiler, tokenizer) -> None:
    wish = StructuredOutputsParams(regex="[a-z]{3,9}")
    one, two = compiler.matcher(wish), compiler.matcher(wish)
    start = allowed(one)
    ids = tokenizer.encode("hello")
    assert all(one.accept(token) for token in ids)
    assert allowed(two) == start
    one.rollback(len(ids))
    assert allowed(one) == start


def test_every_allowed_token_can_be_continued(compiler, tokenizer) -> None:
    """Soundness of a mask, token by token, against `re` with the texts that are possible."""
    pattern, texts = re.compile("(?:red|green|blue)-[0-9]{2}"), []
    for color in ("red", "green", "blue"):
        texts += [f"{color}-{n:02}" for n in range(100)]
    for prefix in ("", "r", "gre", "blue-", "red-4"):
        matcher = compiler.matcher(StructuredOutputsParams(regex=pattern.pattern))
        assert all(matcher.accept(token) for token in tokenizer.encode(prefix))
        for token in allowed(matcher):
            assert any(text.startswith(prefix + tokenizer.decode([token])) for text in texts)


def test_a_token_that_the_grammar_forbids(compiler, tokenizer) -> None:
    matcher = compiler.matcher(StructuredOutputsParams(choice=["yes"]))
    assert not matcher.accept(tokenizer.encode("no")[0])
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        allowed(matcher)


# ---- the compiler -----------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_compilation(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, wish = threading.Event(), StructuredOutputsParams(choice=["slow"])
    real = GrammarCompiler._compile

    def slow(self, params, engine_tokenizer):
        if params == wish:
            gate.wait(30)
        return real(self, params, engine_tokenizer)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    compiler = GrammarCompiler(tokenizer, V, workers=2)
    pending = compiler.submit(wish)
    assert not pending.done(), "submit came back before the gate was opened"
    assert compiler.matcher(StructuredOutputsParams(choice=["fast"])).accept(tokenizer.encode("fast")[0])
    assert not pending.done()
    gate.set()
    pending.result()
    assert pending.done()
    compiler.shutdown()


def test_a_compilation_that_takes_too_long() -> None:
    from concurrent.futures import Future

    now = [100.0]
    pending = PendingGrammar(Future(), timeout=5.0, clock=lambda: now[0])
    assert not pending.done()
    now[0] = 105.0
    assert pending.done()
    with pytest.raises(GrammarError, match="longer than 5 s"):
        pending.result()


def test_the_size_of_a_grammar_is_limited(tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, V, max_bytes=1000)
    with pytest.raises(GrammarError, match="at most 1000 are allowed"):
        compiler.matcher(StructuredOutputsParams(choice=["x" * 2000]))
    compiler.shutdown()


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(compiler, tokenizer) -> None:
    """An exponential automaton: the engine's limits turn it into an error of that request."""
    wish = {"regex": "(.*a.{30}){20}b"}
    state, names = SamplingState(2, V), ["bad", "good"]
    for name, regex in {"bad": wish, "good": {"regex": "[a-z]+"}}.items():
        params = SamplingParams(structured_outputs=regex, seed=1)
        state.add(name, params, [0], [], None, compiler.matcher(params.structured_outputs))
    sampler, errors = Sampler(), {}
    for _ in range(300):
        out = sampler(torch.zeros(2, V), state.batch(names))
        errors = out.errors
        if errors:
            break
        for name, token in zip(names, out.token_ids.tolist(), strict=True):
            if token != tokenizer.eos_token_id:
                state.append(name, token)
    assert list(errors) == ["bad"]
    assert errors["bad"].startswith("grammar: ")
    assert out.token_ids.tolist()[1] >= 0


def test_the_cache(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = GrammarCompiler._compile

    def counting(self, params, engine_tokenizer):
        compiled.append(params.choice[0])
        return real(self, params, engine_tokenizer)

    monkeypatch.setattr(GrammarCompiler, "_compile", counting)
    compiler = GrammarCompiler(tokenizer, V, cache_size=2)
    for word in ("a", "b", "a", "c", "a", "b"):
        compiler.matcher(StructuredOutputsParams(choice=[word]))
    assert compiled == ["a", "b", "c", "b"]
    compiler.shutdown()


def test_the_text_of_a_grammar_needs_no_tokenizer() -> None:
    assert grammar_text(StructuredOutputsParams(choice=["a", 'b"'])) == 'start: "a" | "b\\""'


# ---- in the batch -----------------------------------------------------------------------------------------------


def test_masks_are_applied_to_their_own_rows(compiler, tokenizer) -> None:
    wishes = [None, {"choice": ["yes", "no"]}, None, {"regex": "[0-9]+"}]
    params = [SamplingParams(temperature=0, structured_outputs=wish) for wish in wishes]
    matchers = [compiler.matcher(p.structured_outputs) if p.structured_outputs else None for p in params]
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    got = sample(logits, params, matchers=matchers).token_ids.tolist()
    assert [got[0], got[2]] == logits[[0, 2]].argmax(-1).tolist()
    assert any(word.startswith(tokenizer.decode([got[1]])) for word in ("yes", "no"))
    assert tokenizer.decode([got[3]]).isdigit()


def test_top_k_chooses_among_what_the_grammar_allows(compiler, tokenizer) -> None:
    logits = torch.zeros(1, V)
    logits[0, :100] = 50.0
    params = SamplingParams(top_k=1, top_p=0.1, seed=3, structured_outputs={"regex": "[a-z]{5}"})
    out = sample(logits, [params], matchers=[compiler.matcher(params.structured_outputs)])
    assert not out.errors
    assert re.fullmatch("[a-z]{1,5}", tokenizer.decode(out.token_ids))


def test_a_preempted_request_goes_on_where_it_was(compiler, tokenizer) -> None:
    params = SamplingParams(structured_outputs={"regex": "[0-9]{4}x"})
    matcher = compiler.matcher(params.structured_outputs)
    batch = make_batch([params], V, outputs=[tokenizer.encode("12")], matchers=[matcher])
    batch.state.append("0", tokenizer.encode("3")[0])
    batch.state.append("0", tokenizer.encode("4")[0])
    assert [tokenizer.decode([t]) for t in allowed(matcher)] == ["x"]


def test_a_token_against_the_grammar_fails_the_request(compiler, tokenizer) -> None:
    params = SamplingParams(structured_outputs={"choice": ["yes"]})
    matchers = [compiler.matcher(params.structured_outputs), None]
    batch = make_batch([params, SamplingParams()], V, matchers=matchers)
    batch.state.append("0", tokenizer.encode("no")[0])
    out = Sampler()(torch.zeros(2, V), batch)
    assert list(out.errors) == ["0"]
    assert "does not allow token" in out.errors["0"]


# ---- 500 random wishes ------------------------------------------------------------------------------------------


def closing_bias(tokenizer, kind: str) -> torch.Tensor:
    """Logits that make an end more and more likely: the end token, and tokens that lead to it."""
    bias = torch.zeros(V)
    json_texts = ('"', "{", "[", "}", "]", '"}', '"]', "}}", "]}", ",", ":")
    closers = json_texts if kind == "json" else ("a", "b", "xyz", "yes", "日本", "é", "0", " ", ".", "-")
    for text in closers:
        for token in tokenizer.encode(text):
            bias[token] = 1.0
    bias[tokenizer.eos_token_id] = 2.0
    return bias


def is_valid(kind: str, wish: object, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(str(wish), text) is not None
    try:
        jsonschema.validate(json.loads(text), wish, format_checker=jsonschema.FormatChecker(["date", "uuid", "ipv4"]))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.long
def test_500_random_wishes_give_valid_texts(compiler, tokenizer, capsys: pytest.CaptureFixture) -> None:
    """Random walks through 300 schemas and 200 regexes, 50 side by side in one batch, all with masks."""
    rng = random.Random(7)
    wishes = [("json", random_schema(rng)) for _ in range(300)] + [("regex", random_regex(rng)) for _ in range(200)]
    bias = {kind: closing_bias(tokenizer, kind) for kind in ("json", "regex")}
    end, finished, mask_seconds, tokens = tokenizer.eos_token_id, 0, 0.0, 0
    for start in range(0, 500, 50):
        group = {str(i): wishes[i] for i in range(start, start + 50)}
        state, outputs = SamplingState(50, V), {name: [] for name in group}
        for name, (kind, wish) in group.items():
            tight = {"disable_any_whitespace": True} if kind == "json" and int(name) % 2 else {}
            params = SamplingParams(structured_outputs={kind: wish} | tight, seed=int(name))
            state.add(name, params, [0], [], None, compiler.matcher(params.structured_outputs))
        running, sampler = list(group), Sampler()
        for step in range(120):
            batch = state.batch(running)
            began = time.perf_counter()
            for view in batch.requests:
                view.matcher.fill(np.zeros((V + 31) // 32, np.int32))
            mask_seconds, tokens = mask_seconds + time.perf_counter() - began, tokens + len(running)
            out = sampler(torch.stack([bias[group[name][0]] for name in running]) * min(step, 30), batch)
            assert out.errors == {}
            for name, token in zip(list(running), out.token_ids.tolist(), strict=True):
                if token == end:
                    finished += 1
                    running.remove(name)
                    text = tokenizer.decode(outputs[name], clean_up_tokenization_spaces=False)
                    assert is_valid(*group[name], text), (group[name], text)
                else:
                    state.append(name, token)
                    outputs[name].append(token)
            if not running:
                break
    assert finished >= 450
    with capsys.disabled():
        print(f"\n{finished} of 500 texts finished, all valid; {mask_seconds / tokens * 1e6:.0f} µs a mask")


CIRCLES = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
    {
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2},
        },
    },
    {"allOf": [{"type": "object"}, {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}]},
]
ENDS = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}, "required": ["n"]},
    {"type": "object", "properties": {"a/b": {"enum": [1]}, "n": {"$ref": "#/properties/a~1b"}}, "required": ["n"]},
]


@pytest.mark.parametrize("schema", CIRCLES)
def test_a_schema_that_no_finite_text_satisfies_is_refused(compiler, schema):
    with pytest.raises(GrammarError, match="finite"):
        compiler.submit(StructuredOutputsParams(json=schema)).result()
    tags = {**TAGS, "structures": [{**TAGS["structures"][0], "schema": schema}]}
    with pytest.raises(GrammarError, match="finite"):
        compiler.submit(StructuredOutputsParams(structural_tag=tags)).result()


@pytest.mark.parametrize("schema", ENDS)
def test_a_schema_that_can_come_to_an_end_compiles(compiler, schema):
    compiler.submit(StructuredOutputsParams(json=schema)).result()


@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}, {"additionalProperties": {"type": "string"}}])
def test_a_name_that_is_spelled_with_escapes_evades_no_type(compiler, more):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    assert follows(compiler, '{"a": 1, "b": "x"}', json=schema) and follows(compiler, '{"é\\n": "\\"ü"}', json=schema)
    assert not follows(compiler, '{"a": "x"}', json=schema)
    assert not follows(compiler, '{"\\u0061": "x"}', json=schema)
    assert follows(compiler, '"\\u0001"', json={"const": "\x01"})  # there is no other way to write it


def test_a_grammar_that_is_too_large_is_refused_before_it_is_read(tokenizer):
    compiler = GrammarCompiler(tokenizer, V, max_bytes=2000)
    schema = {"enum": [f"value {i}" for i in range(1000)]}
    with pytest.raises(GrammarError, match="at most 2000"):
        compiler.submit(StructuredOutputsParams(json=schema))
    compiler.shutdown()


def test_a_copy_of_the_params_shares_what_is_frozen():
    params = SamplingParams(structured_outputs={"json": {"enum": ["x"] * 1000}})
    assert params.clone().structured_outputs is params.structured_outputs
