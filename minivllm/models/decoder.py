"""Decoder: a language model over a paged KV cache, built from a DecoderSpec."""

# Generated from nbs/models/decoder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, Plan
from minivllm.attention.state import LayerCacheSpec
from minivllm.core.config import WEIGHT_BITS, KVCacheConfig
from minivllm.core.module import Module, ModuleList
from minivllm.models.layers import NoNorm, Scale
from minivllm.models.linear.base import move_to_huge_pages
from minivllm.models.linear.grouped import QuantizedWeight
from minivllm.models.linear.layer import QUANTIZED, GatheredLinear, Linear, Shard
from minivllm.models.mixers.base import Builder, LinearSpec, Mixer
from minivllm.models.mixers.state import NoMLPSpec
from minivllm.models.ops.base import CapturedSteps, ForwardContext
from minivllm.models.ops.select import make_layer_ops
from minivllm.models.parallel import Stage, TensorGroup
from minivllm.models.pooling import PoolingHead
from minivllm.models.rope import Rope, Rotation
from minivllm.models.spec import DecoderSpec, LayerSpec, NamedWeight


class Media(NamedTuple):
    """Embeddings that take the place of token embeddings in a step.

    Attributes:
        rows: int64 [M], places among the step's tokens.
        values: [M, hidden_size], of the model's dtype.
    """

    rows: Tensor
    values: Tensor


class DecoderLayer(Module):
    """Two blocks, each after its norm and added to the residual stream; see `LayerSpec`."""

    capturable = True

    def __init__(self, spec: LayerSpec, builder: Builder) -> None:
        scale = None if spec.residual_scale == 1.0 else Scale(spec.residual_scale)
        self.mixer_norm = builder.norm() if spec.mixer_norm else NoNorm()
        self.mlp_norm = builder.norm() if spec.mlp_norm else NoNorm()
        self.mixer_post_norm = builder.norm() if spec.mixer_post_norm else scale
        self.mlp_post_norm = builder.norm() if spec.mlp_post_norm else scale
        self.mixer, self.mlp = builder.block(spec.mixer), builder.block(spec.mlp)

    def __call__(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """From the output of the layer before, and the residual stream that it has not been added to yet, to the same of this layer."""
        x, residual = self.mixer_norm.add(x, residual)
        x = self.mixer(x, context)
        if self.mixer_post_norm is not None:
            x = self.mixer_post_norm(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp(x)
        if self.mlp_post_norm is not None:
            x = self.mlp_post_norm(x)
        return x, residual


class PostNormLayer(DecoderLayer):
    """Two blocks, each added to its input, and the sum normed."""

    def __call__(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """x, [T, hidden_size], to the same shape; there is no separate residual stream."""
        x = self.mixer_norm(x + self.mixer(x, context))
        return self.mlp_norm(x + self.mlp(x)), None


class ParallelDecoderLayer(DecoderLayer):
    """Two blocks side by side, which share a norm or have one each."""

    capturable = True

    def __call__(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        x, residual = self.mixer_norm.add(x, residual)
        inner = x if isinstance(self.mlp_norm, NoNorm) else self.mlp_norm(residual)
        return self.mixer(x, context) + self.mlp(inner), residual


class MixerLayer(DecoderLayer):
    """A block in which tokens see each other, and no MLP."""

    capturable = True

    def __call__(self, x: Tensor, residual: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        x, residual = self.mixer_norm.add(x, residual)
        return self.mixer(x, context), residual


def layer_kind(spec: LayerSpec) -> type[DecoderLayer]:
    """The class of a layer."""
    if isinstance(spec.mlp, NoMLPSpec):
        return MixerLayer
    return ParallelDecoderLayer if spec.parallel else PostNormLayer if spec.post_norm else DecoderLayer


class Decoder(Module):
    """A language model for inference: decoder-only, with states, or an encoder. Not a `torch.nn.Module`: it has no gradients.

    Call `load_weights`, then `bind`, then `forward` once per step. Any part may be replaced in between.

    Args:
        spec: what to build.
        backend: computes attention and knows the layout of the cache. It names the ops and the linear method that go with it.
        dtype, device: those of weights and activations.
        linear_method: that of the linear layers, see `make_linear_method`; None for what goes with the backend. If it is one of
            `QUANTIZED`, the output layer gets 8 bits, and embeddings stay as they are.
        kv_dtype: the cache's, see `AttentionSpec`.
        max_model_len: positions that will occur; None for all that the model was meant for.
        stage: the layers that this rank has; None for all. The first stage has the embeddings, the last the output layer.
        group: the ranks that hold the layers together; None for one rank. If there are any, every kernel is launched by itself on a CPU: the ranks
            add up between the matmuls.

    Attributes:
        ops: what is computed between the linear layers.
        taps: layers before which the residual stream is kept for a proposer of draft tokens, see `forward`.
        eager: every kernel is launched by itself; counts from the next `bind` on.
        lora: adapters of the rows (`minivllm.lora.linear.LoRAModel`), or None.
        captured: runs steps that were captured, or None; from `bind` on.
    """

    capturable = True

    def __init__(
        self,
        spec: DecoderSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        linear_method: str | None = None,
        kv_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        group: TensorGroup | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.group, self.stage = group, stage or Stage(range(len(spec.layers)), True, True)
        self.spec, self.backend, self.dtype, self.device, self.kv_dtype = spec, backend, dtype, device, kv_dtype
        self.ops = make_layer_ops(backend.layer_ops, backend.batch_invariant)
        self.linear_method = linear_method or ("batch_invariant" if backend.batch_invariant else backend.linear_method)
        builder = self.builder()
        here = self.stage.is_first or (self.stage.is_last and spec.tie_word_embeddings)
        rows = -(-spec.vocab_size // builder.share.size) if here else 0
        self.embedding = torch.empty(rows, spec.hidden_size, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        layers = [spec.layers[i] for i in self.stage.layers]
        self.layers = ModuleList(layer_kind(layer)(layer, builder) for layer in layers)
        self.final_norm = builder.norm() if spec.names.final_norm else NoNorm()
        self._make_pooling(builder)
        self.head = self._make_head(builder) if self.stage.is_last else None
        self.ropes = ModuleList(None if rope is None else Rope(rope, device, max_model_len) for rope in spec.ropes)
        self.eager, self.taps = False, tuple[int, ...]()
        self.lora: Any = None
        self._captured: CapturedSteps | None = None

    def builder(self) -> Builder:
        """The builder of the model's parts."""
        names = ("hidden_size", "norm_eps", "norm_offset", "layer_norm", "norm_bias")
        return Builder(
            **{name: getattr(self.spec, name) for name in names},
            ops=self.ops,
            backend=self.backend,
            linear_method=self.linear_method,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=self.kv_dtype,
            group=self.group,
        )

    def _make_pooling(self, builder: Builder) -> None:
        """Make what encoders and classifiers have besides their layers, and learned positions."""
        spec, how = self.spec, dict[str, Any](dtype=self.dtype, device=self.device)
        rows = spec.max_position_embeddings + spec.position_offset
        self.positions = torch.empty(rows, spec.hidden_size, **how) if spec.names.positions else None
        self.embedding_norm = builder.norm() if spec.names.embedding_norm else None
        self.token_types = torch.empty(spec.token_types, spec.hidden_size, **how)
        self.pooling_head: PoolingHead | None = None
        if spec.pooler is not None:
            self.pooling_head = PoolingHead(spec.pooler, spec.hidden_size, spec.norm_eps, spec.norm_bias, self.device)

    def _make_head(self, builder: Builder) -> Linear:
        """The output layer, which gives float32 if its method can; over the embeddings' memory if it is tied to them.

        In a model that predicts no tokens it is there, and takes no memory.
        """
        spec, method = self.spec, self.linear_method
        if method in QUANTIZED:
            method = next((how for how in ("torch_", "invariant_") if method.startswith(how)), "") + "int8"
        elif method in WEIGHT_BITS:
            method = self.backend.linear_method
        shared = self.embedding if spec.tie_word_embeddings or spec.pooler is not None else None
        if spec.pooler is not None:
            method = "torch"
        name = spec.names.head.removesuffix(".weight")
        head = LinearSpec(spec.hidden_size, {name: -(-spec.vocab_size // builder.share.size)})
        how: dict[str, Any] = {"method": method, "out_dtype": torch.float32, "weight": shared}
        if self.group is None:
            return builder.linear(head, **how)
        how["shard"] = Shard(*builder.share[:2], "outputs", {name: (builder.share.piece(spec.vocab_size),)})
        return builder.linear(head, cls=partial(GatheredLinear, group=self.group, outputs=spec.vocab_size), **how)

    @property
    def captured(self) -> CapturedSteps | None:
        return self._captured

    def attention_specs(self, block_size: int) -> list[LayerCacheSpec]:
        """What each layer of this rank asks of the attention backend."""
        share = None if self.group is None else self.group.share
        return self.spec.attention_specs(block_size, self.dtype, self.kv_dtype, share)

    def numbered_layers(self) -> list[tuple[int, Any]]:
        """The layers that are here, with their numbers in the model."""
        return list(zip(self.stage.layers, self.layers, strict=True))

    def linears(self) -> list[Linear]:
        """The linear layers of the layers, in the order of a step."""
        return [linear for layer in self.layers for block in (layer.mixer, layer.mlp) for linear in block.linears()]

    def bind(self, kv_cache_config: KVCacheConfig) -> None:
        """Tell each layer which cache tensor and which plan are its own.

        Raises:
            ValueError: the groups do not hold each layer once, or a group's window is not its layers'.
        """
        count, seen = len(self.spec.layers), set[int]()
        for group_index, group in enumerate(kv_cache_config.groups):
            for tensor_index, layer in enumerate(group.layers):
                if layer in seen or not 0 <= layer < count:
                    raise ValueError(f"KV cache groups: layer {layer} of {count} is named twice or does not exist")
                seen.add(layer)
                if layer not in self.stage.layers:
                    continue
                local = self.layers[layer - self.stage.layers.start]
                spec, mixer = self.spec.layers[layer].mixer, getattr(local, "mixer", None)
                if group.spec.window != spec.kv_cache_spec(group.spec.block_size, group.spec.dtype_bytes).window:
                    raise ValueError(f"KV cache groups: layer {layer} needs {spec}, its group has {group.spec}")
                if isinstance(mixer, Mixer):  # a cell may have put something else in its place
                    mixer.cache, mixer.group = tensor_index, group_index
                    mixer.rotation = self.spec.ropes.index(spec.rope)
        if missing := sorted(set(self.stage.layers) - seen):
            raise ValueError(f"KV cache groups: layers {missing} are in no group")
        alone = self.group is None and self.stage.is_first and self.stage.is_last
        self._captured = None if self.eager or not alone else self.ops.capture(self, self._run_layers)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        plans: Sequence[Plan],
        media: Media | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Run all layers for the tokens of one step.

        Args:
            token_ids, positions: int64 [T], requests laid end to end; positions [3, T] for a rotation with sections.
            kv_caches: one per tensor of the KV cache configuration; changed in place.
            plans: one per KV cache group.
            media: embeddings in the place of those of some tokens.
            x: what the first layer reads, [T, hidden_size], overwritten; None for the embeddings of the tokens.

        Returns:
            [T, hidden_size], after the last norm; then, in each row, the streams of the `taps`, hidden_size numbers each.
        """
        if self._captured is not None and media is None and x is None:
            hidden = self._captured.run(token_ids, positions, kv_caches, plans)
            if hidden is not None:
                return hidden
        rotations = [None if rope is None else Rotation(rope, positions, self.dtype) for rope in self.ropes]
        context, stage = ForwardContext(rotations, kv_caches, plans, positions), self.stage
        if stage.is_first and x is None:
            x = self.embed(token_ids, positions, media=media)
        if stage.is_first and stage.is_last:
            assert x is not None
            return self._run_layers(x, context)
        return self._run_stage(x, len(token_ids), context)

    def _run_stage(self, x: Tensor | None, tokens: int, context: ForwardContext) -> Tensor:
        """Run the layers of one stage. Returns hidden states, in the last stage after the final norm. x: the embeddings in the first stage, None in the others."""
        stage = self.stage
        residual: Tensor | None = None
        if x is None:
            x, residual = stage.receive(tokens, self.embedding)
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        if stage.is_last:
            return self.final_norm.add(x, residual)[0]
        stage.send(x, residual)
        return x

    def embed(
        self, token_ids: Tensor, positions: Tensor, out: Tensor | None = None, media: Media | None = None
    ) -> Tensor:
        """The first layer's input, [T, hidden_size], for token ids and positions, int64 [T]; written to `out` if given."""
        kinds = None
        if len(self.token_types):
            kinds, token_ids = token_ids // self.spec.vocab_size, token_ids % self.spec.vocab_size
        if self.group is not None:
            x = self.group.embed(self.embedding, token_ids, self.spec.vocab_size)
        elif out is None and token_ids.is_cuda:
            x = self.embedding[token_ids]  # index_select of up to 16 rows takes several times as long on a GPU
        else:
            x = torch.index_select(self.embedding, 0, token_ids, out=out)
        if self.lora is not None:
            self.lora.embed(token_ids, x)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        if media is not None:
            x[media.rows] = media.values
        if self.positions is not None:
            x += self.positions[positions + self.spec.position_offset]
        if kinds is not None:
            x += self.token_types[kinds]
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _run_layers(self, x: Tensor, context: ForwardContext) -> Tensor:
        """From embeddings [T, hidden_size] to what `forward` gives."""
        if self.taps:
            return self._run_tapped(x, context)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        return self.final_norm.add(x, residual)[0]

    def _run_tapped(self, x: Tensor, context: ForwardContext) -> Tensor:
        """As `_run_layers`, with the streams that are kept."""
        (rows, size), residual = x.shape, None
        out = x.new_empty(rows, (1 + len(self.taps)) * size)
        for i, layer in enumerate(self.layers):
            for place, tap in enumerate(self.taps, 1):
                if tap == i:
                    self.ops.add_into(x, residual, out[:, place * size : (place + 1) * size])
            x, residual = layer(x, residual, context)
        self.ops.add_into(self.final_norm.add(x, residual)[0], None, out[:, :size])
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] from `forward`, only the rows that are wanted, to float32 [R, vocab_size]."""
        assert self.head is not None, "only the last stage has an output layer"
        logits = self.head(hidden).float()
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        cap = self.spec.logits_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def compute_argmax(self, hidden: Tensor) -> Tensor:
        """The argmax of the logits of `compute_logits`, int64 [R]; -1 where there is none, for one is NaN or +inf."""
        assert self.head is not None, "only the last stage has an output layer"
        plain = self.spec.logits_scale == 1.0 and self.spec.logits_soft_cap is None  # then 16 bits have the same order
        return self.ops.argmax(self.head(hidden) if plain else self.compute_logits(hidden))

    def _rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor with a row for each token of the vocabulary."""
        return tensor if self.group is None else tensor.narrow(0, *self.group.share.rows(len(tensor)))

    def targets(self) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """(name in a checkpoint, function that loads the tensor of that name) for all that it must hold."""
        n = self.spec.names
        if len(self.embedding):
            yield n.embedding, self._load_embedding
        if n.positions is not None and self.positions is not None:
            yield n.positions, self.positions.copy_  # type: ignore[misc]
        if n.token_types is not None:
            yield n.token_types, self.token_types.copy_  # type: ignore[misc]
        last = self.final_norm if self.stage.is_last else None
        for name, norm in ((n.embedding_norm, self.embedding_norm), (n.final_norm, last)):
            if name is not None and not isinstance(norm, NoNorm | None):
                yield from ((name.removesuffix("weight") + kind, load) for kind, load in norm.targets())
        if self.pooling_head is not None:
            yield from self.pooling_head.targets()
        elif self.head is not None and not self.spec.tie_word_embeddings:
            yield from self.head.targets()
        for i, layer in self.numbered_layers():
            prefix = n.layer.format(i)
            for attribute, name in self.spec.layers[i].norms().items():
                for kind, load in getattr(layer, attribute).targets():
                    yield f"{prefix}{name}.{kind}", load
            for block in (layer.mixer, layer.mlp):
                for name, load in block.targets():
                    yield prefix + name, load

    def _load_embedding(self, table: Tensor | QuantizedWeight) -> None:
        """Rows are looked up in a tensor. A tied output layer multiplies by what came."""
        if isinstance(table, QuantizedWeight):
            if self.spec.tie_word_embeddings:
                self._load_tied_head(table)
            table = table.dequantize()
        rows = self._rows(table)
        self.embedding[: len(rows)].copy_(rows)
        self.embedding[len(rows) :].zero_()

    def _load_tied_head(self, weight: QuantizedWeight) -> None:
        if self.head is not None:  # in a pipeline, the last stage has it
            (part,) = self.head.parts
            self.head.load(part, "weight", weight)

    def _optional_targets(self) -> Iterator[tuple[str, Callable[[Any], None]]]:
        for i, layer in self.numbered_layers():
            for block in (layer.mixer, layer.mlp):
                for name, load in block.optional_targets():
                    yield self.spec.names.layer.format(i) + name, load

    def load_weights(self, weights: Iterable[NamedWeight]) -> None:
        """Fill every weight, then let the linear layers bring theirs into the form that they multiply with.

        Args:
            weights: names as in the checkpoint, and tensors of any float dtype, or quantized weights, in any order. The scales `k_scale` and
                `v_scale` of a layer's fp8 cache may be among them, one number each.

        Raises:
            ValueError: a tensor is missing, unexpected, given twice or of the wrong shape; names it. Also if a checkpoint
                with tied embeddings brings an output layer that differs from them.
        """
        self._fill(weights)  # a function by itself: what it held of the checkpoint is gone before weights are packed
        self.process_weights_after_loading()

    def check_weights(self, weights: Iterable[NamedWeight]) -> None:
        """Raises ValueError where `load_weights` would, and for values that are not finite in this model's dtype. Changes nothing."""
        n, optional, tied = self.spec.names, dict(self._optional_targets()), dict[str, Tensor | QuantizedWeight]()
        for name, tensor in self._checked(self._usable(weights), optional):
            if self.spec.tie_word_embeddings and name in (n.head, n.embedding):
                tied[name] = tensor
            if name in optional and not (isinstance(tensor, Tensor) and tensor.numel() == 1 and float(tensor) > 0):
                raise ValueError(f"{self.spec.family}: {name!r} must be one number above 0")
        head, table = tied.get(n.head), tied.get(n.embedding)
        if isinstance(head, Tensor) and isinstance(table, Tensor):
            self._check_tied(torch.equal(head.to(self.dtype), table.to(self.dtype)))

    def _checked(self, weights: Iterable[NamedWeight], optional: Container[str]) -> Iterator[NamedWeight]:
        """The tensors in the form of `weight_shapes`. Raises ValueError for one that is unexpected, of the wrong shape or given twice, and after
        the last for one that is missing; the `optional` and a tied output layer may be missing."""
        family, shapes, seen = self.spec.family, self.spec.weight_shapes(), set[str]()
        free = {self.spec.names.head} if self.spec.tie_word_embeddings else set[str]()
        for name, tensor in self.spec.unpacked(weights):
            if name.endswith(".rotary_emb.inv_freq"):
                continue  # old Llama checkpoints carry this table; it follows from the config
            if name not in optional and name not in free:
                if name not in shapes:
                    raise ValueError(f"{family}: the checkpoint has a tensor {name!r} that this model has no place for")
                if name in seen:
                    raise ValueError(f"{family}: tensor {name!r} came twice")
                if tuple(tensor.shape) != shapes[name]:
                    raise ValueError(
                        f"{family}: tensor {name!r} must have shape {shapes[name]}, got {tuple(tensor.shape)}"
                    )
                seen.add(name)
            yield name, tensor
        if missing := [name for name in shapes if name not in seen]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(f"{family}: the checkpoint lacks {', '.join(missing[:5])}{more}")

    def _usable(self, weights: Iterable[NamedWeight]) -> Iterator[NamedWeight]:
        """The weights that `load_weights` reads. Raises ValueError for a dtype that is not a float, or values not finite in the model's dtype."""
        limit = torch.finfo(self.dtype).max
        for name, tensor in weights:
            if self.spec.full_name(name) is None:
                continue
            if isinstance(tensor, Tensor) and (not tensor.is_floating_point() or tensor.element_size() == 1):
                raise ValueError(
                    f"tensor {name!r} has dtype {tensor.dtype}; weights are float64, float32, float16 or bfloat16"
                )
            parts = [tensor] if isinstance(tensor, Tensor) else tensor.tensors().values()
            for part in [part for part in parts if part.is_floating_point() and part.numel()]:
                wide = part.float() if part.element_size() == 1 else part
                if not max(map(abs, map(float, wide.aminmax()))) <= limit:
                    raise ValueError(f"tensor {name!r} has values that are no finite numbers in {self.dtype}")
            yield name, tensor

    def renew(self) -> None:
        """Make room for weights that are loaded anew by `load_weights`, which must follow: see `Linear.renew`."""
        for linear in [*self.linears(), *([] if self.head is None else [self.head])]:
            linear.renew()
        for layer in self.layers:
            layer.mixer.renew()
            layer.mlp.renew()

    def _fill(self, weights: Iterable[NamedWeight]) -> None:
        family, targets, optional = self.spec.family, dict(self.targets()), dict(self._optional_targets())
        waiting = self._quantized_early()
        head: Tensor | QuantizedWeight | None = None
        for name, tensor in self._checked(weights, optional):
            if name == self.spec.names.head and self.spec.tie_word_embeddings:
                head = tensor
                if isinstance(tensor, QuantizedWeight):
                    self._load_tied_head(tensor)
                continue
            if name in optional:
                try:
                    optional[name](tensor)
                except ValueError as error:
                    raise ValueError(f"{family}: {name!r} {error}") from None
                continue
            if (load := targets.pop(name, None)) is None:
                continue  # another rank has it
            try:
                load(tensor)
            except ValueError as error:
                raise ValueError(f"{family}: {name!r}: {error}") from None
            linear = waiting.pop(name, None)
            # whether it is whole: then no other is in memory unrounded
            if linear is not None and linear not in waiting.values():
                linear.method.process_weights_after_loading()
        if isinstance(head, Tensor) and len(self.embedding):
            rows = self._rows(head)
            self._check_tied(torch.equal(rows.to(self.embedding), self.embedding[: len(rows)]))

    def _check_tied(self, same: bool) -> None:
        if not same:
            n = self.spec.names
            raise ValueError(
                f"{self.spec.family}: tie_word_embeddings is true, but {n.head!r} differs from {n.embedding!r}"
            )

    def _quantized_early(self) -> dict[str, Linear]:
        """Which linear layer a tensor belongs to, of those that are quantized as soon as they are whole."""
        if self.linear_method not in (*QUANTIZED, *WEIGHT_BITS):
            return {}
        layers = [(self.spec.names.layer.format(i), layer) for i, layer in self.numbered_layers()]
        linears = [(at, x) for at, layer in layers for block in (layer.mixer, layer.mlp) for x in block.linears()]
        return {prefix + name: linear for prefix, linear in linears for name, _ in linear.targets()}

    def process_weights_after_loading(self) -> None:
        """Bring the weights of all linear layers into the form that they multiply with."""
        linears = [*self.linears(), *([] if self.head is None else [self.head])]
        for linear in linears:
            linear.method.process_weights_after_loading()
        for layer in self.layers:
            layer.mixer.process_weights_after_loading()
            layer.mlp.process_weights_after_loading()
        # only now is all memory around a weight in use
        move_to_huge_pages(memory for linear in linears if (memory := linear.method.memory) is not None)
