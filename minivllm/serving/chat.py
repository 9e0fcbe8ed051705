"""`/v1/chat/completions`: prompt rendering, parameters, streaming."""

# Generated from nbs/serving/chat.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.models.tokenizer import apply_chat_template
from minivllm.sampling.params import SamplingParams, check_text
from minivllm.serving.answers import AnswerReader, Said, structure, tool_use, whole_calls
from minivllm.serving.completions import prompt_logprobs
from minivllm.serving.errors import ApiError, as_api_error
from minivllm.serving.generation import (
    Counter,
    Job,
    ServerState,
    SSEResponse,
    check_output,
    collect,
    merge,
    request_name,
    unless_disconnected,
)
from minivllm.serving.protocol import ChatCompletionRequest, ChatMessage
from minivllm.serving.reasoning import ReasoningParser
from minivllm.serving.tool_parsers import HermesToolParser
from minivllm.serving.tools import CallDelta, CallFormat, ToolUse, show_calls, show_tools

__all__ = [
    "ChatPlan", "ChatWriter", "chat", "chat_logprobs", "chat_params", "chat_router", "plan_chat",
    "render_chat", "render_request", "token_bytes",
]  # fmt: skip


# %% nbs/serving/chat.ipynb #render_chat-def
_RESERVED = {
    "messages", "conversation", "tokenizer", "chat_template", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
}  # fmt: skip


def render_chat(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    *,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    template_kwargs: dict[str, Any],
    tools: ToolUse | None = None,
    form: CallFormat = HermesToolParser.form,
) -> tuple[str, list[int]]:
    """The prompt's text and token ids. Raises ApiError or ValueError: a field that the template would drop, or that it refuses.

    ``form``: how functions, calls and results are shown where the template knows nothing of them.
    """
    for name in template_kwargs:
        if name in _RESERVED:
            raise ApiError(400, f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
    plain = [message.for_template() for message in messages]
    definitions = None if tools is None else [function.definition() for function in tools.functions]
    for field, value in (("messages", plain), ("tools", definitions), ("chat_template_kwargs", template_kwargs)):
        check_text(value, field)
    template = _template(tokenizer, chat_template, definitions)
    if not _uses(template, "tool_calls"):
        plain = show_calls(plain, form)
    if tools is not None and not _uses(template, "tools"):
        plain, definitions = show_tools(plain, tools, form), None
    for i, message in enumerate(plain):
        for name in set(message) - {"role", "content", "tool_call_id"}:  # results are in the order of their calls
            if not _uses(template, name):
                what = f"messages[{i}].{name}"
                raise ApiError(
                    400, f"{what}: the model's chat template has no use for it, it would be dropped", param=what
                )
    text, token_ids = apply_chat_template(
        tokenizer,
        plain,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        tools=definitions,
        **template_kwargs,
    )
    return text, list(tokenizer(text).input_ids) if add_special_tokens else token_ids


# %% nbs/serving/chat.ipynb #chat-template
def _template(tokenizer: Any, chat_template: str | None, definitions: Any) -> str:
    if chat_template is None and not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(chat_template, tools=definitions))


def _uses(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


# %% nbs/serving/chat.ipynb #render_request
async def render_request(
    state: ServerState, body: Any, tools: ToolUse | None = None, template_kwargs: dict[str, Any] | None = None
) -> tuple[str, list[int]]:
    """`render_chat` for a body with the fields of a chat, in the thread of the tokenizer. Raises ApiError."""
    form = state.parsers.form_parser.form
    assert form is not None, "that is what makes it a form parser"
    if body.chat_template is not None and not state.trust_request_chat_template:
        message = (
            "chat_template: this server takes no templates from requests (--trust-request-chat-template allows it)"
        )
        raise ApiError(400, message, param="chat_template")
    given = body.model_fields_set
    if body.continue_final_message and "add_generation_prompt" in given and body.add_generation_prompt:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise ApiError(400, message, param="continue_final_message")
    try:
        return await state.llm.run_input(
            lambda: render_chat(
                state.llm.get_tokenizer(),
                body.messages,
                chat_template=body.chat_template,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                add_special_tokens=bool(body.add_special_tokens),
                template_kwargs=(body.chat_template_kwargs or {}) | (template_kwargs or {}),
                tools=tools,
                form=form,
            )
        )
    except Exception as error:
        raise as_api_error(error) from error


# %% nbs/serving/chat.ipynb #chat_logprobs
def chat_logprobs(completion: CompletionOutput, count: int, to_bytes: Any) -> dict[str, Any]:
    """OpenAI's list for chat. ``to_bytes(token_id, text)``: the bytes of a token, or None."""
    content = []
    for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
        likeliest = sorted((p.rank or 0, other) for other, p in entry.items() if (p.rank or 0) <= count)
        tops = [_one(other, entry[other], to_bytes) for _, other in likeliest]
        content.append({**_one(token_id, entry[token_id], to_bytes), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _one(token_id: int, logprob: Any, to_bytes: Any) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": max(logprob.logprob, -9999.0), "bytes": to_bytes(token_id, text)}


def token_bytes(tokenizer: Any) -> Any:
    """A function from a token to its bytes: exact for byte-level vocabularies, from the text elsewhere (None for broken characters)."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte alphabet keeps these signs
    moved = [b for b in range(256) if b not in kept]
    to_byte = {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}
    special = set(tokenizer.all_special_ids)

    def convert(token_id: int, text: str) -> list[int] | None:
        symbols = tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id not in special and symbols and set(symbols) <= alphabet:
            return [to_byte[sign] for sign in symbols]
        return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))

    return convert


# %% nbs/serving/chat.ipynb #endpoint
def chat_params(body: ChatCompletionRequest, defaults: dict[str, Any], **more: Any) -> SamplingParams:
    """The request as SamplingParams. ``more``: fields that follow from the rest. Raises what `SamplingParams` raises."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limit = limit if limit is not None else defaults.get("max_tokens")
    return body.sampling_params(
        defaults,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        **more,
    )


# %% nbs/serving/chat.ipynb #ChatPlan
@dataclass(frozen=True)
class ChatPlan:
    """A conversation as the engine takes it, and how its answers are read."""

    prompt: dict[str, Any]
    params: SamplingParams
    use: ToolUse | None
    reasoning: Callable[[], ReasoningParser] | None

    @property
    def is_plain(self) -> bool:
        """Whether all that is written is content."""
        return self.use is None and self.reasoning is None

    def reader(self) -> AnswerReader:
        """A reader for one answer."""
        return AnswerReader(self.use, None if self.reasoning is None else self.reasoning())


async def plan_chat(body: ChatCompletionRequest, state: ServerState) -> ChatPlan:
    """Check a body and make its prompt. Raises ApiError."""
    tokenizer, defaults = state.llm.get_tokenizer(), state.llm.get_default_sampling_params()
    use, reasoner = tool_use(body, state.parsers), state.parsers.reasoning_parser
    try:
        chat_params(body, defaults)  # what is wrong with it is said before what is wrong with the messages
        effort = {} if body.reasoning_effort in (None, "none") else {"reasoning_effort": body.reasoning_effort}
        text, token_ids = await render_request(state, body, use, effort)
        reasoning = None if reasoner is None else (lambda: reasoner(text))
        form = structure(body.structure(), use, None if reasoning is None else reasoning(), tokenizer)
        more: dict[str, Any] = {"structured_outputs": form}
        if (use and use.parser.special_tokens) or (reasoner and reasoner.special_tokens):
            more["skip_special_tokens"] = False
        params = chat_params(body, defaults, **more)
    except Exception as error:
        raise as_api_error(error) from error
    prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": token_ids}
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    return ChatPlan(prompt, params, use, reasoning)


# %% nbs/serving/chat.ipynb #chat
async def chat(body: ChatCompletionRequest, request: Request, state: ServerState) -> dict[str, Any] | Response:
    """Answer one body."""
    name = request_name("chatcmpl", body.request_id, request.headers.get("x-request-id"))
    job = Job(state, name, state.check_model(body.model))
    plan = await plan_chat(body, state)
    writer = ChatWriter(body, job, plan)
    unlimited = body.max_completion_tokens is None and body.max_tokens is None
    await job.submit([plan.prompt], plan.params, body.priority, body.user or body.safety_identifier, unlimited)
    if body.stream:
        return SSEResponse(job, writer.chunks())
    try:
        outputs = await unless_disconnected(request, collect(job), state.request_timeout)
    finally:
        await job.close()
    return writer.whole(outputs[0])


# %% nbs/serving/chat.ipynb #ChatWriter
class ChatWriter:
    """Writes the answers of one request, whole or in pieces."""

    def __init__(self, body: ChatCompletionRequest, job: Job, plan: ChatPlan) -> None:
        self.body, self.job, self.plan = body, job, plan
        self.tokenizer = job.state.llm.get_tokenizer()
        self.to_bytes = token_bytes(self.tokenizer) if body.logprobs else None
        self.readers = [plan.reader() for _ in range(body.n)]
        self.waiting: list[CompletionOutput | None] = [None] * body.n

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.job.created, "model": self.job.model}

    def _details(self, completion: CompletionOutput) -> dict[str, Any]:
        """What belongs to tokens and not to text."""
        asked = self.body.logprobs and completion.logprobs is not None and completion.token_ids
        logprobs = chat_logprobs(completion, self.body.top_logprobs or 0, self.to_bytes) if asked else None
        ids = {"token_ids": completion.token_ids} if self.body.return_token_ids else {}
        return {"logprobs": logprobs, **ids}

    def _usage(self, counter: Counter) -> dict[str, Any]:
        bill = counter.usage()
        if self.plan.reasoning is not None:
            thought = sum(reader.count_thought_tokens(self.tokenizer.decode) for reader in self.readers)
            bill["completion_tokens_details"] = {"reasoning_tokens": thought}
        return bill

    # Whole

    # %% nbs/serving/chat.ipynb #ChatWriter-whole
    def whole(self, output: RequestOutput) -> dict[str, Any]:
        counter = Counter()
        counter.add(0, output)
        choices = [self._choice(completion) for completion in output.outputs]
        more = self._prompt(output)
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(counter), **more}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        reader = self.readers[completion.index]
        said = reader.push(completion)
        made = whole_calls(said.calls)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if made:
            message["content"] = said.content or None
            message["tool_calls"] = [self._call(delta) for delta in made]
        if self.plan.reasoning is not None and self.body.include_reasoning:
            message["reasoning"] = message["reasoning_content"] = said.thought or None
        return {
            "index": completion.index,
            "message": message,
            **self._details(completion),
            "finish_reason": reader.finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }

    def _call(self, delta: CallDelta) -> dict[str, Any]:
        assert self.plan.use is not None and delta.name is not None
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"id": self.plan.use.parser.new_id(), "type": "function", "function": function}

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output)
        return more

    # %% nbs/serving/chat.ipynb #ChatWriter-pieces
    def _deltas(self, said: Said) -> Iterator[dict[str, Any]]:
        if said.thought and self.body.include_reasoning:
            yield {"reasoning": said.thought, "reasoning_content": said.thought}
        if said.content:
            yield {"content": said.content}
        for delta in said.calls:
            if delta.name is not None:
                yield {"tool_calls": [{"index": delta.index, **self._call(replace(delta, arguments=""))}]}
            if delta.arguments:
                yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}

    def _pieces(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that a piece of one answer makes."""
        reader, index = self.readers[completion.index], completion.index
        deltas = list(self._deltas(reader.push(completion)))
        tokens = completion if self.waiting[index] is None else _join(self.waiting[index], completion)
        shows_tokens = (self.body.logprobs or self.body.return_token_ids) and tokens.token_ids
        if not deltas and shows_tokens and (self.plan.is_plain or completion.finish_reason is not None):
            deltas = [{"content": ""}]
        self.waiting[index] = None if deltas else tokens
        for delta in deltas:
            yield {"index": index, "delta": delta, **self._details(tokens), "finish_reason": None}
            tokens = replace(tokens, token_ids=[], logprobs=[])
        if completion.finish_reason is not None:
            reason = {"finish_reason": reader.finish_reason(completion), "stop_reason": completion.stop_reason}
            yield {"index": index, "delta": {}, "logprobs": None, **reason}

    # %% nbs/serving/chat.ipynb #ChatWriter-chunks
    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        head, counter = self._head("chat.completion.chunk"), Counter()
        unused = {"usage": None} if self.body.include_usage else {}
        forced = self.plan.use is not None and self.plan.use.forced
        for index in range(self.body.n):
            delta = {"role": "assistant", "content": None if forced else "", "refusal": None}
            yield {
                **head,
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                **unused,
            }
        async for i, output in merge(self.job.streams):
            check_output(output)
            counter.add(i, output)
            for completion in output.outputs:
                for choice in self._pieces(completion):
                    bill = {"usage": self._usage(counter)} if self.body.continuous_usage else unused
                    more = self._prompt(output) if output.finished and choice["finish_reason"] else {}
                    yield {**head, "choices": [choice], **bill, **more}
        if self.body.include_usage:
            yield {**head, "choices": [], "usage": self._usage(counter)}


# %% nbs/serving/chat.ipynb #ChatWriter-chunks
def _join(first: CompletionOutput | None, second: CompletionOutput) -> CompletionOutput:
    """The tokens of two pieces of one answer."""
    assert first is not None
    logprobs = None if second.logprobs is None else [*(first.logprobs or ()), *second.logprobs]
    return replace(second, token_ids=[*first.token_ids, *second.token_ids], logprobs=logprobs)


# %% nbs/serving/chat.ipynb #chat_router
def chat_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> dict[str, Any] | Response:
        """Answer a conversation."""
        return await chat(body, request, state)

    return router
