"""Tool definitions, call formats and grammars for tool calls."""

# Generated from nbs/serving/tools.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar
from uuid import uuid4

from minivllm.core.plugins import registering
from minivllm.sampling.grammar import guided, special_token_ids, without_additional_properties
from minivllm.serving.errors import ApiError
from minivllm.serving.protocol import FunctionDefinition


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was made. ``arguments``: JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number ``index``. The first piece has the name, and every piece more of the arguments' text."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Piece:
    """What a piece of the model's text has turned out to be."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    thought: str = ""


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls down: ``begin``, then ``{"name": ..., "arguments": ...}`` of each call, then ``end``.

    each: begin and end stand around every call, not around all. separator: between two of them. arguments: the key's name.
    """

    begin: str = ""
    end: str = ""
    separator: str = "\n"
    each: bool = False
    arguments: str = "arguments"

    def around(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments of a call of ``name``."""
        before, after = f'{{"name": {json.dumps(name)}, "{self.arguments}": ', "}"
        return (self.begin + before, after + self.end) if self.each else (before, after)

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would have written them."""
        texts = [call.arguments.join(self.around(call.name)) for call in calls]
        whole = self.separator.join(texts)
        return whole if self.each else self.begin + whole + self.end


def literal(text: str, tokenizer: Any) -> str:
    """``text`` as terms of a Lark rule. A special token of the vocabulary is one token there and not its letters."""
    ids = special_token_ids(tokenizer)
    special = sorted((token for token in ids if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(f"<[{ids[part]}]>" if part in special else quoted(part) for part in parts if part)


def quoted(value: Any) -> str:
    """JSON, which is also a string of a Lark grammar. ``::=`` is escaped: it would mark another dialect of grammars."""
    return json.dumps(value, ensure_ascii=False).replace("::=", ":\\u003a=")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, closed to members that it does not list and to optional white space, in which a weak model could get lost."""
    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return guided(without_additional_properties(schema), **compact)


def call_rules(form: CallFormat, functions: Sequence[FunctionDefinition], parallel: bool, tokenizer: Any) -> list[str]:
    """Lark rules: ``calls`` is one call or, with ``parallel``, more; ``call`` is one of any function."""
    rules = []
    for i, function in enumerate(functions):
        before, after = form.around(function.name)
        rules.append(f"call_{i}: {literal(before, tokenizer)} arguments_{i} {literal(after, tokenizer)}")
        rules.append(f"arguments_{i}: %json {quoted(closed(function.arguments_schema()))}")
    more = f" ({literal(form.separator, tokenizer)} call)*" if parallel else ""
    begin, end = ("", "") if form.each else (literal(form.begin, tokenizer), literal(form.end, tokenizer))
    return [
        f"calls: {begin} call{more} {end}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        *rules,
    ]


class ToolParser(ABC):
    """Reads calls in what a model writes, a piece at a time: make one for each answer, `push` its text, then `end`.

    For another family, write a subclass with `push` and `end`, and register it with `register_tool_parser`. ``names``: functions that
    may be called. With ``form`` the server can also force calls, and show a model what its chat template cannot show.
    """

    form: ClassVar[CallFormat | None] = None
    special_tokens: ClassVar[bool] = False
    """Whether the family writes calls with special tokens, so that these must be kept in the text."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    @abstractmethod
    def push(self, text: str) -> Piece:
        """Take more of the text; returns what is certain so far."""

    @abstractmethod
    def end(self) -> Piece:
        """The text is over: returns the rest."""

    @staticmethod
    def new_id() -> str:
        """An id for a call, as OpenAI's look."""
        return f"call_{uuid4().hex[:24]}"

    @classmethod
    def free_rules(cls, functions: Sequence[FunctionDefinition], parallel: bool, tokenizer: Any) -> list[str]:
        """Lark rules from ``start`` on: any text, with calls that fit. Raises ApiError where the family's manner cannot be checked."""
        raise ApiError(
            400, f"strict: the tool parser {cls.__name__} cannot hold a free answer to a schema", param="tools"
        )


Parser = TypeVar("Parser", bound=type[ToolParser])
TOOL_PARSERS: dict[str, type[ToolParser]] = {}


def register_tool_parser(*names: str) -> Callable[[Parser], Parser]:
    """Class decorator: make a `ToolParser` known under these names. Raises TypeError for any other class."""
    return registering(TOOL_PARSERS, ToolParser, names)


def load_plugin(path: str) -> None:
    """Run a Python file, which registers parsers. Raises ValueError that names the file if it does not exist."""
    if not Path(path).is_file():
        raise ValueError(f"there is no plugin {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "it is a file"
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@dataclass(frozen=True)
class ToolUse:
    """What one request says about calls.

    functions: those that may be called. mode: ``named`` is ``required`` with one function, one call. parallel: whether more
    than one call may be made. parser: how calls are read.
    """

    functions: Sequence[FunctionDefinition]
    mode: Literal["auto", "required", "named"]
    parallel: bool
    parser: type[ToolParser]

    @property
    def forced(self) -> bool:
        return self.mode != "auto"

    def reader(self) -> ToolParser:
        """A parser for one answer."""
        return self.parser([function.name for function in self.functions])

    def grammar(self, tokenizer: Any, answer: dict[str, Any] | None) -> list[str] | None:
        """Lark rules of what may be written, beginning with ``start``; None if anything may.

        ``answer``: the JSON schema of an answer that is no call, or None.
        """
        form = self.parser.form
        if self.forced or answer is not None:
            if form is None:
                message = f"response_format: {self.parser.__name__} has no form to choose from"
                raise ApiError(400, message, param="tools")
            calls = call_rules(form, self.functions, self.parallel, tokenizer)
            return ["start: calls", *calls] if self.forced else [
                "start: answer | calls", f"answer: %json {quoted(answer)}", *calls
            ]  # fmt: skip
        if any(function.strict for function in self.functions):
            return self.parser.free_rules(self.functions, self.parallel, tokenizer)
        return None


def show_tools(messages: list[dict[str, Any]], use: ToolUse, form: CallFormat) -> list[dict[str, Any]]:
    """Describe the functions in the system message, for a chat template that has no place for them."""
    definitions = "\n".join(json.dumps(f.definition()["function"], ensure_ascii=False) for f in use.functions)
    example = form.write([Call("NAME", '{"PARAMETER": VALUE}')])
    text = (
        f"These functions can be called; each line is the JSON description of one:\n{definitions}\n\n"
        f"To call a function, write this and nothing else:\n{example}"
    )
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": _joined(first["content"], f"\n\n{text}")}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _joined(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents of messages one after the other: text, or parts if one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    listed = ([{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents)
    return [part for parts in listed for part in parts]


def show_calls(messages: list[dict[str, Any]], form: CallFormat) -> list[dict[str, Any]]:
    """Write calls and their results as plain messages, for a chat template that knows neither."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            made = [call["function"] for call in message["tool_calls"]]
            text = form.write([Call(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in made])
            content = message["content"]
            shown.append({"role": "assistant", "content": _joined(content, f"\n{text}") if content else text})
        elif message["role"] == "tool":
            content = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            shown.append({"role": "user", "content": content})
        else:
            shown.append(message)
    return shown
