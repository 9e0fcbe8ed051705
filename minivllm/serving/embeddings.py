"""`/v1/embeddings`: request model and endpoint."""

# Generated from nbs/serving/embeddings.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from minivllm.engine.outputs import RequestOutput
from minivllm.sampling.pooling import PoolingParams
from minivllm.serving.errors import ApiError, as_api_error
from minivllm.serving.generation import Job, ServerState, check_output, request_name, unless_disconnected
from minivllm.serving.protocol import ApiModel

__all__ = ["EmbeddingRequest", "embed", "embeddings_router"]


# %% nbs/serving/embeddings.ipynb #EmbeddingRequest
class EmbeddingRequest(ApiModel):
    """`POST /v1/embeddings`. Below ``user`` stand the fields that vLLM adds, and ``pooling_type``, which is ours."""

    unsupported: ClassVar = {"lora_request": ((), "not implemented")}

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    normalize: bool = True
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    pooling_type: Literal["mean", "last"] = "mean"

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)

    def pooling_params(self) -> PoolingParams:
        """Raises InvalidParameter."""
        return PoolingParams(
            pooling_type=self.pooling_type,
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


# %% nbs/serving/embeddings.ipynb #encode_vector
def encode_vector(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    """A vector as JSON numbers, or as the base64 of its float32 numbers, little-endian."""
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# %% nbs/serving/embeddings.ipynb #embed
async def embed(body: EmbeddingRequest, request: Request, state: ServerState) -> dict[str, Any]:
    """Answer one body."""
    name = request_name("embd", body.request_id, request.headers.get("x-request-id"))
    job = Job(state, name, state.check_model(body.model))
    if not body.inputs():
        raise ApiError(400, "input: an empty list; give at least one input", param="input")
    try:
        params = body.pooling_params()
        prompts = [await _prompt(text, body, state) for text in body.inputs()]
    except Exception as error:
        raise as_api_error(error) from error
    await job.submit(prompts, params, body.priority, body.user)
    try:
        outputs = await unless_disconnected(request, _collect(job), state.request_timeout)
    finally:
        await job.close()
    data = [
        {"object": "embedding", "index": i, "embedding": encode_vector(output.pooled or [], body.encoding_format)}
        for i, output in enumerate(outputs)
    ]
    count = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"id": job.id, "object": "list", "created": job.created, "model": job.model, "data": data, "usage": usage}


async def _prompt(given: str | list[int], body: EmbeddingRequest, state: ServerState) -> dict[str, Any]:
    """An input as the engine takes it."""
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    if not isinstance(given, str):
        return {"prompt_token_ids": given, **salt}
    if body.add_special_tokens:
        return {"prompt": given, **salt}
    tokenizer = state.llm.get_tokenizer()
    token_ids = await state.llm.run_input(lambda: tokenizer.encode(given, add_special_tokens=False))
    return {"prompt_token_ids": token_ids, **salt}


async def _collect(job: Job) -> list[RequestOutput]:
    outputs = []
    for stream in job.streams:
        async for output in stream:
            check_output(output)
            outputs.append(output)
    return outputs


def embeddings_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embedding(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """A vector for each input."""
        return await embed(body, request, state)

    return router
