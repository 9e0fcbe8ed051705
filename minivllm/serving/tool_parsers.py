"""Tool call parsers for streamed text: Hermes, Llama 3, Mistral and others."""

# Generated from nbs/serving/tool_parsers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import json
import re
import string
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

from minivllm.sampling.grammar import special_token_ids
from minivllm.serving.protocol import FunctionDefinition
from minivllm.serving.tools import CallDelta, CallFormat, Piece, ToolParser, call_rules, literal, register_tool_parser

__all__ = ["HermesToolParser", "Llama3JsonToolParser", "MarkedToolParser", "held_back"]

_SPACE = " \t\r\n"
_CLOSES = {"{": "}", "[": "]"}


class NotACall(ValueError):
    """The text that was read is not a call."""


class CallReader:
    """Reads ``{"name": ..., "arguments": {...}}`` one character at a time.

    name: None until it has been read. text: of the arguments, as far as it is known and not taken yet. done: the object is closed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.text = ""
        self.done = False
        self._steps = self._object()
        next(self._steps)

    @property
    def begun(self) -> bool:
        """Whether it is certain to be a call: it has a name, and the arguments have begun or will not come."""
        return self.name is not None and (self.done or self.text != "")

    def push(self, char: str) -> None:
        """Take one character. Raises NotACall."""
        try:
            self._steps.send(char)
        except StopIteration:
            self.done = True

    def _object(self) -> Generator[None, str, None]:
        char = yield
        if char != "{":
            raise NotACall(char)
        seen = False
        char = yield from self._after_space()
        while char != "}":
            key = yield from self._string(char)
            if (yield from self._after_space()) != ":":
                raise NotACall(key)
            char = yield from self._after_space()
            if key == "name":
                self.name = yield from self._string(char)
                char = yield from self._after_space()
            elif key in ("arguments", "parameters") and not seen:
                seen = True
                char = yield from self._arguments(char)
            else:
                char = yield from self._value(char, keep=False)
            if char == ",":
                char = yield from self._after_space()
            elif char != "}":
                raise NotACall(char)
        if self.name is None:
            raise NotACall("no name")
        if not seen:
            self.text = "{}"

    def _after_space(self) -> Generator[None, str, str]:
        char = yield
        while char in _SPACE:
            char = yield
        return char

    def _string(self, char: str) -> Generator[None, str, str]:
        if char != '"':
            raise NotACall(char)
        raw, escaped = '"', False
        while True:
            char = yield
            raw += char
            if char == '"' and not escaped:
                break
            escaped = char == "\\" and not escaped
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            raise NotACall(raw) from None

    def _arguments(self, char: str) -> Generator[None, str, str]:
        """An object; or a string that holds one, as some models write it; or null for none."""
        if char == "{":
            return (yield from self._value(char, keep=True))
        if char == '"':
            self.text = (yield from self._string(char)) or "{}"
            return (yield from self._after_space())
        if char == "n":
            self.text = "{}"
            return (yield from self._value(char, keep=False))
        raise NotACall(char)

    def _value(self, char: str, keep: bool) -> Generator[None, str, str]:
        if char == '"':
            yield from self._string(char)
            return (yield from self._after_space())
        if char not in _CLOSES:
            while char not in ",}]":
                char = yield
            return char
        yield from self._container(char, keep)
        return (yield from self._after_space())

    def _container(self, char: str, keep: bool) -> Generator[None, str, None]:
        """From an opening bracket to the one that closes it."""
        open_, quoted, escaped = [_CLOSES[char]], False, False
        self.text += char if keep else ""
        while open_:
            char = yield
            self.text += char if keep else ""
            if quoted:
                quoted, escaped = char != '"' or escaped, char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in _CLOSES:
                open_.append(_CLOSES[char])
            elif char in "}]" and char != open_.pop():
                raise NotACall(char)


class JsonToolParser(ToolParser):
    """Calls as JSON objects after a mark. ``begin``, ``end``: the marks; without ``end`` the calls go on to the end of the text.

    bare: calls may also come without the mark, at the very beginning; then a name is a call only if the request has such a function.
    """

    begin: ClassVar[str]
    end_mark: ClassVar[str] = ""
    bare: ClassVar[bool] = False

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._buffer = ""
        self._inside = False  # after the mark
        self._fresh = self.bare  # nothing was written yet
        self._made = False  # whether a call was read since the mark
        self._raw = ""  # text read that may turn out not to be a call
        self._space = ""  # white space before what may turn out to be a call
        self._reader: CallReader | None = None
        self._broken = False  # the call that was begun is no JSON
        self._announced = False
        self._count = 0

    def push(self, text: str) -> Piece:
        piece, self._buffer = Piece(), self._buffer + text
        while self._buffer and (self._in_calls(piece) if self._inside else self._in_text(piece)):
            pass
        return piece

    def end(self) -> Piece:
        piece = Piece()
        rest = self._take(len(self._buffer))
        if self._announced and self._reader is not None:
            self._broken = True
            self._argue(piece, rest)
        elif not (self._inside and self._made and self._reader is None):
            text = self._space + self._raw + rest
            piece.content = text if text.strip(_SPACE) or not self._count else ""
        self._space = self._raw = ""
        return piece

    def _in_text(self, piece: Piece) -> bool:
        """Pass text on up to the mark. Returns whether to go on with the buffer."""
        if self._fresh:
            lead = self._buffer.lstrip(_SPACE)
            if not lead:
                return False
            self._fresh = False
            if lead[0] == "{":
                self._inside, self._made, self._raw, self._buffer = True, False, self._buffer[: -len(lead)], lead
                return True
        at = self._buffer.find(self.begin)
        if at >= 0:
            self._say(piece, self._take(at))
            self._inside, self._made, self._raw = True, False, self._take(len(self.begin))
            return True
        self._say(piece, self._take(len(self._buffer) - held_back(self._buffer, self.begin)))
        return False

    def _take(self, count: int) -> str:
        """Remove characters from the front of the buffer."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, piece: Piece, text: str) -> None:
        """White space is held back: before a call it means nothing."""
        text = self._space + text
        kept = text.rstrip(_SPACE)
        piece.content += kept
        self._space = text[len(kept) :]

    def _in_calls(self, piece: Piece) -> bool:
        """Read on after the mark, a character or a mark at a time."""
        if self._reader is None:
            return self._between(piece)
        if self._broken:
            return self._to_the_end_mark(piece)
        char = self._take(1)
        self._raw += char
        try:
            self._reader.push(char)
            foreign = self.bare and self._reader.name not in self.names
            if foreign and self._reader.begun and not self._announced:
                raise NotACall(self._reader.name)
        except NotACall:
            self._fail(piece)
            return True
        self._tell(piece)
        if self._reader.done:
            self._close()
        return True

    def _close(self) -> None:
        """The call is over."""
        self._reader, self._announced, self._broken, self._made, self._raw = None, False, False, True, ""
        self._count += 1

    def _between(self, piece: Piece) -> bool:
        if self.end_mark and self._buffer.startswith(self.end_mark):
            self._inside, self._raw, self._space = False, "", ""
            self._take(len(self.end_mark))
            return True
        if self._buffer.startswith(self.begin):  # a family may repeat the mark
            self._take(len(self.begin))
            return True
        if self.begin.startswith(self._buffer) or self.end_mark.startswith(self._buffer):
            return False
        char = self._buffer[0]
        if char in _SPACE or char in "[],;":
            self._raw += self._take(1)
        elif (reader := self.start_call(char)) is not None:
            self._reader = reader
        else:
            self._fail(piece)
        return True

    def start_call(self, char: str) -> CallReader | None:
        """A reader for a call that begins with ``char``; None if no call does."""
        return CallReader() if char == "{" else None

    def _tell(self, piece: Piece) -> None:
        reader = self._reader
        assert reader is not None
        if not self._announced and reader.begun:
            self._announced, self._space = True, ""
            piece.calls.append(CallDelta(self._count, reader.name, ""))
        if self._announced and reader.text:
            self._argue(piece, reader.text)
            reader.text = ""

    def _argue(self, piece: Piece, text: str) -> None:
        last = piece.calls[-1] if piece.calls else None
        if last is not None and last.index == self._count:
            piece.calls[-1] = CallDelta(last.index, last.name, last.arguments + text)
        elif text:
            piece.calls.append(CallDelta(self._count, None, text))

    def _fail(self, piece: Piece) -> None:
        """Turn a failed call into text again. If it was already reported as a call, the faulty text goes into its arguments, for the client to see."""
        assert self._raw or self._buffer
        if self._announced:
            assert self._reader is not None
            self._argue(piece, self._reader.text)
            self._broken = True
            return
        raw, self._raw = self._raw, ""
        self._inside, self._reader = False, None
        self._say(piece, raw)

    def _to_the_end_mark(self, piece: Piece) -> bool:
        at = self._buffer.find(self.end_mark) if self.end_mark else -1
        if at >= 0:
            self._argue(piece, self._take(at).rstrip(_SPACE))
            self._close()
            return True
        self._argue(piece, self._take(len(self._buffer) - held_back(self._buffer, self.end_mark)))
        return False


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


_TEXT_RULE = "TEXT: /(.|\\n)*/"


class MarkedToolParser(JsonToolParser):
    """Calls that always come after the mark. A subclass has a form."""

    form: ClassVar[CallFormat]

    @classmethod
    def free_rules(cls, functions: Sequence[FunctionDefinition], parallel: bool, tokenizer: Any) -> list[str]:
        """Rules for free text in which whatever follows the mark is a call that fits."""
        form, mark = cls.form, literal(cls.begin, tokenizer)
        head = f"head: TEXT {mark}" if cls.begin in special_token_ids(tokenizer) else f"head[lazy]: TEXT {mark}"
        rest = replace(form, begin=form.begin.removeprefix(cls.begin))
        tail = "(head calls)* TEXT" if parallel and form.each else "(head calls)? TEXT"
        rules = call_rules(rest, functions, parallel and not form.each, tokenizer)
        return [f"start: {tail}", _TEXT_RULE, head, *rules]


@register_tool_parser("hermes", "qwen", "smollm2")
class HermesToolParser(MarkedToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen and SmolLM2 write it (the last as a list)."""

    begin, end_mark = "<tool_call>", "</tool_call>"
    special_tokens = True
    form = CallFormat("<tool_call>\n", "\n</tool_call>", each=True)


@register_tool_parser("llama3_json", "llama4_json")
class Llama3JsonToolParser(JsonToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several with ``;`` between, perhaps after ``<|python_tag|>``."""

    begin, bare = "<|python_tag|>", True
    special_tokens = True
    form = CallFormat(separator="; ", arguments="parameters")

    @classmethod
    def free_rules(cls, functions: Sequence[FunctionDefinition], parallel: bool, tokenizer: Any) -> list[str]:
        text = "text: /([^{ \\t\\r\\n<](.|\\n)*)?/"
        return ["start: calls | text", text, *call_rules(cls.form, functions, parallel, tokenizer)]


class NamedCallReader(CallReader):
    """Reads ``name{...}`` or ``name[ARGS]{...}``."""

    def _object(self) -> Generator[None, str, None]:
        name = ""
        while True:
            char = yield
            if char == "{":
                break
            name += char
        self.name = re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip()
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise NotACall(name)
        yield from self._container("{", keep=True)


@register_tool_parser("mistral")
class MistralToolParser(MarkedToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and the newer ``[TOOL_CALLS]name{...}``."""

    begin = "[TOOL_CALLS]"
    special_tokens = True
    form = CallFormat("[TOOL_CALLS][", "]", ", ")

    def start_call(self, char: str) -> CallReader | None:
        return NamedCallReader() if char.isalpha() or char == "_" else super().start_call(char)

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: Mistral's templates accept no other."""
        alphabet, number = string.ascii_letters + string.digits, uuid4().int
        return "".join(alphabet[number // 62**i % 62] for i in range(9))


@register_tool_parser("pythonic", "llama4_pythonic")
class PythonicToolParser(ToolParser):
    """``[weather(city="Paris"), time()]`` as the whole answer: Python, of which only calls with literal arguments are read."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._text = ""
        self._plain = False

    def push(self, text: str) -> Piece:
        """A list is reported only at its end; text that does not begin as a list is passed on."""
        if self._plain:
            return Piece(text)
        self._text += text
        begun = self._text.lstrip(_SPACE)
        self._plain = begun != "" and begun[0] != "["
        return Piece(self._text) if self._plain else Piece()

    def end(self) -> Piece:
        if self._plain:
            return Piece()
        try:
            calls = [self._call(node) for node in self._list(self._text)]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return Piece(self._text)
        return Piece(calls=[CallDelta(i, name, arguments) for i, (name, arguments) in enumerate(calls)])

    def _list(self, text: str) -> list[ast.expr]:
        body = ast.parse(text.strip(), mode="eval").body
        if not isinstance(body, ast.List) or not body.elts:
            raise NotACall(text)
        return body.elts

    def _call(self, node: ast.expr) -> tuple[str, str]:
        if not isinstance(node, ast.Call) or node.args or ast.unparse(node.func) not in self.names:
            raise NotACall(ast.unparse(node))
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        if any(keyword.arg is None for keyword in node.keywords):
            raise NotACall(ast.unparse(node))
        return ast.unparse(node.func), json.dumps(given, ensure_ascii=False)
