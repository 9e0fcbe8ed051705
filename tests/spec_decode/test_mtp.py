"""The layer that a checkpoint brings to draft with: its guesses are those of a plain torch model with transformers' own layer."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint, hf_model, tiny_model_path  # noqa: F401 - a fixture
from torch.nn import functional

from minivllm import LLM, SamplingParams

H, MOST, LAST = 72, 3, 3
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"dtype": "float32", "attention_backend": "sdpa", "max_model_len": 128, "num_gpu_blocks": 60}
NAMES = {  # by family: what the layer's tensors begin with; norm of the embedding and of the state, matrix, last norm
    "deepseek-v3": ("model.layers.4.", *(f"model.layers.4.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))),
    "qwen3-next-attention": ("mtp.layers.0.", *(f"mtp.{n}" for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))),
}  # fmt: skip


def mtp_tensors(name: str) -> dict[str, torch.Tensor]:
    """The model's last layer again, with norms and a matrix of its own."""
    g, (prefix, embedding_norm, hidden_norm, fuse, final_norm) = torch.Generator().manual_seed(5), NAMES[name]
    old = f"model.layers.{LAST}."
    layer = {n.replace(old, prefix): t for n, t in checkpoint(hf_model(name)).items() if n.startswith(old)}
    norms = {f"{n}.weight": 1 + torch.randn(H, generator=g) / 4 for n in (embedding_norm, hidden_norm, final_norm)}
    return layer | norms | {f"{fuse}.weight": torch.randn(H, 2 * H, generator=g) / 9}


def rms(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight + offset)


@torch.no_grad()
def guesses(name: str, tokens: list[int], count: int) -> list[int]:
    """Over the whole text again for every guess."""
    target, tensors, said = hf_model(name), mtp_tensors(name), []
    _, embedding_norm, hidden_norm, fuse, final_norm = (tensors.get(f"{n}.weight") for n in NAMES[name])
    offset = 1.0 if name.startswith("qwen3-next") else 0.0
    states, layer = target.model(torch.tensor([tokens])).last_hidden_state[0, :-1], target.model.layers[LAST]
    for _ in range(count):
        x = target.model.embed_tokens(torch.tensor([*tokens[1:], *said]))
        if name == "deepseek-v3":
            x[0] = 0
        both = torch.cat([rms(x, embedding_norm, offset), rms(states, hidden_norm, offset)], 1)
        x = functional.linear(both, fuse)[None]
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        rotation = target.model.rotary_emb(x, torch.arange(n)[None])
        out = layer(x, attention_mask=mask, position_embeddings=rotation)
        out = (out if isinstance(out, torch.Tensor) else out[0])[0, -1]
        normed = rms(out, final_norm, offset)
        said.append(int(target.lm_head(normed).argmax()))
        states = torch.cat([states, (normed if name.startswith("qwen3-next") else out)[None]])
    return said


@pytest.fixture(scope="module")
def with_layer(tiny_model_path, tmp_path_factory):  # noqa: F811
    """A function from a model's name to a folder of it that holds the layer too."""

    def folder(name):
        path = tmp_path_factory.mktemp("mtp") / name
        shutil.copytree(tiny_model_path(name), path)
        file = path / "model.safetensors"
        shared = {}
        if name == "deepseek-v3":  # copies of what the model has
            shared = {f"model.layers.4.{n}.weight": torch.zeros(3) for n in ("embed_tokens", "shared_head.head")}
        save_file({n: t.contiguous().clone() for n, t in (load_file(file) | mtp_tensors(name) | shared).items()}, file)
        return path

    return folder


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_the_layers_own_and_no_answer_changes(with_layer, name):
    path, rng = with_layer(name), random.Random(1)
    shared = [rng.randrange(250) for _ in range(30)]
    prompts = [shared[: 7 * i] + [rng.randrange(250) for _ in range(rng.randrange(1, 20))] for i in range(3)]
    asked = [{"prompt_token_ids": p} for p in prompts]
    with LLM(path, **SIZES) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]
    config = {"method": "mtp", "num_speculative_tokens": MOST, "dynamic_length": False}
    with LLM(path, speculative_config=config, max_num_batched_tokens=24, max_num_seqs=8, **SIZES) as llm:
        drafter, told = llm.llm_engine.core.executor.runner.drafter, []
        propose = drafter.proposer.propose

        def listen(requests, view):
            drafts = propose(requests, view)
            told.extend((r.token_ids.tolist(), list(d.token_ids)) for r, d in zip(requests, drafts, strict=True))
            return drafts

        drafter.proposer.propose = listen
        for _ in range(2):  # the second finds prefixes in the cache
            assert [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)] == plain
        assert drafter.problem is None
    drafted = [(tokens, ids) for tokens, ids in told if ids]
    assert len(drafted) > 20
    for tokens, ids in drafted[:: len(drafted) // 5]:
        assert ids == guesses(name, tokens, len(ids))


def test_a_checkpoint_or_a_family_without_the_layer_is_refused(tiny_model_path):  # noqa: F811
    config = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match=r"has no tensor model.layers.4\.\*: its layer to draft with was left out"):
        LLM(tiny_model_path("deepseek-v3"), speculative_config=config, **SIZES)
    with pytest.raises(ValueError, match="a checkpoint of this model has no layer to draft with"):
        LLM(tiny_model_path("llama"), speculative_config=config, **SIZES)
    with pytest.raises(ValueError, match="2 layers to draft with"):
        LLM(
            tiny_model_path("deepseek-v3"),
            speculative_config=config,
            hf_overrides={"num_nextn_predict_layers": 2},
            **SIZES,
        )


def test_the_layers_memory_is_counted(tiny_model_path):  # noqa: F811
    size = {"load_format": "dummy", **SIZES, "num_gpu_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    with LLM(tiny_model_path("deepseek-v3"), **size) as alone:
        count = alone.llm_engine.config.cache.num_gpu_blocks
    config = {"method": "mtp", "num_speculative_tokens": 1}
    with LLM(tiny_model_path("deepseek-v3"), speculative_config=config, **size) as both:
        assert both.llm_engine.config.cache.num_gpu_blocks == count * 4 // 5  # one layer more than four
        both.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)
        assert both.llm_engine.core.scheduler.spec_stats.num_draft_tokens > 0
