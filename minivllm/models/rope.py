"""Rotary position embeddings: default, linear, dynamic NTK, YaRN, Llama 3, LongRoPE."""

# Generated from nbs/models/rope.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minivllm.core.module import Module

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Which rotation belongs to which position.

    Attributes:
        kind: one of `ROPE_KINDS`.
        theta: base of the frequencies.
        dim: rotated dimensions of a head, even; all of them, or the first ones.
        max_position: length that the configuration gives (`max_position_embeddings`).
        factor: how far the context is stretched; all kinds but `default`.
        original_max_position: length before stretching (`llama3`, `yarn`, `longrope`).
        low_freq_factor, high_freq_factor: bounds of the blend, in turns per original length (`llama3`).
        attention_factor: on cos and sin; None for the paper's rule (`yarn`, `longrope`).
        beta_fast, beta_slow: bounds of the blend, in turns per original length (`yarn`).
        mscale, mscale_all_dim: another rule for `attention_factor` (`yarn`, DeepSeek).
        truncate: round the bounds to whole dimensions (`yarn`).
        sections: pairs that turn with each of a token's three positions, time, row and column (M-RoPE); () for one position.
        short_factors, long_factors: by which each pair is slowed, in sequences of up to the original length and in longer ones (`longrope`).
    """

    kind: str = "default"
    theta: float = 10000.0
    dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    sections: tuple[int, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check()

    @property
    def max_length(self) -> int:
        """Longest sequence that the stretched rotation was meant for, by vLLM's rule."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position * self.factor)
        return int(self.original_max_position * self.factor) if self.kind == "yarn" else self.max_position

    def _check(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"RopeSpec.dim must be even and at least 2, got {self.dim}")
        if self.sections and (len(self.sections) != 3 or 2 * sum(self.sections) != self.dim or self.kind == "dynamic"):
            rule = f"three numbers with the sum {self.dim // 2}, and not with rope type 'dynamic'"
            raise ValueError(f"mrope_section must be {rule}, got {list(self.sections)} with {self.kind!r}")
        for name in ("short_factors", "long_factors") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != self.dim // 2:
                raise ValueError(f"rope type 'longrope' needs {self.dim // 2} {name}, got {len(getattr(self, name))}")


def _plain(spec: RopeSpec, theta: float | Tensor) -> Tensor:
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    return 1.0 / (theta**exponents)


def _llama3(spec: RopeSpec) -> Tensor:
    """Turn slow dimensions `factor` times slower, leave fast ones, blend in between."""
    inv_freq = _plain(spec, spec.theta)
    turns = spec.original_max_position / (2 * math.pi / inv_freq)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv_freq / spec.factor + blend * inv_freq


def _yarn(spec: RopeSpec) -> Tensor:
    """As llama3, but the blend is linear in the dimension's number (Peng et al., 2023)."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes `turns` turns over the original length."""
        return spec.dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    slowed = 1.0 / (spec.factor / _plain(spec, spec.theta))
    return slowed * (1 - keep) + _plain(spec, spec.theta) * keep


def inverse_frequencies(spec: RopeSpec, max_positions: int | None = None) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [dim / 2] (`dynamic`: of positions below `max_position`).

    max_positions: length of the longest sequence that will occur, which decides the factors of `longrope`; None for any.
    """
    if spec.kind == "longrope":
        short = (max_positions or spec.max_length) <= spec.original_max_position
        return 1.0 / (torch.tensor(spec.short_factors if short else spec.long_factors) / _plain(spec, spec.theta))
    if spec.kind == "llama3":
        return _llama3(spec)
    if spec.kind == "yarn":
        return _yarn(spec)
    inv_freq = _plain(spec, spec.theta)
    return inv_freq / spec.factor if spec.kind == "linear" else inv_freq


def attention_factor(spec: RopeSpec) -> float:
    """Factor on cos and sin: 1, but for `yarn` and `longrope`, which sharpen the softmax of stretched contexts."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        return 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))

    def rule(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return rule(spec.mscale) / rule(spec.mscale_all_dim)
    return rule(1.0)


class Rope(Module):
    """Cosines and sines of a step, for all layers that share a `RopeSpec`.

    Args:
        spec: which rotation.
        device: that of positions and results.
        max_positions: length of the longest sequence, and rows of `table`; None for what the rotation was meant for.
    """

    capturable = True

    def __init__(self, spec: RopeSpec, device: torch.device, max_positions: int | None = None) -> None:
        self.spec, self.max_positions = spec, max_positions or spec.max_length
        self.inv_freq = inverse_frequencies(spec, max_positions).to(device)
        self.factor = attention_factor(spec)
        self.axes = torch.arange(3, device=device).repeat_interleave(
            torch.tensor(spec.sections or (0, 0, 0), device=device)
        )

    def _dynamic_angles(self, positions: Tensor) -> Tensor:
        # transformers grows the base with the longest position of a call. Taken per position, as here, that is the
        # same when tokens come one by one, and does not depend on chunking, on other requests or on cached prefixes.
        s = self.spec
        length = (positions + 1).clamp(min=s.max_position).float()
        stretch = (s.factor * length / s.max_position - (s.factor - 1)) ** (s.dim / (s.dim - 2))
        exponents = torch.arange(0, s.dim, 2, dtype=torch.int64, device=positions.device).float() / s.dim
        return positions[:, None].float() * (1.0 / (s.theta * stretch[:, None]) ** exponents)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for `apply_rope`.

        Args:
            positions: int64 [T], or [3, T] with `RopeSpec.sections`.
            dtype: that of the result; the angles are float32 whatever it is.

        Returns:
            cos and sin, each [T, 1, dim]; the first half of sin is negated.
        """
        if self.spec.kind == "dynamic":
            angles = self._dynamic_angles(positions)
        else:
            of_pair = positions[:, None] if positions.dim() == 1 else positions[self.axes].T
            angles = of_pair.float() * self.inv_freq
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)

    @cached_property
    def table(self) -> Tensor:
        """Half cosines, half sines of every position: float32 [max_positions, dim]."""
        half = self.spec.dim // 2
        cos, sin = self(torch.arange(self.max_positions, device=self.inv_freq.device), torch.float32)
        return torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1).contiguous()


@dataclass
class Rotation:
    """A rotation of the tokens of one step: positions, and what rotates them, worked out when it is first asked for.

    Args:
        rope: the layers' `Rope`.
        positions: int64 [T], or [3, T] (see `Rope`).
        dtype: that of queries and keys.
    """

    rope: Rope
    positions: Tensor
    dtype: torch.dtype

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Tables for `apply_rope`, [T, 1, dim]."""
        return self.rope(self.positions, self.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2) of the first `dim` numbers of each head; the rest stays as it is.

    Args:
        x: [T, heads, at least dim].
        cos, sin: from `Rope`.

    Returns:
        A new tensor like `x`.
    """
    if (dim := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((apply_rope(x[..., :dim], cos, sin), x[..., dim:]), -1)
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


_ORIGINAL = "original_max_position_embeddings"
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (
        (),
        ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", _ORIGINAL, "attention_factor")),
}
"""The parameters that each rope type needs, and those that it may have."""


def rope_from_parameters(
    parameters: dict[str, Any], *, theta: float, dim: int, max_position: int, original_max_position: int | None = None
) -> RopeSpec:
    """From a Hugging Face `rope_parameters` or `rope_scaling` dictionary.

    Args:
        parameters: the dictionary, flat.
        theta: used if the dictionary has no `rope_theta`.
        dim: numbers of a head.
        max_position: the configuration's `max_position_embeddings`.
        original_max_position: the configuration's own field of that name, which has precedence, if it has one.

    Raises:
        ValueError: unknown rope type, unknown field, or a field missing; names it.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)  # names in the first files of Phi-3 and Qwen2-VL
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    required, optional = _PARAMETERS[kind]
    given = {name: value for name, value in parameters.items() if value is not None}
    sections = tuple(given.pop("mrope_section", ()))
    for name, value in given.items():
        if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor", *required, *optional):
            raise ValueError(f"rope parameter {name}={value!r} is not supported with rope type {kind!r}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope parameter partial_rotary_factor={given['partial_rotary_factor']!r} is not supported")
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"rope type {kind!r} needs the rope parameter {missing[0]}, got {parameters}")
    values = {name: given[name] for name in (*required, *optional) if name in given}
    if _ORIGINAL in optional:
        named = values.pop(_ORIGINAL, max_position)
        values["original_max_position"] = original_max_position or named
    for name in ("short", "long") if kind == "longrope" else ():
        values[f"{name}_factors"] = tuple(map(float, values.pop(f"{name}_factor")))
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = max_position / values["original_max_position"]
    return RopeSpec(
        kind=kind,
        theta=float(given.get("rope_theta", theta)),
        dim=dim,
        max_position=max_position,
        sections=sections,
        **values,
    )
