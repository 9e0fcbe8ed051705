"""Which linear method a model gets, and why."""

# Generated from nbs/models/linear/choose.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from minivllm.core.config import INTEGER_BITS, WEIGHT_BITS
from minivllm.models.linear.layer import make_linear_method

_NO_NUMBA = "numba is not installed (pip install 'minivllm[kernels]')"


def explain_linear_method(
    name: str | None,
    wanted: str,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    checkpoint: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """(method of a model's linear layers, and why). Single layers of odd sizes may get `torch`.

    Args:
        name: the method that the user asked for by `quantization`, or None.
        wanted: the method that goes with the attention backend, its `linear_method`.
        batch_invariant: the backend's.
        checkpoint: its `quantization_config`, if it is quantized: then this is about the weights that are not.

    Raises:
        ValueError: a quantized method cannot be had on this device, in this dtype, with this backend or this checkpoint.
        ImportError: it needs numba, which is not installed.
    """
    if checkpoint:
        method = checkpoint.get("quant_method")
        if name is not None:
            raise ValueError(f"the checkpoint is quantized already ({method}): leave out quantization")
        chosen, why = explain_linear_method(None, wanted, dtype, device, batch_invariant)
        return chosen, f"{why}; what the checkpoint quantized ({method}) is multiplied as it is"
    if name in INTEGER_BITS:
        return _explain_quantized(name, wanted, dtype, device, batch_invariant)
    if name is not None:
        problem = make_linear_method(name).problem(64, 64, dtype, device)
        if batch_invariant:
            problem = "it does not go with an attention backend that is batch-invariant"
        if problem:
            raise ValueError(f"quantization={name!r} cannot be used: {problem}")
        return name, f"{WEIGHT_BITS[name]:g} bits for each weight, rounded at load; the output layer stays as it is"
    if batch_invariant:
        return "batch_invariant", "the attention backend asks for rows that do not depend on the batch"
    if wanted == "torch":
        return "torch", "it goes with the attention backend, which is torch throughout"
    if importlib.util.find_spec("numba") is None:
        return "torch", _NO_NUMBA
    if problem := make_linear_method(wanted).problem(64, 64, dtype, device):
        return "torch", problem
    if wanted == "cpu":
        from minivllm.models.linear.cpu import explain

        return "cpu", explain(dtype)
    return wanted, "kernels of our own for up to 16 rows, on Hopper 64, and torch's matmul for more"


def _explain_quantized(
    name: str, wanted: str, dtype: torch.dtype, device: torch.device, batch_invariant: bool
) -> tuple[str, str]:
    if device.type != "cpu":
        raise ValueError(
            f"quantization is implemented on the CPU, not on {device.type}; use device='cpu', or no quantization"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        shown = str(dtype).removeprefix("torch.")
        raise ValueError(f"quantization is implemented for dtype float32 and bfloat16, not {shown}")
    if batch_invariant and wanted == "torch":
        raise ValueError(
            "quantization does not go with attention_backend='reference', which asks for rows that do not depend on the batch:"
            " torch multiplies by what it writes out, and rounds by the number of rows; 'numba_cpu_invariant' takes it"
        )
    if importlib.util.find_spec("numba") is None:
        raise ImportError(f"quantized weights are multiplied by numba: {_NO_NUMBA}")
    from minivllm.models.linear.quantized import explain

    name = f"torch_{name}" if wanted == "torch" else f"invariant_{name}" if batch_invariant else name
    return name, explain(name)
