"""`/v1/completions`: prompts, echo, logprobs, streaming."""

# Generated from nbs/serving/completions.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.detokenizer import DetokenizerFactory
from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.multimodal.inputs import decode_tensor
from minivllm.sampling.grammar import check_limits
from minivllm.sampling.params import SamplingParams
from minivllm.serving.errors import ApiError
from minivllm.serving.generation import Job, Plan, ServerState, Writer, answer, engine_prompts, plan_fields
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.protocol import CompletionRequest

__all__ = ["completion_logprobs", "completions_router", "finite", "prompt_logprobs"]


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
        values.append(None if chosen is None else finite(chosen.logprob))
        tops.append(None if entry is None else _top(token_id, entry, count))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(offsets)}


def _top(token_id: int, entry: dict[int, Any], count: int) -> dict[str, float]:
    """The most likely first, then the chosen one if it is not among them. Tokens of equal text share an entry, the first one's."""
    found: dict[str, float] = {}
    for other, logprob in sorted(entry.items(), key=lambda item: item[1].rank or 0):
        if (logprob.rank or 0) <= count or other == token_id:
            found.setdefault(logprob.decoded_token or "", finite(logprob.logprob))
    return found


def finite(value: float) -> float:
    """JSON has no infinity: a forbidden token gets vLLM's stand-in."""
    return max(value, -9999.0)


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
        text = output.prompt
        self.text: str = decode(self.token_ids, skip_special_tokens=skip_special_tokens) if text is None else text

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
    """The arrays of a prompt, followed by those of its answer."""
    if second is None:
        return first
    second = second | {"text_offset": [at + moved for at in second["text_offset"]]}
    return {name: [*first[name], *second[name]] for name in first}


class CompletionWriter(Writer):
    """Writes the choices of completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._offset: dict[int, int] = {}  # characters of the echo, by choice

    def usage(self) -> dict[str, Any]:
        return self.counter.usage(self.body.max_tokens != 0)

    def choices(self, i: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for completion in output.outputs:
            yield self._choice(i * self.body.n + completion.index, output, completion)

    def pieces(self, i: int, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for completion in output.outputs:
            if completion.text or completion.token_ids or completion.finish_reason is not None:
                yield self._choice(i * self.body.n + completion.index, output, completion), {}

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """One entry of ``choices``; in a stream, what is new."""
        body, first = self.body, index not in self._offset
        generates = body.max_tokens != 0
        text, logprobs = (completion.text, self._logprobs(index, completion)) if generates else ("", None)
        if first:
            self._offset[index] = 0
            if body.echo:
                detokenizers = self.job.state.llm.get_detokenizers()
                echo = Echo(output, detokenizers, body.skip_special_tokens, continued=generates)
                self._offset[index] = len(echo.text)
                if body.logprobs is not None:
                    logprobs = join(echo.logprobs(body.logprobs), logprobs, len(echo.text))
                text = echo.text + text
        shows_scores = body.prompt_logprobs is not None and completion.finish_reason is not None
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason if generates else "length",
            "stop_reason": completion.stop_reason if generates else None,
            "prompt_logprobs": prompt_logprobs(output) if shows_scores else None,
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids if generates else []
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice

    def _logprobs(self, index: int, completion: CompletionOutput) -> dict[str, Any] | None:
        if self.body.logprobs is None or completion.logprobs is None:
            return None
        moved = self._offset.get(index) or 0
        offsets = [at + moved for at in completion.text_offsets or ()]
        return completion_logprobs(completion.token_ids, completion.logprobs, offsets, self.body.logprobs)


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token {token id: {logprob, rank, decoded_token}}, null for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token, p in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]


def _completion_params(body: CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """The request as SamplingParams. Raises ApiError or what `SamplingParams` raises."""
    check_limits(body.structure() or {})
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


def _read_embeds(body: CompletionRequest, texts: Sequence[str], state: ServerState) -> list[dict[str, Any]]:
    """Prompts of embeddings as the engine takes them. Raises ApiError."""
    if not state.llm.config.args.enable_prompt_embeds:
        message = "prompt_embeds are not allowed here (--enable-prompt-embeds allows them)"
        raise ApiError(400, message, param="prompt_embeds")
    if body.echo:
        raise ApiError(400, "echo: a prompt of prompt_embeds has no text", param="echo")
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    try:
        return [{"prompt_embeds": decode_tensor(text, f"prompt_embeds[{i}]")} | salt for i, text in enumerate(texts)]
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt_embeds") from error


async def _plan_completion(body: CompletionRequest, request: Request, state: ServerState) -> Plan:
    """Check a body and make its prompts. Raises ApiError or what `SamplingParams` raises."""
    fields = plan_fields(body, state, request, "cmpl")
    params = _completion_params(body, state.llm.get_default_sampling_params())
    prompts, embeds = body.prompts(), body.embeds()
    if not prompts and not embeds:
        raise ApiError(400, "prompt is required: give at least one prompt, or prompt_embeds", param="prompt")
    state.check_room((len(embeds) + len(prompts)) * body.n)
    made = await state.llm.run_input(lambda: _read_embeds(body, embeds, state)) if embeds else []
    return Plan(
        **fields,
        prompts=made + await engine_prompts(body, prompts, state),
        params=params,
        cut_max_tokens=False,
    )


def completions_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> dict[str, Any] | Response:
        """Complete one or more prompts."""
        return await answer(request, state, body.model, _plan_completion(body, request, state), CompletionWriter)

    return router
