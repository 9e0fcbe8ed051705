"""Calls are found in text, wherever the text is cut."""

import json
import random
from typing import Any

import pytest

import minivllm.serving.tool_parsers  # noqa: F401 - registers
from minivllm.serving.tools import TOOL_PARSERS, Call, Piece, ToolParser, load_plugin

WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
PARAMETERS = WEATHER.replace("arguments", "parameters")
TRICKY = json.dumps({"text": 'a "quoted\\" }] </tool_call', "n": {"deep": [{}, [], None, -1.5e3, True]}, "é": "\n"})
TRICKY_CALL = f'{{"name": "say", "arguments": {TRICKY}}}'
SAY = [("weather", ARGUMENTS), ("say", TRICKY)]

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # parser, text, content, calls
    ("hermes", "Hello there.\n", "Hello there.\n", []),
    ("hermes", "", "", []),
    ("hermes", "  ", "  ", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{WEATHER}", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{WEATHER}</tool_", "", [("weather", ARGUMENTS)]),
    ("hermes", f"Wait.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{TRICKY_CALL}</tool_call> ", "Wait.", SAY),
    ("hermes", f"<tool_call>[{WEATHER}, {TRICKY_CALL}]</tool_call>", "", SAY),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> Done.", " Done.", [("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [("time", "{}")]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1},"x":[{}]}</tool_call>', "", [("f", '{"a":1}')]),
    ("hermes", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
    ("hermes", '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]} x</tool_call>', "", [("f", '{"a": 1]} x')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ("llama3_json", PARAMETERS, "", [("weather", ARGUMENTS)]),
    ("llama3_json", f"\n<|python_tag|>{PARAMETERS}", "", [("weather", ARGUMENTS)]),
    ("llama3_json", f"{PARAMETERS}; {TRICKY_CALL}", "", SAY),
    ("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", f"Well: {PARAMETERS}", f"Well: {PARAMETERS}", []),
    ("mistral", "Hello", "Hello", []),
    ("mistral", f"[TOOL_CALLS][{WEATHER}, {TRICKY_CALL}]", "", SAY),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}]", "", [("weather", ARGUMENTS)]),
    ("mistral", f"So. [TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]say[ARGS]{TRICKY}", "So.", SAY),
    ("mistral", "[TOOL_CALLS]???{", "[TOOL_CALLS]???{", []),
    ("pythonic", "Hello", "Hello", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", '[weather(city="Paris", days=[1, 2])]', "", [("weather", ARGUMENTS)]),
    ("pythonic", '[weather(city="Paris", days=[1, 2]), time()]', "", [("weather", ARGUMENTS), ("time", "{}")]),
    ("pythonic", '[weather(city=__import__("os"))]', '[weather(city=__import__("os"))]', []),
    ("pythonic", "[unknown()]", "[unknown()]", []),
    ("pythonic", "[weather(*x)]", "[weather(*x)]", []),
]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for piece in [*map(parser.push, pieces), parser.end()]:
        assert isinstance(piece, Piece)
        content += piece.content
        for delta in piece.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "numbers go up by one"
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1, "a piece of the last call"
                calls[-1][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_however_the_text_is_cut(name: str, text: str, content: str, calls: list[tuple[str, str]]):
    rng = random.Random(text)
    cuts = [[text], list(text)]
    for _ in range(20):
        at = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 8)))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in cuts:
        got = read(TOOL_PARSERS[name](["weather", "say", "time"]), pieces)
        assert got == (content, calls), pieces


def test_arguments_are_told_while_they_are_written():
    parser = TOOL_PARSERS["hermes"](["weather"])
    got = [(d.name, d.arguments) for char in f"<tool_call>{WEATHER}" for d in parser.push(char).calls]
    assert got[0] == ("weather", "{") and [text for _, text in got] == list(ARGUMENTS)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_what_is_written_is_read_again(name: str):
    cls = TOOL_PARSERS[name]
    assert cls.form is not None
    for calls in ([Call("weather", ARGUMENTS)], [Call("weather", ARGUMENTS), Call("say", TRICKY)]):
        text = cls.form.write(calls)
        assert read(cls(["weather", "say"]), list(text)) == ("", [(c.name, c.arguments) for c in calls])


def test_ids():
    assert TOOL_PARSERS["hermes"].new_id().startswith("call_")
    assert len(TOOL_PARSERS["mistral"].new_id()) == 9 and TOOL_PARSERS["mistral"].new_id().isalnum()


def test_a_plugin_registers_a_family(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "from minivllm.serving.tools import CallDelta, Piece, ToolParser, register_tool_parser\n"
        "@register_tool_parser('mine')\n"
        "class Mine(ToolParser):\n"
        "    def push(self, text): return Piece(calls=[CallDelta(0, text, '{}')])\n"
        "    def end(self): return Piece()\n"
    )
    monkeypatch.setattr("minivllm.serving.tools.TOOL_PARSERS", TOOL_PARSERS)
    load_plugin(str(file))
    assert read(TOOL_PARSERS.pop("mine")([]), ["f"]) == ("", [("f", "{}")])
    with pytest.raises(ValueError, match="no plugin"):
        load_plugin(str(tmp_path / "none.py"))
