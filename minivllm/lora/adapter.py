"""LoRA adapters in PEFT's folder layout: checks, tensors, scale."""

# Generated from nbs/lora/adapter.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.models.loading import DTYPES, TensorRecord, read_header
from minivllm.models.mixers.moe import MoESpec
from minivllm.models.spec import DecoderSpec


class AdapterError(ValueError):
    """An adapter that cannot be used; the message names the file, and the field or tensor at fault."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a request runs with.

    Attributes:
        lora_name: what the adapter is called; cached blocks are shared under the same name only.
        lora_int_id: a number of at least 1, different for each adapter.
        lora_path: folder with `adapter_config.json` and `adapter_model.safetensors`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise TypeError(f"LoRARequest.{name} must be a string that is not empty, got {value!r}")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"LoRARequest.lora_int_id must be a whole number of at least 1, got {self.lora_int_id!r}")


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NEUTRAL = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode
    layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core peft_version
    qalora_group_size revision runtime_config task_type
"""
_READ = "alpha_pattern bias init_lora_weights lora_alpha peft_type r rank_pattern target_modules use_rslora"
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "single trained tokens",
    "target_parameters": "adapters of bare parameters",
    "lora_bias": "a bias in the adapter",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
}
_KNOWN = frozenset((_NEUTRAL + _READ).split())
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_regex(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _is_table(value: Any, good: Callable[[Any], bool]) -> bool:
    pairs = value.items() if isinstance(value, dict) else [(None, None)]
    return value is None or all(_is_regex(key) and good(each) for key, each in pairs)


def _is_list(value: Any, kind: type) -> bool:
    return value is None or (isinstance(value, list) and all(type(each) is kind for each in value))


_NAMES = (lambda value: _is_regex(value) or _is_list(value, str), "a list of names or a regular expression")
# what the value of a field must be: a test, and words
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a whole number above 0"),
    "lora_alpha": (_is_alpha, "a finite number above 0"),
    "rank_pattern": (lambda value: _is_table(value, _is_rank), "whole numbers above 0 by regular expression"),
    "alpha_pattern": (lambda value: _is_table(value, _is_alpha), "finite numbers above 0 by regular expression"),
    "use_rslora": (lambda value: value in (None, True, False), "true or false"),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "layers_to_transform": (lambda v: type(v) is int or _is_list(v, int), "a layer's number or a list of them"),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The checked `adapter_config.json`.

    Raises:
        AdapterError: there is none, or it asks for something that is not implemented; names the field.
    """
    file = folder / CONFIG
    try:
        config = json.loads(_inside(folder, CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise AdapterError(f"{file}: peft_type must be 'LORA', it is {kind!r}")
    for name, value in config.items():
        if value and name not in _KNOWN:
            what = _REFUSED.get(name, "a field that is not known here")
            raise AdapterError(f"{file}: {name}={value!r} ({what}) is not implemented")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"{file}: bias={config['bias']!r} trains biases of the base model; only 'none' is implemented"
        )
    if (init := config.get("init_lora_weights")) not in _INITS:
        raise AdapterError(
            f"{file}: init_lora_weights={init!r} changes the base model's weights; convert the adapter to plain LoRA"
            " (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name, (is_good, allowed) in _FIELDS.items():
        if not is_good(config.get(name)):
            raise AdapterError(f"{file}: {name} must be {allowed}, it is {config.get(name)!r}")
    return config


def _inside(folder: Path, name: str) -> Path:
    """The file of this name, which must not lead out of the folder."""
    file = folder / name
    if not file.is_file():
        pickle = folder / "adapter_model.bin"
        if name == WEIGHTS and pickle.is_file():
            raise AdapterError(
                f"{pickle} is a pickle file, which can run code when opened, and is refused; save it as {WEIGHTS}"
            )
        raise AdapterError(f"there is no {file}")
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not any(file.resolve().is_relative_to(place) for place in (home, blobs)):
        raise AdapterError(f"{file} is a link that leaves its folder, and is refused")
    return file


def adapter_digest(folder: Path) -> str:
    """Changes whenever a file of the adapter does: SHA-256 of both files, as hex digits."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            with open(_inside(folder, name), "rb") as file:
                hashlib.file_digest(file, lambda: digest)
    except OSError as error:
        raise AdapterError(str(error)) from error
    return digest.hexdigest()


def lora_targets(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every module of a model that may have an adapter, by its name in a checkpoint.

    Experts, shared ones too, are not among them, and neither is what the layers use as a bare tensor (DeepSeek's kv_b_proj).

    Besides the parts of linear layers these are the embedding, whose input is a token id, and the output layer. If both
    share their weight, an adapter of one of them still moves that one only, as PEFT's unmerged adapters do.
    """
    names, hidden = spec.names, spec.hidden_size
    targets = {_module(names.embedding): (hidden, spec.vocab_size), _module(names.head): (spec.vocab_size, hidden)}
    for i, layer in enumerate(spec.layers):
        for block in (layer.mixer, layer.mlp):
            for linear in block.linears(hidden).values():
                for part, outputs in linear.parts.items():
                    targets[names.layer.format(i) + part] = (outputs, linear.inputs)
    return targets


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<half>lora_A\.weight|lora_B\.weight|lora_embedding_[AB])")
_BASE = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.(weight|bias)")


def _pairs(file: Path) -> dict[str, dict[str, TensorRecord]]:
    """{module: {"A": tensor, "B": tensor}}."""
    try:
        records = read_header(file)
    except (OSError, ValueError) as error:
        raise AdapterError(str(error)) from error
    pairs: dict[str, dict[str, TensorRecord]] = {}
    copies = set()
    for record in records:
        if found := _NAME.fullmatch(record.name):
            half = found["half"].removesuffix(".weight")[-1]
            pairs.setdefault(found["module"], {})[half] = record
        elif base := _BASE.fullmatch(record.name):
            copies.add(base["module"])
        else:
            raise AdapterError(f"{file}: tensor {record.name!r} is no part of a LoRA adapter that is implemented")
        if record.dtype not in DTYPES:
            raise AdapterError(f"{file}: tensor {record.name!r} has dtype {record.dtype}; known: {', '.join(DTYPES)}")
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise AdapterError(f"{file}: {module} has only half of its pair, lora_{next(iter(pair))}")
    if not pairs or copies - pairs.keys():
        raise AdapterError(f"{file}: {', '.join(sorted(copies - pairs.keys())) or 'the file'} has no lora_A and lora_B")
    return pairs


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The number for a module: that of the first pattern that matches the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and scale of one module's adapter, by PEFT's rules."""
    rank: int = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _not_linear(spec: DecoderSpec) -> set[str]:
    """Targets that PEFT's "all-linear" may leave out: the embedding, the output layer, routers."""
    mlps = [(spec.names.layer.format(i), layer.mlp) for i, layer in enumerate(spec.layers)]
    routers = {prefix + mlp.router.name for prefix, mlp in mlps if isinstance(mlp, MoESpec)}
    return routers | {_module(spec.names.embedding), _module(spec.names.head)}


def _is_target(config: Mapping[str, Any], module: str, not_linear: Collection[str]) -> bool:
    """Whether the config says that a module of the base has an adapter."""
    wanted, excluded = config.get("target_modules") or (), config.get("exclude_modules") or ()
    if wanted == "all-linear":
        return module not in not_linear and not _matches(excluded, module)
    if not _matches(wanted, module) or _matches(excluded, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or isinstance(wanted, str):
        return True
    number = re.search(r"\.(\d+)\.", module)
    return number is not None and int(number[1]) in ([layers] if isinstance(layers, int) else layers)


def _matches(wanted: str | Iterable[str], module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


@dataclass(frozen=True)
class AdapterFile:
    """A folder that was checked. Nothing of its weights has been read.

    Attributes:
        spec: the base model's.
        ranks: the rank of each module that it changes, by name.
        digest: see `adapter_digest`.
    """

    folder: Path
    spec: DecoderSpec
    config: dict[str, Any]
    pairs: dict[str, dict[str, TensorRecord]]
    ranks: dict[str, int]
    digest: str


def _no_target(spec: DecoderSpec, module: str) -> str:
    """Why a module cannot have an adapter."""
    if "expert" in module:
        return f"adapters of experts are not implemented ({module!r})"
    if f"{module}.weight" in spec.weight_shapes():
        return f"adapters of {module.rpartition('.')[2]} are not implemented ({module!r})"
    return f"this base model has no layer {module!r}"


def check_adapter(path: str | Path, spec: DecoderSpec, max_rank: int) -> AdapterFile:
    """Check an adapter's folder against a base model.

    Args:
        spec: the base model's.
        max_rank: the largest rank that fits.

    Raises:
        AdapterError: says which file, field or tensor is at fault.
    """
    try:
        folder = Path(path).expanduser()
        found = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"cannot read adapter folder {str(path)!r}: {error}") from error
    if not found:
        raise AdapterError(f"there is no adapter folder {str(path)!r}")
    config, file = read_config(folder), _inside(folder, WEIGHTS)
    pairs, ranks, targets, not_linear = _pairs(file), {}, lora_targets(spec), _not_linear(spec)
    base = config.get("base_model_name_or_path")
    for module, pair in pairs.items():
        rank, _ = rank_and_scale(config, module)
        if module not in targets:
            raise AdapterError(f"{file}: {_no_target(spec, module)} (the adapter is for {base!r})")
        outputs, inputs = targets[module]
        for half, wanted in (("A", (rank, inputs)), ("B", (outputs, rank))):
            if pair[half].shape != wanted:
                raise AdapterError(
                    f"{file}: tensor {pair[half].name!r} has shape {list(pair[half].shape)}, this base model and the rank in"
                    f" {CONFIG} want {list(wanted)} (the adapter is for {base!r})"
                )
        if rank > max_rank:
            raise AdapterError(f"{file}: {module} has rank {rank}, at most max_lora_rank={max_rank} is allowed")
        ranks[module] = rank
    for module in targets:
        if module not in pairs and _is_target(config, module, not_linear):
            raise AdapterError(f"{file}: {module} is one of target_modules, but the file has no tensors for it")
    return AdapterFile(folder, spec, config, pairs, ranks, adapter_digest(folder))


@dataclass(frozen=True)
class LoRAWeights:
    """The weights of one module's adapter, which adds `x @ a.T @ b.T`. `b` is scaled already, and its rows are in the loaded weight's order.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank].
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory: its weights by the names of the modules that they move."""

    name: str
    digest: str
    modules: dict[str, LoRAWeights]


def _as_loaded(spec: DecoderSpec, module: str, b: Tensor) -> Tensor:
    """`b` with its rows reordered as the rows of the base's weight were when it was loaded."""
    name = f"{module}.weight"
    rule = next((rule for rule in spec.unpack if rule.rows and name.endswith(rule.suffix)), None)
    return b if rule is None else rule.parts(b)[rule.suffix]


def load_adapter(name: str, checked: AdapterFile, dtype: torch.dtype) -> Adapter:
    """Read the weights of a folder that was checked, in the dtype of the model.

    Raises:
        AdapterError: the file cannot be read, or has numbers that are not finite.
    """
    from safetensors import SafetensorError, safe_open

    file, modules = checked.folder / WEIGHTS, {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for module, pair in checked.pairs.items():
                a, b = (tensors.get_tensor(pair[half].name).float() for half in "AB")
                b = _as_loaded(checked.spec, module, b * rank_and_scale(checked.config, module)[1])
                modules[module] = LoRAWeights(a.to(dtype), b.to(dtype))
                if not all(bool(x.isfinite().all()) for x in (modules[module].a, modules[module].b)):
                    raise AdapterError(f"{file}: {module} has numbers that are not finite in {dtype}")
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    return Adapter(name, checked.digest, modules)
