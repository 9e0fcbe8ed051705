"""EAGLE-3: a layer that drafts from three of the target's hidden states."""

# Generated from nbs/spec_decode/eagle3.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minivllm.core.module import Module
from minivllm.models.decoder import Decoder
from minivllm.models.layers import NoNorm
from minivllm.models.loading import CheckpointError, LoadedModel, read_json
from minivllm.models.mixers.attention import SelfAttention, SelfAttentionSpec
from minivllm.models.mixers.base import LinearSpec, register_mixer
from minivllm.models.spec import DecoderSpec, WeightNames
from minivllm.spec_decode.draft_model import DraftHost, read_drafter
from minivllm.spec_decode.heads import EagleProposer, check_target, read_tensors, take, take_if_there, widen


@dataclass(frozen=True, kw_only=True)
class WideAttentionSpec(SelfAttentionSpec):
    """Self-attention that reads an embedding and a state side by side, [T, 2 * hidden_size]."""

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        linears = super().linears(hidden_size)
        return linears | {"qkv": linears["qkv"]._replace(inputs=2 * hidden_size)}


register_mixer(WideAttentionSpec)(SelfAttention)


class SideBySideNorm(Module):
    """Norms an embedding and a state, each by itself; the state becomes the residual stream.

    Args:
        of_token, of_state: the norms.
    """

    def __init__(self, of_token: Any, of_state: Any) -> None:
        self.of_token, self.of_state = of_token, of_state

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`. x: [T, 2 * hidden_size]; there is no residual stream yet."""
        assert residual is None
        token, state = (half.contiguous() for half in x.chunk(2, 1))
        return torch.cat([self.of_token(token), self.of_state(state)], 1), state


class Eagle3Proposer(EagleProposer):
    """Guesses with a layer that reads three of the target's residual streams (Li et al. 2025, arXiv 2503.01840), a chain of them.

    Args:
        host: the target, and what it runs by. Its `taps` are set.
        decoder: the layer, with its final norm, and without its own embedding and output layer.
        fuse: weight [H, taps * H] and bias [H] or None, from the streams to what the layer reads.
        taps: see `Decoder`.
        embedding: float [V, H]; None for the target's.
        output: float [v, H]; None for the target's.
        token_map: int64 [v], the tokens that `output` knows; None for all.
    """

    def __init__(
        self,
        host: DraftHost,
        decoder: Decoder,
        fuse: tuple[Tensor, Tensor | None],
        taps: tuple[int, ...],
        embedding: Tensor | None = None,
        output: Tensor | None = None,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__(host, decoder, fuse, embedding)
        self.output, self.token_map = output, token_map
        self.last_norm, decoder.final_norm = decoder.final_norm, NoNorm()
        host.target.taps = taps

    def _features(self, hidden: Tensor) -> Tensor:
        size = self.decoder.spec.hidden_size
        return functional.linear(hidden[:, size:].to(self.fuse[0].dtype), *self.fuse)

    def _inputs(self, token_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        return self._pairs(token_ids, positions, features)

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden, target = self.last_norm(hidden), self.host.target
        if self.output is None:
            return target.compute_logits(hidden)
        return widen(functional.linear(hidden, self.output).float(), self.token_map, target.spec.vocab_size)


def read_taps(config: dict[str, Any], num_layers: int, where: Any) -> tuple[int, ...]:
    """The numbers of the target's layers whose input stream is read: those that the config names, else the authors' choice.

    Raises:
        CheckpointError: they are no layers of the target.
    """
    own = config.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{where}/config.json says use_aux_hidden_state=false, but EAGLE-3 reads several hidden states"
        )
    name = "eagle_aux_hidden_state_layer_ids"
    taps = config.get(name) or own.get(name) or (2, num_layers // 2, num_layers - 3)
    if not all(type(tap) is int and 0 <= tap < num_layers for tap in taps):
        raise CheckpointError(
            f"{where}: {name} must hold layers of the target, 0 to {num_layers - 1}; got {list(taps)}"
        )
    return tuple(taps)


def read_token_map(tensors: dict[str, Tensor], known: int, vocab_size: int, where: Any) -> Tensor | None:
    """Tokens of the target by those of the layer, int64 [known], from `d2t`; None if all are known. Takes `d2t` and `t2d` out.

    Raises:
        ValueError: `d2t` is missing or has another shape, names no token, or one twice; or `t2d` says otherwise.
    """
    if known == vocab_size and "d2t" not in tensors:
        tensors.pop("t2d", None)
        return None
    d2t, t2d = take(tensors, "d2t", (known,), where), tensors.pop("t2d", None)
    token_map = torch.arange(known) + d2t.long()
    if d2t.is_floating_point() or not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise ValueError(f"{where}: d2t must lead to token ids below {vocab_size}")
    if len(token_map.unique()) < known:
        raise ValueError(f"{where}: d2t leads to a token twice")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], token_map.sort().values):
        raise ValueError(f"{where}: t2d must mark the tokens that d2t leads to")
    return token_map


def wide_layer(folder: LoadedModel) -> DecoderSpec:
    """The spec of a decoder with the layer of a folder, and neither embedding nor output layer.

    Raises:
        CheckpointError: it has several layers.
    """
    spec = folder.spec
    if spec.num_layers != 1:
        raise CheckpointError(f"{folder.path} has {spec.num_layers} layers; an EAGLE-3 head with one is implemented")
    (layer,) = spec.layers
    wide = WideAttentionSpec(**{f.name: getattr(layer.mixer, f.name) for f in fields(SelfAttentionSpec)})
    names = WeightNames(embedding="-", final_norm="norm.weight", head="-.head", layer="layers.{}.")
    one = replace(layer, mixer=wide, mixer_norm=None)
    return replace(spec, layers=(one,), names=names, vocab_size=1, tie_word_embeddings=True)


def load_eagle3(host: DraftHost) -> Eagle3Proposer:
    """An EAGLE-3 layer from a folder. Raises ValueError for one that is made for another target, or lacks something."""
    folder, target = read_drafter(host.config.args), host.target
    config, where, size = read_json(folder.path / "config.json"), folder.path, target.spec.hidden_size
    check_target(folder, target)
    spec, taps = wide_layer(folder), read_taps(config, target.spec.num_layers, where)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read_tensors(folder).items()}
    vocab = target.spec.vocab_size
    known = config.get("draft_vocab_size") or vocab
    token_map = read_token_map(tensors, known, vocab, where)

    def on(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(target.device, target.dtype, copy=True)

    fuse = take(tensors, "fc.weight", (size, len(taps) * size), where)
    bias = take_if_there(tensors, "fc.bias", (size,), where)
    embedding = take_if_there(tensors, "embed_tokens.weight", (vocab, size), where)
    own = "lm_head.weight" in tensors or token_map is not None
    output = take(tensors, "lm_head.weight", (known, size), where) if own else None
    longest = min(spec.max_model_len, host.config.scheduler.max_model_len)
    decoder = Decoder(spec, host.backend, target.dtype, target.device, max_model_len=longest)
    norms = []
    for name in ("input_layernorm", "hidden_norm"):
        norms.append(decoder.builder().norm())
        dict(norms[-1].targets())["weight"](take(tensors, f"layers.0.{name}.weight", (size,), where))
    decoder.load_weights([*tensors.items(), ("-", torch.zeros(1, size))])
    decoder.layers[0].mixer_norm = SideBySideNorm(*norms)
    there = None if token_map is None else token_map.to(target.device)
    return Eagle3Proposer(host, decoder, (on(fuse), on(bias)), taps, on(embedding), on(output), there)  # type: ignore[arg-type]
