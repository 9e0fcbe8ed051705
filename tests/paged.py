"""A few lines that do what the model runner does: hold block tables, lay requests end to end, run a decoder."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tiny_models import checkpoint

from minivllm.attention.backend import AttentionBackend, AttentionBatch
from minivllm.attention.select import make_backend
from minivllm.attention.state import cache_layout
from minivllm.core.config import STATE_KINDS, KVCacheConfig, make_kv_cache_groups, unify_block_size
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config

CPU = torch.device("cpu")


def make_decoder(hf_model: Any, backend: str | AttentionBackend = "reference", **kwargs: Any) -> Decoder:
    """Our decoder with the weights of a transformers model."""
    backend = make_backend(backend) if isinstance(backend, str) else backend
    dtype = kwargs.pop("dtype", torch.float32)
    decoder = Decoder(spec_from_config(hf_model.config.to_dict()), backend, dtype, CPU, **kwargs)
    decoder.load_weights(checkpoint(hf_model).items())
    return decoder


class PagedDecoder:
    """A decoder with its cache and some requests. Unused slots hold NaN, blocks come in random order."""

    def __init__(
        self, decoder: Decoder, *, block_size: int = 8, num_blocks: int = 400, seed: int = 0, mode: str = "none"
    ) -> None:
        item = torch.empty(0, dtype=decoder.kv_dtype or decoder.dtype).element_size()
        block_size = unify_block_size(decoder.spec.kv_cache_specs(block_size, item), block_size)
        self.decoder, self.block_size = decoder, block_size
        specs = decoder.spec.kv_cache_specs(block_size, item)
        groups = make_kv_cache_groups([replace(s, kind=STATE_KINDS[mode]) if s.rules.is_state else s for s in specs])
        self.config = KVCacheConfig(num_blocks, block_size, groups)
        decoder.bind(self.config)
        self.specs = decoder.attention_specs(block_size)
        shape, dtype = cache_layout(decoder.backend, self.specs, num_blocks)
        # four bytes of 255 are a NaN, too
        nothing = torch.nan if dtype.is_floating_point else 255 if dtype == torch.uint8 else -1
        self.caches = [torch.full(shape, nothing, dtype=dtype) for _ in range(self.config.num_tensors)]
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, num_blocks)))
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}

    def add(self, name: str, tokens: list[int]) -> None:
        self.tokens[name], self.computed[name] = list(tokens), 0
        self.tables[name] = [[] for _ in self.config.groups]

    @torch.inference_mode()
    def step(self, scheduled: dict[str, int]) -> dict[str, torch.Tensor]:
        """Compute the scheduled tokens of each request; gives the logits of each of them."""
        ids, positions = [], []
        for name, count in scheduled.items():
            begin = self.computed[name]
            self.computed[name] += count
            ids += self.tokens[name][begin : begin + count]
            positions.append(np.arange(begin, begin + count))
            for group, table in zip(self.config.groups, self.tables[name], strict=True):
                while len(table) < group.spec.rules.num_blocks(group.spec, self.computed[name]):
                    table.append(int(self.free.pop()))
        plans = [self._plan(g, scheduled, positions) for g in range(len(self.config.groups))]
        hidden = self.decoder.forward(torch.tensor(ids), torch.as_tensor(np.concatenate(positions)), self.caches, plans)
        logits = self.decoder.compute_logits(hidden)
        return dict(zip(scheduled, logits.split(list(scheduled.values())), strict=True))

    def _plan(self, group: int, scheduled: dict[str, int], positions: list[np.ndarray]) -> Any:
        tables = [self.tables[name][group] for name in scheduled]
        block_table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables):
            block_table[row, : len(table)] = table
        slots = [
            np.resize(tables[row], p[-1] // self.block_size + 1)[p // self.block_size] * self.block_size
            + p % self.block_size
            for row, p in enumerate(positions)
        ]
        batch = AttentionBatch(
            query_start_loc=np.cumsum([0, *scheduled.values()]).astype(np.int32),
            seq_lens=np.array([self.computed[name] for name in scheduled], np.int32),
            block_table=block_table,
            slot_mapping=np.concatenate(slots),
        )
        layer = self.config.groups[group].layers[0]
        return self.specs[layer].planner(self.decoder.backend, CPU)(batch)

    def generate(self, prompts: dict[str, list[int]], max_tokens: int, chunk: int = 1000) -> dict[str, list[int]]:
        """Greedy tokens, all requests in one batch, prompts in chunks."""
        for name, prompt in prompts.items():
            self.add(name, prompt)
        while running := [n for n in prompts if len(self.tokens[n]) < len(prompts[n]) + max_tokens]:
            todo = {n: min(chunk, len(self.tokens[n]) - self.computed[n]) for n in running}
            for name, logits in self.step(todo).items():
                if self.computed[name] == len(self.tokens[name]):
                    self.tokens[name].append(int(logits[-1].argmax()))
        return {name: self.tokens[name][len(prompt) :] for name, prompt in prompts.items()}
