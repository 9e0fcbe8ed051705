"""numba kernels for paged KV caches on CPUs and NVIDIA GPUs, independent of torch."""

# Generated from nbs/numba_kernels/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib.util

__all__: list[str] = []

if importlib.util.find_spec("numba_cuda") is not None:  # it wants names that newer releases of numpy dropped
    import numpy as np

    for _old, _new in (("row_stack", "vstack"), ("trapz", "trapezoid"), ("in1d", "isin")):
        if not hasattr(np, _old):
            setattr(np, _old, getattr(np, _new))
