"""Kernels for a paged KV cache.

Question: can Python keep up with the best CUDA there is?
"""

# Generated from nbs/minivllm_kernels/index.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=017c8557dd53 module=8e44c38a8083

import numpy as np

__all__ = []


# %% nbs/minivllm_kernels/index.ipynb #code-e71db1
for _old, _new in (("row_stack", "vstack"), ("trapz", "trapezoid"), ("in1d", "isin")):
    if not hasattr(np, _old):
        setattr(np, _old, getattr(np, _new))
