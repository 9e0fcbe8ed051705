"""GPTQ: weights rounded to 4 bits so that the outputs on a calibration text change least."""

# Generated from nbs/models/quantization/gptq.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minivllm.models.decoder import Decoder
from minivllm.models.linear.base import LinearMethod
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.layer import Linear
from minivllm.models.quantization.writers import group_scales, linear_names, symmetric


class WatchedLinear(LinearMethod):
    """Multiplies as another method does, and adds up what it reads.

    Attributes:
        hessian: float32 [inputs, inputs], the sum of x^T x over all tokens.
        tokens: how many there were.
    """

    def __init__(self, inner: LinearMethod, inputs: int) -> None:
        super().__init__()
        self.inner, self.hessian, self.tokens = inner, torch.zeros(inputs, inputs), 0

    def create_weights(self, *args: object, **kwargs: object) -> None:
        """See `LinearMethod`. The weights are the inner method's."""
        raise TypeError("WatchedLinear creates no weights: it has those of the method that it watches")

    def process_weights_after_loading(self) -> None:
        self.inner.process_weights_after_loading()

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def apply(self, x: Tensor) -> Tensor:
        rows = x.float().cpu()
        self.hessian.addmm_(rows.T, rows)
        self.tokens += len(rows)
        return self.inner.apply(x)


_BLOCK = 64
"""Inputs that are rounded before their errors are applied to the rest: few large matmuls instead of many small ones."""


def gptq(weight: Tensor, hessian: Tensor, group: int, damp: float = 0.01) -> GroupedWeight:
    """4 bits, symmetric around zero, chosen so that `x @ weight.T` changes little for the inputs that were seen.

    Args:
        weight: [outputs, inputs]; scales get its dtype.
        hessian: float32 [inputs, inputs], the sum of x^T x over those inputs.
        group: inputs that share a scale; divides their number.
        damp: added to the diagonal of `hessian`, as a share of its mean.

    Raises:
        ValueError: no input was seen.
    """
    mean = hessian.diagonal().mean()
    if not mean > 0:
        raise ValueError("GPTQ needs inputs: none but zeros were seen")
    scale = group_scales(weight, group, 4)
    order = hessian.diagonal().argsort(descending=True)
    step = scale.float().masked_fill(scale == 0, 1).repeat_interleave(group, 1).T[order]
    w, q = weight.float().T[order], torch.empty_like(step)  # a row for each input
    damped = hessian[order][:, order] + damp * mean * torch.eye(len(order))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    for start in range(0, len(w), _BLOCK):
        end = min(start + _BLOCK, len(w))
        errors = torch.empty(end - start, w.shape[1])
        for i in range(start, end):
            q[i] = (w[i] / step[i]).round_().clamp_(-8, 7)
            errors[i - start] = (w[i] - q[i] * step[i]) / upper[i, i]
            w[i + 1 : end].addr_(upper[i, i + 1 : end], errors[i - start], alpha=-1)
        w[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return symmetric(q[order.argsort()].T.contiguous(), scale, 4)


def calibrate(decoder: Decoder, read: Callable[[], None], group: int, stages: int = 6) -> dict[str, GroupedWeight]:
    """Round the matmuls of all layers. The decoder multiplies with the rounded weights from then on.

    Args:
        read: makes the decoder compute all tokens of the calibration text.
        group: inputs that share a scale.
        stages: how often the text is read.

    Returns:
        The weights by their names in a checkpoint.

    Raises:
        ValueError: no token of the text reached one of the layers (an expert that was never chosen).
    """
    found: dict[str, GroupedWeight] = {}
    layers, names = decoder.numbered_layers(), linear_names(decoder.spec)
    for stage in range(stages):
        watched = [
            (prefix, linear, linear.method)
            for i, layer in layers[len(layers) * stage // stages : len(layers) * (stage + 1) // stages]
            for prefix in (decoder.spec.names.layer.format(i),)
            for linear in (*layer.mixer.linears(), *layer.mlp.linears())
            if all(f"{prefix}{part}.weight" in names for part in linear.parts)  # a router stays as it is
        ]
        for _, linear, method in watched:
            linear.method = WatchedLinear(method, linear.in_features)
        if watched:
            read()
        for prefix, linear, method in watched:
            seen, linear.method = linear.method, method
            assert isinstance(seen, WatchedLinear)
            found |= _round(prefix, linear, seen, group)
    return found


def _round(prefix: str, linear: Linear, seen: WatchedLinear, group: int) -> dict[str, GroupedWeight]:
    names = [f"{prefix}{part}" for part in linear.parts]
    if not seen.tokens:
        raise ValueError(f"no token of the calibration text reached {names[0]}: take a longer text")
    parts: Sequence[Tensor] = linear.weight.cpu().split(list(linear.parts.values()))  # where the sums are
    rounded = [gptq(part, seen.hessian, group) for part in parts]
    linear.use("torch", torch.cat([part.dequantize() for part in rounded]).to(linear.device, linear.dtype))
    return {f"{name}.weight": part for name, part in zip(names, rounded, strict=True)}
