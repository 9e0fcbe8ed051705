"""Checkpoint loading: safetensors index, tensors, dummy weights."""

# Generated from nbs/models/loading.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import json
import math
import mmap
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.config import INTEGER_BITS, KV_CACHE_DTYPES, WEIGHT_BITS, ModelFacts, stage_layers
from minivllm.models.hub import resolve_model

__all__ = [
    "DTYPES", "DTYPE_BYTES", "FLOAT16_MAX", "INDEX", "LOAD_FORMATS", "PICKLES", "SINGLE", "CheckpointError",
    "LoadedModel", "TensorRecord", "checkpoint_format", "dummy_tensors", "find_tensors", "load_model",
    "read_header",
]  # fmt: skip

if TYPE_CHECKING:
    import torch

    from minivllm.models.parallel import Share
    from minivllm.models.quantization.formats import Format
    from minivllm.models.spec import DecoderSpec


class CheckpointError(ValueError):
    """A model folder that cannot be loaded; the message names the file, and the tensor where there is one."""


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies: file, safetensors dtype (`F32`, `BF16`, ...), shape, and the first of its bytes in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        bits = re.search("[0-9]+", self.dtype)  # F8_E4M3 has 8
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TORCH_DTYPES = DTYPES | {
    f"{kind}{bits}": f"{name}int{bits}" for kind, name in (("I", ""), ("U", "u")) for bits in (8, 16, 32, 64)
}
_TORCH_DTYPES |= {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
FLOAT16_MAX = 65504
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def read_header(file: Path) -> list[TensorRecord]:
    """The table of contents of a safetensors file, without reading a single weight.

    The file begins with the length of a JSON text (8 bytes, little-endian) and that text. Raises `CheckpointError` if
    the file is cut off or not a safetensors file.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length} bytes cannot be in a file of {size} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        announced = 8 + length + max(ends, default=0)
        if announced != size:
            raise ValueError(f"{announced} bytes announced, {size} found: an interrupted download?")
        records = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            record = TensorRecord(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
            if begin < 0 or any(size < 0 for size in record.shape) or end - begin != record.nbytes:
                raise ValueError(
                    f"tensor {name} of {record.dtype} and shape {record.shape} is not in bytes {begin} to {end}"
                )
            records.append(record)
        return records
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_tensors(folder: Path) -> list[TensorRecord]:
    """Every tensor of the folder's checkpoint: of `model.safetensors`, of the shards that the index names, or of the only
    safetensors file there is. Raises `CheckpointError` otherwise."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _sharded(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return read_header(found[0])
    if found:
        raise CheckpointError(f"{folder}: several safetensors files and no {INDEX} that says what belongs together")
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as {', '.join(pickles)}: pickle files, which can run code when opened, are refused. "
            "Save the model again as safetensors"
        )
    raise CheckpointError(f"{folder}: no {SINGLE}, no {INDEX}")


def _sharded(folder: Path) -> list[TensorRecord]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} holds no weight_map from tensor names to files")
    records: dict[tuple[str, str], TensorRecord] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names the file {shard!r}, which is outside of the folder")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names the file {shard}, which is not there")
        records.update(((record.name, shard), record) for record in read_header(folder / shard))
    for name, shard in weight_map.items():
        if (name, shard) not in records:
            raise CheckpointError(f"{index} says that {name} is in {shard}, which does not hold it")
    return [records[item] for item in weight_map.items()]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; `CheckpointError` names the file if it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def iter_tensors(
    records: list[TensorRecord], dtype: str, quantized: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` as stored, one at a time and file by file, for a model that computes in `dtype`.

    Files are memory-mapped and the tensors are views of them: a weight is read from disk when it is used. So copy it at
    once (`target.copy_(tensor)`, which also casts: one pass and no second copy in memory) and never write to it. When the
    next is asked for, its pages leave this process; a later look reads the file again.
    torch works on one thread meanwhile: copying is bound by memory, and a team of threads for each of hundreds of
    small copies costs seconds when other processes want the cores.

    Raises `CheckpointError` for a tensor that is not of a float type, or that `dtype` float16 cannot hold. Those of
    `quantized` are passed on whatever they are.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for file in dict.fromkeys(record.file for record in records):
            with open(file, "rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            for record in records:
                if record.file == file:
                    tensor = _view(record, mapped)
                    yield record.name, tensor if record.name in quantized else _checked(record, tensor, dtype)
                    _let_go(record, mapped)
    finally:
        torch.set_num_threads(threads)


def _view(record: TensorRecord, mapped: mmap.mmap) -> torch.Tensor:
    import torch

    if record.dtype not in _TORCH_DTYPES or not hasattr(torch, _TORCH_DTYPES[record.dtype]):
        raise CheckpointError(
            f"{record.file}: tensor {record.name} has dtype {record.dtype}, which torch does not have"
        )
    kind = getattr(torch, _TORCH_DTYPES[record.dtype])
    if not record.nbytes:
        return torch.empty(record.shape, dtype=kind)
    memory = torch.frombuffer(mapped, dtype=torch.uint8, count=record.nbytes, offset=record.offset)
    return (memory if record.offset % kind.itemsize == 0 else memory.clone()).view(kind).view(record.shape)


def _let_go(record: TensorRecord, mapped: mmap.mmap) -> None:
    """Take whole pages of a tensor out of this process's memory; they stay in the system's."""
    page = mmap.PAGESIZE
    first, end = -(-record.offset // page) * page, (record.offset + record.nbytes) // page * page
    if first < end and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, end - first)


def _checked(record: TensorRecord, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    where = f"{record.file}: tensor {record.name}"
    if record.dtype not in DTYPES:
        raise CheckpointError(f"{where} has dtype {record.dtype}; implemented: {', '.join(DTYPES)}")
    if dtype == "float16" and record.dtype != "F16" and tensor.numel() and tensor.abs().max() > FLOAT16_MAX:
        raise CheckpointError(
            f"{where} ({record.dtype}) has values beyond float16's {FLOAT16_MAX}; use bfloat16 or float32"
        )
    return tensor


def dummy_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random float32 weights of the given names and shapes: the same for the same seed and kind of device, whatever the order.

    Uniform with standard deviation 0.02, so that activations stay in range; norm weights are ones.
    """
    import torch

    bound = 0.02 * math.sqrt(3)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, device=device)
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        yield name, torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class LoadedModel:
    """A model folder that has been read but for its weights.

    Attributes:
        name: as the user gave it.
        path: the folder, in Hugging Face layout.
        hf_config: its `config.json`.
        generation_config: its `generation_config.json`, with the end tokens of `config.json` if it names none itself.
        records: the tensors of the checkpoint, in the file's order; empty for dummy weights.
        load_format: `safetensors` or `dummy`.
        seed: seed of dummy weights.
        model_impl: see `EngineArgs.model_impl`.
        quantization: the `quantization_config` of `config.json`; empty for a checkpoint that is not quantized.
    """

    name: str
    path: Path
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    records: tuple[TensorRecord, ...]
    load_format: str
    seed: int = 0
    quantization: dict[str, Any] = field(default_factory=dict)
    model_impl: str = "auto"

    @cached_property
    def spec(self) -> DecoderSpec:
        """What `models.spec` makes of the configuration; raises for an architecture that is not implemented."""
        from minivllm.models.families.registry import is_known, spec_from_config

        if self.hf_config.get("is_encoder_decoder"):
            named = (self.hf_config.get("architectures") or [self.hf_config.get("model_type")])[0]
            raise CheckpointError(
                f"{named} is an encoder-decoder model (is_encoder_decoder in config.json): cross-attention is not implemented"
            )

        if self.model_impl == "transformers" or (self.model_impl == "auto" and not is_known(self.hf_config)):
            from minivllm.models.fallback import transformers_spec

            if self.quantization:
                raise CheckpointError(f"{self.path}: model_impl='transformers' reads no quantized checkpoints")
            return transformers_spec(self.hf_config)
        spec = spec_from_config(self.hf_config)
        own = spec.tie_word_embeddings and self._has_own_head(spec)
        return replace(spec, tie_word_embeddings=False) if own else spec

    def _has_own_head(self, spec: DecoderSpec) -> bool:
        """Whether the checkpoint brings an output layer that differs from the embedding, whatever the configuration says."""
        records = [record for record in self.records if record.name in (spec.names.head, spec.names.embedding)]
        if len(records) < 2:
            return False
        import torch

        (_, first), (_, second) = iter_tensors(records, "float32")
        return not torch.equal(first, second)

    @property
    def checkpoint_dtype(self) -> str:
        """The dtype that the configuration names, else the one that most of the weights have."""
        named = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype")
        if named in DTYPE_BYTES:
            return named
        sizes: dict[str, int] = {}
        for record in self.records:
            sizes[record.dtype] = sizes.get(record.dtype, 0) + math.prod(record.shape)
        return DTYPES.get(max(sizes, key=sizes.__getitem__), "float32") if sizes else "float32"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text. May be empty."""
        found = self.generation_config.get("eos_token_id")
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    def weights(self, dtype: str, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` for a model that computes in `dtype` (`"float32"`, `"bfloat16"` or `"float16"`).

        The tensors come in the dtype they are stored in, on the CPU; see `iter_tensors` for how to take them. Dummy weights
        are float32 and drawn on `device`, where the model is.
        """
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}")
        if self.load_format == "dummy":
            return dummy_tensors(self.spec.weight_shapes(), self.seed, device)
        if not self.quantization:
            return iter_tensors([record for record in self.records if self.spec.full_name(record.name)], dtype)
        return self._decoded(dtype)

    def mtp_weights(self, dtype: str, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """As `weights`, for the layer that drafts tokens; see `DecoderSpec.mtp`.

        Raises:
            ValueError: the model has no such layer, or the checkpoint has left it out.
        """
        spec, mtp = self.spec.mtp_layer(), self.spec.mtp
        assert mtp is not None
        names, hidden = (mtp.embedding_norm, mtp.hidden_norm, mtp.fuse), spec.hidden_size
        shapes = spec.weight_shapes() | dict(zip(names, ((hidden,), (hidden,), (hidden, 2 * hidden)), strict=True))
        del shapes[spec.names.embedding]
        if self.load_format == "dummy":
            return dummy_tensors(shapes, self.seed, device)
        starts = (spec.names.layer.format(0), *names, mtp.final_norm)
        part = replace(self, records=tuple(record for record in self.records if record.name.startswith(starts)))
        if not part.records:
            raise CheckpointError(f"{self.path} has no tensor {starts[0]}*: its layer to draft with was left out")
        return part._decoded(dtype) if self.quantization else iter_tensors(list(part.records), dtype)

    def _decoded(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        from minivllm.models.quantization.formats import decoded, quantized_modules

        try:
            format = checkpoint_format(self.quantization)
            modules = quantized_modules(format, [(record.name, record.dtype) for record in self.records])
            names = {name for kinds in modules.values() for name in kinds.values()}
            yield from decoded(format, modules, iter_tensors(list(self.records), dtype, names))
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _weight_bytes(self, size: int, linear_kernel: str | None, share: Share | None, layers: range) -> int:
        if self.quantization:
            return -(-sum(record.nbytes for record in self.records) // (1 if share is None else share.size))
        spec, shapes = self.spec, self.spec.stage_shapes(layers, share)
        total = sum(math.prod(shape) for shape in shapes.values()) * size
        if (rename := spec.rename) is not None:  # what is not the decoder's is the encoder's
            total += size * sum(math.prod(record.shape) for record in self.records if rename(record.name) is None)
        if linear_kernel is None:
            return total
        matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
        embedding, head = matrices.pop(spec.names.embedding, 0), matrices.pop(spec.names.head, 0)
        products = sum(matrices.values())
        if linear_kernel not in INTEGER_BITS:  # the output layer stays what it is
            return total - products * size + int(products * WEIGHT_BITS[linear_kernel]) // 8
        # the output layer has 8 bits, and is there besides the embeddings even if it is tied to them
        return total - (products + head) * size + embedding + int(products * WEIGHT_BITS[linear_kernel]) // 8

    def facts(
        self,
        block_size: int,
        dtype: str,
        linear_kernel: str | None = None,
        kv_cache_dtype: str = "auto",
        share: Share | None = None,
        stages: int = 1,
    ) -> ModelFacts:
        """The facts that `EngineArgs.resolve` needs, for this block size, dtype, kernel of quantized weights, and cache.

        share: what each rank has of the model, in tensor parallelism; sizes are then those of a rank.
        stages: how many a pipeline has; the weights are those of the largest stage, of a quantized checkpoint those of all stages.
        """
        spec, size = self.spec, DTYPE_BYTES[dtype]
        number, scale = KV_CACHE_DTYPES[kv_cache_dtype] or (size, 0)
        kv_specs = spec.kv_cache_specs(block_size, number, share)
        if scale:
            options = (("scale_bytes", scale),)
            kv_specs = [s if s.rules.is_state else replace(s, options=s.options + options) for s in kv_specs]
        return ModelFacts(
            name=self.name,
            path=str(self.path),
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            max_position_embeddings=spec.max_model_len,
            kv_specs=tuple(kv_specs),
            weight_bytes=max(
                self._weight_bytes(size, linear_kernel, share, layers)
                for layers in stage_layers(spec.num_layers, stages)
            ),
            checkpoint_dtype=self.checkpoint_dtype,
            hidden_size=spec.hidden_size,
            reads_media=spec.media is not None,
            padding="" if share is None else spec.padding(share),
        )


LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def load_model(
    name: str | Path,
    *,
    load_format: str = "auto",
    download_dir: str | Path | None = None,
    revision: str | None = None,
    hf_overrides: dict[str, Any] | None = None,
    seed: int = 0,
    model_impl: str = "auto",
) -> LoadedModel:
    """Resolve a model name (see `resolve_model`) and read everything but the weights; `.weights(dtype)` streams those.

    `load_format`: `auto` or `safetensors`; `gguf` for a model that comes from a GGUF file and nothing else; `dummy` for
    random weights made from `seed`, with no checkpoint needed but `config.json`. `hf_overrides` replaces entries of
    `config.json`. Raises `ValueError` (`CheckpointError`) for what cannot be loaded. torch is imported by `weights`, not here.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {load_format!r}")
    path = resolve_model(name, download_dir, revision)
    if load_format == "gguf" and not (path / "minivllm_source.json").is_file():
        raise CheckpointError(
            f"load_format='gguf', but {path} was not made from a GGUF file; name a .gguf file, or use 'auto'"
        )
    config = read_json(path / "config.json") | (hf_overrides or {})
    quantization = _quantization(config, path / "config.json", load_format)
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    for found, where in ((config, path / "config.json"), (generation, file)):
        _check_end_tokens(found, where, config.get("vocab_size"))
    ends = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    if generation.get("eos_token_id") is None and ends is not None:
        generation["eos_token_id"] = ends
    return LoadedModel(
        name=str(name),
        path=path,
        hf_config=config,
        generation_config=generation,
        records=() if load_format == "dummy" else tuple(find_tensors(path)),
        load_format="dummy" if load_format == "dummy" else "safetensors",
        seed=seed,
        quantization=quantization,
        model_impl=model_impl,
    )


def checkpoint_format(config: dict[str, Any]) -> Format:
    """The format that a `quantization_config` describes.

    Raises:
        ValueError: a method or a setting that is not implemented; names it.
    """
    from minivllm.models.quantization import blocks, codes, compressed  # noqa: F401 - importing them registers their formats
    from minivllm.models.quantization.formats import FORMATS

    method = config.get("quant_method")
    if method not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"quantization_config: quant_method={method!r} is not implemented; implemented: {known}")
    return FORMATS[method](config)


def _quantization(config: dict[str, Any], file: Path, load_format: str) -> dict[str, Any]:
    """Takes `quantization_config` out of a configuration; CheckpointError if it is not a table or cannot be had."""
    found = config.pop("quantization_config", None) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: quantization_config must be a JSON object, it is {found!r}")
    if found and load_format == "dummy":
        raise CheckpointError(
            f"{file}: dummy weights of a quantized model are not implemented; "
            "use hf_overrides={'quantization_config': None} for weights that are not quantized"
        )
    return found


def _check_end_tokens(found: dict[str, Any], file: Path, vocab_size: Any) -> None:
    """Raise CheckpointError for an end token that is no token id."""
    value = found.get("eos_token_id")
    below = f" below vocab_size, {vocab_size}" if isinstance(vocab_size, int) else ""
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if type(token) is not int or token < 0 or (below and token >= vocab_size):
            raise CheckpointError(f"{file}: eos_token_id must be a token id{below}, or a list of them; it is {value!r}")
