"""How does a conversation become a prompt, and back?

A model reads one line of tokens.
"""

# Generated from nbs/6_serving/08_chat.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=c0fb6d77a243 module=1b4880410195

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.models.tokenizer import apply_chat_template
from minivllm.sampling.params import SamplingParams
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

__all__ = [
    "ChatWriter",
    "chat",
    "chat_logprobs",
    "chat_params",
    "chat_router",
    "render_chat",
    "render_request",
    "token_bytes",
]


# %% nbs/6_serving/08_chat.ipynb #render_chat
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
) -> tuple[str, list[int]]:
    """The prompt's text and token ids. Raises ApiError or ValueError: a field that the template would drop, or that it refuses."""
    for name in template_kwargs:
        if name in _RESERVED:
            raise ApiError(400, f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
    plain = [message.for_template() for message in messages]
    template = chat_template or str(tokenizer.chat_template or "")
    for i, message in enumerate(plain):
        for name in set(message) - {"role", "content"}:
            if not re.search(rf"\b{name}\b", template):
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
        **template_kwargs,
    )
    return text, list(tokenizer(text).input_ids) if add_special_tokens else token_ids


async def render_request(state: ServerState, body: Any) -> tuple[str, list[int]]:
    """`render_chat` for a body with the fields of a chat, in the thread of the tokenizer. Raises ApiError."""
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
                template_kwargs=body.chat_template_kwargs or {},
            )
        )
    except Exception as error:
        raise as_api_error(error) from error


# %% nbs/6_serving/08_chat.ipynb #chat_logprobs
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


# %% nbs/6_serving/08_chat.ipynb #endpoint
def chat_params(body: ChatCompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """The request as SamplingParams. Raises what `SamplingParams` raises."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limit = limit if limit is not None else defaults.get("max_tokens")
    return body.sampling_params(
        defaults,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


async def chat(body: ChatCompletionRequest, request: Request, state: ServerState) -> dict[str, Any] | Response:
    """Answer one body."""
    name = request_name("chatcmpl", body.request_id, request.headers.get("x-request-id"))
    job = Job(state, name, state.check_model(body.model))
    try:
        params = chat_params(body, state.llm.get_default_sampling_params())
    except Exception as error:
        raise as_api_error(error) from error
    text, token_ids = await render_request(state, body)
    prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": token_ids}
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    writer = ChatWriter(body, job, token_bytes(state.llm.get_tokenizer()) if body.logprobs else None)
    await job.submit([prompt], params, body.priority, body.user or body.safety_identifier)
    if body.stream:
        return SSEResponse(job, writer.chunks())
    try:
        outputs = await unless_disconnected(request, collect(job), state.request_timeout)
    finally:
        await job.close()
    return writer.whole(outputs[0])


class ChatWriter:
    """Writes one answer, whole or in pieces."""

    def __init__(self, body: ChatCompletionRequest, job: Job, to_bytes: Any) -> None:
        self.body, self.job, self.to_bytes = body, job, to_bytes

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.job.id, "object": kind, "created": self.job.created, "model": self.job.model}

    def _choice(self, completion: CompletionOutput, name: str, message: dict[str, Any]) -> dict[str, Any]:
        asked = self.body.logprobs and completion.logprobs is not None and completion.token_ids
        logprobs = chat_logprobs(completion, self.body.top_logprobs or 0, self.to_bytes) if asked else None
        choice = {
            "index": completion.index,
            name: message,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return choice | ({"token_ids": completion.token_ids} if self.body.return_token_ids else {})

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        counter = Counter()
        counter.add(0, output)
        choices = [
            self._choice(c, "message", {"role": "assistant", "content": c.text, "refusal": None})
            for c in output.outputs
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": counter.usage(), **self._prompt(output)}

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output)
        return more

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        head, counter = self._head("chat.completion.chunk"), Counter()
        unused = {"usage": None} if self.body.include_usage else {}
        for index in range(self.body.n):
            delta = {"role": "assistant", "content": ""}
            yield {
                **head,
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
                **unused,
            }
        async for i, output in merge(self.job.streams):
            check_output(output)
            counter.add(i, output)
            for completion in output.outputs:
                if not completion.text and not completion.token_ids and completion.finish_reason is None:
                    continue
                delta = {"content": completion.text} if completion.text or completion.token_ids else {}
                bill = {"usage": counter.usage()} if self.body.continuous_usage else unused
                more = self._prompt(output) if output.finished else {}
                yield {**head, "choices": [self._choice(completion, "delta", delta)], **bill, **more}
            if output.finished:
                self.job.state.observe(output, counter.generated[i])
        if self.body.include_usage:
            yield {**head, "choices": [], "usage": counter.usage()}


def chat_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> dict[str, Any] | Response:
        """Answer a conversation."""
        return await chat(body, request, state)

    return router
