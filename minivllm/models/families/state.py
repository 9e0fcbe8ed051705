"""Families with state-space layers: Mamba-2."""

# Generated from nbs/models/families/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math

from minivllm.models.mixers.mamba2 import Mamba2Spec
from minivllm.models.mixers.state import NoMLPSpec
from minivllm.models.spec import ConfigReader, DecoderSpec, LayerSpec, WeightNames, family, read_common

__all__ = ["LONGEST", "mamba2", "read_dt_limit"]

LONGEST = 1 << 17
"""Positions of a model whose config names no limit, since it needs none."""
_BACKBONE = WeightNames(
    embedding="backbone.embeddings.weight", final_norm="backbone.norm_f.weight", layer="backbone.layers.{}."
)


def read_dt_limit(r: ConfigReader, name: str = "time_step_limit") -> tuple[float, float]:
    """Bounds of step sizes. JSON has no infinity: it is spelled as a bare word, or as transformers 5 does."""
    low, high = r.get(name) or (0.0, math.inf)
    return tuple(float(x["__float__"]) if isinstance(x, dict) else float(x) for x in (low, high))  # type: ignore[return-value]


@family("Mamba2ForCausalLM", "mamba2")
def mamba2(r: ConfigReader) -> DecoderSpec:
    """Mamba-2: nothing but state-space layers."""
    r.assume(max_position_embeddings=LONGEST, hidden_size=4096, vocab_size=32768, num_hidden_layers=64)
    r.only("hidden_act", "silu", "swish")
    for training in ("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"):
        r.get(training)
    (
        r.get("residual_in_fp32"),
        r.get("chunk_size"),
        r.get("rms_norm"),
    )  # how to round, how to cut, and what transformers ignores
    hidden, heads, head_dim = r.need("hidden_size"), r.get("num_heads", 128), r.get("head_dim", 64)
    if heads * head_dim != r.get("expand", 2) * hidden:
        raise ValueError(
            f"{heads} heads of {head_dim} are not expand * hidden_size = {r.get('expand', 2) * hidden} numbers"
        )
    eps = r.get("layer_norm_epsilon", 1e-5)
    mixer = Mamba2Spec(
        prefix="mixer.", num_heads=heads, head_dim=head_dim, num_groups=r.get("n_groups", 8),
        state_size=r.get("state_size", 128), kernel=r.get("conv_kernel", 4), bias=r.get("use_bias", False),
        conv_bias=r.get("use_conv_bias", True), eps=eps, dt_limit=read_dt_limit(r),
    )  # fmt: skip
    layer = LayerSpec(mixer=mixer, mlp=NoMLPSpec(), mixer_norm="norm", mlp_norm=None)
    common = read_common(r, eps_name=None, eps=eps)
    return DecoderSpec(**common, layers=(layer,) * r.need("num_hidden_layers"), names=_BACKBONE)
