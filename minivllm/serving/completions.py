"""`/v1/completions`: prompts, echo, logprobs, streaming."""

# Generated from nbs/serving/completions.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.detokenizer import DetokenizerFactory
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.sampling.params import SamplingParams
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
    usage,
)
from minivllm.serving.protocol import CompletionRequest

__all__ = [
    "Writer", "complete", "completion_params", "completions_router", "engine_prompts", "prompt_logprobs",
]  # fmt: skip


# %% nbs/serving/completions.ipynb #completion_logprobs
def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[dict[int, Any] | None], offsets: Sequence[int], count: int
) -> dict[str, Any]:
    """OpenAI's arrays. ``entries``: {token id: Logprob} of each token. ``count``: alternatives asked for; the chosen one is always there."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        chosen = None if entry is None else entry[token_id]
        tokens.append((chosen.decoded_token or "") if chosen is not None else "")
        values.append(None if chosen is None else _finite(chosen.logprob))
        tops.append(None if entry is None else _top(token_id, entry, count))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def _top(token_id: int, entry: dict[int, Any], count: int) -> dict[str, float]:
    """The likeliest first, then the chosen one if it is not among them. Tokens of equal text share an entry: the likeliest has it."""
    found: dict[str, float] = {}
    for other, logprob in sorted(entry.items(), key=lambda item: item[1].rank or 0):
        if (logprob.rank or 0) <= count or other == token_id:
            found.setdefault(logprob.decoded_token or "", _finite(logprob.logprob))
    return found


def _finite(value: float) -> float:
    """JSON has no infinity: a forbidden token gets vLLM's stand-in."""
    return max(value, -9999.0)


# %% nbs/serving/completions.ipynb #Echo
class Echo:
    """The prompt of a request, as the beginning of its answer.

    ``continued``: an answer follows, which begins with the character that the prompt leaves unfinished.
    """

    def __init__(
        self, output: RequestOutput, detokenizers: DetokenizerFactory, skip_special_tokens: bool, continued: bool
    ) -> None:
        self.token_ids, self.detokenizers = output.prompt_token_ids, detokenizers
        self.entries = output.prompt_logprobs
        self.pieces = [detokenizers.token_text(token) for token in self.token_ids]
        decode = detokenizers.settled_text if continued else detokenizers.tokenizer.decode
        self.text = output.prompt
        if self.text is None:
            self.text = decode(self.token_ids, skip_special_tokens=skip_special_tokens)

    def logprobs(self, count: int) -> dict[str, Any]:
        entries = self.entries or [None] * len(self.token_ids)
        arrays = completion_logprobs(self.token_ids, entries, self.offsets(), count)
        return arrays | {"tokens": self.pieces}

    def offsets(self) -> list[int]:
        """Where each token begins in the text. A special token that the text does not hold takes no room."""
        detokenizer, found, at = self.detokenizers(skip_special_tokens=False), [], 0
        for token in self.token_ids:
            found.append(min(at, len(self.text)))
            piece = detokenizer.push(token)
            if token not in self.detokenizers.special or self.text.startswith(piece, at):
                at += len(piece)
        return found


def join(first: dict[str, Any], second: dict[str, Any] | None, moved: int) -> dict[str, Any]:
    """Arrays of a prompt and of its answer, one behind the other."""
    if second is None:
        return first
    second = second | {"text_offset": [at + moved for at in second["text_offset"]]}
    return {name: [*first[name], *second[name]] for name in first}


# %% nbs/serving/completions.ipynb #Writer
class Writer:
    """Writes the choices of one request."""

    def __init__(self, body: CompletionRequest, detokenizers: DetokenizerFactory) -> None:
        self.body, self.detokenizers = body, detokenizers
        self.generates = body.max_tokens != 0
        self.offset: dict[int, int] = {}
        self.echoed: set[int] = set()

    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """One entry of ``choices``; in a stream, what is new."""
        count = self.body.logprobs
        text, logprobs = (completion.text, self._logprobs(index, completion)) if self.generates else ("", None)
        if self.body.echo and index not in self.echoed:
            self.echoed.add(index)
            echo = Echo(output, self.detokenizers, self.body.skip_special_tokens, self.generates)
            self.offset[index] = len(echo.text)
            if count is not None:
                logprobs = join(echo.logprobs(count), logprobs, len(echo.text))
            text = echo.text + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
        choice["finish_reason"] = "length" if not self.generates else completion.finish_reason
        choice["stop_reason"] = completion.stop_reason if self.generates else None
        if self.body.prompt_logprobs is not None and completion.finish_reason is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output)
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids if self.generates else []
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(self, index: int, completion: CompletionOutput) -> dict[str, Any] | None:
        if self.body.logprobs is None or completion.logprobs is None:
            return None
        moved = self.offset.get(index, 0)
        offsets = [at + moved for at in completion.text_offsets or ()]
        return completion_logprobs(completion.token_ids, completion.logprobs, offsets, self.body.logprobs)


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token {token id: {logprob, rank, decoded_token}}, null for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token, p in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]


# %% nbs/serving/completions.ipynb #endpoint
def completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """The request as SamplingParams. Raises ApiError or what `SamplingParams` raises."""
    scores_only = body.max_tokens == 0
    if scores_only and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1, got 0 (0 needs echo=true)", param="max_tokens")
    if body.echo and body.logprobs is not None and body.prompt_logprobs not in (None, body.logprobs):
        raise ApiError(400, "with echo, prompt_logprobs follows logprobs; leave it out", param="prompt_logprobs")
    scores = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    return body.sampling_params(
        defaults,
        max_tokens=1 if scores_only else body.max_tokens,
        best_of=body.best_of,
        logprobs=body.logprobs,
        prompt_logprobs=scores,
    )


async def engine_prompts(body: CompletionRequest, state: ServerState) -> list[Any]:
    """Prompts as the engine takes them: token ids where ``add_special_tokens`` is off, and the cache salt."""
    tokenizer = state.llm.get_tokenizer()
    prompts: list[Any] = []
    for prompt in body.prompts():
        form: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if isinstance(prompt, str) and not body.add_special_tokens:
            text = prompt
            form["prompt_token_ids"] = await state.llm.run_input(
                lambda text=text: tokenizer.encode(text, add_special_tokens=False)  # type: ignore[misc]
            )
        prompts.append(form if body.cache_salt is None else form | {"cache_salt": body.cache_salt})
    return prompts


# %% nbs/serving/completions.ipynb #complete
async def complete(body: CompletionRequest, request: Request, state: ServerState) -> dict[str, Any] | Response:
    """Answer one body."""
    job = Job(
        state, request_name("cmpl", body.request_id, request.headers.get("x-request-id")), state.check_model(body.model)
    )
    try:
        params = completion_params(body, state.llm.get_default_sampling_params())
        if not body.prompts():
            raise ApiError(400, "prompt: an empty list; give at least one prompt", param="prompt")
        prompts = await engine_prompts(body, state)
    except ApiError:
        raise
    except Exception as error:
        raise as_api_error(error) from error
    writer = Writer(body, state.llm.get_detokenizers())
    unlimited = body.max_tokens is None
    await job.submit(prompts, params, body.priority, body.user or body.safety_identifier, unlimited)
    if body.stream:
        return SSEResponse(job, _chunks(body, job, writer))
    try:
        outputs = await unless_disconnected(request, collect(job), state.request_timeout)
    finally:
        await job.close()
    return _whole(body, job, writer, outputs)


# %% nbs/serving/completions.ipynb #completion-chunks
def _head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "object": "text_completion", "created": job.created, "model": job.model}


def _whole(body: CompletionRequest, job: Job, writer: Writer, outputs: list[RequestOutput]) -> dict[str, Any]:
    counter, choices = Counter(), []
    for i, output in enumerate(outputs):
        counter.add(i, output)
        choices += [writer.choice(i * body.n + c.index, output, c) for c in output.outputs]
    return {**_head(job), "choices": choices, "usage": _bill(writer, counter)}


async def _chunks(body: CompletionRequest, job: Job, writer: Writer) -> AsyncIterator[dict[str, Any]]:
    counter = Counter()
    async for i, output in merge(job.streams):
        check_output(output)
        counter.add(i, output)
        for completion in output.outputs:
            if not completion.text and not completion.token_ids and completion.finish_reason is None:
                continue
            chunk = {**_head(job), "choices": [writer.choice(i * body.n + completion.index, output, completion)]}
            if body.continuous_usage:
                chunk["usage"] = _bill(writer, counter)
            elif body.include_usage:
                chunk["usage"] = None
            yield chunk
    if body.include_usage:
        yield {**_head(job), "choices": [], "usage": _bill(writer, counter)}


def _bill(writer: Writer, counter: Counter) -> dict[str, Any]:
    bill = counter.usage()
    if writer.generates:
        return bill
    return usage(bill["prompt_tokens"], 0, bill["prompt_tokens_details"]["cached_tokens"])


def completions_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> dict[str, Any] | Response:
        """Complete one or more prompts."""
        return await complete(body, request, state)

    return router
