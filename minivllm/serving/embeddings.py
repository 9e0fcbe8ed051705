"""`/v1/embeddings`: request model and endpoint."""

# Generated from nbs/serving/embeddings.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.outputs import RequestOutput
from minivllm.serving.generation import ServerState, answer
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.pooling import PooledFields, PoolingWriter, plan_inputs

__all__ = ["EmbeddingRequest", "EmbeddingWriter", "embeddings_router"]


class EmbeddingRequest(PooledFields):
    """`POST /v1/embeddings`. ``dimensions`` and ``encoding_format`` are OpenAI's, ``pooling_type`` is ours, the others are vLLM's."""

    fixed: ClassVar = {"task": "embed"}
    names: ClassVar[tuple[str, ...]] = (*PooledFields.names, "pooling_type", "dimensions", "normalize")

    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool | None = None
    add_special_tokens: bool = True
    pooling_type: Literal["mean", "cls", "last"] | None = None


def encode_vector(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    """A vector as JSON numbers, or as the base64 of its float32 numbers, little-endian."""
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class EmbeddingWriter(PoolingWriter):
    """Writes the vectors of one request."""

    def entry(self, i: int, output: RequestOutput) -> dict[str, Any]:
        vector = encode_vector(output.pooled or [], self.body.encoding_format)
        return {"object": "embedding", "index": i, "embedding": vector}


def embeddings_router(state: ServerState) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings", response_model=None)
    async def create_embedding(body: EmbeddingRequest, request: Request) -> dict[str, Any] | Response:
        """A vector for each input."""
        return await answer(request, state, body.model, plan_inputs(body, request, state, "embd"), EmbeddingWriter)

    return router
