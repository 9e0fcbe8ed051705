"""Training of Medusa heads from what a model itself says."""

# Generated from nbs/spec_decode/training.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from minivllm.spec_decode.proposers import DraftRequest, DraftView, HiddenStates


class StateCollector:
    """A proposer that drafts nothing, and keeps the hidden states and tokens of every request that was computed from its first token on."""

    def __init__(self) -> None:
        self._states: dict[str, list[Tensor]] = {}
        self._tokens: dict[str, list[int]] = {}

    def read(self, states: Sequence[HiddenStates]) -> None:
        """Keep the states and tokens that come next in each request."""
        for each in states:
            name = each.request.request_id
            known = self._states.setdefault(name, [])
            if each.start == sum(map(len, known)):  # else a prefix came from the cache, or is computed again
                known.append(each.hidden.float().cpu())
                self._tokens[name] = each.request.token_ids.tolist()

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [[] for _ in requests]

    def texts(self) -> list[tuple[Tensor, Tensor]]:
        """States float32 [n, H] and tokens int64 [n + 1] of each request."""
        found = [(torch.cat(self._states[name]), torch.tensor(ids)) for name, ids in self._tokens.items()]
        return [(states, ids[: len(states) + 1]) for states, ids in found]


def head_pairs(texts: Sequence[tuple[Tensor, Tensor]], num_heads: int) -> tuple[Tensor, Tensor]:
    """The states that heads read, and the tokens that they must guess.

    Args:
        texts: states [n, H] and tokens [n + 1] of each text.
        num_heads: how many tokens after the next one are guessed.

    Returns:
        States [N, H], and the right tokens int64 [N, num_heads].
    """
    x, y = [], []
    for states, ids in texts:
        n = max(0, len(ids) - 1 - num_heads)
        x.append(states[:n])
        y.append(torch.stack([ids[2 + i : 2 + i + n] for i in range(num_heads)], 1))
    return torch.cat(x), torch.cat(y)


def train_medusa(
    texts: Sequence[tuple[Tensor, Tensor]],
    num_heads: int,
    output: Tensor,
    *,
    epochs: int = 8,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    weight_decay: float = 0.05,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Heads with one residual layer each, for the tokens that occur in the texts.

    Args:
        texts: see `head_pairs`.
        num_heads: how many.
        output: the target's output layer, [V, H], from which the heads' output layers start.
        epochs, batch_size, learning_rate, weight_decay, seed: settings of the training with AdamW.

    Returns:
        The tensors by vLLM's names, as `save_medusa` writes them.
    """
    x, y = head_pairs(texts, num_heads)
    known = y.unique()
    right, size = torch.searchsorted(known, y), x.shape[1]
    torch.manual_seed(seed)
    blocks = [torch.nn.Linear(size, size) for _ in range(num_heads)]
    for block in blocks:
        torch.nn.init.zeros_(block.weight)
        torch.nn.init.zeros_(block.bias)
    outputs = [output[known].float().clone().requires_grad_() for _ in range(num_heads)]
    weights = [*outputs, *(p for block in blocks for p in block.parameters())]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch_size):
            loss = torch.zeros(())
            for i, (block, matrix) in enumerate(zip(blocks, outputs, strict=True)):
                hidden = x[rows] + functional.silu(block(x[rows]))
                loss = loss + 0.8**i * functional.cross_entropy(hidden @ matrix.T, right[rows, i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tensors = {"token_map": known}
    for i, (block, matrix) in enumerate(zip(blocks, outputs, strict=True)):
        tensors[f"blocks.{i}.layers.0.weight"] = block.weight.detach()
        tensors[f"blocks.{i}.layers.0.bias"] = block.bias.detach()
        tensors[f"lm_heads.{i}.weight"] = matrix.detach()
    return tensors


def save_medusa(folder: str | Path, tensors: dict[str, Tensor]) -> Path:
    """Write heads into a folder that `speculative_config` with the method `medusa` can name; gives the folder back."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    heads = sum(name.startswith("lm_heads.") for name in tensors)
    (folder / "config.json").write_text(json.dumps({"num_heads": heads, "num_hidden_layers": 1}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
