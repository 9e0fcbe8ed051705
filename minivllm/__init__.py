"""A small, readable vLLM: LLM, SamplingParams and the engine behind them."""

# Generated from nbs/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
import os
from typing import TYPE_CHECKING, Any

from minivllm.core import views as core_views

__version__ = "0.1.0"

if os.environ.get("MINIVLLM_CPU_FEATURES"):  # before torch is imported, which looks at the CPU once
    from minivllm_kernels.cpu.features import narrow_torch

    narrow_torch()

if TYPE_CHECKING:
    from minivllm.core.config import EngineArgs
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.llm import LLM
    from minivllm.engine.llm_engine import LLMEngine
    from minivllm.engine.outputs import CompletionOutput, RequestOutput
    from minivllm.lora.adapter import LoRARequest
    from minivllm.sampling.params import SamplingParams
    from minivllm.sampling.pooling import PoolingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

core_views.provide(lambda: importlib.import_module("minivllm.viz"))  # `trace.show()` asks the core for them
_HOMES = {
    "AsyncLLM": "minivllm.engine.async_llm",
    "CompletionOutput": "minivllm.engine.outputs",
    "EngineArgs": "minivllm.core.config",
    "LLM": "minivllm.engine.llm",
    "LLMEngine": "minivllm.engine.llm_engine",
    "LoRARequest": "minivllm.lora.adapter",
    "PoolingParams": "minivllm.sampling.pooling",
    "RequestOutput": "minivllm.engine.outputs",
    "SamplingParams": "minivllm.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
