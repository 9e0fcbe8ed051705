"""CPU features: what this machine has, what may be used, and how tests narrow it."""

# Generated from nbs/numba_kernels/cpu/features.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import os
import sys
from dataclasses import dataclass

"""The CPU features that kernels may use, and the environment variable that narrows them."""

VARIABLE = "MINIVLLM_CPU_FEATURES"


@dataclass(frozen=True)
class Level:
    """A kind of x86-64 CPU: its names in LLVM, oneDNN and ATen.

    Attributes:
        llvm_cpu: LLVM's name of a CPU with exactly these features.
        llvm_features: the features that LLVM must see on the host, as in `+avx2,+fma`.
        onednn: value of ONEDNN_MAX_CPU_ISA.
        aten: value of ATEN_CPU_CAPABILITY.
        bf16: has instructions that multiply bfloat16.
    """

    llvm_cpu: str
    llvm_features: str
    onednn: str
    aten: str
    bf16: bool = False


_AVX512 = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
LEVELS = {
    "sse": Level("x86-64", "+sse2", "SSE41", "default"),
    "avx2": Level("haswell", "+avx2,+fma,+f16c", "AVX2", "avx2"),
    "avx512": Level("skylake-avx512", _AVX512, "AVX512_CORE", "avx512"),
    "avx512_bf16": Level("cooperlake", f"{_AVX512},+avx512bf16,+avx512vnni", "AVX512_CORE_BF16", "avx512", True),
}
"""The levels that a machine can be narrowed to, each with all that the one before has."""


def chosen_level() -> Level | None:
    """The level that MINIVLLM_CPU_FEATURES names; None if it is not set: then all features of the CPU are used.

    Raises:
        ValueError: the name is not one of `LEVELS`.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    if name not in LEVELS:
        raise ValueError(f"{VARIABLE}={name!r} is not known; it can be {', '.join(LEVELS)}, or unset: all the CPU has")
    return LEVELS[name]


def narrow_torch() -> None:
    """Hold torch and oneDNN to the chosen level as well. They read their variables once, when they first compute.

    Raises:
        RuntimeError: torch has been imported already, and may have chosen.
    """
    level = chosen_level()
    if level is None:
        return
    wanted = {"ONEDNN_MAX_CPU_ISA": level.onednn, "ATEN_CPU_CAPABILITY": level.aten}
    if "torch" in sys.modules and any(os.environ.get(name) != value for name, value in wanted.items()):
        raise RuntimeError(f"{VARIABLE} is set, and torch was imported before minivllm: import minivllm first")
    os.environ.update(wanted)
