"""Request model of `/v1/responses`: items, tools, conversion to chat messages."""

# Generated from nbs/serving/response_request.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from minivllm.serving.errors import ApiError, from_validation
from minivllm.serving.protocol import (
    HINTS,
    ApiModel,
    ChatCompletionRequest,
    FunctionDefinition,
    Int64,
    check_count,
    log_no_effect,
)

__all__ = ["ResponsesRequest", "as_chat", "messages_of"]

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(ApiModel):
    """A part of a message; ``annotations`` and ``logprobs`` come back from an earlier answer and say nothing to a model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(ApiModel):
    type: Literal["refusal"]
    refusal: str


class ReasoningPart(ApiModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class InputItem(ApiModel):
    """Fields of all items. ``id`` and ``status`` come from an earlier answer."""

    id: str | None = None
    status: Status | None = None


class MessageItem(InputItem):
    """A message. ``phase`` is that of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: str | None = None


class CallItem(InputItem):
    """A call that the model made."""

    no_effect: ClassVar = {"parsed_arguments": "it repeats an earlier answer"}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(InputItem):
    """A thought of the model. It goes back to models whose chat template has a place for it."""

    unsupported: ClassVar = {"encrypted_content": ((), "thoughts are plain text here")}

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list)
    content: list[ReasoningPart] | None = None


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])

# Codex offers one with every request, so it is left out of them; all other hosted tools are refused
_LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")


class ResponseFunctionTool(FunctionDefinition):
    """A function, with its fields side by side."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "function":
            raise ValueError(f"type must be 'function' (or 'web_search', which is left out), got {data.get('type')!r}")
        return data


def _unless_left_out(tool: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return None if isinstance(tool, dict) and tool.get("type") in _LEFT_OUT else check(tool)


def _without_left_out(tools: list[Any]) -> list[Any]:
    kept = [tool for tool in tools if tool is not None]
    if len(kept) < len(tools):
        why = "the web is not searched here, and the model is not told of web_search"
        log_no_effect("ResponsesRequest", "tools", why)
    return kept


_Tool = Annotated[ResponseFunctionTool, WrapValidator(_unless_left_out)]


class ResponseFunctionName(ApiModel):
    type: Literal["function"]
    name: str


class ResponseAllowedTools(ApiModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseFunctionName], Field(min_length=1, max_length=256)]


class TextFormat(ApiModel):
    no_effect: ClassVar = {"description": "the model is not shown the schema; describe it in a message"}

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to type 'json_schema', and to no other")
        return self

    def response_format(self) -> dict[str, Any]:
        """The format as a chat's ``response_format``."""
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(ApiModel):
    unsupported: ClassVar = {"verbosity": (("medium",), "not implemented")}

    format: TextFormat | None = None


class ReasoningOptions(ApiModel):
    no_effect: ClassVar = {
        "summary": "thoughts are given as they are",
        "generate_summary": "thoughts are given as they are",
    }
    unsupported: ClassVar = {"context": ((), "not implemented"), "mode": ((), "not implemented")}

    effort: str | None = None


class ResponseStreamOptions(ApiModel):
    unsupported: ClassVar = {"include_obfuscation": ((False,), "lengths of pieces are not hidden")}


class ResponseFields(ApiModel):
    """The fields of `POST /v1/responses`. Below ``user`` stand those that vLLM adds."""

    no_effect: ClassVar = HINTS
    unsupported: ClassVar = {
        "access_programs": ((), "not implemented"),
        "background": ((False,), "ask and wait, or stream"),
        "background_options": ((), "there is no background"),
        "context_management": (([],), "not implemented"),
        "conversation": ((), "use previous_response_id"),
        "image": ((), "text is all that the models served here produce"),
        "moderation": ((), "not implemented"),
        "prompt": ((), "no prompts are stored here"),
        "truncation": (("disabled",), "what does not fit is refused"),
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[_Tool], Field(max_length=256), AfterValidator(_without_left_out)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseFunctionName | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    safety_identifier: str | None = None
    user: str | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _without_tags(where: Sequence[Any]) -> list[Any]:
    """The path of an error inside items, without pydantic's names for the kinds of items and parts."""
    return [part for i, part in enumerate(where) if not (isinstance(part, str) and i and isinstance(where[i - 1], int))]


class ResponsesRequest(ResponseFields):
    """`POST /v1/responses`, checked."""

    _items: list[dict[str, Any]] | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _count_items(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_count("input", data.get("input"))
        return data

    @model_validator(mode="after")
    def _check_together(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        for name, value in (self.metadata or {}).items():
            if len(name) > 64 or len(value) > 512:
                what = {"field": "metadata", "name": name[:64]}
                text = "metadata: {name} is longer than 64 characters, or its value than 512"
                raise PydanticCustomError("long", text, what)
        if set(self.include or ()) - {"message.output_text.logprobs"}:
            why = "nothing but message.output_text.logprobs is in answers here"
            log_no_effect("ResponsesRequest", "include", why)
        if self._items is None:
            self._items = self._checked_items()
        return self

    def items(self) -> list[dict[str, Any]]:
        """The input as items, with defaults filled in."""
        return list(self._items or ())

    def _checked_items(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        if not self.input:
            raise PydanticCustomError("empty", "input: an empty list; give at least one item", {"field": "input"})
        typed = [item if item.get("type") else {**item, "type": "message"} for item in self.input]
        try:
            _ITEMS.validate_python(typed)
        except ValidationError as error:
            fault = from_validation([e | {"loc": ("input", *_without_tags(e["loc"]))} for e in error.errors()])
            what = {"field": fault.param, "text": fault.message.removeprefix(f"{fault.param}: ")}
            raise PydanticCustomError("item", "{text}", what) from None
        return typed

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


def messages_of(items: Sequence[dict[str, Any]], keep_thoughts: bool) -> list[dict[str, Any]]:
    """Items as chat messages. What the model thought, said and called in one turn is one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the model's, still open
    for item in items:
        kind = item["type"]
        if kind == "function_call_output" or (kind == "message" and item["role"] != "assistant"):
            turn = None
            messages.append(_from_outside(item))
            continue
        if kind == "reasoning" and not keep_thoughts:
            continue
        if turn is None or (turn["content"] is not None and kind != "function_call"):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            turn["reasoning_content"] = "".join(part["text"] for part in parts)
        elif kind == "message":
            turn["content"] = _text(item["content"])
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return messages


def _from_outside(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
    return {"role": item["role"], "content": _text(item["content"])}


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal", "") for part in content)


_SHARED = ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "priority", "cache_salt",
           "chat_template_kwargs", "user", "safety_identifier", "parallel_tool_calls")  # fmt: skip


def as_chat(
    body: ResponsesRequest, items: Sequence[dict[str, Any]], *, keep_thoughts: bool, strict: bool
) -> ChatCompletionRequest:
    """The request as a chat request. ``items``: the whole conversation. ``strict``: for functions that do not set it.

    Raises:
        ApiError: names the field.
    """
    messages = messages_of(items, keep_thoughts)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    chat |= {"messages": messages, "stream": bool(body.stream), "max_completion_tokens": body.max_output_tokens}
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = body.text.format.response_format()
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        chat["tools"] = [_chat_tool(tool, strict) for tool in body.tools]
    chat["tool_choice"] = _chat_choice(body.tool_choice)
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        fault = from_validation(error.errors())
        message = fault.message.replace("messages", "input", 1)
        raise ApiError(400, message, param=fault.param and "input", code=fault.code) from None


def _chat_name(name: ResponseFunctionName) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name.name}}


def _chat_tool(tool: ResponseFunctionTool, strict: bool) -> dict[str, Any]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": {"strict": strict, **function}}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, ResponseFunctionName):
        return _chat_name(choice)
    if isinstance(choice, ResponseAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_chat_name(name) for name in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice
