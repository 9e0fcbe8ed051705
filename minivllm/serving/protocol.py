"""Request models of the OpenAI API with vLLM's extra fields."""

# Generated from nbs/serving/protocol.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from minivllm.sampling.params import RequestOutputKind, SamplingParams

__all__ = [
    "AllowedToolChoice", "AllowedTools", "ApiModel", "ChatCompletionRequest", "ChatMessage",
    "ChatTemplateFields", "ChatTool", "CompletionRequest", "ContentPart", "DetokenizeRequest", "FunctionCall",
    "FunctionDefinition", "FunctionName", "Int64", "NamedToolChoice", "TokenizeRequest", "ToolCall",
    "ToolFields", "check_tool_messages",
]  # fmt: skip


# %% nbs/serving/protocol.ipynb #Request
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Larger numbers can be written in JSON, but cross neither to the engine's process nor into a tensor."""


class ApiModel(BaseModel):
    """A body: no unknown field, no value of another type. ``unsupported``: {field: (values that ask for nothing, why)}."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (neutral, why) in cls.unsupported.items():
            if name in data and data[name] is not None and data[name] not in neutral:
                raise PydanticCustomError("unsupported", "{field} is not supported: {why}", {"field": name, "why": why})
        return {name: value for name, value in data.items() if name not in cls.unsupported}


# %% nbs/serving/protocol.ipynb #ResponseFormat
class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(ApiModel):
    """``strict`` asks for what is always done: the grammar holds exactly. ``name`` is for the client's own use."""

    unsupported: ClassVar = {"description": (("",), "the model is not shown the schema; describe it in a message")}

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type 'json_schema', and to no other")
        return self


# %% nbs/serving/protocol.ipynb #SamplingFields
class SamplingFields(ApiModel):
    """What OpenAI and vLLM let a client say about the draw."""

    model: str | None = None
    n: Int64 = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int64 = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int64 | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        asked = self.response_format is not None and self.response_format.type != "text"
        if asked and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both say what the answer must look like; give one")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    # %% nbs/serving/protocol.ipynb #SamplingFields-sampling_params
    def structure(self) -> dict[str, Any] | None:
        """What the answer must look like, as fields of StructuredOutputsParams."""
        if self.structured_outputs is not None:
            return self.structured_outputs
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is None:
            return {"json_object": True}
        return {"json": self.response_format.json_schema.schema_}

    def sampling_params(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """``defaults``: for fields that were not given. ``more``: fields that only one endpoint has.

        Raises:
            InvalidParameter, TypeError: a value out of range, an unknown name in a nested object.
        """
        given = {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        merged = {**defaults, **given, "structured_outputs": self.structure(), "output_kind": kind}
        merged["extra_args"] = self.vllm_xargs
        return SamplingParams.from_optional(
            **{**merged, **{k: v for k, v in more.items() if v is not None or k not in merged}}
        )


# %% nbs/serving/protocol.ipynb #SamplingFields-sampling_params
_PASSED_ON = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "logit_bias", "allowed_token_ids", "repetition_detection",
)  # fmt: skip


# %% nbs/serving/protocol.ipynb #CompletionRequest
_LATER = "not implemented"


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. ``max_tokens`` may be 0 with ``echo``: then the prompt is scored and nothing generated."""

    unsupported: ClassVar = {
        "suffix": (("",), "the models served here complete at the end of a text, they do not fill in"),
        "prompt_embeds": ((), _LATER),
        "lora_request": ((), _LATER),
    }

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: Int64 | None = None
    echo: bool = False
    logprobs: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    max_tokens: Int64 | None = 16
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)


class ContentPart(ApiModel):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _one_text(self) -> "ContentPart":
        if getattr(self, self.type) is None or (self.text is not None and self.refusal is not None):
            raise ValueError(f"a part of type {self.type!r} has the field {self.type!r} and no other")
        return self


_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class FunctionCall(ApiModel):
    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "FunctionCall":
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object. Raises ValueError if they are none."""
        try:
            return _OBJECT.validate_json(self.arguments or "{}")
        except ValueError:
            raise ValueError(f"arguments must be the text of a JSON object, got {self.arguments[:80]!r}") from None


class ToolCall(ApiModel):
    """A call that the model made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ApiModel):
    unsupported: ClassVar = {"audio": ((), _LATER), "function_call": ((), "use tool_calls")}

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> "ChatMessage":
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role 'tool', and to no other")
        return self

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates expect: content as one string, arguments as objects, absent fields left out, developer a system role."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or part.refusal or "" for part in content)
        more: dict[str, Any] = {name: getattr(self, name) for name in ("name", "tool_call_id")}
        more["reasoning_content"] = self.reasoning_content if self.reasoning is None else self.reasoning
        if self.tool_calls:
            more["tool_calls"] = [
                {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": c.function.parsed()}}
                for c in self.tool_calls
            ]
        role = "system" if self.role == "developer" else self.role
        text = self.refusal if content is None else content
        return {"role": role, "content": text or ""} | {
            name: value for name, value in more.items() if value is not None
        }


# %% nbs/serving/protocol.ipynb #ChatTemplateFields
class FunctionDefinition(ApiModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _parameters_are_an_object(self) -> "FunctionDefinition":
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise ValueError(f"parameters must be a JSON schema of type 'object', got {kind!r}")
        return self


class ChatTool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedToolChoice(ApiModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(ApiModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1)]


class AllowedToolChoice(ApiModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolFields(ApiModel):
    """Functions that the model may call."""

    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise PydanticCustomError(
                    "twice", "two tools have the name {name}", {"name": name, "field": f"tools[{i}]"}
                )
        return self


def check_tool_messages(messages: Sequence[ChatMessage]) -> None:
    """Every result must belong to a call before it. Raises PydanticCustomError that names the message."""
    made: set[str] = set()
    for i, message in enumerate(messages):
        made.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in made:
            what = {"field": f"messages[{i}].tool_call_id", "id": repr(message.tool_call_id)}
            raise PydanticCustomError("no_call", "{field}: no message before it has a tool call with the id {id}", what)


class ChatTemplateFields(ToolFields):
    """How messages become a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _results_have_calls(self) -> "ChatTemplateFields":
        check_tool_messages(self.messages)
        return self


class ChatCompletionRequest(SamplingFields, ChatTemplateFields):
    """`POST /v1/chat/completions`."""

    unsupported: ClassVar = {
        "functions": (([],), "deprecated"),
        "function_call": (("none",), "deprecated"),
        "modalities": ((["text"],), "text is all that the models served here produce"),
        "audio": ((), _LATER),
        "prediction": ((), _LATER),
        "store": ((False,), "nothing is stored here"),
        "metadata": (({},), "nothing is stored here"),
        "service_tier": (("auto", "default"), "there is one tier"),
        "verbosity": (("medium",), _LATER),
        "web_search_options": ((), _LATER),
        "moderation": ((), _LATER),
        "prompt_cache_key": ((), "the prefix cache finds equal prefixes by itself; cache_salt keeps users apart"),
        "prompt_cache_options": ((), "the prefix cache has no options"),
        "prompt_cache_retention": ((), "cached prefixes are kept while there is room"),
        "documents": (([],), _LATER),
        "echo": ((False,), _LATER),
        "best_of": ((1,), "use /v1/completions"),
        "mm_processor_kwargs": (({},), "the models served here read text only"),
    }

    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ValueError(f"top_logprobs must be at least 0, got {self.top_logprobs}")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self


# %% nbs/serving/protocol.ipynb #TokenizeRequest
class TokenizeRequest(ToolFields):
    """`POST /tokenize`: a prompt, or messages as they would go to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        check_tool_messages(self.messages or ())
        return self


class DetokenizeRequest(ApiModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
