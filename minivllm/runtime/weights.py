"""Weights loaded anew while an engine runs, and memory that is given back meanwhile."""

# Generated from nbs/runtime/weights.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import importlib
import mmap
import operator
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.core.config import EngineArgs
from minivllm.models.decoder import Decoder
from minivllm.models.fallback import TransformersDecoder
from minivllm.models.linear.grouped import QuantizedWeight
from minivllm.models.loading import SINGLE, find_tensors, iter_tensors, load_model

_MADV_DONTNEED = 4


class Parked:
    """Memory under tensors, which is released and taken again, while the tensors stay.

    On a CPU addresses stay, and pages are zeros when they are touched again; whole pages alone can be released. On a GPU the
    address changes.

    Raises:
        ValueError: tensors on a CPU, and the system is not Linux.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._sizes = {address: storage.nbytes() for address, storage in self._storages.items()}
        self._copies: dict[int, Tensor] = {}
        if sys.platform != "linux" and any(storage.device.type == "cpu" for storage in storages):
            raise ValueError(f"memory of a CPU can be given back to the system on Linux, not on {sys.platform}")

    def free(self, keep: bool = False) -> int:
        """Give the memory back. Returns how many bytes. keep: what is on a GPU is copied to the host, what is on the host stays."""
        freed = 0
        for address, storage in self._storages.items():
            if storage.device.type == "cpu":
                freed += 0 if keep else _give_back_pages(address, self._sizes[address])
                continue
            if keep:
                host = torch.empty(self._sizes[address], dtype=torch.uint8, pin_memory=True)
                self._copies[address] = host.copy_(_bytes(storage))
            storage.resize_(0)
            freed += self._sizes[address]
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return freed

    def restore(self) -> None:
        """Take the memory again, on a GPU with what was kept of it, or zeros. What was not freed, or is there again, stays as it is."""
        for address, storage in self._storages.items():
            if storage.device.type != "cpu" and not storage.nbytes():
                storage.resize_(self._sizes[address])
                kept = self._copies.pop(address, None)
                _bytes(storage).zero_() if kept is None else _bytes(storage).copy_(kept)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_back_pages(address: int, size: int) -> int:
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= end:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise could not give {end - first:,} bytes back")
    return end - first


def weight_tensors(model: Decoder) -> list[Tensor]:
    """The large tensors among those that `Decoder.load_weights` fills, as they are kept."""
    if isinstance(model, TransformersDecoder):
        return list(model.model.parameters())
    found = [model.embedding, model.token_types, *([] if model.positions is None else [model.positions])]
    for linear in [*model.linears(), *([] if model.head is None else [model.head])]:
        for value in vars(linear.method.innermost).values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for item in items:
                if isinstance(item, QuantizedWeight):
                    found += item.tensors().values()
                elif isinstance(item, Tensor) and item.layout is torch.strided:
                    found.append(item)
    return found


Weights = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None
"""A model as `EngineArgs.model` names one, a folder of safetensors alone, names and tensors, or None for the engine's own checkpoint."""


def check_pairs(weights: Weights) -> str | Path | list[tuple[str, Tensor]] | None:
    """Weights with names and tensors as a list: all are looked at before one is used. Names of models and folders stay as they are.

    Raises:
        ValueError: no name, no tensor at all, or a name that comes twice.
        TypeError: something else.
    """
    if weights == "":
        raise ValueError("load_weights: the name of the model is empty")
    if weights is None or isinstance(weights, str | Path):
        return weights
    items = weights.items() if isinstance(weights, Mapping) else weights
    if not isinstance(items, Iterable):
        raise TypeError(_not_weights(weights))
    found: dict[str, Tensor] = {}
    for item in items:
        name, tensor = item if isinstance(item, tuple | list) and len(item) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(_not_weights(item))
        if name in found:
            raise ValueError(f"load_weights: tensor {name!r} came twice")
        found[name] = tensor
    if not found:
        raise ValueError("load_weights: there is no tensor in what was given")
    return list(found.items())


def _not_weights(what: object) -> str:
    wanted = "the name of a model, a folder, a dict or pairs of names and torch tensors, or None"
    return f"load_weights takes {wanted}; got {type(what).__name__} {repr(what)[:80]}"


def read_weights(model: Decoder, args: EngineArgs, path: str | None) -> Iterable[tuple[str, Any]]:
    """The tensors of a checkpoint. Raises ValueError if it is not of this model, or cannot be read."""
    dtype, spec = str(model.dtype).removeprefix("torch."), model.spec
    if path is not None and Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        return iter_tensors([record for record in find_tensors(Path(path)) if spec.full_name(record.name)], dtype)
    about: dict[str, Any] = {name: getattr(args, name) for name in ("download_dir", "hf_overrides", "model_impl")}
    if path is None:
        about |= {name: getattr(args, name) for name in ("load_format", "revision", "seed")}
    loaded = load_model(path or args.model, **about)
    if loaded.spec != spec:
        raise ValueError(f"load_weights: {path} is another model than {args.model}: their configurations differ")
    return loaded.weights(dtype, model.device)


def check_loadable(model: Decoder) -> None:
    """Raises ValueError for a model that can take no other weights, and so must keep its own."""
    if isinstance(model, TransformersDecoder) or model.spec.media is not None:
        raise ValueError(
            f"{model.spec.family} has parts that are not the decoder's: load_weights and sleep(level=2) are not implemented"
        )


def open_weights(model: Decoder, args: EngineArgs, weights: Weights) -> Iterable[tuple[str, Any]]:
    """Names and tensors to fill a model with; nothing is changed yet.

    Raises:
        ValueError: a checkpoint of another model, or one that cannot be read; or see `check_loadable`.
    """
    check_loadable(model)
    if weights is None or isinstance(weights, str | Path):
        return read_weights(model, args, None if weights is None else str(weights))
    return weights.items() if isinstance(weights, Mapping) else weights


@contextmanager
def as_path(weights: Weights) -> Iterator[str | None]:
    """Weights as something that other processes of this machine can read: pairs are written to a file, which is removed at the end."""
    weights = check_pairs(weights)
    if weights is None or isinstance(weights, str | Path):
        yield None if weights is None else str(weights)
        return
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="minivllm-weights-") as folder:
        save_file({name: tensor.detach().cpu().clone() for name, tensor in weights}, Path(folder) / SINGLE)
        yield folder


Function = Callable[[Any], Any]


def pack_function(function: Function) -> str:
    """A function for another process: its module and its name. Raises ValueError for one that cannot be found by them there."""
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    if name.startswith("__main__:"):
        raise ValueError(f"{_BY_NAME}; {function!r} was defined in a cell or a script")
    if unpack_function(name) is not function:
        raise ValueError(f"{_BY_NAME}; that of {function!r} means another one")
    return name


_BY_NAME = "a function crosses to worker processes by its module and name"


def unpack_function(function: Function | str) -> Function:
    """The function again. Raises ValueError if it cannot be imported here."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        found: Function = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{_BY_NAME}: {error}") from error
    return found
