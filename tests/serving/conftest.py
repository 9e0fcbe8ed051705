from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from tiny_models import tiny_model_path

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions

__all__ = ["tiny_model_path"]


@pytest.fixture(scope="session")
def tiny_args(tiny_model_path: Any) -> EngineArgs:
    """A tiny random model, with a small pool."""
    return EngineArgs(
        model=str(tiny_model_path("llama")),
        dtype="float32",
        num_gpu_blocks=128,
        max_num_seqs=16,
        max_num_batched_tokens=512,
    )


@pytest.fixture(scope="session")
def long_args(tiny_args: EngineArgs) -> EngineArgs:
    """The tiny model with room for answers that are still under way when a test acts on them."""
    return replace(tiny_args, hf_overrides={"max_position_embeddings": 4096}, num_gpu_blocks=2048)


@pytest.fixture(scope="session")
def tiny(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    """A server of the tiny model; leave it as it was found."""
    options = ServerOptions(served_model_name=["tiny", "tiny-alias"], enable_prompt_tokens_details=True)
    with live_server(tiny_args, options) as server:
        yield server


@pytest.fixture(scope="session")
def smol(smollm2_path: Path) -> Iterator[LiveServer]:
    """A server of SmolLM2 in float32."""
    args = EngineArgs(model=str(smollm2_path), dtype="float32", max_model_len=1024, num_gpu_blocks=512)
    with live_server(args, ServerOptions(served_model_name=["smollm2"])) as server:
        yield server
