"""`/v1/chat/completions`: prompt rendering, parameters, streaming."""

# Generated from nbs/serving/chat.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.detokenizer import byte_alphabet
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.models.tokenizer import render_chat_template
from minivllm.multimodal.audio import decode_wav
from minivllm.multimodal.images import MediaError, decode_image
from minivllm.multimodal.inputs import decode_tensor
from minivllm.sampling.grammar import check_limits
from minivllm.sampling.params import SamplingParams, check_text
from minivllm.serving.answers import AnswerReader, structure, tool_use, whole_calls
from minivllm.serving.completions import finite, prompt_logprobs
from minivllm.serving.errors import ApiError
from minivllm.serving.generation import Job, Plan, ServerState, Writer, answer, plan_fields
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.protocol import ChatCompletionRequest, ChatMessage, ContentPart, log_no_effect
from minivllm.serving.reasoning import ReasoningParser
from minivllm.serving.tool_parsers import HermesToolParser
from minivllm.serving.tools import CallDelta, CallFormat, Piece, ToolUse, show_calls, show_tools

__all__ = [
    "ChatPlan", "chat_logprobs", "chat_router", "fetch_media", "plan_chat", "render_chat", "render_request",
    "token_bytes",
]  # fmt: skip

_RESERVED = {
    "messages", "conversation", "tokenizer", "chat_template", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
}  # fmt: skip


def render_chat(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    *,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    tools: ToolUse | None = None,
    form: CallFormat = HermesToolParser.form,
    marker: str | None = None,
    modality: str = "image",
    **options: Any,
) -> str:
    """The text of a prompt.

    Args:
        tools: Functions that may be called.
        form: How functions, calls and results are written if the template has no place for them.
        marker: Text that stands for a picture or clip if the template has no place for one; None if the model reads text alone.
        modality: What the marker stands for: image or audio.
        options: ``add_generation_prompt``, ``continue_final_message``.

    Raises:
        ApiError, ValueError: a variable that the template does not use, or messages that it refuses.
    """
    for name in template_kwargs or ():
        if name in _RESERVED:
            raise ApiError(400, f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
    plain = [message.for_template() for message in messages]
    definitions = None if tools is None else [function.definition() for function in tools.functions]
    for field, value in (("messages", plain), ("tools", definitions), ("chat_template_kwargs", template_kwargs)):
        check_text(value, field)
    template = ""
    if chat_template is not None or tokenizer.chat_template:
        template = str(tokenizer.get_chat_template(chat_template, tools=definitions))
    if not _uses(template, "tool_calls"):
        plain = show_calls(plain, form)
    if tools is not None and not _uses(template, "tools"):
        plain, definitions = show_tools(plain, tools, form), None
    plain = _with_media(plain, marker, _uses(template, modality))
    options = {**options, "chat_template": chat_template, "tools": definitions, **(template_kwargs or {})}
    text = _render(tokenizer, plain, options)
    _log_left_out(tokenizer, plain, options, template, text)
    return text


def _with_media(messages: list[dict[str, Any]], marker: str | None, listed: bool) -> list[dict[str, Any]]:
    """Messages with all contents as lists of parts, or as strings with markers. Raises ApiError for media without a marker."""
    made = []
    for message in messages:
        content = message["content"]
        if marker is None and not isinstance(content, str):
            raise ApiError(400, "messages: this model reads text alone", param="messages")
        if isinstance(content, str) and marker is not None and listed:
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, str) and not listed:
            content = "\n".join(part.get("text", marker) for part in content)
        made.append({**message, "content": content})
    return made


def _uses(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


def _render(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    try:
        return render_chat_template(tokenizer, messages, **options)
    except ValueError:
        texts = [_with_text_arguments(message) for message in messages]
        if texts != messages:
            try:
                return render_chat_template(tokenizer, texts, **options)
            except ValueError:
                pass  # the first error says what is wrong
        raise


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


_left_out: set[tuple[int, str]] = set()


def _log_left_out(
    tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any], template: str, text: str
) -> None:
    """Log which fields of messages are not in the prompt, each field once."""
    for name in ("name", "reasoning_content"):
        key = (hash(template), name)
        if key in _left_out or not any(name in message for message in messages):
            continue
        without = [{k: v for k, v in message.items() if k != name} for message in messages]
        try:
            same = _render(tokenizer, without, options) == text
        except ValueError:  # it is needed
            same = False
        if same:
            _left_out.add(key)
            log_no_effect("messages", name, "the model's chat template leaves it out")


def render_request(
    state: ServerState,
    body: Any,
    tools: ToolUse | None = None,
    effort: str | None = None,
    given: Mapping[str, list[Any]] | None = None,
) -> dict[str, Any]:
    """The prompt that a body asks for, as the engine takes it: text, token ids, and the media in them. Raises ApiError or ValueError.

    Args:
        body: Has the fields of ChatTemplateFields.
        effort: For the template's variable ``reasoning_effort``; None for none.
        given: The media of the messages by modality, in their order; None if there can be none.
    """
    limit = state.llm.config.scheduler.max_model_len
    if len(body.messages) > limit:
        message = f"messages: {len(body.messages)} are too many for max_model_len={limit}: each has a token at least"
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    if body.chat_template is not None and not state.options.trust_request_chat_template:
        message = (
            "chat_template: this server takes no templates from requests (--trust-request-chat-template allows it)"
        )
        raise ApiError(400, message, param="chat_template")
    goes_on = body.continue_final_message
    if goes_on and "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    engine, form = state.llm.llm_engine, state.parsers.form_parser.form
    media = engine.input_processor.media
    assert form is not None, "that is what makes it a form parser"
    text = render_chat(
        engine.tokenizer,
        body.messages,
        chat_template=body.chat_template,
        template_kwargs=(body.chat_template_kwargs or {}) | ({} if effort is None else {"reasoning_effort": effort}),
        tools=tools,
        form=form,
        marker=None if media is None else media.rules.marker,
        modality="image" if media is None else media.spec.modality,
        add_generation_prompt=body.add_generation_prompt and not goes_on,
        continue_final_message=goes_on,
    )
    encode = partial(engine.tokenizer.encode, add_special_tokens=bool(body.add_special_tokens))
    engine.input_processor.check_characters(text)  # the template has written bos and the like as text
    if media is None or not any(message.media for message in body.messages):
        return {"prompt": text, "prompt_token_ids": list(encode(text))}
    if given is None:
        raise ApiError(400, "messages: pictures and clips are not supported here", param="messages")
    try:
        items = media.load(given)
        expanded = media.expand(text, items)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    engine.input_processor.check_characters(expanded)
    token_ids = list(encode(expanded))
    return {"prompt": text, "prompt_token_ids": token_ids, "mm_features": media.place(token_ids, items)}


def chat_logprobs(completion: CompletionOutput, count: int, to_bytes: Any) -> dict[str, Any]:
    """OpenAI's list for chat. ``to_bytes(token_id, text)``: the bytes of a token, or None."""
    content = []
    for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
        top = sorted((p.rank or 0, other) for other, p in entry.items() if (p.rank or 0) <= count)
        tops = [_one(other, entry[other], to_bytes) for _, other in top]
        content.append({**_one(token_id, entry[token_id], to_bytes), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _one(token_id: int, logprob: Any, to_bytes: Any) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": finite(logprob.logprob), "bytes": to_bytes(token_id, text)}


def token_bytes(tokenizer: Any) -> Any:
    """A function from a token to its bytes: exact for byte-level vocabularies, from the text elsewhere (None for broken characters)."""
    to_byte = byte_alphabet()
    special = set(tokenizer.all_special_ids)

    def convert(token_id: int, text: str) -> list[int] | None:
        symbols = tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id not in special and symbols and set(symbols) <= to_byte.keys():
            return [to_byte[sign] for sign in symbols]
        return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))

    return convert


@dataclass(frozen=True, kw_only=True)
class ChatPlan(Plan):
    """A conversation as the engine takes it, and how its answers are read. ``reasoning``: makes a parser of thoughts."""

    use: ToolUse | None = None
    reasoning: Callable[[], ReasoningParser] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the model writes content alone: no calls, no thoughts to divide off."""
        return self.use is None and self.reasoning is None

    def reader(self) -> AnswerReader:
        """A reader for one answer."""
        return AnswerReader(self.use, None if self.reasoning is None else self.reasoning())


def _chat_params(body: ChatCompletionRequest, defaults: dict[str, Any], **more: Any) -> SamplingParams:
    """The request as SamplingParams. ``more``: further fields, derived from the rest of the body. Raises what `SamplingParams` raises."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return body.sampling_params(
        defaults,
        max_tokens=limit if limit is not None else defaults.get("max_tokens"),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        **more,
    )


def fetch_media(body: ChatCompletionRequest, state: ServerState) -> dict[str, list[Any]]:
    """The pictures and clips of a request by modality, in the order of its messages. Raises ApiError that names the part."""
    parts = [(f"messages[{i}]", part) for i, message in enumerate(body.messages) for part in message.media]
    media, left = state.llm.llm_engine.input_processor.media, state.options.max_image_pixels
    found: dict[str, list[Any]] = {}
    if parts and media is None:
        raise ApiError(400, f"{parts[0][1].type}: this model reads text alone", param="messages")
    if len(parts) > (limit := state.llm.config.scheduler.max_model_len):  # before any is decoded
        message = f"messages: {len(parts)} pictures and clips are too many for max_model_len={limit}: each has a token at least"
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    for kind, most in (media.limits if media is not None else {}).items():
        if (count := sum(part.modality == kind for _, part in parts)) > most:
            raise ApiError(400, f"messages: {count} {kind}s; at most {most} are allowed", param="messages")
    for place, part in parts:
        try:
            value = _read_part(part, state, left)
        except (MediaError, ValueError) as error:
            code = f"invalid_{part.modality}"
            raise ApiError(400, f"{place}: {part.type}: {error}", param=place, code=code) from error
        if part.image_url is not None:
            left -= math.prod(value.size)
        found.setdefault(part.modality or "", []).append(value)
    return found


def _read_part(part: ContentPart, state: ServerState, max_pixels: int) -> Any:
    """A picture, a clip or embeddings. Raises ValueError."""
    if part.image_url is not None:
        return decode_image(state.connector.fetch(part.image_url.url), max_pixels)
    if part.input_audio is not None:
        if part.input_audio.format != "wav":
            raise MediaError(f"format={part.input_audio.format!r} is not supported, 'wav' is")
        return decode_wav(state.connector.fetch(f"data:audio/wav;base64,{part.input_audio.data}"))
    if not state.llm.config.args.enable_mm_embeds:
        raise MediaError("not allowed here (--enable-mm-embeds allows them)")
    if part.image_embeds is None or isinstance(part.image_embeds, str):
        return decode_tensor(part.image_embeds or "", "the tensor")
    texts = {name: text for name, text in vars(part.image_embeds).items() if text is not None}
    return {name: decode_tensor(text, name) for name, text in texts.items()}


def plan_chat(
    body: ChatCompletionRequest,
    state: ServerState,
    fields: dict[str, Any],
    media: Mapping[str, list[Any]] | None = None,
) -> ChatPlan:
    """Check a body and make its prompt. ``fields``: of `plan_fields`; ``media``: see `fetch_media`. Raises ApiError, or what is wrong with a parameter."""
    tokenizer, defaults = state.llm.get_tokenizer(), state.llm.get_default_sampling_params()
    use, reasoner = tool_use(body, state.parsers), state.parsers.reasoning_parser
    for function in use.functions if use is not None else ():
        check_limits({"json": function.parameters})
    check_limits(body.structure() or {})
    _chat_params(body, defaults)  # what is wrong with it is said before what is wrong with the messages
    effort = None if body.reasoning_effort == "none" else body.reasoning_effort
    prompt = render_request(state, body, use, effort, media)
    reasoning = None if reasoner is None else partial(reasoner, prompt["prompt"])
    form = structure(body.structure(), use, None if reasoning is None else reasoning(), tokenizer)
    more: dict[str, Any] = {"structured_outputs": form}
    if (use and use.parser.special_tokens) or (reasoner and reasoner.special_tokens):
        more["skip_special_tokens"] = False
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    return ChatPlan(
        **fields,
        prompts=[prompt | salt],
        params=_chat_params(body, defaults, **more),
        cut_max_tokens=body.max_completion_tokens is None and body.max_tokens is None,
        use=use,
        reasoning=reasoning,
    )


class ChatWriter(Writer):
    """Writes the answers of one request."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.to_bytes = token_bytes(self.tokenizer) if self.body.num_logprobs is not None else None
        self.readers = [self.plan.reader() for _ in range(self.body.n)]
        self._held: list[CompletionOutput | None] = [None] * self.body.n  # tokens whose text has not been sent

    def usage(self) -> dict[str, Any]:
        usage = self.counter.usage()
        if self.plan.reasoning is not None:
            thought = sum(reader.count_thought_tokens(self.tokenizer.decode) for reader in self.readers)
            usage["completion_tokens_details"] = {
                **usage.get("completion_tokens_details", {}),
                "reasoning_tokens": thought,
            }
        return usage

    def _details(self, completion: CompletionOutput) -> dict[str, Any]:
        """Fields of a choice that belong to tokens and not to text."""
        count = self.body.num_logprobs
        asked = count is not None and completion.logprobs is not None and completion.token_ids
        logprobs = chat_logprobs(completion, count or 0, self.to_bytes) if asked else None
        ids = {"token_ids": completion.token_ids} if self.body.return_token_ids else {}
        return {"logprobs": logprobs, **ids}

    def _call(self, delta: CallDelta) -> dict[str, Any]:
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"id": self.plan.use.parser.new_id(), "type": "function", "function": function}

    def _thought(self, part: Piece) -> str | None:
        return (part.thought or None) if self.body.include_reasoning else None

    def choices(self, i: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for completion in output.outputs:
            reader = self.readers[completion.index]
            part = reader.push(completion)
            made, thought = whole_calls(part.calls), self._thought(part)
            message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
            if made:
                message["content"] = part.content or None
                message["tool_calls"] = [self._call(delta) for delta in made]
            yield {
                "index": completion.index,
                "message": message | {"reasoning": thought, "reasoning_content": thought},
                **self._details(completion),
                "finish_reason": reader.finish_reason(completion),
                "stop_reason": completion.stop_reason,
            }

    def further(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output) if self.body.prompt_logprobs is not None else None,
        }

    def opening(self, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        forced = self.plan.use is not None and self.plan.use.forced
        ids = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
        for index in range(self.body.n):
            delta = {"role": "assistant", "content": None if forced else "", "refusal": None}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, ids

    def pieces(self, i: int, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        asked = self.body.prompt_logprobs is not None and output.finished
        scores = {"prompt_logprobs": prompt_logprobs(output)} if asked else {}
        for completion in output.outputs:
            for choice in self._choices_of(completion):
                yield choice, scores if choice["finish_reason"] else {}

    def _choices_of(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        reader, index, ends = self.readers[completion.index], completion.index, completion.finish_reason is not None
        deltas = list(self._deltas(reader.push(completion)))
        tokens = _join(self._held[index], completion)
        shows_tokens = (self.body.num_logprobs is not None or self.body.return_token_ids) and tokens.token_ids
        if not deltas and (ends or (shows_tokens and self.plan.is_plain)):
            deltas = [{"content": ""}]
        self._held[index] = None if deltas else tokens
        for number, delta in enumerate(deltas):
            end: dict[str, Any] = {"finish_reason": None}
            if ends and number == len(deltas) - 1:
                end = {"finish_reason": reader.finish_reason(completion), "stop_reason": completion.stop_reason}
            yield {"index": index, "delta": delta, **self._details(tokens), **end}
            tokens = replace(tokens, token_ids=[], logprobs=[])

    def _deltas(self, part: Piece) -> Iterator[dict[str, Any]]:
        thought = self._thought(part)
        if thought is not None:
            yield {"reasoning": thought, "reasoning_content": thought}
        if part.content:
            yield {"content": part.content}
        for delta in part.calls:
            if delta.name is not None:
                yield {"tool_calls": [{"index": delta.index, **self._call(replace(delta, arguments=""))}]}
            if delta.arguments:
                yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}


def _join(first: CompletionOutput | None, second: CompletionOutput) -> CompletionOutput:
    """The tokens of two pieces of one answer."""
    if first is None:
        return second
    logprobs = None if second.logprobs is None else [*(first.logprobs or ()), *second.logprobs]
    return replace(second, token_ids=[*first.token_ids, *second.token_ids], logprobs=logprobs)


async def _plan(body: ChatCompletionRequest, state: ServerState, request: Request) -> ChatPlan:
    """`plan_chat`, after pictures and clips have been fetched."""
    media: dict[str, list[Any]] = {}
    if any(message.media for message in body.messages):  # in another thread than tokenizing, which others wait for
        media = await asyncio.to_thread(fetch_media, body, state)
    fields = partial(plan_fields, body, state, request, "chatcmpl")
    return await state.llm.run_input(lambda: plan_chat(body, state, fields(), media))


def chat_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> dict[str, Any] | Response:
        """Answer a conversation."""
        return await answer(request, state, body.model, _plan(body, state, request), ChatWriter)

    return router
