"""Any causal model of transformers on the paged cache, through its AttentionInterface."""

# Generated from nbs/models/fallback.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import copy
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, Plan
from minivllm.core.config import KVCacheConfig
from minivllm.core.module import ModuleList
from minivllm.models.decoder import Decoder
from minivllm.models.mixers.attention import SelfAttentionSpec
from minivllm.models.mixers.state import NoMLPSpec
from minivllm.models.ops.select import make_layer_ops
from minivllm.models.parallel import Stage
from minivllm.models.spec import DecoderSpec, LayerSpec

_NAME = "minivllm_paged"


@dataclass(frozen=True, kw_only=True)
class TransformersSpec(DecoderSpec):
    """The spec of a model that transformers computes, but for its attention.

    Attributes:
        shapes: those of all parameters, by their names in the model.
        config: the config object of transformers.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    config: Any = field(default=None, compare=False, repr=False)

    def weight_shapes(self, share: Any = None) -> dict[str, tuple[int, ...]]:
        """See `DecoderSpec`. Raises ValueError for a share: transformers has the whole model."""
        if share is not None:
            raise ValueError(
                f"tensor_parallel_size is not implemented for {self.family}, which runs through transformers"
            )
        return dict(self.shapes)


def _refused(what: str, why: str) -> ValueError:
    return ValueError(f"{what} cannot run through transformers (model_impl='transformers'): {why}")


def model_class(hf_config: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' class for a config, and the config as its object.

    Raises:
        ValueError: there is none, or its attention cannot be replaced; names it.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    model_type = hf_config.get("model_type")
    name = (hf_config.get("architectures") or [NAMES.get(str(model_type), f"model_type {model_type!r}")])[0]
    cls = getattr(transformers, str(name), None)
    if cls is None or name not in NAMES.values():
        raise _refused(name, f"transformers {transformers.__version__} has no such language model")
    if not cls._supports_attention_backend or getattr(cls, "_is_stateful", False):
        raise _refused(name, "its attention does not go through transformers' AttentionInterface")
    config = transformers.AutoConfig.for_model(**{k: v for k, v in hf_config.items() if k != "transformers_version"})
    chunked = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if chunked:
        raise _refused(name, f"its layers are of the types {', '.join(sorted(chunked))}")
    return cls, config


def transformers_spec(hf_config: dict[str, Any]) -> TransformersSpec:
    """The spec of a model, found by running it without memory.

    Raises:
        ValueError: it cannot be run on a paged cache; names the model, and what it needs.
    """
    cls, config = model_class(hf_config)
    calls: list[tuple[Any, ...]] = []
    with torch.device("meta"):
        model = _build(cls, config).to(torch.bfloat16)  # on this device, matmuls of experts know no other
        if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
            raise _refused(cls.__name__, "its forward takes no position_ids")
        try:
            ids = torch.zeros((1, 2), dtype=torch.int64)
            model.base_model(input_ids=ids, position_ids=ids, use_cache=False, minivllm=calls.append)
        except Exception as error:
            raise _refused(cls.__name__, f"it cannot be run without memory: {type(error).__name__}: {error}") from error
    if [layer for layer, _ in calls] != list(range(len(calls))) or not calls:
        raise _refused(cls.__name__, f"its layers call attention in the order {[layer for layer, _ in calls]}")
    types = getattr(config, "layer_types", None) or [None] * len(calls)
    for (_, mixer), kind in zip(calls, types, strict=False):
        if kind == "sliding_attention" and mixer.sliding_window is None:
            raise _refused(cls.__name__, "its windows are said by a mask alone")
    return TransformersSpec(
        family=cls.__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_eps=1e-6,
        layers=tuple(LayerSpec(mixer=mixer, mlp=NoMLPSpec()) for _, mixer in calls),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        shapes=tuple((name, tuple(p.shape)) for name, p in model.named_parameters()),
        config=config,
    )


def _build(cls: Any, config: Any) -> Any:
    """A model with our attention, its parameters not yet loaded."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, paged_attention)
    return cls._from_config(copy.deepcopy(config), attn_implementation=_NAME).eval()


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    minivllm: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface. query [1, heads, T, D], key and value [1, kv_heads, T, D]; gives [1, T, heads, D].

    minivllm: the callable that handles the call. It takes (layer, its spec) while the model is looked at, and computes a step's
    attention later.
    """
    if attention_mask is not None or not getattr(module, "is_causal", True) or others.get("position_bias") is not None:
        raise ValueError("its attention is not causal, or is said by a mask")
    dims = query.shape[-1], value.shape[-1]
    if query.is_meta:
        spec = SelfAttentionSpec(
            num_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim=max(dims), scale=scaling or dims[0] ** -0.5,
            sliding_window=sliding_window, soft_cap=softcap, sinks=None if s_aux is None else "sinks",
        )  # fmt: skip
        minivllm((module.layer_idx, spec))
        return value.new_empty(1, query.shape[2], query.shape[1], dims[1]), None
    q, k, v = (F.pad(x[0].transpose(0, 1), (0, max(dims) - x.shape[-1])).contiguous() for x in (query, key, value))
    return minivllm(module.layer_idx, q, k, v, s_aux)[None, ..., : dims[1]], None


class _Given(torch.nn.Module):
    """Stands in the place of a model's layers, and gives what it is given. kind: of output that those layers have."""

    kind: Any = dict

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return self.kind(last_hidden_state=inputs_embeds)


class TransformersDecoder(Decoder):
    """A model of transformers with paged attention; see `Decoder`.

    Attributes:
        model: the model, from `load_weights` on.
    """

    spec: TransformersSpec

    def __init__(
        self,
        spec: TransformersSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None,
    ) -> None:
        self.spec, self.backend, self.dtype, self.device, self.kv_dtype = spec, backend, dtype, device, kv_dtype
        self.ops = make_layer_ops("torch", backend.batch_invariant)
        self.layers, self.eager, self.lora, self.pooling_head, self._captured = ModuleList(), True, None, None, None
        self.group, self.stage = None, Stage(range(spec.num_layers), True, True)
        self.model: Any = None

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Fill every parameter from (name in the model, tensor). Raises ValueError for one that is missing or unknown."""
        cls, _ = model_class(self.spec.config.to_dict() | {"architectures": [self.spec.family]})
        self._use(_build(cls, self.spec.config).to(self.dtype))
        missing, unknown = self.model.load_state_dict(dict(weights), strict=False)
        if wrong := [*missing, *unknown]:
            raise ValueError(f"{self.spec.family}: weights are missing or unknown: {', '.join(wrong[:5])}")

    def load_folder(self, folder: str) -> None:
        """Read a checkpoint as transformers does, in any form that it knows. Raises ValueError for one that lacks something."""
        cls, _ = model_class(self.spec.config.to_dict() | {"architectures": [self.spec.family]})
        model, found = cls.from_pretrained(
            folder, config=copy.deepcopy(self.spec.config), dtype=self.dtype, attn_implementation=_NAME,
            local_files_only=True, output_loading_info=True,
        )  # fmt: skip
        if wrong := sorted([*found["missing_keys"], *found["mismatched_keys"]]):
            raise ValueError(f"{self.spec.family}: the checkpoint lacks {', '.join(map(str, wrong[:5]))}")
        self._use(model)

    def _use(self, model: Any) -> None:
        self.model = model.eval().to(self.device)
        head, self._given = copy.copy(self.model), _Given()
        head.__dict__["_modules"] = dict(self.model._modules) | {self.model.base_model_prefix: self._given}
        self._head = head
        self._backends: dict[int, AttentionBackend] = {}

    def bind(self, kv_cache_config: KVCacheConfig) -> None:
        groups = enumerate(kv_cache_config.groups)
        self._places = {layer: (g, i) for g, group in groups for i, layer in enumerate(group.layers)}

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        plans: Sequence[Plan],
        media: Any = None,
        x: Tensor | None = None,
    ) -> Tensor:

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            group, place = self._places[layer]
            if layer not in self._backends:
                self._backends[layer] = self.backend if sinks is None else self.backend.with_sinks(sinks)
            backend, cache, plan = self._backends[layer], kv_caches[place], plans[group]
            backend.write(k, v, cache, plan.slot_mapping)
            return backend.attend(q, cache, plan)

        if media is not None and x is None:
            x = self.model.get_input_embeddings()(token_ids)
            x[media.rows] = media.values
        given = {"input_ids": token_ids[None]} if x is None else {"inputs_embeds": x[None]}
        found = self.model.base_model(**given, position_ids=positions[None], use_cache=False, minivllm=attend)
        self._given.kind = type(found)
        return found.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
