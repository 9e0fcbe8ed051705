"""Vectors and class scores of a whole prompt: pooling, heads, and the files that describe them."""

# Generated from nbs/models/pooling.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.config import PoolingFacts
from minivllm.core.module import Module
from minivllm.models.ops.torch import ACTIVATIONS

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "tanh": torch.tanh, **ACTIVATIONS}


class HeadLayer(NamedTuple):
    """`norm(activation(x @ weight.T + bias))`. name, norm: in a checkpoint; norm: None for none."""

    name: str
    outputs: int
    bias: bool = True
    activation: str | None = None
    norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class PoolerSpec:
    """What follows the last hidden states of a model that predicts no tokens.

    Attributes:
        pooling_type: see `PoolingFacts`.
        head: layers from a pooled hidden state to class scores; none in a model that gives vectors.
        per_token: the head is for single tokens, not for a prompt.
        labels: names of the classes.
        activation: applied to class scores, see `PoolingFacts`.
    """

    pooling_type: str = "mean"
    head: tuple[HeadLayer, ...] = ()
    per_token: bool = False
    labels: tuple[str, ...] = ()
    activation: str = "softmax"

    def weight_shapes(self, hidden_size: int, norm_bias: bool) -> dict[str, tuple[int, ...]]:
        """Name and shape of each of the head's tensors in a checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in self.head:
            shapes[f"{layer.name}.weight"] = (layer.outputs, hidden_size)
            hidden_size = layer.outputs
            if layer.bias:
                shapes[f"{layer.name}.bias"] = (hidden_size,)
            if layer.norm is not None:
                shapes |= {f"{layer.norm}.{kind}": (hidden_size,) for kind in ("weight", "bias")[: 1 + norm_bias]}
        return shapes

    @property
    def tasks(self) -> tuple[str, ...]:
        """See `PoolingFacts`."""
        if not self.head:
            return ("embed", "token_embed", "score")
        if self.per_token:
            return ("token_classify",)
        return ("classify", "token_classify", "score") if len(self.labels) == 1 else ("classify", "token_classify")


class PoolingHead(Module):
    """The layers of a `PoolerSpec`, in float32.

    Attributes:
        weights: by their names in a checkpoint.
    """

    def __init__(
        self, spec: PoolerSpec, hidden_size: int, norm_eps: float, norm_bias: bool, device: torch.device
    ) -> None:
        self.spec, self.norm_eps = spec, norm_eps
        shapes = spec.weight_shapes(hidden_size, norm_bias)
        self.weights = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """(name in a checkpoint, function that loads the tensor)."""
        yield from ((name, weight.copy_) for name, weight in self.weights.items())

    def __call__(self, x: Tensor) -> Tensor:
        """[R, hidden_size] to class scores, float32 [R, labels]."""
        x, get = x.float(), self.weights.get
        for layer in self.spec.head:
            x = _ACTIVATIONS[layer.activation or ""](
                F.linear(x, self.weights[f"{layer.name}.weight"], get(f"{layer.name}.bias"))
            )
            if (norm := layer.norm) is not None:
                x = F.layer_norm(x, x.shape[-1:], get(f"{norm}.weight"), get(f"{norm}.bias"), self.norm_eps)
        return x


_TORCH_NAMES = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def read_labels(config: dict[str, Any]) -> dict[str, Any]:
    """The fields `labels` and `activation` of a `PoolerSpec`, from a classifier's config.

    Raises:
        ValueError: an activation that is not known.
    """
    given = config.get("id2label") or {}
    count = len(given) or config.get("num_labels") or 2
    labels = tuple(str(given.get(str(i), given.get(i, f"LABEL_{i}"))) for i in range(count))
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        activation = _TORCH_NAMES.get(str(named).rpartition(".")[2])
    else:
        problem = config.get("problem_type")
        activation = _PROBLEMS.get(problem) if problem else "softmax" if count > 1 else "sigmoid"
    if activation is None:
        raise ValueError(
            f"the activation of the scores is {named or config['problem_type']!r}; known: {', '.join((*_TORCH_NAMES, *_PROBLEMS))}"
        )
    return {"labels": labels, "activation": activation}


_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def read_sentence_transformers(folder: Path) -> dict[str, Any] | None:
    """The fields `pooling_type` and `normalize` of `PoolingFacts`, and `max_seq_length`; None for a folder of another kind.

    Raises:
        ValueError: a module or a pooling that is not implemented; names it.
    """
    modules = _json(folder / "modules.json")
    if modules is None:
        return None
    found: dict[str, Any] = {"pooling_type": "mean", "normalize": False, "max_seq_length": None}
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            config = _json(folder / module["path"] / "config.json") or {}
            modes = [mode for name, mode in _MODES.items() if config.get(name)]
            if "pooling_mode" in config:
                modes = [_POOLING.get(config["pooling_mode"], "")]
            others = [
                name for name, on in config.items() if name.startswith("pooling_mode_") and on and name not in _MODES
            ]
            if others or len(modes) != 1 or not modes[0]:
                raise ValueError(
                    f"{folder / module['path']}: this pooling is not implemented; one of cls, mean, last is"
                )
            found["pooling_type"] = modes[0]
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise ValueError(f"{folder / 'modules.json'}: a module of type {kind!r} is not implemented")
    found["max_seq_length"] = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return found


def pooling_facts(
    pooler: PoolerSpec | None, config: dict[str, Any], folder: Path, runner: str, given: dict[str, Any] | None
) -> tuple[PoolingFacts, int | None]:
    """What the engine needs to know, and the longest text that the model was trained for, if the folder says so.

    Args:
        pooler: that of the model's spec; None for a model that predicts tokens.
        config, folder: the model's.
        runner, given: what the user said, see `EngineArgs.runner` and `EngineArgs.pooler_config`.

    Raises:
        ValueError: the model cannot generate, or what the user said of the pooling is unknown.
    """
    written = read_sentence_transformers(folder)
    if runner == "generate" and pooler is not None:
        raise ValueError(f"runner='generate': {config.get('architectures', ['this model'])[0]} predicts no tokens")
    generates = pooler is None and (runner == "generate" or (runner == "auto" and written is None))
    pools = pooler or PoolerSpec(pooling_type="mean" if generates else "last")
    facts = PoolingFacts(
        tasks=pools.tasks,
        pooling_type=pools.pooling_type,
        labels=pools.labels,
        activation=pools.activation,
        matryoshka_dimensions=tuple(config.get("matryoshka_dimensions") or ()),
        generates=generates,
    )
    if written is not None and not pools.head:
        facts = replace(facts, **{name: written[name] for name in ("pooling_type", "normalize")})
    facts = replace(facts, **(given or {}))
    if facts.pooling_type not in _MODES.values() or not isinstance(facts.normalize, bool):
        raise ValueError(f"pooler_config: pooling_type is one of cls, mean, last and normalize a bool; got {given!r}")
    return facts, None if written is None else written["max_seq_length"]
