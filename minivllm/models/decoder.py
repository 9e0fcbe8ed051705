"""Decoder-only transformer over a paged KV cache, built from a DecoderSpec."""

# Generated from nbs/models/decoder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionSpec, KVScales, Plan
from minivllm.core.config import KVCacheConfig
from minivllm.models import cpu_pointwise
from minivllm.models.layers import ACTIVATIONS, GatedMLP, QKNorm, RMSNorm, row_by_row
from minivllm.models.linear import QUANTIZED, Linear, use_huge_pages
from minivllm.models.rope import Rope, apply_rope
from minivllm.models.spec import DecoderSpec

__all__ = ["Attention", "Decoder", "DecoderLayer", "RopeTable", "norm_dtype"]

if TYPE_CHECKING:
    from minivllm.models.cpu_step import CPUStep

RopeTable = tuple[Tensor, Tensor] | None
"""cos and sin of the step's positions, or None for a layer without positions."""


class Attention:
    """Self-attention of one layer: QKV product, head norms, rotation, cache, attention, output product.

    Attributes:
        fused: the rotation is one kernel of `cpu_pointwise`, where that has one; set by the model.
    """

    __slots__ = ("backend", "fused", "head_dim", "num_heads", "num_qk_heads", "o", "qk_norm", "qkv")

    def __init__(self, spec: DecoderSpec, backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> None:
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q": q, "k": kv, "v": kv}
        self.qkv = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(q, {"o": spec.hidden_size}, bias=spec.o_bias, dtype=dtype, device=device)
        self.qk_norm: QKNorm | None = None
        if spec.qk_norm:
            heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
            self.qk_norm = QKNorm(*heads, spec.norm_eps, dtype=norm_dtype(spec, dtype), device=device)
        self.backend, self.head_dim, self.fused = backend, spec.head_dim, False
        self.num_heads, self.num_qk_heads = spec.num_heads, spec.num_heads + spec.num_kv_heads

    def __call__(self, x: Tensor, rope: RopeTable, kv_cache: Tensor, plan: Plan) -> Tensor:
        """[T, hidden_size] to the same shape; writes the step's keys and values into `kv_cache`."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        if self.fused and rope is not None and (self.qk_norm is None or self.qk_norm.weight.dtype == x.dtype):
            kv_heads = self.num_qk_heads - self.num_heads
            q, k = cpu_pointwise.rotate(heads, *rope, self.num_heads, kv_heads, self.qk_norm)
            self.backend.write(k, heads[:, self.num_qk_heads :], kv_cache, plan.slot_mapping)
            return self.o(self.backend.attend(q, kv_cache, plan).reshape(x.shape[0], -1))
        qk, v = heads[:, : self.num_qk_heads], heads[:, self.num_qk_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        self.backend.write(qk[:, self.num_heads :], v, kv_cache, plan.slot_mapping)
        out = self.backend.attend(qk[:, : self.num_heads], kv_cache, plan)
        return self.o(out.reshape(x.shape[0], -1))


def norm_dtype(spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the norms' weights: `1 + weight` must not be rounded."""
    return torch.float32 if spec.norm_offset else dtype


class DecoderLayer:
    """Attention and MLP, each behind its norm and added to the residual stream."""

    __slots__ = ("attention", "attention_norm", "attention_post_norm", "mlp", "mlp_norm", "mlp_post_norm")

    def __init__(self, spec: DecoderSpec, backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(spec.hidden_size, spec.norm_eps, dtype=norm_dtype(spec, dtype), device=device)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if spec.names.attention_post_norm else None
        self.mlp_post_norm = norm() if spec.names.mlp_post_norm else None
        self.attention = Attention(spec, backend, dtype, device)
        sizes = (spec.hidden_size, spec.intermediate_size)
        self.mlp = GatedMLP(*sizes, spec.activation, bias=spec.mlp_bias, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rope: RopeTable, kv_cache: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """The output of the layer before, and the residual stream that it has not been added to yet; likewise returned."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, rope, kv_cache, plan)
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.mlp_post_norm is not None:
            x = self.mlp_post_norm(x)
        return x, residual


class Decoder:
    """A decoder-only language model for inference. Not a `torch.nn.Module`: it has no gradients and no hooks.

    Call `load_weights`, then `bind`, then `forward` once a step.

    Args:
        spec: what to build.
        backend: attention, and the layout of the cache.
        dtype, device: of weights and activations.
        linear_kernel: for the products, see `Linear.prepare`; None for `batch_invariant` if the attention backend is,
            else `auto`. If it is one of `QUANTIZED`, the output layer gets 8 bits, and embeddings stay as they are.
        kv_dtype: of the cache, see `AttentionSpec`.

    Attributes:
        eager: every kernel is launched by itself; counts from the next `bind` on.
        cpu_step: makes steps of few tokens by one launch, or None; from `bind` on.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        linear_kernel: str | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec, self.backend, self.dtype, self.device, self.kv_dtype = spec, backend, dtype, device, kv_dtype
        self.linear_kernel = linear_kernel or ("batch_invariant" if backend.batch_invariant else "auto")
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self.layers = [DecoderLayer(spec, backend, dtype, device) for _ in spec.layers]
        self.final_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=norm_dtype(spec, dtype), device=device)
        if spec.tie_word_embeddings:
            self.head = Linear.sharing(self.embedding)
        else:
            self.head = Linear(spec.hidden_size, {"head": spec.vocab_size}, bias=False, dtype=dtype, device=device)
        distinct = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self.ropes = [None if rope is None else Rope(rope, device) for rope in distinct]
        self.layer_to_rope = [distinct.index(layer.rope) for layer in spec.layers]
        self.layer_to_cache: list[int] = []
        self.layer_to_group: list[int] = []
        self.eager = False
        self.cpu_step: CPUStep | None = None

    def attention_specs(self, block_size: int) -> list[AttentionSpec]:
        """What each layer asks of the attention backend."""
        return self.spec.attention_specs(block_size, self.dtype, self.kv_dtype)

    def bind(self, kv_cache_config: KVCacheConfig) -> None:
        """Learn which cache tensor and which plan belong to which layer.

        Raises:
            ValueError: the groups do not hold each layer once, or a group's window is not its layers'.
        """
        place: dict[int, tuple[int, int]] = {}
        for group_index, group in enumerate(kv_cache_config.groups):
            for tensor_index, layer in enumerate(group.layers):
                if layer in place or not 0 <= layer < len(self.layers):
                    raise ValueError(
                        f"KV cache groups: layer {layer} of {len(self.layers)} is named twice or does not exist"
                    )
                spec = self.spec.layers[layer]
                if group.spec.window != (spec.sliding_window or spec.chunk):
                    raise ValueError(f"KV cache groups: layer {layer} needs {spec}, its group has {group.spec}")
                place[layer] = (tensor_index, group_index)
        if len(place) != len(self.layers):
            raise ValueError(
                f"KV cache groups: layers {sorted(set(range(len(self.layers))) - set(place))} are in no group"
            )
        self.layer_to_cache = [place[layer][0] for layer in range(len(self.layers))]
        self.layer_to_group = [place[layer][1] for layer in range(len(self.layers))]
        self._choose_step()

    def _choose_step(self) -> None:
        """Steps of few tokens by one launch, if there are the kernels for it."""
        self.cpu_step = None
        if not self.eager and self.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            from minivllm.models.cpu_step import CPUStep, step_problem

            self.cpu_step = None if step_problem(self) else CPUStep(self)

    def linears(self) -> list[Linear]:
        """The products of the layers, in the order of a step."""
        return [y for x in self.layers for y in (x.attention.qkv, x.attention.o, x.mlp.gate_up, x.mlp.down)]

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], plans: Sequence[Plan]
    ) -> Tensor:
        """Run all layers for the tokens of one step.

        Args:
            token_ids, positions: int64 [T], requests laid end to end.
            kv_caches: one per tensor of the KV cache configuration; changed in place.
            plans: one per KV cache group.

        Returns:
            [T, hidden_size], after the last norm.
        """
        if self.cpu_step is not None and self.cpu_step.takes(len(token_ids)):
            return self.cpu_step(token_ids, positions, kv_caches, plans)  # type: ignore[arg-type]  # its backend made them
        tables = [None if rope is None else rope(positions, self.dtype) for rope in self.ropes]
        x = F.embedding(token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        residual = None
        for layer, rope, cache, group in zip(
            self.layers, self.layer_to_rope, self.layer_to_cache, self.layer_to_group, strict=True
        ):
            x, residual = layer(x, residual, tables[rope], kv_caches[cache], plans[group])
        return self.final_norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] from `forward`, only the rows that are wanted, to float32 [R, vocab_size]."""
        logits = self.head(hidden).float()
        cap = self.spec.logits_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _places(self) -> Iterator[tuple[str, Linear, str]]:
        """(name in a checkpoint, up to `.weight` or `.bias`; product; part of it) for all products of the layers."""
        n = self.spec.names
        for i, layer in enumerate(self.layers):
            prefix, attention, mlp = n.layer.format(i), layer.attention, layer.mlp
            places = [(n.q, attention.qkv, "q"), (n.k, attention.qkv, "k"), (n.v, attention.qkv, "v")]
            places += [(n.o, attention.o, "o"), (n.gate, mlp.gate_up, "gate"), (n.up, mlp.gate_up, "up")]
            for name, linear, part in [*places, (n.down, mlp.down, "down")]:
                yield prefix + name, linear, part

    def _owners(self) -> dict[str, Linear]:
        """Which product of a layer a tensor of a checkpoint belongs to."""
        kinds = ("weight", "bias")
        places = [(name, linear, kind) for name, linear, _ in self._places() for kind in kinds]
        return {
            f"{name}.{kind}": linear for name, linear, kind in places if kind == "weight" or linear.bias is not None
        }

    def _targets(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: views into the fused weights."""
        n = self.spec.names
        targets = {n.embedding: self.embedding, n.final_norm: self.final_norm.weight}
        if not self.spec.tie_word_embeddings:
            targets[n.head] = self.head.weight
        for name, linear, part in self._places():
            targets[f"{name}.weight"] = linear.part(part)
            if linear.bias is not None:
                targets[f"{name}.bias"] = linear.part(part, "bias")
        for i, layer in enumerate(self.layers):
            prefix, attention = n.layer.format(i), layer.attention
            norms = [(n.attention_norm, layer.attention_norm), (n.mlp_norm, layer.mlp_norm)]
            post_norms = [(n.attention_post_norm, layer.attention_post_norm), (n.mlp_post_norm, layer.mlp_post_norm)]
            for norm_name, norm in [*norms, *post_norms]:
                if norm is not None:
                    targets[f"{prefix}{norm_name}.weight"] = norm.weight
            if attention.qk_norm is not None:
                targets[f"{prefix}{n.q_norm}.weight"] = attention.qk_norm.q_weight
                targets[f"{prefix}{n.k_norm}.weight"] = attention.qk_norm.k_weight
        return targets

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every weight, then let the products prepare themselves.

        Args:
            weights: names as in the checkpoint, and tensors of any float dtype, in any order. The scales `k_scale` and
                `v_scale` of a layer's fp8 cache may be among them, one number each; a missing one is the other, or 1.
                A cache of another dtype has none, and leaves them aside.

        Raises:
            ValueError: a tensor is missing, unexpected, given twice or of the wrong shape; names it. Also if a checkpoint
                with tied embeddings brings an output layer that differs from them.
        """
        self._fill(weights)  # a function of its own: what it held of the checkpoint is gone before weights are packed
        self.prepare()

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        shapes, targets = self.spec.weight_shapes(), self._targets()
        owners = self._owners() if self.linear_kernel in QUANTIZED else {}
        scale_names = self._scale_names()
        scales: dict[tuple[int, str], float] = {}
        seen: set[str] = set()
        head: Tensor | None = None
        for name, tensor in weights:
            if name.endswith(".rotary_emb.inv_freq"):
                continue  # old Llama checkpoints carry this table; it follows from the config
            if name == self.spec.names.head and self.spec.tie_word_embeddings:
                head = tensor
                continue
            if name in scale_names:
                scales[scale_names[name]] = self._scale(name, tensor)
                continue
            if name not in shapes:
                raise ValueError(
                    f"{self.spec.family}: the checkpoint has a tensor {name!r} that this model has no place for"
                )
            if name in seen:
                raise ValueError(f"{self.spec.family}: tensor {name!r} came twice")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(
                    f"{self.spec.family}: tensor {name!r} must have shape {shapes[name]}, got {tuple(tensor.shape)}"
                )
            is_norm = len(shapes[name]) == 1 and name.endswith(".weight")
            targets.pop(name).copy_(tensor.float() + 1 if is_norm and self.spec.norm_offset else tensor)
            seen.add(name)
            owner = owners.pop(name, None)
            if owner is not None and owner not in owners.values():  # it is whole: never more than a layer is in memory
                owner.prepare(self.linear_kernel)
        self._scale_caches(scales)
        missing = [name for name in shapes if name not in seen]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(f"{self.spec.family}: the checkpoint lacks {', '.join(missing[:5])}{more}")
        if head is not None and not torch.equal(head.to(self.embedding), self.embedding):
            raise ValueError(
                f"{self.spec.family}: tie_word_embeddings is true, but {self.spec.names.head!r} differs from"
                f" {self.spec.names.embedding!r}"
            )

    def _scale_names(self) -> dict[str, tuple[int, str]]:
        """Names that the scales of a layer's fp8 cache may have in a checkpoint: (layer, "k" or "v")."""
        n, names = self.spec.names, {}
        for i in range(len(self.layers)):
            for part, product in (("k", n.k), ("v", n.v)):
                for place in (product.rpartition(".")[0], product):
                    names[f"{n.layer.format(i)}{place}.{part}_scale"] = (i, part)
        return names

    def _scale(self, name: str, tensor: Tensor) -> float:
        scale = float(tensor) if tensor.numel() == 1 else math.nan
        if not 0 < scale < math.inf:
            raise ValueError(f"{self.spec.family}: {name!r} must be one number above 0, got {tensor.tolist()}")
        return scale

    def _scale_caches(self, scales: dict[tuple[int, str], float]) -> None:
        for i, layer in enumerate(self.layers):
            k, v = scales.get((i, "k")), scales.get((i, "v"))
            if self.kv_dtype is not None and (k or v):
                layer.attention.backend = self.backend.scaled(KVScales(k or v or 1.0, v or k or 1.0))

    def prepare(self) -> None:
        """Choose the matrix products, now that the weights are known, and what is done between them.

        Where the choice of products is left to us on a CPU, norms, rotations and activations are fused kernels too.
        """
        fused = self.linear_kernel in ("auto", *QUANTIZED) and cpu_pointwise.can_fuse(self.dtype, self.device)
        self.final_norm.fused = fused
        for layer in self.layers:
            for part in (layer.attention_norm, layer.mlp_norm, layer.attention, layer.mlp):
                part.fused = fused
            if self.linear_kernel == "batch_invariant" and self.device.type == "cpu":
                layer.mlp.activation = row_by_row(ACTIVATIONS[self.spec.activation])
        linears = self.linears()
        for linear in linears:
            if linear.kernel != self.linear_kernel:  # else it was prepared as soon as it was loaded
                linear.prepare(self.linear_kernel)
        self.head.prepare("int8" if self.linear_kernel in QUANTIZED else self.linear_kernel, wide=True)
        for linear in (*linears, self.head):  # only now is all memory around a weight in use
            if linear.memory is not None:
                use_huge_pages(linear.memory)
        if self.layer_to_cache:
            self._choose_step()
