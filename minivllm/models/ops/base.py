"""LayerOps: the interface of what a layer computes between two matmuls."""

# Generated from nbs/models/ops/base.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from minivllm.attention.backend import AttentionBackend, Plan
from minivllm.core.module import Module
from minivllm.models.ops.states import StateOps
from minivllm.models.rope import Rotation


@dataclass(slots=True)
class ForwardContext:
    """What the layers of one step need besides their input. vLLM has a class of this name for the same purpose.

    Attributes:
        rotations: one for each rotation that the model has, or None for layers without positions.
        kv_caches: one for each tensor of the KV cache configuration; changed in place.
        plans: one for each KV cache group, from the attention backend.
        positions: int64 [T], of the tokens. Only for layers that need more than a rotation: in a captured step they are not the step's.
    """

    rotations: Sequence[Rotation | None]
    kv_caches: Sequence[Tensor]
    plans: Sequence[Plan]
    positions: Tensor


class CapturedSteps(Protocol):
    """Steps that were run once and are replayed."""

    def run(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], plans: Sequence[Plan]
    ) -> Tensor | None:
        """The hidden states [T, hidden_size], or None if this step must be run layer by layer."""
        ...


class AttentionHeads(Protocol):
    """What `rope_and_cache` needs to know of a layer. qk_norm: norms each query and key head, or None. backend: knows the cache's layout."""

    num_heads: int
    head_dim: int
    qk_norm: Any
    backend: AttentionBackend


class LayerOps(Module):
    """What a layer computes between its matmuls. Chosen once, together with the attention backend; see `make_layer_ops`.

    Attributes:
        name: what it is called.
        batch_invariant: a row's result must have the same bits in any batch.
        states: what layers with states need, see `StateOps`.
    """

    name: ClassVar[str]
    state_ops: ClassVar[type[StateOps]] = StateOps

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant, self.states = batch_invariant, self.state_ops()

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last dimension, in float32 inside, in the dtype of `x`.

        A weight of a wider dtype is multiplied before rounding (Gemma).
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x [T, size] to the residual stream, in place, and norm the sum: (normed, stream). No residual: x begins it."""

    @abstractmethod
    def add_into(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Write x + residual, or x alone, all [T, size], to `out`, whose rows may lie apart."""

    @abstractmethod
    def rope_and_cache(
        self, layer: AttentionHeads, qkv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, rotation: Rotation | None
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the cache.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim]: query heads, key heads, value heads.
            slot_mapping: int64 [T], where in the cache each token goes.
            rotation: rotates by this step's positions; None for no rotation.

        Returns:
            The queries, [T, num_heads, head_dim].
        """

    @abstractmethod
    def gated_linear(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], activation: str) -> Tensor:
        """`activation(gate) * up`, [T, n], of the two halves of `gate_up(x)` [T, 2 n]."""

    @abstractmethod
    def activate(self, x: Tensor, activation: str) -> Tensor:
        """`activation(x)`, [T, n]."""

    @abstractmethod
    def moe_permute(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of tokens, one for each expert that they visit, sorted by expert, and within an expert by token.

        Args:
            x: [T, size].
            ids: int64 [T, top_k], experts of each token.

        Returns:
            The rows, [T * top_k, size]; the place of each choice among them, int64 [T, top_k]; and the number of rows of each
            expert, int64 [num_experts].
        """

    @abstractmethod
    def moe_unpermute(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """For each token the sum of its experts' outputs times their weights, in the order of its choice.

        Args:
            rows: [T * top_k, size], and places: int64 [T, top_k]: see `moe_permute`.
            weights: float32 [T, top_k].

        Returns:
            [T, size], of the dtype of `rows`, summed in float32.
        """

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The place of the largest number in each row of logits [R, V], the first of equals: int64 [R]; -1 where it is not finite."""

    def capture(self, model: Module, run: Callable[[Tensor, ForwardContext], Tensor]) -> CapturedSteps | None:
        """Steps of `model` to capture and replay, or None if these ops launch nothing that can be captured.

        run: the layers of the model, from embeddings [T, hidden_size] to hidden states.
        """
        return None
