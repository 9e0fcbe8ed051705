"""The decoder against transformers, on tiny models with random weights, through the paged cache."""

import functools

import pytest
import torch
from paged import CPU, PagedDecoder, make_decoder
from tiny_models import EXPERTS, FAMILIES, STATES, TINY_MODELS, VOCAB_SIZE, hf_model, logits_equal, next_logits

from minivllm.attention.select import make_backend
from minivllm.core.config import KVCacheConfig, KVCacheGroup, KVCacheSpec
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config

BACKENDS = ("reference", "sdpa")
MODELS = [(name, backend) for name in TINY_MODELS for backend in BACKENDS if (name, backend) != ("gemma2", "sdpa")]
"""A soft cap on scores is what sdpa has no room for."""
INVARIANT = (*FAMILIES, *EXPERTS, "gpt-oss", "deepseek-v2")

PROVEN = [(name, "reference") for name in INVARIANT]
"""Their logits are the same in every batch, to the bit: see below."""


@pytest.fixture(autouse=True)
def one_thread():
    """These matmuls are too small to share out; on a busy machine waiting for each other takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
@torch.inference_mode()
def hf_logits(name: str) -> torch.Tensor:
    """Of `prompt(90)`, of which every shorter one is the beginning; where positions depend on the longest, of `prompt(60)`."""
    return hf_model(name)(torch.tensor([prompt(60 if name == "llama-rope-dynamic" else 90)])).logits[0]


@torch.inference_mode()
def hf_generate(name: str, tokens: list[int], max_tokens: int) -> list[int]:
    model = hf_model(name)
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([tokens]), max_new_tokens=max_tokens, do_sample=False)
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize(("name", "backend"), MODELS)
def test_logits_in_one_piece_in_chunks_and_token_by_token(name, backend):
    tokens = prompt(60)
    want = hf_logits(name)[:60]
    assert want.abs().max() > 3  # random, but not flat
    decoder = make_decoder(hf_model(name), backend)
    for chunks in ([60], [23, 30, 7], [40] + [1] * 20):
        paged = PagedDecoder(decoder)
        paged.add("r", tokens)
        got = torch.cat([paged.step({"r": n})["r"] for n in chunks])
        assert got.dtype == torch.float32
        assert logits_equal(got, want)
        assert name not in STATES or (got - want).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "backend"), [case for case in MODELS if case not in PROVEN])
def test_greedy_tokens_of_a_mixed_batch(name, backend):
    """Prompts of many lengths start at different steps, so prefill chunks and decodes share batches."""
    prompts = {str(n): prompt(n, seed=n) for n in (1, 2, 17, 40, 48)}
    paged = PagedDecoder(make_decoder(hf_model(name), backend))
    got = paged.generate(prompts, 16, chunk=13)
    want = next_logits(hf_model(name), list(prompts.values()), list(got.values()))
    assert list(got.values()) == [logits.argmax(-1).tolist() for logits in want]


def test_dynamic_ntk_beyond_its_limit_generates_what_transformers_does():
    """transformers stretches the frequencies as the sequence grows; so does every position of ours."""
    tokens = prompt(50)
    want = hf_generate("llama-rope-dynamic", tokens, 40)  # the limit is 64
    for backend in BACKENDS:
        paged = PagedDecoder(make_decoder(hf_model("llama-rope-dynamic"), backend))
        assert paged.generate({"r": tokens}, 40)["r"] == want


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in INVARIANT), ("llama", 2)])
def test_reference_logits_are_bit_identical_in_any_batch_chunking_and_placement(name, threads):
    torch.set_num_threads(threads)
    decoder = make_decoder(hf_model(name), "reference")
    assert {linear.method_name for linear in decoder.linears()} == {"batch_invariant"}
    tokens = prompt(50)
    alone = PagedDecoder(decoder)
    alone.add("r", tokens)
    want = alone.step({"r": 50})["r"]
    for seed, chunks in enumerate(([50], [20, 30], [31] + [1] * 19, [7, 20, 20, 3])):
        paged = PagedDecoder(decoder, seed=seed + 1)
        paged.add("r", tokens)
        got = []
        for step, n in enumerate(chunks):
            paged.add(f"a{step}", prompt(40, seed=step))
            paged.add(f"b{step}", prompt(1, seed=step))
            got.append(paged.step({f"a{step}": 33, "r": n, f"b{step}": 1})["r"])
        assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_blocks_that_left_the_window_are_not_read(name):
    """The cache manager gives them away and points their entries to the null block."""
    tokens, window = prompt(90), 24
    want = hf_logits(name)
    for backend in BACKENDS:
        paged = PagedDecoder(make_decoder(hf_model(name), backend))
        paged.add("r", tokens)
        got = [paged.step({"r": 60})["r"]]
        while paged.computed["r"] < 90:
            for group, table in zip(paged.config.groups, paged.tables["r"], strict=True):
                if group.spec.kind == "sliding_window":
                    for j in range((paged.computed["r"] - window + 1) // paged.block_size):
                        table[j] = 0
            got.append(paged.step({"r": 5})["r"])
        assert (torch.cat(got) - want).abs().max() < 1e-4


def test_requests_do_not_see_each_other():
    """A request full of infinities leaves the others alone, even in blocks that it has used before them."""
    decoder = make_decoder(hf_model("llama"), "sdpa")
    clean = PagedDecoder(decoder)
    clean.add("r", prompt(20))
    want = clean.step({"r": 20})["r"]
    paged = PagedDecoder(decoder)
    for cache in paged.caches:
        cache.fill_(torch.inf)
    paged.add("x", prompt(9))
    paged.add("r", prompt(20))
    paged.step({"x": 9, "r": 19})
    torch.testing.assert_close(paged.step({"r": 1})["r"], want[19:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name):
    import copy

    tokens = prompt(60)
    exact = hf_logits(name)[:60]
    low = copy.deepcopy(hf_model(name)).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = (low(torch.tensor([tokens])).logits[0].float() - exact).pow(2).mean().sqrt()
    paged = PagedDecoder(make_decoder(hf_model(name), "sdpa", dtype=torch.bfloat16))
    paged.add("r", tokens)
    ours = (paged.step({"r": 60})["r"] - exact).pow(2).mean().sqrt()
    assert ours < 1.2 * theirs


def empty_decoder(name: str = "llama") -> Decoder:
    return Decoder(spec_from_config(hf_model(name).config.to_dict()), make_backend("sdpa"), torch.float32, CPU)


def weights(name: str = "llama") -> dict[str, torch.Tensor]:
    return dict(hf_model(name).state_dict())


def test_load_fuses_and_ties():
    decoder, tensors = empty_decoder("llama-tied-biased"), weights("llama-tied-biased")
    decoder.load_weights(tensors.items())
    assert decoder.head.weight is decoder.embedding
    mixer = decoder.layers[1].mixer
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(mixer.qkv.weight, torch.cat(parts))
    assert torch.equal(mixer.qkv.part("self_attn.v_proj", "bias"), tensors["model.layers.1.self_attn.v_proj.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks model.norm.weight$"),
        ({f"model.layers.{i}.mlp.up_proj.weight": None for i in range(4)} | {"lm_head.weight": None, "model.norm.weight": None},
         "lacks .* and 1 more"),
        ({"model.layers.4.mlp.up_proj.weight": torch.zeros(100, 72)}, "'model.layers.4.mlp.up_proj.weight' that this model"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}, "q_proj.bias' that this model has no place for"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.zeros(1, 72)}, r"must have shape \(32, 72\), got \(1, 72\)"),
        ({"model.layers.0.input_layernorm.weight": torch.zeros(1)}, r"must have shape \(72,\), got \(1,\)"),
    ],
)  # fmt: skip
def test_load_refuses(change, message):
    tensors = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        empty_decoder().load_weights(tensors.items())


def test_load_refuses_a_tensor_that_comes_twice():
    tensors = [*weights().items(), ("model.norm.weight", torch.ones(72))]
    with pytest.raises(ValueError, match=r"'model.norm.weight' came twice"):
        empty_decoder().load_weights(tensors)


def test_load_of_tied_embeddings_accepts_only_an_equal_head():
    tensors = weights("llama-tied-biased")
    assert "lm_head.weight" in tensors
    empty_decoder("llama-tied-biased").load_weights(tensors.items())
    empty_decoder("llama-tied-biased").load_weights((k, v) for k, v in tensors.items() if k != "lm_head.weight")
    other = tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but 'lm_head.weight' differs"):
        empty_decoder("llama-tied-biased").load_weights(other.items())


def test_load_skips_the_rotary_table_of_old_checkpoints():
    tensors = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    empty_decoder().load_weights(tensors.items())


def test_bind_refuses_groups_that_do_not_fit():
    decoder = empty_decoder("qwen2-window")
    full = KVCacheSpec("full", 8, 2, 16)
    window = KVCacheSpec("sliding_window", 8, 2, 16, 24)

    def config(*groups):
        return KVCacheConfig(10, 8, tuple(KVCacheGroup(spec, layers) for spec, layers in groups))

    decoder.bind(config((full, (0, 1)), (window, (2, 3))))
    assert [layer.mixer.cache for layer in decoder.layers] == [0, 1, 0, 1]
    assert [layer.mixer.group for layer in decoder.layers] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="layer 2 needs"):
        decoder.bind(config((full, (0, 1, 2, 3))))
    with pytest.raises(ValueError, match=r"layers \[3\] are in no group"):
        decoder.bind(config((full, (0, 1)), (window, (2,))))
    with pytest.raises(ValueError, match="layer 1 of 4 is named twice"):
        decoder.bind(config((full, (0, 1)), (window, (1, 2))))
