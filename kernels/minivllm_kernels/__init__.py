"""numba kernels for paged KV caches on CPUs and NVIDIA GPUs, independent of torch."""

# Generated from nbs/numba_kernels/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import numpy as np

__all__: list[str] = []

for _old, _new in (("row_stack", "vstack"), ("trapz", "trapezoid"), ("in1d", "isin")):
    if not hasattr(np, _old):
        setattr(np, _old, getattr(np, _new))
