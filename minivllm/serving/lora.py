"""LoRA adapters over HTTP: served by name, loaded and unloaded while serving."""

# Generated from nbs/serving/lora.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import Field

from minivllm.lora.adapter import LoRARequest
from minivllm.serving.errors import ApiError
from minivllm.serving.generation import ServerState
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.protocol import ApiModel

Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapter(ApiModel):
    """`POST /v1/load_lora_adapter`, in vLLM's form."""

    lora_name: Name
    lora_path: Name


class UnloadAdapter(ApiModel):
    """`POST /v1/unload_lora_adapter`, in vLLM's form."""

    lora_name: Name


def serve_adapters(state: ServerState) -> None:
    """Check the adapters that the operator named, and serve them. Raises ValueError for one that cannot be used."""
    options, args = state.options, state.llm.config.args
    if (options.lora_modules or options.lora_resolvers or options.enable_runtime_lora) and not args.enable_lora:
        raise ValueError("--lora-modules, --lora-resolvers and --enable-runtime-lora need --enable-lora")
    for name, path in options.adapters().items():
        if name in state.model_names:
            raise ValueError(f"--lora-modules: {name!r} is the name of the base model")
        adapter = LoRARequest(name, next(state.lora_ids), path)
        state.llm.llm_engine.input_processor.register(adapter)
        state.adapters[name] = adapter


def lora_router(state: ServerState) -> APIRouter:
    """Load and unload adapters, where the operator allows it."""
    router = APIRouter(route_class=JsonRoute)

    def check_allowed() -> None:
        if not state.options.enable_runtime_lora:
            raise ApiError(403, "this server was started without --enable-runtime-lora", code="runtime_lora_disabled")

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapter) -> PlainTextResponse:
        """Serve an adapter under a name from now on."""
        check_allowed()
        if body.lora_name in state.model_names:
            raise ApiError(400, f"{body.lora_name!r} is served already; unload it first", param="lora_name")
        await state.add_adapter(LoRARequest(body.lora_name, 1, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapter) -> PlainTextResponse:
        """Serve an adapter no longer. Requests that use it go on to their end."""
        check_allowed()
        adapter = state.adapters.pop(body.lora_name, None)
        if adapter is None:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found")
        await state.llm.remove_lora(adapter.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
