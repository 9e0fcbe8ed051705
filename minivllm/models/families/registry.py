"""All model families, and the spec of any of them from a Hugging Face config."""

# Generated from nbs/models/families/registry.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any, NamedTuple

from minivllm.models import gguf, spec
from minivllm.models.families import deepseek, dense, encoders, media, moe, state

_MODULES = (spec, dense, moe, deepseek, encoders, state, media)  # importing them has registered their families
spec_from_config = spec.spec_from_config  # so here it knows them all


def architectures(pooling: bool | None = None) -> tuple[str, ...]:
    """Names of `architectures` in a config that `spec_from_config` knows. pooling: only those that predict no tokens, or only the others."""
    return tuple(name for name, make in spec.FAMILIES.items() if pooling in (None, _kind(make) == "pooling"))


def is_known(hf_config: dict[str, Any]) -> bool:
    """Whether `spec_from_config` knows the architecture."""
    named = (hf_config.get("architectures") or [None])[0]
    return named in spec.FAMILIES if named else spec._ARCHITECTURE_OF.get(hf_config.get("model_type") or "") is not None


_KINDS = {encoders.__name__: "pooling", state.__name__: "states", media.__name__: "pictures"}
TESTED = {
    "text": "logits and greedy tokens",
    "states": "logits and greedy tokens",
    "pictures": "log-probabilities and greedy tokens, with 0, 1 and 3 pictures or clips",
    "pooling": "hidden states, pooled vectors and class scores",
}
"""For each kind of family, what is compared with transformers, in ragged batches with chunked prompts, prefix hits and preemption where the kind has
them. A test refuses a family that is not in its comparison."""


class FamilyFacts(NamedTuple):
    """Facts about a family. kind: a key of `TESTED`. formats: those of its checkpoints."""

    about: str
    architectures: tuple[str, ...]
    kind: str
    formats: tuple[str, ...]


def _kind(make: spec.Family) -> str:
    return _KINDS.get(make.__module__, "text")


def families() -> list[FamilyFacts]:
    """All families, one for each function that makes a spec, in the order of registration."""
    found: dict[spec.Family, list[str]] = {}
    for name, make in spec.FAMILIES.items():
        found.setdefault(make, []).append(name)
    in_gguf = {family.hf_class for family in gguf.FAMILIES.values()}
    return [
        FamilyFacts(
            (make.__doc__ or make.__name__).splitlines()[0].rstrip("."), tuple(names), _kind(make),
            ("safetensors", "GGUF") if in_gguf & set(names) else ("safetensors",),
        )
        for make, names in found.items()
    ]  # fmt: skip
