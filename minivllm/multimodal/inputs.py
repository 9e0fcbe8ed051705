"""Embeddings as prompts: checks, pieces, names by content."""

# Generated from nbs/multimodal/inputs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import binascii
import hashlib
import io
import pickletools
import zipfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange

PIECE = 256  # rows of a piece, at most


MAX_EMBEDDING = 65_504  # the largest float16: a model of any dtype can take it


def check_embeds(value: Any, hidden_size: int | None, name: str) -> np.ndarray:
    """Embeddings as float32 [n, hidden_size], in memory of their own.

    Args:
        value: a torch tensor or an array of floats, [n, hidden_size], or [1, n, hidden_size].
        name: for messages.

    Raises:
        TypeError, ValueError: it is something else, not finite, or beyond `MAX_EMBEDDING`.
    """
    if hasattr(value, "detach"):  # a torch tensor, maybe bfloat16, which numpy does not know
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating):
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or array of floats [tokens, hidden_size], got {what}")
    rows = value[0] if value.ndim == 3 and len(value) == 1 else value
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != hidden_size:
        raise ValueError(f"{name} must have shape [at least 1, {hidden_size}], got {list(value.shape)}")
    rows = np.array(rows, np.float32, order="C")
    if not (np.abs(rows) <= MAX_EMBEDDING).all():  # nor for NaN
        raise ValueError(f"{name} has values that are not finite, or beyond {MAX_EMBEDDING:,}")
    return rows


def embeds_feature(rows: np.ndarray, offset: int, modality: str) -> MultiModalFeatureSpec:
    """Checked embeddings as an input of a request, from token `offset` on."""
    name = hashlib.sha256(repr(rows.shape).encode() + rows.tobytes()).hexdigest()
    return MultiModalFeatureSpec(name, modality, PlaceholderRange(offset, len(rows)), {"embeds": rows})


def embeds_prompt(
    value: Any, hidden_size: int | None, most: int
) -> tuple[list[int], tuple[MultiModalFeatureSpec, ...]]:
    """Placeholder token ids, and the inputs of a request, for a prompt of embeddings. most: rows of a piece, besides `PIECE`.

    Raises:
        TypeError, ValueError: see `check_embeds`.
    """
    rows = check_embeds(value, hidden_size, "prompt_embeds")
    size = min(PIECE, most)
    pieces = range(0, len(rows), size)
    return [0] * len(rows), tuple(embeds_feature(rows[at : at + size], at, "prompt_embeds") for at in pieces)


def _check_pickle(data: bytes) -> None:
    """Raises ValueError for a name that no plain tensor's pickle has: `weights_only` also allows what takes memory, such as `bytearray`."""
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"it must be one dense tensor, and its pickle uses {opcode.name}")
        if opcode.name == "GLOBAL":
            module, _, name = str(value).partition(" ")
            known = module == "torch" and (
                name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
            )
            if not known and value not in _NAMES:
                raise ValueError(f"it must be one dense tensor, and its pickle names {module}.{name}")


_NAMES = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch.storage UntypedStorage", "collections OrderedDict")  # fmt: skip


def decode_tensor(text: str, name: str) -> Tensor:
    """A tensor that `torch.save` wrote, in base64, as vLLM's clients send it. It may come from anyone: nothing in it is run
    (`weights_only`), and no more memory is taken than it brings.

    Args:
        name: for messages.

    Raises:
        ValueError: it is something else, compressed, or stands for more numbers than are in it.
    """
    try:
        data = base64.b64decode(text, validate=True)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
            for entry in archive.infolist():
                if entry.filename.endswith("data.pkl"):
                    _check_pickle(archive.read(entry))
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except binascii.Error as error:
        raise ValueError(f"{name} is not base64: {error}") from None
    except Exception as error:  # noqa: BLE001 - what a reader of foreign bytes raises is not ours to know
        why = str(error).partition("\n")[0][:200]
        raise ValueError(f"{name} is no tensor that torch.save wrote: {why}") from None
    views = isinstance(value, Tensor) and (value.is_nested or value.is_quantized or value.is_neg() or value.is_conj())
    if type(value) is not Tensor or views or value.layout is not torch.strided or value.device.type != "cpu":
        raise ValueError(f"{name} must be one dense tensor, got {type(value).__name__}")
    if value.numel() * value.element_size() > len(data):
        raise ValueError(f"{name} of shape {list(value.shape)} has more elements than the data that came with it")
    return value
