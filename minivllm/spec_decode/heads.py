"""Proposers that read the target's hidden states: Medusa heads, EAGLE-1 layers."""

# Generated from nbs/spec_decode/heads.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from minivllm.models.decoder import Decoder
from minivllm.models.layers import NoNorm
from minivllm.models.loading import CheckpointError, LoadedModel
from minivllm.models.spec import LayerSpec, WeightNames
from minivllm.spec_decode.draft_model import DraftHost, DraftModelProposer, choose_guesses, read_drafter
from minivllm.spec_decode.proposers import DraftRequest, DraftView, HiddenStates
from minivllm.spec_decode.rejection import Draft


def read_tensors(folder: LoadedModel) -> dict[str, Tensor]:
    """All tensors of a small checkpoint."""
    files = dict.fromkeys(record.file for record in folder.records)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: Any) -> Tensor:
    """Take a tensor out of a checkpoint. Raises ValueError if it is missing, or of another shape."""
    if name not in tensors:
        raise ValueError(f"{where} lacks the tensor {name!r}")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{where}: tensor {name!r} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor


def take_if_there(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: Any) -> Tensor | None:
    """`take`, or None if the checkpoint has no such tensor."""
    return take(tensors, name, shape, where) if name in tensors else None


class MedusaProposer:
    """Guesses each of the next tokens with a separate head on the target's hidden state (Cai et al. 2024, arXiv 2401.10774).

    Args:
        target: gives the output layer to heads without one.
        blocks: for each head, weight [H, H] and bias [H] of its residual layers.
        outputs: for each head its output layer, [v, H], or None.
        token_map: int64 [v], the tokens that `outputs` know; None for all.
    """

    def __init__(
        self,
        target: Decoder,
        blocks: Sequence[Sequence[tuple[Tensor, Tensor]]],
        outputs: Sequence[Tensor | None],
        token_map: Tensor | None = None,
    ) -> None:
        self.target, self.blocks, self.outputs, self.token_map = target, blocks, outputs, token_map
        self._states: dict[str, tuple[int, Tensor]] = {}

    def read(self, states: Sequence[HiddenStates]) -> None:
        """Keep the newest state of each request."""
        for each in states:
            self._states[each.request.request_id] = each.end, each.hidden[-1].clone()

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks."""
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[Draft]:
        known = [i for i, r in enumerate(requests) if self._states.get(r.request_id, (0,))[0] == len(r.token_ids) - 1]
        drafts = [Draft()] * len(requests)
        if not known:
            return drafts
        asked = [requests[i] for i in known]
        hidden = torch.stack([self._states[request.request_id][1] for request in asked])
        most, guesses = min(len(self.blocks), max(request.most for request in asked)), []
        for place in range(most):
            guesses.append(choose_guesses(self.logits(hidden, place), asked, place, self.target.ops.argmax))
        ids = torch.stack([token_ids for token_ids, _ in guesses], 1).tolist()
        for row, i in enumerate(known):
            n, probs = min(most, requests[i].most), [q[row] for _, q in guesses]
            drafts[i] = Draft(ids[row][:n], None if probs[0] is None else torch.stack(probs)[:n])  # type: ignore[arg-type]
        return drafts

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """float32 [R, V] of one head; minus infinity for tokens that it does not know."""
        for weight, bias in self.blocks[head]:
            hidden = hidden + functional.silu(functional.linear(hidden, weight, bias))
        output = self.outputs[head]
        if output is None:
            return self.target.compute_logits(hidden)
        logits = functional.linear(hidden, output).float()
        return widen(logits, self.token_map, self.target.spec.vocab_size)


def widen(logits: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [R, v] of the tokens int64 [v] as those of all, [R, vocab_size]; None for all."""
    if token_map is None:
        return logits
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, token_map, logits)


def _medusa_name(name: str) -> str:
    """vLLM's name of a tensor that may have that of the first Medusa code, `head.layer.linear.weight` or `head.layer.weight`."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return "blocks.{}.layers.{}.{}".format(*found.groups())
    found = re.fullmatch(r"(\d+)\.\d+\.weight", name)
    return f"lm_heads.{found[1]}.weight" if found else name


def load_medusa(host: DraftHost) -> MedusaProposer:
    """Medusa heads from a folder. Raises ValueError for one that lacks something, or has too few heads."""
    folder, target = read_drafter(host.config.args), host.target
    where, size, vocab = folder.path, target.spec.hidden_size, target.spec.vocab_size
    tensors = {_medusa_name(name): tensor for name, tensor in read_tensors(folder).items()}
    config = folder.hf_config
    heads, layers = (config.get(a, config.get(b)) for a, b in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")))  # fmt: skip
    if not isinstance(heads, int) or not isinstance(layers, int):
        raise CheckpointError(
            f"{where}/config.json must say num_heads and num_hidden_layers, got {heads!r} and {layers!r}"
        )
    if heads < host.most:
        raise ValueError(f"{where} has {heads} heads, too few for num_speculative_tokens={host.most}")
    token_map = tensors.pop("token_map", None)
    if token_map is not None and (token_map.is_floating_point() or not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab):  # fmt: skip
        raise ValueError(f"{where}: token_map must hold token ids below {vocab}")
    known = vocab if token_map is None else len(token_map)

    def on(tensor: Tensor) -> Tensor:
        return tensor.to(target.device, target.dtype, copy=True)

    blocks, outputs = [], list[Tensor | None]()
    for i in range(heads):
        of = [f"blocks.{i}.layers.{j}." for j in range(layers)]
        zero = torch.zeros(size)
        blocks.append(
            [
                (on(take(tensors, name + "weight", (size, size), where)), on(tensors.pop(name + "bias", zero)))
                for name in of
            ]
        )
        name = f"lm_heads.{i}.weight"
        own = name in tensors or token_map is not None
        outputs.append(on(take(tensors, name, (known, size), where)) if own else None)
    if tensors:
        raise ValueError(f"{where} has a tensor {next(iter(tensors))!r} that Medusa heads have no place for")
    return MedusaProposer(target, blocks, outputs, None if token_map is None else token_map.long().to(target.device))


class EagleProposer(DraftModelProposer):
    """Guesses the target's next hidden states with a separate layer (Li et al. 2024, arXiv 2401.15077), a chain of them.

    Args:
        host: the target, and what it runs by.
        decoder: the layer, without embedding, norms and output.
        fuse: weight [H, 2 H] and bias [H] or None, from embedding and state to what the layer reads.
        embedding: float [V, H]; None for the target's.
    """

    LEAD = 1

    def __init__(
        self, host: DraftHost, decoder: Decoder, fuse: tuple[Tensor, Tensor | None], embedding: Tensor | None = None
    ) -> None:
        super().__init__(host, decoder)
        self.fuse, self.embedding = fuse, embedding
        self._states: dict[str, tuple[int, Tensor]] = {}  # the newest that was predicted, and where its token belongs

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def read(self, states: Sequence[HiddenStates]) -> None:
        """Run the layer over what the target has computed."""
        spans, found = [], []
        for i, each in enumerate(states):
            if self.cache.computed(each.request) >= each.start:
                spans.append((i, each.start, each.end))
                found.append(each)
                self.cache.advance(each.request, each.start, each.end)  # a later one may share these blocks already
        if not spans:
            return
        ids = [each.request.token_ids[each.start + 1 : each.end + 1].tolist() for each in found]
        token_ids = torch.tensor([token for of_one in ids for token in of_one], device=self.decoder.device)
        requests = [each.request for each in states]
        hidden = self._run(requests, spans, token_ids, self._features(torch.cat([each.hidden for each in found])))
        at = 0
        for each in found:
            at += each.end - each.start
            self.cache.advance(each.request, each.start, each.end)
            self._states[each.request.request_id] = each.end, hidden[at - 1].clone()

    def _begin(self, requests: Sequence[DraftRequest], rooms: list[int]) -> Tensor:
        states = []
        for i, request in enumerate(requests):
            end, state = self._states.get(request.request_id, (-1, None))
            if state is None or end != len(request.token_ids) - 1:
                rooms[i] = 0
            elif rooms[i] > 0:
                states.append(state)
        return torch.stack(states) if states else torch.empty(0)

    def _run(
        self,
        requests: Sequence[DraftRequest],
        spans: Sequence[tuple[int, int, int]],
        token_ids: Tensor,
        features: Tensor | None = None,
    ) -> Tensor:
        positions, plans = self.cache.plan(requests, spans)
        assert features is not None
        x = self._inputs(token_ids, positions, features)
        return self.decoder.forward(token_ids, positions, self.cache.tensors, plans, x=x)

    def _features(self, hidden: Tensor) -> Tensor:
        """The features that the layer reads, [T, H], from `HiddenStates.hidden`."""
        return hidden

    def _inputs(self, token_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        """The layer's input for tokens int64 [T] and states [T, H]."""
        return functional.linear(self._pairs(token_ids, positions, features), *self.fuse)

    def _pairs(self, token_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        """[T, 2 H]: embeddings of tokens, and states."""
        own = self.embedding
        x = self.host.target.embed(token_ids, positions) if own is None else own[token_ids]
        return torch.cat([x, features.to(x.dtype)], 1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.host.target.compute_logits(hidden)


def check_target(folder: LoadedModel, target: Decoder) -> None:
    """Raise ValueError unless a layer that reads states was made for a target of these sizes."""
    made, has = ((spec.hidden_size, spec.vocab_size) for spec in (folder.spec, target.spec))
    if made != has:
        raise ValueError(
            f"{folder.path} is made for states of {made[0]} numbers and {made[1]} tokens; the target has {has[0]} and {has[1]}"
        )


def load_eagle(host: DraftHost) -> EagleProposer:
    """An EAGLE-1 layer from a folder. Raises ValueError for one that is made for another target, or lacks something."""
    folder, target = read_drafter(host.config.args), host.target
    spec, size, where = folder.spec, target.spec.hidden_size, folder.path
    check_target(folder, target)
    layers: list[LayerSpec] = [replace(spec.layers[0], mixer_norm=None), *spec.layers[1:]]
    names = WeightNames(embedding="-", final_norm="-.weight", head="lm_head.weight", layer="layers.{}.")
    spec = replace(spec, layers=tuple(layers), names=names, vocab_size=1, tie_word_embeddings=True)
    tensors = read_tensors(folder)

    def on(tensor: Tensor) -> Tensor:
        return tensor.to(target.device, target.dtype, copy=True)

    fuse = on(take(tensors, "fc.weight", (size, 2 * size), where))
    bias = take_if_there(tensors, "fc.bias", (size,), where)
    embedding = take_if_there(tensors, "embed_tokens.weight", (target.spec.vocab_size, size), where)
    longest = min(spec.max_model_len, host.config.scheduler.max_model_len)
    decoder = Decoder(spec, host.backend, target.dtype, target.device, max_model_len=longest)
    decoder.load_weights([*tensors.items(), ("-", torch.zeros(1, size)), ("-.weight", torch.ones(size))])
    decoder.final_norm = NoNorm()
    given = None if embedding is None else on(embedding)
    return EagleProposer(host, decoder, (fuse, None if bias is None else on(bias)), given)
