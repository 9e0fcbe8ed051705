"""Draft model: its own layers under the target's block ids, and what they have computed."""

# Generated from nbs/spec_decode/draft_model.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionBatch, Plan
from minivllm.attention.state import backend_needs, cache_layout
from minivllm.core.config import EngineArgs, EngineConfig, KVCacheConfig, ModelFacts, make_kv_cache_groups
from minivllm.models.decoder import Decoder
from minivllm.models.loading import DTYPE_BYTES, LoadedModel, load_model, read_json
from minivllm.sampling.random import as_seed, uniforms
from minivllm.sampling.transforms import draw, keep_from, top_k_threshold, top_p_threshold
from minivllm.spec_decode.proposers import DraftRequest, DraftView, Tokens
from minivllm.spec_decode.rejection import Draft


@dataclass(frozen=True)
class DraftHost:
    """What a model runner offers to a proposer that has layers or heads.

    Attributes:
        target: the model, with its weights.
        backend: the attention backend.
        config: the engine's.
    """

    target: Decoder
    backend: AttentionBackend
    config: EngineConfig

    @property
    def most(self) -> int:
        """The most draft tokens of a request in a step."""
        assert self.config.speculative is not None
        return self.config.speculative.num_speculative_tokens


def shared_group(kv: KVCacheConfig) -> int:
    """The KV cache group of the target whose block ids draft layers use: one that keeps every token.

    Raises:
        ValueError: there is none.
    """
    for i, group in enumerate(kv.groups):
        if group.spec.kind in ("full", "latent"):
            return i
    kinds = ", ".join(dict.fromkeys(group.spec.kind for group in kv.groups))
    raise ValueError(f"draft layers need a target with a layer that keeps all tokens; this one has: {kinds}")


_Span = tuple[int, int, int]
"""A request by its place in a list, and the first and last + 1 of its tokens."""


@dataclass(slots=True)
class _Known:
    computed: int = 0
    hashes: list[int] = field(default_factory=list)  # of the tokens up to the end of each block
    # computed after those, and not known to be right
    guesses: Tokens = field(default_factory=lambda: np.zeros(0, np.int64))


class DraftCache:
    """Keys and values of draft layers under the block ids of the target, and what they are known to belong to.

    Args:
        decoder: the layers; they are bound to this cache.
        host: whose blocks these are.
        lead: tokens that a layer reads ahead of its place.

    Attributes:
        tensors: the layers' cache tensors.
    """

    def __init__(self, decoder: Decoder, host: DraftHost, lead: int = 0) -> None:
        kv, limits, size = host.config.kv_cache, host.config.scheduler, host.config.kv_cache.block_size
        self.decoder, self.backend, self.lead, self.block_size = decoder, host.backend, lead, size
        self.num_blocks, self.spare = kv.num_blocks, -(-host.most // size) + 1
        self._stride = kv.num_blocks + limits.max_num_seqs * self.spare
        groups = make_kv_cache_groups(decoder.spec.kv_cache_specs(size, decoder.dtype.itemsize))
        specs = decoder.attention_specs(size)
        self._specs = [specs[group.layers[0]] for group in groups]
        total = self._stride * len(groups)
        shape, dtype = cache_layout(host.backend, specs, total)
        self.tensors = [torch.zeros(shape, dtype=dtype, device=decoder.device) for _ in groups[0].layers]
        decoder.eager = host.config.args.enforce_eager
        decoder.bind(KVCacheConfig(total, size, groups))
        self._stamps = np.zeros(kv.num_blocks, np.int64)
        self._known: dict[str, _Known] = {}

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks."""
        self._known.pop(request_id, None)

    def computed(self, request: DraftRequest) -> int:
        """For how many tokens of a request, from its first on, the layers have keys and values."""
        known, tokens = self._known.get(request.request_id), request.token_ids
        if known is None:
            known = self._known[request.request_id] = _Known()
            for i, block in enumerate(request.blocks[: (len(tokens) - self.lead) // self.block_size].tolist()):
                if self._stamps[block] != self._hash(known, tokens, i):
                    break
                known.computed += self.block_size
        came = tokens[known.computed + self.lead :][: len(known.guesses)]
        right = int(np.cumprod(came == known.guesses[: len(came)]).sum())
        known.computed, known.guesses = known.computed + right, known.guesses[:0]
        return min(known.computed, len(tokens) - self.lead)

    def _hash(self, known: _Known, tokens: Tokens, block: int) -> int:
        """The hash of all tokens up to the end of a request's block; never 0. (With a lead, its last place depends on one token more, and may
        have read that of another request: one key of many in a guess, and not worth a block.)"""
        size, hashes = self.block_size, known.hashes
        for i in range(len(hashes), block + 1):
            before = hashes[-1] if hashes else 0
            hashes.append(hash((before, tokens[i * size : (i + 1) * size].tobytes())) or 1)
        return hashes[block]

    def plan(self, requests: Sequence[DraftRequest], spans: Sequence[_Span]) -> tuple[Tensor, list[Plan]]:
        """Positions, int64 [T], and the plans of one step over these spans of the requests' places."""
        size = self.block_size
        width = max(len(requests[i].blocks) for i, _, _ in spans) + self.spare
        tables, slots, starts = np.zeros((len(spans), width), np.int32), [], [0]
        for row, (i, start, end) in enumerate(spans):
            own = requests[i].blocks
            tables[row, : len(own)] = own
            tables[row, len(own) : len(own) + self.spare] = self.num_blocks + i * self.spare + np.arange(self.spare)
            self._stamps[own[start // size : -(-end // size)]] = 0
            places = np.arange(start, end)
            slots.append(tables[row, places // size].astype(np.int64) * size + places % size)
            starts.append(starts[-1] + end - start)
        ends, begins = np.array([end for _, _, end in spans], np.int32), np.array(starts, np.int32)
        positions = torch.from_numpy(np.concatenate([np.arange(start, end) for _, start, end in spans]))
        plans, slots_of_all = [], np.concatenate(slots)
        for group, spec in enumerate(self._specs):  # each has separate blocks, after those of the group before
            shift = group * self._stride
            batch = AttentionBatch(begins, ends, tables + np.int32(shift), slots_of_all + shift * size)
            plans.append(spec.planner(self.backend, self.decoder.device)(batch))
        return positions.to(self.decoder.device), plans

    def advance(self, request: DraftRequest, start: int, end: int) -> None:
        """The places from `start` to `end` of a request have been computed, with all before them."""
        known, size = self._known[request.request_id], self.block_size
        known.computed, known.guesses = min(end, len(request.blocks) * size), known.guesses[:0]
        for i in range(start // size, known.computed // size):
            self._stamps[request.blocks[i]] = self._hash(known, request.token_ids, i)

    def guess(self, request: DraftRequest, token_ids: Sequence[int]) -> None:
        """Note that these tokens were computed after the known ones; they may turn out to be right."""
        known = self._known[request.request_id]
        room = len(request.blocks) * self.block_size - known.computed  # what lies in scratch blocks is lost
        known.guesses = np.array(token_ids[: max(0, room)], np.int64)


DRAW = np.uint64(0x3C6EF372FE94F82B)  # numbers that are independent of those that tokens are accepted and drawn with


def choose_guesses(
    logits: Tensor, requests: Sequence[DraftRequest], place: int, argmax: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """A guess at each request's next token, and the distribution that it was drawn from.

    Args:
        logits: float32 [R, V] of the draft model; overwritten.
        requests: R of them.
        place: how many draft tokens stand before the guess.
        argmax: gives the place of the largest number of each row, as `LayerOps.argmax`.

    Returns:
        int64 [R], and for each row float32 [V], or None for a greedy request.
    """
    token_ids, probs = argmax(logits).clamp(min=0), list[Tensor | None]([None] * len(requests))
    drawn = [i for i, request in enumerate(requests) if not request.params.is_greedy]
    if not drawn:
        return token_ids, probs
    rows, params = torch.tensor(drawn, device=logits.device), [requests[i].params for i in drawn]
    part, vocab = logits[rows], logits.shape[1]
    part /= torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    if any(0 < p.top_k < vocab for p in params):
        k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=logits.device)
        part = keep_from(part, top_k_threshold(part, k, int(k.max())))
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
        part = keep_from(part, top_p_threshold(part, top_p))
    seeds = np.array([as_seed(requests[i].seed) ^ DRAW for i in drawn], np.uint64)
    said = np.array([len(requests[i].token_ids) - requests[i].num_prompt_tokens + place for i in drawn])
    token_ids = token_ids.index_copy(0, rows, draw(part, torch.from_numpy(uniforms(seeds, said)).to(logits.device))[0])
    for i, q in zip(drawn, torch.softmax(part, -1), strict=True):
        probs[i] = q
    return token_ids, probs


class DraftModelProposer:
    """Guesses with a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        host: the target, and what it runs by.
        decoder: the draft model, with its weights.
    """

    LEAD = 0
    uses_blocks = True

    def __init__(self, host: DraftHost, decoder: Decoder) -> None:
        limits = host.config.scheduler
        self.host, self.decoder, self.cache = host, decoder, DraftCache(decoder, host, self.LEAD)
        self._budget = limits.max_num_batched_tokens
        self._longest = min(decoder.spec.max_model_len, limits.max_model_len)

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks."""
        self.cache.forget(request_id)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[Draft]:
        rooms = [min(request.most, self._longest - len(request.token_ids)) for request in requests]
        hidden = self._begin(requests, rooms)
        ids: list[list[int]] = [[] for _ in requests]
        probs: list[list[Tensor | None]] = [[] for _ in requests]
        alive = [i for i, room in enumerate(rooms) if room > 0]
        for place in range(max(rooms, default=0)):
            asked = [requests[i] for i in alive]
            token_ids, q = choose_guesses(self._logits(hidden), asked, place, self.decoder.ops.argmax)
            for i, token_id, row in zip(alive, token_ids.tolist(), q, strict=True):
                ids[i].append(token_id)
                probs[i].append(row)
            going = [at for at, i in enumerate(alive) if rooms[i] > place + 1]
            alive = [alive[at] for at in going]
            if not alive:
                break
            at = torch.tensor(going, device=hidden.device)
            here = [len(requests[i].token_ids) - self.LEAD + place for i in alive]
            spans = [(i, start, start + 1) for i, start in zip(alive, here, strict=True)]
            hidden = self._run(requests, spans, token_ids[at], hidden[at])
        for request, drafted in zip(requests, ids, strict=True):
            if drafted and not self.LEAD:  # else the target's own states come instead of those that were guessed
                self.cache.guess(request, drafted[:-1])  # the last was not read
        return [Draft(i, None if not q or q[0] is None else torch.stack(q)) for i, q in zip(ids, probs, strict=True)]  # type: ignore[arg-type]

    def _begin(self, requests: Sequence[DraftRequest], rooms: list[int]) -> Tensor:
        """Compute what is missing of the requests with room. Returns the hidden state of the newest token of each."""
        todo, last = [], {}
        for i, request in enumerate(requests):
            if rooms[i] > 0:
                end = len(request.token_ids)
                todo.append((i, min(self.cache.computed(request), end - 1), end))
        for spans in pieces(todo, self._budget):
            token_ids = np.concatenate([requests[i].token_ids[start:end] for i, start, end in spans]).astype(np.int64)
            hidden, at = self._run(requests, spans, torch.from_numpy(token_ids).to(self.decoder.device)), 0
            for i, start, end in spans:
                self.cache.advance(requests[i], start, end)
                at += end - start
                last[i] = hidden[at - 1]
        return torch.stack([last[i] for i, _, _ in todo]) if todo else torch.empty(0)

    def _run(
        self,
        requests: Sequence[DraftRequest],
        spans: Sequence[_Span],
        token_ids: Tensor,
        features: Tensor | None = None,
    ) -> Tensor:
        """Hidden states, [T, hidden_size], of the tokens [T] at these places. features: what was there before; not used here."""
        positions, plans = self.cache.plan(requests, spans)
        return self.decoder.forward(token_ids, positions, self.cache.tensors, plans)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.compute_logits(hidden)


def pieces(todo: Sequence[_Span], budget: int) -> Iterator[list[_Span]]:
    """The spans in their order, cut into lists of at most `budget` tokens."""
    spans, left = list[_Span](), budget
    for i, start, end in todo:
        while start < end:
            taken = min(left, end - start)
            spans.append((i, start, start + taken))
            start, left = start + taken, left - taken
            if not left:
                yield spans
                spans, left = [], budget
    if spans:
        yield spans


def read_drafter(args: EngineArgs, target: LoadedModel | None = None) -> LoadedModel:
    """The folder that `speculative_config["model"]` names, without its weights.

    Args:
        target: compare its vocabulary with this model's.

    Raises:
        ValueError: no such model, or another vocabulary; names the difference.
    """
    speculative = args.speculative
    assert speculative is not None and speculative.model is not None
    load_format = args.load_format if args.load_format == "dummy" else "auto"
    drafter = load_model(speculative.model, load_format=load_format, download_dir=args.download_dir, seed=args.seed)
    if speculative.method in ("eagle", "eagle3"):
        drafter = replace(drafter, hf_config=_without_eagle(drafter.hf_config))
    if target is not None and speculative.method == "draft_model":
        check_vocabulary(target, drafter)
    return drafter


_EAGLE_FIELDS = (
    "bias",  # of the matrix, which the tensors show
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
    "max_window_layers",  # of the target that it was made from; it has no window
)


def _without_eagle(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an EAGLE layer as that of a model with one layer: `EagleLlamaForCausalLM` and `LlamaForCausalLMEagle3` are Llamas."""
    plain = {name: value for name, value in config.items() if name not in _EAGLE_FIELDS}
    if isinstance(names := config.get("architectures"), list):
        plain["architectures"] = [re.sub("Eagle3?", "", str(name)) for name in names]
    return plain


def check_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise ValueError unless a token id is the same text in both models."""
    sizes = target.spec.vocab_size, draft.spec.vocab_size
    differs = f"the draft model {draft.name!r} cannot draft for {target.name!r}: "
    if sizes[0] != sizes[1]:
        raise ValueError(f"{differs}its vocabulary has {sizes[1]} tokens, not {sizes[0]}")
    files = [model.path / "tokenizer.json" for model in (target, draft)]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_token_texts(file) for file in files)
    if other := [i for i in ours if i in theirs and ours[i] != theirs[i]]:
        raise ValueError(f"{differs}token {other[0]} is {theirs[other[0]]!r} there and {ours[other[0]]!r} here")


def _token_texts(file: Path) -> dict[int, str]:
    content = read_json(file)
    vocab = content.get("model", {}).get("vocab", {})
    pairs = vocab.items() if isinstance(vocab, dict) else [(entry[0], i) for i, entry in enumerate(vocab)]
    return {i: text for text, i in pairs} | {t["id"]: t["content"] for t in content.get("added_tokens", ())}


def with_drafter(facts: ModelFacts, args: EngineArgs, target: LoadedModel, dtype: str) -> ModelFacts:
    """The facts of a model with its drafter: the memory of both. Unchanged without a draft model, heads or layer."""
    speculative, size = args.speculative, DTYPE_BYTES[dtype]
    if speculative is not None and speculative.method == "mtp":
        layer, block = target.spec.mtp_layer(), args.block_size
        weights = layer.num_parameters() + 2 * layer.hidden_size**2
        (spec,) = layer.kv_cache_specs(block, size)
        bytes_ = facts.weight_bytes + weights * size
        return replace(facts, weight_bytes=bytes_, draft_bytes_per_block=spec.bytes_per_block)
    if speculative is None or speculative.model is None:
        return facts
    drafter = read_drafter(args, target)
    weights = sum(math.prod(record.shape) for record in drafter.records) or drafter.spec.num_parameters()
    per_block = 0
    if speculative.method in ("draft_model", "eagle", "eagle3"):
        specs = drafter.spec.kv_cache_specs(args.block_size, size)
        if any(spec.rules.is_state for spec in specs):
            raise ValueError(
                f"the draft model {drafter.name!r} has states, out of which a rejected token cannot be taken back"
            )
        per_block = sum(spec.bytes_per_block for spec in specs)
    return replace(facts, weight_bytes=facts.weight_bytes + weights * size, draft_bytes_per_block=per_block)


def load_draft_model(host: DraftHost) -> DraftModelProposer:
    """A proposer with the draft model that the configuration names. Raises ValueError if the attention backend cannot run it."""
    config, target = host.config, host.target
    drafter = read_drafter(config.args)
    for spec in backend_needs(drafter.spec.attention_specs(config.kv_cache.block_size, target.dtype)):
        if (why := host.backend.unsupported(spec, target.device)) is not None:
            raise ValueError(f"the draft model {drafter.name!r} does not run on {host.backend.name!r}: {why}")
    longest = min(drafter.spec.max_model_len, config.scheduler.max_model_len)
    decoder = Decoder(drafter.spec, host.backend, target.dtype, target.device, max_model_len=longest)
    decoder.load_weights(drafter.weights(config.dtype, target.device))
    return DraftModelProposer(host, decoder)
