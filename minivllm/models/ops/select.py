"""LayerOps by name: torch, numba on a CPU, numba on a GPU."""

# Generated from nbs/models/ops/select.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from pkgutil import resolve_name

from minivllm.models.ops.base import LayerOps

_OPS = {
    "torch": "minivllm.models.ops.torch:TorchOps",
    "numba_cpu": "minivllm.models.ops.numba_cpu:NumbaCPUOps",
    "numba_cuda": "minivllm.models.ops.numba_cuda:NumbaCudaOps",
}


def make_layer_ops(name: str, batch_invariant: bool = False) -> LayerOps:
    """The ops of this name.

    Raises:
        ValueError: no such name.
    """
    if name not in _OPS:
        raise ValueError(f"no layer ops {name!r}; known: {', '.join(_OPS)}")
    return resolve_name(_OPS[name])(batch_invariant)
