"""The frame of blocks that keep a state: read it, work through a step's tokens, write it."""

# Generated from nbs/models/mixers/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from minivllm.attention.state import MambaSpec, StatePlan, StateView
from minivllm.core.config import KVCacheSpec
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import Builder, Mixer, MixerSpec, TokenMixerSpec, register_mixer
from minivllm.models.ops.base import ForwardContext, InPlace

States = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class StateMixerSpec(TokenMixerSpec):
    """Parameters of a `StateMixer`. States are float32: they sum up what thousands of tokens left.

    Attributes:
        prefix: of the names of the weights in a checkpoint, after the layer's.
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
        """See `MixerSpec`."""
        extra = {self.prefix + name: shape for name, shape in self.extra_shapes().items()}
        return MixerSpec.weight_shapes(self, hidden_size) | extra

    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> MambaSpec:
        """See `TokenMixerSpec`."""
        shapes = self.state_shapes()
        return MambaSpec(shapes=shapes, dtypes=(torch.float32,) * len(shapes), block_size=block_size, dtype=dtype)

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """See `TokenMixerSpec`."""
        size = self.attention_spec(block_size, torch.float32, None).num_bytes
        return KVCacheSpec("state", block_size, 1, size, None, 1)


class StateMixer(Mixer):
    """Matmul in, state, matmul out.

    Attributes:
        extra: the weights that are no linear layer's, by the last part of their names.
        steps, scans: each part's recurrence, for one token of many sequences and for many tokens of one.
    """

    steps: ClassVar[tuple[Callable, ...]]
    scans: ClassVar[tuple[Callable, ...]]

    spec: StateMixerSpec
    in_proj: Linear
    out_proj: Linear

    def __init__(self, spec: StateMixerSpec, builder: Builder) -> None:
        super().__init__(spec, builder)
        how: dict[str, Any] = {"dtype": builder.dtype, "device": builder.device}
        self._kept: dict[str, Any] = {}
        self.extra = {name: torch.empty(shape, **how) for name, shape in spec.extra_shapes().items()}

    @abstractmethod
    def mix(self, u: Tensor, states: States, *forms: Callable) -> tuple[Tensor, States]:
        """From the first matmul to the last, with one form of each recurrence: of `steps`, of `scans`, or of `kernels`."""

    def kernels(self, views: list[StateView]) -> tuple[InPlace | None, ...]:
        """What runs each recurrence on states where they lie, if the ops have it."""
        return (None,)

    def step(self, u: Tensor, states: States) -> tuple[Tensor, States]:
        """One token of each of R sequences.

        Args:
            u: [R, outputs of `in_proj`]. states: parts, each `[R, *shape]`.

        Returns:
            [R, inputs of `out_proj`], and the new states.
        """
        return self.mix(u, states, *self.steps)

    def scan(self, u: Tensor, states: States) -> tuple[Tensor, States]:
        """T tokens of one sequence: u [T, ...], parts without the first dimension."""
        return self.mix(u, states, *self.scans)

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """See `Mixer`."""
        yield from Mixer.targets(self)
        for name, weight in self.extra.items():
            yield self.spec.prefix + name, weight.copy_

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, hidden_size] to the same shape; changes states in this layer's cache."""
        plan = context.plans[self.group]
        assert isinstance(plan, StatePlan), "the group of a state-space layer has a StatePlan"
        views, kernels = self._places(context.kv_caches[self.cache], plan.spec)
        u = self.in_proj(x)
        y = u.new_empty(len(u), self.out_proj.in_features)
        if self.ops.batch_invariant:
            self._run_alone(u, y, views, plan)
        elif None in kernels:
            self._run(u, y, views, plan)
        elif len(plan.rows) == len(u):  # nothing but decodes, in the order of the batch
            y = self._decode(u, kernels, plan)
        else:
            self._run_in_place(u, y, kernels, plan)
        return self.out_proj(y)

    def _places(self, cache: Tensor, spec: MambaSpec) -> tuple[list[StateView], tuple[Any, ...]]:
        """Where this layer's states are in a cache, and what works on them there. Worked out anew for another cache."""
        key = cache.data_ptr(), cache.shape, spec
        if self._kept.get("key") != key:
            views = [StateView(cache, spec, part) for part in range(len(spec.shapes))]
            self._kept.update(key=key, places=(views, self.kernels(views)))
        return self._kept["places"]

    def _run(self, u: Tensor, y: Tensor, views: list[StateView], plan: StatePlan) -> None:
        """Work through a step, into y [T, ...]: decodes together, then pieces."""
        if len(plan.rows):
            y[plan.rows], states = self.step(u[plan.rows], tuple(view.read(plan.read) for view in views))
            for view, state in zip(views, states, strict=True):
                view.write(plan.write, state)
        for i, piece in enumerate(plan.pieces):
            tokens = slice(piece.start, piece.end)
            y[tokens], states = self.scan(u[tokens], tuple(state[0] for state in self._begin(views, plan, i)))
            for view, state in zip(views, states, strict=True):
                view.write(plan.piece_write[i : i + 1], state[None])

    def _decode(self, u: Tensor, kernels: tuple[InPlace, ...], plan: StatePlan) -> Tensor:
        """The single tokens of a step."""
        where = {"read": plan.read, "write": plan.write, "begins": torch.arange(len(u) + 1)}
        return self._mix_in_place(u, kernels, where)

    def _mix_in_place(self, u: Tensor, kernels: tuple[InPlace, ...], where: dict[str, Tensor]) -> Tensor:
        nothing = (None,) * len(kernels)
        return self.mix(u, nothing, *(partial(kernel, **where) for kernel in kernels))[0]  # type: ignore[arg-type]

    def _begin(self, views: list[StateView], plan: StatePlan, i: int) -> States:
        """The states before piece i, as a batch of one; zeros at the beginning of a request, whose block holds anything."""
        if plan.pieces[i].read < 0:
            return tuple(torch.zeros((1, *view.shape), dtype=view.dtype, device=plan.rows.device) for view in views)
        return tuple(view.read(plan.piece_read[i : i + 1]) for view in views)

    def _run_alone(self, u: Tensor, y: Tensor, views: list[StateView], plan: StatePlan) -> None:
        """As `_run`, every token by itself."""
        for i, row in enumerate(plan.rows.tolist()):
            y[row : row + 1], states = self.step(
                u[row : row + 1], tuple(view.read(plan.read[i : i + 1]) for view in views)
            )
            for view, state in zip(views, states, strict=True):
                view.write(plan.write[i : i + 1], state)
        for i, piece in enumerate(plan.pieces):
            states = self._begin(views, plan, i)
            for t in range(piece.start, piece.end):
                y[t : t + 1], states = self.step(u[t : t + 1], states)
            for view, state in zip(views, states, strict=True):
                view.write(plan.piece_write[i : i + 1], state)

    def _run_in_place(self, u: Tensor, y: Tensor, kernels: tuple[InPlace, ...], plan: StatePlan) -> None:
        """As `_run`, on states where they lie."""
        if len(plan.rows):
            y[plan.rows] = self._decode(u[plan.rows], kernels, plan)
        for i, piece in enumerate(plan.pieces):
            begins = torch.tensor([0, piece.end - piece.start])
            where = {"read": torch.tensor([piece.read]), "write": plan.piece_write[i : i + 1], "begins": begins}
            tokens = slice(piece.start, piece.end)
            y[tokens] = self._mix_in_place(u[tokens], kernels, where)


@dataclass(frozen=True, kw_only=True)
class NoMLPSpec(MixerSpec):
    """Of a layer that has no MLP."""

    def linears(self, hidden_size: int) -> dict[str, Any]:
        """See `MixerSpec`."""
        return {}


@register_mixer(NoMLPSpec)
class NoMLP(Mixer):
    """Holds the place of an MLP; is never called."""

    capturable = True
