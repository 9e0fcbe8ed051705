"""Random quantized weights of every form that the GPU's kernels multiply by."""

import torch

from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.scaled import FP8, ScaledWeight

WEIGHTS = {  # bits, inputs, group, dtype of the scales; what else
    "int4": (4, 128, 64, torch.bfloat16, ""),
    "int4 with zero points": (4, 256, 128, torch.float16, "zeros"),
    "int4 in groups of 32": (4, 256, 32, torch.float16, "zeros"),
    "int4 by outputs": (4, 320, 320, torch.float32, ""),
    "int4 by outputs with zero points": (4, 320, 320, torch.float16, "zeros"),
    "act-order": (4, 128, 32, torch.float16, "order"),
    "int8": (8, 96, 32, torch.float16, ""),
    "fp8 in blocks": (8, 256, 128, torch.float32, "fp8"),
    "fp8 by outputs": (8, 96, 96, torch.float32, "fp8"),
}


def random_weight(
    name: str, outputs: int, inputs: int | None = None, device: str = "cpu"
) -> GroupedWeight | ScaledWeight:
    """A weight of one of `WEIGHTS`. inputs: others than there."""
    bits, columns, group, dtype, what = WEIGHTS[name]
    whole = group == columns
    columns = inputs or columns
    group = columns if whole else group
    scale = (torch.rand(outputs, columns // group, device=device) + 0.5).mul(2.0**-6).to(dtype)
    if what == "fp8":
        return ScaledWeight(
            torch.randn(outputs, columns, device=device).mul(100).clamp(-448, 448).to(FP8), scale, group
        )
    q = torch.randint(0, 256, (outputs, columns * bits // 8), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 17, scale.shape, device=device) if what == "zeros" else None
    low = None if zeros is None else zeros * -scale.float()
    order = torch.randperm(columns, device=device) if what == "order" else None
    return GroupedWeight(q if bits == 4 else q.view(torch.int8), scale, low, order=order)
