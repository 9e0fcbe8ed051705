"""Mixtures of experts: routing against transformers' routers, sorted experts against a loop, both forms of a checkpoint."""

from dataclasses import replace

import pytest
import torch
from paged import CPU, PagedDecoder, make_decoder
from tiny_models import EXPERTS, VOCAB_SIZE, checkpoint, hf_model

from minivllm.attention.select import make_backend
from minivllm.core.module import ModuleList
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.mixers.base import Builder
from minivllm.models.mixers.mlp import GatedMLP, GatedMLPSpec
from minivllm.models.mixers.moe import MoE, MoESpec, RouterSpec, groups_experts, route
from minivllm.models.ops.torch import TorchOps
from minivllm_kernels.cpu.program import LAUNCHER


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def dense(weights: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(len(weights), count).scatter_(1, ids, weights)


@pytest.mark.parametrize("groups", [1, 4])
def test_router_of_deepseek_v3(groups):
    """Sigmoid, groups by their two best, a correction in the choice only."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": groups, "topk_group": max(groups // 2, 1)}
    config = AutoConfig.for_model("deepseek_v3", hidden_size=24, moe_intermediate_size=8, **sizes)
    theirs = DeepseekV3MoE(config)
    torch.manual_seed(0)
    theirs.gate.weight.data.normal_()
    theirs.gate.e_score_correction_bias.data.normal_(std=0.2)
    x = torch.randn(50, 24)
    with torch.inference_mode():
        _, weights, ids = theirs.gate(x)
        scores = torch.sigmoid(x @ theirs.gate.weight.T)
    spec = RouterSpec(
        top_k=3, score="sigmoid", normalize=True, epsilon=1e-20, scale=2.5, groups=groups,
        top_groups=max(groups // 2, 1), group_score=2,
    )  # fmt: skip
    ours = route(scores, spec, theirs.gate.e_score_correction_bias)
    torch.testing.assert_close(dense(*ours, 16), dense(weights, ids, 16), atol=1e-6, rtol=0)
    plain = route(scores, spec)
    assert not torch.equal(dense(*plain, 16), dense(*ours, 16))  # the correction matters


def test_groups_by_their_best_against_brute_force():
    """DeepSeek-V2's rule: the groups with the largest single scores, and the best experts within them."""
    scores = torch.softmax(torch.randn(40, 12, generator=torch.Generator().manual_seed(1)), -1)
    _, ids = route(scores, RouterSpec(top_k=3, groups=4, top_groups=2))
    for row, chosen in zip(scores.tolist(), ids.tolist(), strict=True):
        best = sorted(range(4), key=lambda g: -max(row[3 * g : 3 * g + 3]))[:2]
        allowed = [e for g in best for e in range(3 * g, 3 * g + 3)]
        assert chosen == sorted(allowed, key=lambda e: -row[e])[:3]


def decoder_of(name: str, backend: str = "sdpa", original_format: bool = True) -> Decoder:
    model = hf_model(name)
    decoder = Decoder(spec_from_config(model.config.to_dict()), make_backend(backend), torch.float32, CPU)
    decoder.load_weights(checkpoint(model, original_format).items())
    return decoder


@pytest.mark.parametrize("name", EXPERTS)
def test_stacked_checkpoints_give_the_same_model(name):
    assert set(checkpoint(hf_model(name))) != set(checkpoint(hf_model(name), False))
    outputs = []
    for original_format in (True, False):
        paged = PagedDecoder(decoder_of(name, original_format=original_format))
        paged.add("r", tokens(20))
        outputs.append(paged.step({"r": 20})["r"])
    assert torch.equal(*outputs)


def moe_of(decoder: Decoder) -> MoE:
    return next(layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE))


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_sorted_segments_are_each_token_by_itself(rows):
    """One token after the other, expert by expert, is the definition; and an expert without tokens is not run."""
    moe = moe_of(decoder_of("qwen2-moe"))
    x = torch.randn(rows, 72, generator=torch.Generator().manual_seed(0))
    calls = []
    removers = [
        expert.register_forward_hook(lambda module, args, out, e=e: calls.append((e, len(args[0]))))
        for e, expert in enumerate(moe.experts)
    ]
    got = moe(x)
    for remove in removers:
        remove()
    sizes = dict(calls)
    weights, ids = moe.route(x)
    assert sorted(sizes) == sorted(set(ids.flatten().tolist())) and sum(sizes.values()) == 3 * rows
    for row in range(rows):
        want = sum(w * moe.experts[e](x[row : row + 1]) for w, e in zip(weights[row], ids[row].tolist(), strict=True))
        want = want + moe.shared(x[row : row + 1]) * torch.sigmoid(moe.shared_gate(x[row : row + 1]))
        torch.testing.assert_close(got[row : row + 1], want, atol=1e-5, rtol=1e-5)


@pytest.fixture
def grouped(monkeypatch):
    """A model whose experts are stacked, some tokens, and how often a grouped matmul was called."""
    decoder = decoder_of("qwen3-moe", "sdpa")
    moe, calls, multiply = moe_of(decoder), [], torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **kwargs: calls.append(1) or multiply(*args, **kwargs))
    assert not moe.grouped and not moe.stacked
    moe.grouped = True
    moe.process_weights_after_loading()
    return decoder, moe, torch.randn(33, 72, generator=torch.Generator().manual_seed(0)), calls


def by_loop(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    kept, moe.stacked = moe.stacked, []
    out = moe(x)
    moe.stacked = kept
    return out


def test_a_grouped_matmul_is_the_loop_over_experts(grouped):
    decoder, moe, x, calls = grouped
    assert moe.stacked[0].shape == (8, 96, 72)
    assert moe.experts[3].down.weight.data_ptr() == moe.stacked[1][3].data_ptr()  # no second copy
    want = by_loop(moe, x)
    assert calls == []
    torch.testing.assert_close(moe(x), want, atol=1e-5, rtol=1e-5)
    PagedDecoder(decoder)  # binding sets attributes, and leaves the experts what they are
    torch.testing.assert_close(moe(x), want, atol=1e-5, rtol=1e-5)
    assert len(calls) == 4


def another_expert(moe):
    moe.experts[3] = moe.experts[4]


def another_weight(moe):
    moe.experts[3].down.use("torch", 2 * moe.experts[3].down.weight)


def a_hook(moe):
    return moe.experts[3].register_forward_hook(lambda module, args, output: 2 * output)


def another_activation(moe):
    for expert in moe.experts:
        expert.activation = "relu"


def one_other_activation(moe):
    moe.experts[3].activation = "relu"


def other_ops(moe):
    class Doubled(TorchOps):
        capturable = True

        def gated_linear(self, *args):
            return 2 * super().gated_linear(*args)

    moe.experts[3].ops = Doubled()


def another_class(moe):
    class Doubled(GatedMLP):
        capturable = True

        def __call__(self, x):
            return 2 * super().__call__(x)

    expert = Doubled.__new__(Doubled)
    vars(expert).update(vars(moe.experts[3]))
    moe.experts[3] = expert


def an_adapter(moe):
    down = moe.experts[3].down

    class Doubled(type(down.method)):
        capturable = True

        def apply(self, x):
            return 2 * super().apply(x)

    method = Doubled.__new__(Doubled)
    vars(method).update(vars(down.method))
    down.method = method


CHANGES = [another_expert, another_weight, a_hook, another_activation, one_other_activation, other_ops, another_class]


@pytest.mark.parametrize("change", [*CHANGES, an_adapter])
def test_a_changed_expert_computes_what_it_is_now(grouped, change):
    _, moe, x, calls = grouped
    before = moe(x)
    undo = change(moe)
    try:
        want, got = by_loop(moe, x), moe(x)
    finally:
        if undo is not None:
            undo()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert (want - before).abs().max() > 0.1
    if undo is not None:  # and the stack is used again
        calls.clear()
        torch.testing.assert_close(moe(x), before, atol=1e-5, rtol=1e-5)
        assert len(calls) == 2


def launches_of(moe: MoE, x: torch.Tensor, monkeypatch) -> tuple[torch.Tensor, list[str]]:
    """What a block gives, and the kernels that it launched."""
    names, run = [], LAUNCHER.run
    with monkeypatch.context() as patch:
        patch.setattr(LAUNCHER, "run", lambda kernel, *args: names.append(kernel.name) or run(kernel, *args))
        return moe(x), names


def by_single_experts(moe: MoE, x: torch.Tensor, monkeypatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "_grouped_linears", lambda self: [])
        return moe(x)


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2-moe", torch.float32), ("qwen2-moe", torch.bfloat16), ("gpt-oss", torch.float32)]
)
def test_a_cpu_computes_all_experts_by_one_launch_of_each_matmul(name, dtype, monkeypatch):
    """The same as one expert after the other; and a changed expert is what it is now."""
    model = hf_model(name)
    decoder = Decoder(spec_from_config(model.config.to_dict()), make_backend("numba_cpu"), dtype, CPU)
    decoder.load_weights(checkpoint(model, True).items())
    moe = moe_of(decoder)
    size = decoder.spec.hidden_size
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).to(dtype)  # so few that each kernel takes them
    want = by_single_experts(moe, x, monkeypatch)
    got, names = launches_of(moe, x, monkeypatch)
    shared = 0 if moe.shared is None else 2
    assert names.count("matmul") == 2 + shared and [name for name in names if name.endswith("_rows")] == [
        "copy_rows",
        "add_rows",
    ]
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(got, want, **close)
    chosen = int(moe.route(x)[1][0, 0])
    remove = moe.experts[chosen].register_forward_hook(lambda module, args, output: 2 * output)
    hooked, names = launches_of(moe, x, monkeypatch)
    assert names.count("matmul") > 2 + shared and torch.equal(hooked, by_single_experts(moe, x, monkeypatch))
    remove()
    assert torch.equal(moe(x), got) and not torch.allclose(hooked, want, **close)


def test_experts_that_a_rank_holds_are_its_part_of_the_sum(monkeypatch):
    """Ranks by expert, each with half of them; one has no token at all."""
    model = hf_model("olmoe")
    decoder = Decoder(spec_from_config(model.config.to_dict()), make_backend("numba_cpu"), torch.float32, CPU)
    decoder.load_weights(checkpoint(model, True).items())
    moe, x = moe_of(decoder), torch.randn(5, 72, generator=torch.Generator().manual_seed(0))
    whole, experts = moe(x), list(moe.experts)
    parts = []
    for first in (0, 4):
        moe.spec, moe.experts = replace(moe.spec, held=(first, 4)), ModuleList(experts[first : first + 4])
        parts.append(moe(x))
        assert torch.equal(parts[-1], by_single_experts(moe, x, monkeypatch))
    torch.testing.assert_close(sum(parts), whole, atol=1e-6, rtol=1e-5)
    monkeypatch.setattr(moe, "route", lambda x: (torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)))
    assert (moe(x) == 0).all()  # all tokens go to expert 0, which the other rank has


def test_batch_invariant_experts_are_never_grouped():
    """How a grouped matmul rounds a row depends on the rows beside it."""
    moe = moe_of(decoder_of("qwen3-moe", "reference"))
    how = {"backend": make_backend("sdpa"), "linear_method": "torch", "dtype": torch.bfloat16}
    sizes = {"hidden_size": 72, "norm_eps": 1e-5, "norm_offset": False, "device": torch.device("cuda")}
    assert groups_experts(Builder(**how, **sizes, ops=TorchOps(False)))
    assert not groups_experts(Builder(**how, **sizes, ops=TorchOps(True)))
    moe.grouped = True
    moe.process_weights_after_loading()
    assert not moe.stacked  # and their linear methods do not let themselves be stacked


def test_quantized_experts_stay_close_and_the_router_exact():
    decoder = make_decoder(hf_model("olmoe"), "sdpa", linear_method="torch_int8")
    moe, exact = moe_of(decoder), moe_of(decoder_of("olmoe"))
    assert moe.experts[0].down.method_name == "torch_int8" and moe.router.method_name == "torch"
    x = torch.randn(20, 72, generator=torch.Generator().manual_seed(0))
    assert torch.equal(moe.route(x)[1], exact.route(x)[1])
    error = (moe(x) - exact(x)).norm() / exact(x).norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts must be .* got 0"),
        ({"router": RouterSpec(top_k=9)}, "cannot have 9 experts of 8"),
        ({"router": RouterSpec(top_k=2, groups=3)}, "8 experts, 3 groups"),
        ({"router": RouterSpec(top_k=5, groups=2)}, "cannot have 5 experts of 8"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, message):
    spec = MoESpec(num_experts=8, router=RouterSpec(top_k=2), expert=GatedMLPSpec(intermediate_size=4, gate="{}.g"))
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)
    with pytest.raises(ValueError, match="router score 'tanh'"):
        RouterSpec(top_k=2, score="tanh")


@pytest.mark.parametrize("stacked", [False, True])
def test_a_broken_checkpoint_is_refused_by_the_tensors_name(stacked):
    model = hf_model("olmoe")
    tensors = checkpoint(model, not stacked)
    name = "model.layers.1.mlp.experts.down_proj" if stacked else "model.layers.1.mlp.experts.5.down_proj.weight"
    spec = spec_from_config(model.config.to_dict())

    def load(changed):
        Decoder(spec, make_backend("sdpa"), torch.float32, CPU).load_weights(changed.items())

    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.experts.\d.down_proj.weight"):
        load({key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts.\d.down_proj.weight' must have shape"):
        load(tensors | {name: tensors[name][..., :-1]})
    if stacked:
        with pytest.raises(ValueError, match="experts.gate_up_proj' of shape .* cannot be taken apart"):
            load(tensors | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(())})


def test_layers_that_only_draft_tokens_are_not_loaded():
    """DeepSeek-V3's checkpoints hold one after the last, with an embedding and an output layer of its own."""
    model = hf_model("deepseek-v3")
    config, tensors = model.config.to_dict(), dict(checkpoint(model))
    names = ("input_layernorm.weight", "embed_tokens.weight", "eh_proj.weight", "shared_head.head.weight")
    tensors |= {f"model.layers.4.{name}": torch.zeros(3) for name in (*names, "mlp.experts.0.up_proj.weight")}

    def load(**changed):
        decoder = Decoder(spec_from_config(config | changed), make_backend("sdpa"), torch.float32, CPU)
        decoder.load_weights(tensors.items())

    load(num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"'model.layers.4.input_layernorm.weight' that this model has no place for"):
        load(num_nextn_predict_layers=0)
    tensors["model.layers.5.input_layernorm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'model.layers.5.input_layernorm.weight' that this model has no place for"):
        load(num_nextn_predict_layers=1)
    load(num_nextn_predict_layers=2)


def test_a_latent_cache_holds_what_the_paper_says():
    """DeepSeek-V3: 512 numbers and 64 rotated ones in each of 61 layers, of two bytes (DeepSeek-AI, 2024)."""
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
    config = {"model_type": "deepseek_v3", **sizes, "vocab_size": 129280, "max_position_embeddings": 4096}
    specs = spec_from_config(config).kv_cache_specs(16, 2)
    assert sum(spec.bytes_per_block for spec in specs) == 16 * 61 * (512 + 64) * 2
    assert {spec.kind for spec in specs} == {"latent"}
