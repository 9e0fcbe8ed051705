"""All model families, and the spec of any of them from a Hugging Face config."""

# Generated from nbs/models/families/registry.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from minivllm.models import spec
from minivllm.models.families import deepseek, dense, encoders, moe, state
from minivllm.models.spec import DecoderSpec

__all__ = ["architectures", "spec_from_config"]

_MODULES = (spec, dense, moe, deepseek, encoders, state)  # importing them has registered their families


def architectures(pooling: bool | None = None) -> tuple[str, ...]:
    """Names of `architectures` in a config that `spec_from_config` knows. pooling: only those that predict no tokens, or only the others."""
    poolers = (encoders.bert, encoders.roberta, encoders.modernbert, encoders.with_head)
    return tuple(name for name, make in spec.FAMILIES.items() if pooling in (None, make in poolers))


def spec_from_config(hf_config: dict[str, Any]) -> DecoderSpec:
    """The spec of the model that a `config.json` describes.

    Args:
        hf_config: the parsed file, of transformers 5 or older.

    Raises:
        ValueError: unknown architecture, unsupported field or value; names it.
    """
    return spec.spec_from_config(hf_config)
