"""The frame of blocks that keep a state: read it, work through a step's tokens, write it."""

# Generated from nbs/models/mixers/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.state import MambaSpec, Sequences, StatePlan, StateView
from minivllm.core.config import KVCacheSpec
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import Builder, Mixer, MixerSpec, TokenMixerSpec, register_mixer
from minivllm.models.ops.base import ForwardContext


@dataclass(frozen=True, kw_only=True)
class StateMixerSpec(TokenMixerSpec):
    """Parameters of a `StateMixer`. States are float32: they sum up what thousands of tokens left.

    Attributes:
        prefix: what the weights' names in a checkpoint begin with, after the layer's prefix.
    """

    prefix: str
    rope = None

    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of a state."""

    @abstractmethod
    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the weights that are no linear layer's."""

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        extra = {self.prefix + name: shape for name, shape in self.extra_shapes().items()}
        return MixerSpec.weight_shapes(self, hidden_size) | extra

    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> MambaSpec:
        shapes = self.state_shapes()
        return MambaSpec(shapes=shapes, dtypes=(torch.float32,) * len(shapes), block_size=block_size, dtype=dtype)

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        size = self.attention_spec(block_size, torch.float32, None).num_bytes
        return KVCacheSpec("state", block_size, 1, size, None, 1)


class StateMixer(Mixer):
    """Matmul in, state, matmul out.

    Attributes:
        extra: the weights that are no linear layer's, by the last part of their names.
        wide: the same in float32, those of a convolution [K, C], and `A` of `A_log`: how fast states decay, below 0, [heads] or
            [state_size, channels]; from `process_weights_after_loading` on.
    """

    spec: StateMixerSpec
    in_proj: Linear
    out_proj: Linear

    def __init__(self, spec: StateMixerSpec, builder: Builder) -> None:
        super().__init__(spec, builder)
        how: dict[str, Any] = {"dtype": builder.dtype, "device": builder.device}
        self._kept: dict[str, Any] = {}
        self.extra = {name: torch.empty(shape, **how) for name, shape in spec.extra_shapes().items()}
        self.wide = dict[str, Tensor]()

    @abstractmethod
    def mix(self, u: Tensor, views: list[StateView], where: Sequences) -> Tensor:
        """From the outputs of the first matmul to the inputs of the last, [T, ...], for whole sequences.

        views: where each part of a state is in this layer's cache; changed.
        """

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        yield from Mixer.targets(self)
        for name, weight in self.extra.items():
            yield self.spec.prefix + name, weight.copy_

    def process_weights_after_loading(self) -> None:
        wide = {name: weight.float() for name, weight in self.extra.items()}
        self.wide = {name: w[:, 0].T.contiguous() if w.dim() == 3 else w for name, w in wide.items()}
        if "A_log" in wide:
            decay = -wide["A_log"].exp()
            self.wide["A"] = decay.T.contiguous() if decay.dim() == 2 else decay

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, hidden_size] to the same shape; changes states in this layer's cache."""
        plan = context.plans[self.group]
        assert isinstance(plan, StatePlan), "the group of a state-space layer has a StatePlan"
        views, u = self._views(context.kv_caches[self.cache], plan.spec), self.in_proj(x)
        runs = plan.tokens if self.ops.batch_invariant else plan.runs
        if len(plan.rows) == len(u) and len(runs) == 1:  # nothing but decodes, in the order of the batch
            return self.out_proj(self.mix(u, views, plan.decodes))
        y = u.new_empty(len(u), self.out_proj.in_features)
        for rows, where in runs:
            y[rows] = self.mix(u[rows], views, where)
        return self.out_proj(y)

    def _views(self, cache: Tensor, spec: MambaSpec) -> list[StateView]:
        """Where this layer's states are in a cache. Worked out anew for another cache."""
        key = cache.data_ptr(), cache.shape, spec
        if self._kept.get("key") != key:
            self._kept.update(key=key, views=[StateView(cache, spec, part) for part in range(len(spec.shapes))])
        return self._kept["views"]


@dataclass(frozen=True, kw_only=True)
class NoMLPSpec(MixerSpec):
    """The spec in the MLP's place, for a layer that has none."""

    def linears(self, hidden_size: int) -> dict[str, Any]:
        return {}


@register_mixer(NoMLPSpec)
class NoMLP(Mixer):
    """Holds the place of an MLP; is never called."""

    capturable = True
