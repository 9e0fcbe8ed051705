"""Splits generated text into reasoning, content and tool calls."""

# Generated from nbs/serving/answers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.engine.outputs import CompletionOutput
from minivllm.sampling.grammar import guided, without_additional_properties
from minivllm.serving.errors import ApiError
from minivllm.serving.protocol import AllowedToolChoice, FunctionDefinition, NamedToolChoice, ToolFields
from minivllm.serving.reasoning import REASONING_PARSERS, ReasoningParser, tokens_up_to
from minivllm.serving.tool_parsers import HermesToolParser
from minivllm.serving.tools import TOOL_PARSERS, CallDelta, Piece, ToolParser, ToolUse, quoted

__all__ = ["AnswerReader", "ParserOptions", "structure", "tool_use"]


@dataclass(frozen=True)
class ParserOptions:
    """How one server reads answers.

    tool_parser: reads the calls that a model makes unasked; None if the operator named none. auto: models may call functions unasked."""

    tool_parser: type[ToolParser] | None = None
    auto: bool = False
    reasoning_parser: type[ReasoningParser] | None = None

    @classmethod
    def from_names(cls, tool_call_parser: str | None, auto: bool, reasoning_parser: str | None) -> "ParserOptions":
        """Look the parsers up. Raises ValueError that lists the known ones."""
        if auto and tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        tools = _known("--tool-call-parser", tool_call_parser, TOOL_PARSERS)
        return cls(tools, auto, _known("--reasoning-parser", reasoning_parser, REASONING_PARSERS))

    @property
    def form_parser(self) -> type[ToolParser]:
        """A parser with a form, in which calls can be forced: the family's own, or Hermes' if it has none."""
        has_form = self.tool_parser is not None and self.tool_parser.form is not None
        return self.tool_parser if self.tool_parser is not None and has_form else HermesToolParser


def _known(flag: str, name: str | None, parsers: dict[str, Any]) -> Any:
    if name is None:
        return None
    if name not in parsers:
        raise ValueError(f"{flag} {name!r} is not known; {', '.join(sorted(parsers))} are")
    return parsers[name]


def tool_use(body: ToolFields, options: ParserOptions) -> ToolUse | None:
    """What the request says about calls; None if none may be made. Raises ApiError."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: it needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    functions = [tool.function for tool in body.tools]
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        named = _only(functions, [choice.function.name])
        return ToolUse(named, "named", False, options.form_parser)
    if isinstance(choice, AllowedToolChoice):
        functions = _only(functions, [tool.function.name for tool in choice.allowed_tools.tools])
        choice = choice.allowed_tools.mode
    if choice == "required":
        return ToolUse(functions, "required", parallel, options.form_parser)
    if not options.auto or options.tool_parser is None:
        message = (
            "tool_choice 'auto' needs a server started with --enable-auto-tool-choice and --tool-call-parser; 'required',"
            " 'none' and a named function do not"
        )
        raise ApiError(400, message, param="tool_choice")
    return ToolUse(functions, "auto", parallel, options.tool_parser)


def _only(functions: Sequence[FunctionDefinition], names: Sequence[str]) -> list[FunctionDefinition]:
    known = {function.name: function for function in functions}
    for name in names:
        if name not in known:
            raise ApiError(400, f"tool_choice: there is no function {name!r} among the tools", param="tool_choice")
    return [known[name] for name in dict.fromkeys(names)]


def structure(
    asked: dict[str, Any] | None, use: ToolUse | None, reasoning: ReasoningParser | None, tokenizer: Any
) -> dict[str, Any] | None:
    """What the whole text must look like, calls and thoughts included, as fields of StructuredOutputsParams; None if anything may come.

    ``asked``: the fields that the request gives for the answer alone. Raises ApiError if the parts cannot be combined.
    """
    rules: list[str] | None = None
    if use is not None:
        answer = None if asked is None else _schema(asked)
        if asked is not None and answer is None:
            raise ApiError(400, "structured_outputs: with tools it can be json only", param="structured_outputs")
        rules = use.grammar(tokenizer, None if use.forced else answer)
    if rules is None and asked is not None and reasoning is not None and reasoning.thinking is not False:
        rules = [f"start: {_terms(asked)}"]
    if rules is None:
        return asked
    if reasoning is not None:
        rules = reasoning.rules(rules, tokenizer)
    return {"grammar": "\n".join(["%llguidance {}", *rules])}


def _schema(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that ``asked`` gives, with its options inside; None if it asks for something else."""
    schema = {"type": "object"} if asked.get("json_object") else asked.get("json")
    if not isinstance(schema, dict):
        return None
    if asked.get("disable_additional_properties"):
        schema = without_additional_properties(schema)
    return guided(
        schema,
        whitespace_flexible=not asked.get("disable_any_whitespace"),
        whitespace_pattern=asked.get("whitespace_pattern") or None,
    )


def _terms(asked: dict[str, Any]) -> str:
    """What ``asked`` allows, as terms of a Lark rule. Raises ApiError for a kind that cannot follow thoughts."""
    schema = _schema(asked)
    if schema is not None:
        return f"%json {quoted(schema)}"
    if isinstance(asked.get("choice"), list) and asked["choice"]:
        return " | ".join(quoted(text) for text in asked["choice"])
    if isinstance(asked.get("regex"), str):
        return "/" + asked["regex"].replace("/", "\\/").replace("::=", ":\\x3a=") + "/"
    kind = next(iter(asked), "nothing")
    raise ApiError(
        400,
        f"structured_outputs.{kind}: not implemented for a model that thinks first; json, json_object, choice and regex are",
        param=f"structured_outputs.{kind}",
    )


class AnswerReader:
    """Divides one answer into thoughts, content and calls, while it comes or when it is whole."""

    def __init__(self, use: ToolUse | None, reasoning: ReasoningParser | None) -> None:
        self.use, self.reasoning = use, reasoning
        self.tools = None if use is None else use.reader()
        self.num_calls = 0
        self._thought = False
        self._token_ids: list[int] = []

    def push(self, completion: CompletionOutput) -> Piece:
        """Take the new part of an answer. A part with a finish reason is the last."""
        last = completion.finish_reason is not None
        part = Piece(content=completion.text)
        if self.reasoning is not None:
            self._think(self.reasoning, part, last)
            self._token_ids += completion.token_ids
        if self.tools is not None:
            self._find_calls(part, last)
        return part

    def _think(self, parser: ReasoningParser, part: Piece, last: bool) -> None:
        before = parser.thinking
        part.thought, part.content = parser.push(part.content)
        if last:
            thought, content = parser.end()
            part.thought, part.content = part.thought + thought, part.content + content
        self._thought = self._thought or bool(before or parser.thinking or part.thought)

    def count_thought_tokens(self, decode: Callable[[Sequence[int]], str]) -> int:
        """Tokens of the thoughts so far, with their tags."""
        if self.reasoning is None or not self._thought:
            return 0
        if self.reasoning.thinking:
            return len(self._token_ids)
        return tokens_up_to(self.reasoning.end_mark, self._token_ids, decode)

    def _find_calls(self, part: Piece, last: bool) -> None:
        assert self.tools is not None and self.use is not None
        pieces = [self.tools.push(part.content), *([self.tools.end()] if last else [])]
        part.content = "" if self.use.forced else "".join(piece.content for piece in pieces)
        for delta in (delta for piece in pieces for delta in piece.calls):
            if delta.index == 0 or self.use.parallel:
                part.calls.append(delta)
                self.num_calls = max(self.num_calls, delta.index + 1)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """OpenAI's: an answer that ended with calls says so, unless the client had named the function."""
        if completion.finish_reason == "stop" and self.num_calls and self.use is not None and self.use.mode != "named":
            return "tool_calls"
        return completion.finish_reason


def whole_calls(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """The calls that pieces add up to."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        before = calls.get(delta.index)
        calls[delta.index] = delta if before is None else replace(before, arguments=before.arguments + delta.arguments)
    return list(calls.values())
