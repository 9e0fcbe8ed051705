"""`/v1/embeddings`: request model and endpoint."""

# Generated from nbs/serving/embeddings.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.outputs import RequestOutput
from minivllm.sampling.pooling import PoolingParams
from minivllm.serving.errors import ApiError
from minivllm.serving.generation import Plan, ServerState, Writer, answer, engine_prompts, plan_fields
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.protocol import Int64, RequestFields, as_list

__all__ = ["EmbeddingRequest", "EmbeddingWriter", "embeddings_router"]


class EmbeddingRequest(RequestFields):
    """`POST /v1/embeddings`. ``dimensions`` and ``encoding_format`` are OpenAI's, ``pooling_type`` is ours, the others are vLLM's."""

    unsupported: ClassVar = {"lora_request": ((), "name the adapter as the model")}
    n: ClassVar = 1
    stream: ClassVar = False

    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    add_special_tokens: bool = True
    pooling_type: Literal["mean", "cls", "last"] | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids."""
        return as_list(self.input)

    def pooling_params(self) -> PoolingParams:
        """Raises InvalidParameter."""
        names = ("pooling_type", "dimensions", "normalize", "truncate_prompt_tokens")
        return PoolingParams(task="embed", **{name: getattr(self, name) for name in names})


def encode_vector(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    """A vector as JSON numbers, or as the base64 of its float32 numbers, little-endian."""
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class EmbeddingWriter(Writer):
    """Writes the vectors of one request."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        form = self.body.encoding_format
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(output.pooled or [], form)}
            for i, output in enumerate(outputs)
        ]
        count = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {**self._head("list"), "data": data, "usage": usage}


async def _plan_embedding(body: EmbeddingRequest, request: Request, state: ServerState) -> Plan:
    """Check a body and make its prompts. Raises ApiError, InvalidParameter."""
    inputs = body.inputs()
    if not inputs:
        raise ApiError(400, "input: an empty list; give at least one input", param="input")
    return Plan(
        **plan_fields(body, state, request, "embd"),
        params=body.pooling_params(),
        prompts=await engine_prompts(body, inputs, state),
    )


def embeddings_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings", response_model=None)
    async def create_embedding(body: EmbeddingRequest, request: Request) -> dict[str, Any] | Response:
        """A vector for each input."""
        return await answer(request, state, body.model, _plan_embedding(body, request, state), EmbeddingWriter)

    return router
