"""Rotary positions against transformers' own functions."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.models.rope import Rope, RopeSpec, apply_rope, attention_factor, inverse_frequencies, rope_from_parameters

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3.2": LLAMA3 | {"factor": 32.0},
    "yarn": YARN,
    "yarn-factor-from-lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    "yarn-no-truncate": YARN | {"truncate": False},
    "yarn-betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": YARN | {"mscale": 1.4},
}


def config(parameters: dict, theta: float, max_position: int = 131072) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={**parameters, "rope_theta": theta},
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", PARAMETERS)
def test_cos_and_sin_equal_transformers(name, theta):
    parameters = PARAMETERS[name]
    theirs = LlamaRotaryEmbedding(config(dict(parameters), theta))
    spec = rope_from_parameters(parameters, theta=theta, dim=64, max_position=131072)
    positions = torch.cat((torch.arange(50), torch.tensor([999, 8191, 32768, 131071])))
    cos, sin = theirs(torch.empty(0), positions[None])
    mine_cos, mine_sin = Rope(spec, CPU)(positions, torch.float32)
    sign = torch.cat((-torch.ones(32), torch.ones(32)))
    torch.testing.assert_close(inverse_frequencies(spec), theirs.inv_freq, rtol=2e-7, atol=0)
    assert attention_factor(spec) == pytest.approx(theirs.attention_scaling)
    # one float32 step of the frequency, times the largest position
    torch.testing.assert_close(mine_cos[:, 0], cos[0], atol=0.01, rtol=0)
    torch.testing.assert_close(mine_cos[:50, 0], cos[0, :50], atol=1e-5, rtol=0)
    torch.testing.assert_close((mine_sin[:, 0] * sign)[:50], sin[0, :50], atol=1e-5, rtol=0)


LONGROPE = {"short_factor": [1 + i / 40 for i in range(32)], "long_factor": [2 + i / 3 for i in range(32)]}


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"attention_factor": 1.3}])
@pytest.mark.parametrize(("longest", "kind"), [(64, "longrope"), (65, "longrope"), (None, "su")])
def test_longrope_has_the_factors_of_the_longest_sequence(longest, kind, more):
    """transformers takes them by the longest of a call."""
    parameters = {**LONGROPE, **more, "original_max_position_embeddings": 64}
    theirs = LlamaRotaryEmbedding(config(parameters | {"rope_type": "longrope"}, 10000.0, max_position=256))
    spec = rope_from_parameters(parameters | {"type": kind}, theta=1e4, dim=64, max_position=256)
    assert spec.max_length == 256
    positions = torch.arange(longest or 256)
    cos, _ = theirs(torch.empty(0), positions[None])
    torch.testing.assert_close(Rope(spec, CPU, longest)(positions, torch.float32)[0][:, 0], cos[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_is_bit_identical_to_transformers(dtype):
    spec = RopeSpec(dim=64, max_position=4096)
    positions = torch.tensor([0, 5, 77, 4000])
    x = torch.randn(4, 3, 64).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config({"rope_type": "default"}, 10000.0))(x, positions[None])
    want, _ = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)
    assert torch.equal(apply_rope(x, *Rope(spec, CPU)(positions, dtype)), want[0].transpose(0, 1))


def test_rotation_turns_products_into_functions_of_distance():
    rope = Rope(RopeSpec(dim=8, max_position=100), CPU)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def product(i: int, j: int) -> float:
        tables = rope(torch.tensor([i, j]), torch.float64)
        return float((apply_rope(q, tables[0][:1], tables[1][:1]) * apply_rope(k, tables[0][1:], tables[1][1:])).sum())

    assert product(7, 3) == pytest.approx(product(54, 50), abs=1e-5)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


def test_dynamic_beyond_the_limit_is_what_growing_token_by_token_gives():
    parameters = {"rope_type": "dynamic", "factor": 4.0}
    spec = rope_from_parameters(parameters, theta=10000.0, dim=64, max_position=128)
    theirs = LlamaRotaryEmbedding(config(parameters, 10000.0, max_position=128))
    together = Rope(spec, CPU)(torch.arange(300), torch.float32)[0][:, 0]
    for position in range(300):  # a call a token, as `generate` does
        cos, _ = theirs(torch.empty(0), torch.tensor([[position]]))
        torch.testing.assert_close(together[position], cos[0, 0], atol=1e-4, rtol=0)
    assert (
        together[299] - Rope(RopeSpec(dim=64, max_position=128), CPU)(torch.tensor([299]), torch.float32)[0]
    ).abs().max() > 0.1


def test_old_and_new_spelling():
    new = rope_from_parameters(LLAMA3 | {"rope_theta": 500000.0}, theta=1.0, dim=64, max_position=131072)
    old = {name: value for name, value in LLAMA3.items() if name != "rope_type"} | {"type": "llama3"}
    assert rope_from_parameters(old, theta=500000.0, dim=64, max_position=131072) == new
    assert rope_from_parameters({}, theta=10000.0, dim=64, max_position=9).kind == "default"


def test_every_type_of_transformers_is_known_or_refused_by_name():
    for kind in ROPE_INIT_FUNCTIONS:
        if kind in ("linear", "dynamic", "llama3", "yarn", "longrope"):
            continue
        with pytest.raises(ValueError, match=f"rope type '{kind}' is not supported; supported: default, linear"):
            rope_from_parameters({"rope_type": kind, "factor": 2.0}, theta=1e4, dim=64, max_position=9)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "default", "mrope_section": [16, 24, 24]},
            "mrope_section must be three numbers with the sum 32",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "linear"}, "needs the rope parameter factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs the rope parameter high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32}, "needs the rope parameter long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0]}, "needs 32 long_factors, got 1"),
    ],
)
def test_refusals_name_the_parameter(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_from_parameters(parameters, theta=1e4, dim=64, max_position=4096)


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        (LLAMA3, 4096),
        (YARN, 131072),
    ],
)
def test_max_length(parameters, length):
    assert rope_from_parameters(parameters, theta=1e4, dim=64, max_position=4096).max_length == length
