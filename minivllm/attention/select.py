"""Registry of attention backends and the choice of one for a model and device."""

# Generated from nbs/attention/select.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterable
from pkgutil import resolve_name

import torch

from minivllm.attention.backend import AttentionBackend, AttentionSpec
from minivllm.core.plugins import register

_BACKENDS: dict[str, str | Callable[[], AttentionBackend]] = {
    "reference": "minivllm.attention.reference:ReferenceBackend",
    "sdpa": "minivllm.attention.sdpa:SDPABackend",
    "encoder": "minivllm.attention.encoder:EncoderBackend",
    "numba_cpu": "minivllm.attention.numba_cpu:NumbaCPUBackend",
    "numba_cpu_invariant": "minivllm.attention.numba_cpu:NumbaCPUInvariantBackend",
    "numba_cuda": "minivllm.attention.numba_cuda:NumbaCudaBackend",
    "numba_cuda_invariant": "minivllm.attention.numba_cuda:NumbaCudaInvariantBackend",
}
_AUTO_ORDER: list[str] = ["numba_cuda", "numba_cpu", "sdpa", "reference"]


def backend_names() -> tuple[str, ...]:
    """Names that `select_backend` knows, besides `auto`."""
    return tuple(_BACKENDS)


def register_backend(name: str, make: str | Callable[[], AttentionBackend], *, auto_before: str | None = None) -> None:
    """Make a backend known.

    Args:
        name: what users will call it.
        make: `"module:Class"`, imported when it is first wanted, or a function that makes the backend.
        auto_before: name of the backend before which `auto` tries this one; None if `auto` never does.

    Raises:
        ValueError: the name is taken, or `auto_before` is unknown.
        TypeError: `make` is neither.
    """
    if name == "auto":
        raise ValueError("attention backend 'auto' exists already")
    if auto_before is not None and auto_before not in _AUTO_ORDER:
        raise ValueError(f"auto_before={auto_before!r} must be one of {', '.join(_AUTO_ORDER)}")
    register(_BACKENDS, "attention backend", name, make, AttentionBackend, by_name=True)
    if auto_before is not None:
        _AUTO_ORDER.insert(_AUTO_ORDER.index(auto_before), name)


def make_backend(name: str) -> AttentionBackend:
    """The backend of this name.

    Raises:
        ValueError: no such name.
        ImportError: a library that it needs is not installed.
    """
    if name not in _BACKENDS:
        raise ValueError(f"no attention backend {name!r}; known: auto, {', '.join(_BACKENDS)}")
    make = _BACKENDS[name]
    return (resolve_name(make) if isinstance(make, str) else make)()


def select_backend(
    name: str, spec: AttentionSpec | Iterable[AttentionSpec], device: torch.device
) -> tuple[AttentionBackend, str]:
    """The backend to use, and why.

    Args:
        name: a backend's name, or `auto` for the fastest that can do it.
        spec: what it must be able to do; one for each layer, or one for all.
        device: where.

    Returns:
        The backend and the reason in a few words.

    Raises:
        ValueError: the name is unknown, or the backend asked for cannot do it; says why.
    """
    specs = {spec} if isinstance(spec, AttentionSpec) else set(spec)
    if name != "auto":
        backend = make_backend(name)
        for one in specs:
            if reason := backend.unsupported(one, device):
                raise ValueError(
                    f"attention backend {name!r} cannot run this model on {device}: {reason}; attention_backend='auto' finds one that can"
                )
        return backend, "asked for"
    refused: list[str] = []
    for candidate in _AUTO_ORDER if all(one.causal for one in specs) else ["encoder"]:
        try:
            backend = make_backend(candidate)
        except ImportError as error:
            refused.append(f"{candidate} cannot be loaded: {error}")
            continue
        reasons = [reason for one in specs if (reason := backend.unsupported(one, device))]
        if not reasons:
            return backend, "; ".join([*refused, f"fastest that runs this model on {device.type}"])
        refused.append(f"{candidate} cannot: {reasons[0]}")
    raise ValueError(f"no attention backend runs this model on {device}: {'; '.join(refused)}")
