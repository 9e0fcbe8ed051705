"""Request models of the OpenAI API with vLLM's extra fields."""

# Generated from nbs/serving/protocol.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import logging
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from minivllm.sampling.params import RequestOutputKind, SamplingParams

__all__ = [
    "HINTS", "MAX_ANSWERS", "MAX_PARTS", "ApiModel", "ChatCompletionRequest", "ChatMessage",
    "ChatTemplateFields", "CompletionRequest", "DetokenizeRequest", "ImageEmbeds", "ImageURL", "InputAudio",
    "Int64", "RequestFields", "RequestId", "SamplingFields", "TokenizeRequest", "ToolFields", "as_list",
    "check_count", "log_no_effect",
]  # fmt: skip

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Larger numbers can be written in JSON, but cross neither to the engine's process nor into a tensor."""

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
MAX_PARTS = 8192
"""Messages, parts of messages and tool calls of one request, together."""
MAX_ANSWERS = 2048
"""Prompts of one request times the answers to each."""
_log = logging.getLogger("minivllm.serving")
HINTS = {
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself; cache_salt keeps users apart",
    "prompt_cache_options": "the prefix cache has no options",
    "prompt_cache_retention": "cached prefixes are kept while there is room",
    "client_metadata": "nothing is stored here",
    "service_tier": "there is one tier",
}
_NOT_STORED = dict.fromkeys(("store", "metadata"), "nothing is stored here")


@cache
def log_no_effect(where: str, field: str, why: str) -> None:
    """Say once in the log that a field was accepted and does nothing."""
    _log.warning("%s: %s has no effect: %s (said once)", where, field, why)


class ApiModel(BaseModel):
    """A JSON body: no unknown field, no value of another type, and null for a field that was not given.

    Attributes:
        no_effect: Fields that cannot change the answer, and why they do nothing here.
        unsupported: Fields that would change it: the values that ask for nothing, and why the others are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    no_effect: ClassVar[dict[str, str]] = {}
    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _sort_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        used = {}
        for name, value in data.items():
            field = cls.model_fields.get(name)
            if value is None and not (field is not None and field.is_required()):
                continue
            if field is None and name in cls.no_effect:
                log_no_effect(cls.__name__, name, cls.no_effect[name])
            elif field is None and name in cls.unsupported:
                neutral, why = cls.unsupported[name]
                if value not in neutral:
                    what = {"field": name, "why": why}
                    raise PydanticCustomError("unsupported", "{field} is not supported: {why}", what)
            else:
                used[name] = value
        return used

    @classmethod
    def field_table(cls) -> dict[str, str]:
        """Each known field and its treatment: "used", "no effect: why" or "refused: why"."""
        table = {field.alias or name: "used" for name, field in cls.model_fields.items()}
        table |= {name: f"no effect: {why}" for name, why in cls.no_effect.items()}
        return table | {name: f"refused: {why}" for name, (_, why) in cls.unsupported.items()}


def check_count(name: str, items: Any) -> None:
    """Count messages or items, and the parts and calls listed in them, before any is parsed.

    Raises:
        PydanticCustomError: there are more than MAX_PARTS.
    """
    if not isinstance(items, list):
        return
    count = len(items)
    for item in items[:MAX_PARTS]:
        if isinstance(item, dict):
            count += sum(len(value) for value in item.values() if isinstance(value, list))
    if count > MAX_PARTS:
        what = {"field": name, "count": count, "limit": MAX_PARTS}
        raise PydanticCustomError("too_many", "{field}: {count} messages and parts; at most {limit} are allowed", what)


class StreamOptions(ApiModel):
    unsupported: ClassVar = {"include_obfuscation": ((False,), "lengths of pieces are not hidden")}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(ApiModel):
    """``strict`` changes nothing: the schema is always enforced exactly. ``name`` is for the client's own use."""

    no_effect: ClassVar = {"description": "the model is not shown the schema; describe it in a message"}

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


Words = Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=1024)]


class RequestFields(ApiModel):
    """Fields of every request to the engine."""

    model: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    request_id: RequestId | None = None

    @property
    def end_user(self) -> str | None:
        """Whose request it is, for policies that are fair to users."""
        return self.user or self.safety_identifier


class SamplingFields(RequestFields):
    """OpenAI's and vLLM's fields for sampling."""

    n: Annotated[int, Field(le=128)] = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | Words | None = None
    stop_token_ids: Annotated[list[Int64], Field(max_length=65536)] | None = None
    bad_words: Words | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int64 = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int64 | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=65536)] | None = None
    allowed_token_ids: list[Int64] | None = None
    repetition_detection: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    vllm_xargs: dict[str, Any] | None = None

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
        """Usage with every chunk; as in vLLM, only where usage is asked for at all."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

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
        """The request as SamplingParams. ``defaults``: for fields that were not given. ``more``: fields that only one endpoint has.

        Raises:
            InvalidParameter, TypeError: a value out of range, an unknown name in a nested object.
        """
        names = [name for name in SamplingFields.model_fields if name in SamplingParams.__dataclass_fields__]
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        fields |= {"structured_outputs": self.structure(), "output_kind": kind, "extra_args": self.vllm_xargs}
        merged = defaults | fields
        return SamplingParams.from_optional(
            **merged | {name: value for name, value in more.items() if value is not None or name not in merged}
        )


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. ``max_tokens`` may be 0 with ``echo``: then the prompt is scored and nothing generated."""

    no_effect: ClassVar = {**HINTS, **_NOT_STORED}
    unsupported: ClassVar = {
        "suffix": (("",), "the models served here complete at the end of a text, they do not fill in"),
        "lora_request": ((), "name the adapter as the model"),
    }

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    best_of: Annotated[int, Field(le=128)] | None = None
    echo: bool = False
    logprobs: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    max_tokens: Int64 = 16
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. None, or beside embeddings an empty text, is none."""
        return [] if self.prompt is None or (not self.prompt and self.prompt_embeds) else as_list(self.prompt)

    def embeds(self) -> list[str]:
        """The prompts of embeddings, see `decode_tensor`. They come before the others."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []


def as_list(prompt: Any) -> list[Any]:
    """One prompt or several (a text or token ids each) as a list of prompts."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)


class ImageURL(ApiModel):
    no_effect: ClassVar = {"detail": "a picture is processed as the model's own processor says"}

    url: str


class InputAudio(ApiModel):
    data: str
    format: Literal["wav", "mp3"]


class ImageEmbeds(ApiModel):
    """Tensors in base64, see `decode_tensor`."""

    image_embeds: str
    image_grid_thw: str | None = None


class ContentPart(ApiModel):
    no_effect: ClassVar = {
        "cache_control": "the prefix cache finds equal prefixes by itself",
        "annotations": "the model is not shown them",
    }

    type: Literal["text", "refusal", "image_url", "image_embeds", "input_audio"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | None = None
    image_embeds: str | ImageEmbeds | None = None
    input_audio: InputAudio | None = None

    @property
    def modality(self) -> str | None:
        """Kind of media in the part, image or audio; None for text."""
        return {"image_url": "image", "image_embeds": "image", "input_audio": "audio"}.get(self.type)

    @model_validator(mode="after")
    def _one_text(self) -> "ContentPart":
        names = ("text", "refusal", "image_url", "image_embeds", "input_audio")
        given = [name for name in names if getattr(self, name) is not None]
        if given != [self.type]:
            raise ValueError(f"a part of type {self.type!r} has the field {self.type!r} and no other")
        return self


_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_FROM_AN_ANSWER = "it repeats an earlier answer"


class FunctionCall(ApiModel):
    no_effect: ClassVar = {"parsed_arguments": _FROM_AN_ANSWER}

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> "FunctionCall":
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object. Raises ValueError if they are not the text of one."""
        try:
            return _OBJECT.validate_json(self.arguments or "{}")
        except ValueError:
            raise ValueError(f"arguments must be the text of a JSON object, got {self.arguments[:80]!r}") from None


class ToolCall(ApiModel):
    """A call that the model made earlier."""

    no_effect: ClassVar = {"index": _FROM_AN_ANSWER}

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ApiModel):
    no_effect: ClassVar = {
        name: "it belongs to an earlier answer, and the model is not shown it"
        for name in ("annotations", "citations", "parsed", "provider_specific_fields", "reasoning_details",
                     "reasoning_items", "thinking_blocks", "token_ids", "stop_reason", "finish_reason", "images")
    }  # fmt: skip
    unsupported: ClassVar = {"audio": ((), "not implemented"), "function_call": ((), "use tool_calls")}

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
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to the role 'assistant', not {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the role 'tool', and to no other")
        return self

    @property
    def media(self) -> list[ContentPart]:
        """The message's pictures and clips, in their order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if part.modality is not None]

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates expect: one string (with media, a list of parts), arguments as objects, developer a system role, nothing absent."""
        content: Any = self.content
        if self.media:
            content = [
                {"type": part.modality} if part.modality else {"type": "text", "text": part.text or part.refusal or ""}
                for part in self.content or ()
                if not isinstance(part, str)
            ]
        elif isinstance(content, list):
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


class FunctionDefinition(ApiModel):
    """A function that the model may call. ``parameters``: the JSON schema of its arguments, an object."""

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

    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; without one the function takes none."""
        return {"type": "object", "properties": {}} | (self.parameters or {})

    def definition(self) -> dict[str, Any]:
        """The dict that chat templates expect, OpenAI's."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.arguments_schema()}}


class ChatTool(ApiModel):
    no_effect: ClassVar = {"cache_control": "the prefix cache finds equal prefixes by itself"}

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedToolChoice(ApiModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(ApiModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=256)]


class AllowedToolChoice(ApiModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolFields(ApiModel):
    """Functions that the model may call."""

    tools: Annotated[list[ChatTool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> "ToolFields":
        names: set[str] = set()
        for i, tool in enumerate(self.tools or ()):
            if tool.function.name in names:
                what = {"name": tool.function.name, "field": f"tools[{i}]"}
                raise PydanticCustomError("twice", "two tools have the name {name}", what)
            names.add(tool.function.name)
        return self


class ChatTemplateFields(ToolFields):
    """How messages become a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _count_messages(cls, data: Any) -> Any:
        check_count("messages", data.get("messages") if isinstance(data, dict) else None)
        return data

    @model_validator(mode="after")
    def _results_have_calls(self) -> Self:
        made: set[str] = set()
        for i, message in enumerate(self.messages or ()):
            made.update(call.id for call in message.tool_calls or ())
            if message.role == "tool" and message.tool_call_id not in made:
                what = {"field": f"messages[{i}].tool_call_id", "id": repr(message.tool_call_id)}
                text = "{field}: no message before it has a tool call with the id {id}"
                raise PydanticCustomError("no_call", text, what)
        return self


class ChatCompletionRequest(SamplingFields, ChatTemplateFields):
    """`POST /v1/chat/completions`."""

    no_effect: ClassVar = {**HINTS, **_NOT_STORED, "prediction": "it is a hint for speed"}
    unsupported: ClassVar = {
        "functions": (([],), "deprecated; use tools"),
        "function_call": (("none",), "deprecated; use tool_choice"),
        "modalities": ((["text"],), "text is all that the models served here produce"),
        "audio": ((), "not implemented"),
        "verbosity": (("medium",), "not implemented"),
        "web_search_options": ((), "not implemented"),
        "moderation": ((), "not implemented"),
        "documents": (([],), "not implemented"),
        "echo": ((False,), "not implemented"),
        "best_of": ((1,), "use /v1/completions"),
        "mm_processor_kwargs": (({},), "pictures and clips are processed as the model's own processor says"),
    }

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Int64 | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show for each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(ChatTemplateFields):
    """`POST /tokenize`: a prompt, or messages as they would go to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None  # type: ignore[assignment]
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self


class DetokenizeRequest(ApiModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 18)]
