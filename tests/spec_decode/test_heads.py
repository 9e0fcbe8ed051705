"""Medusa heads and EAGLE layers: their guesses are those of a plain torch model that reads transformers' hidden states."""

import copy
import json
import random
from typing import Any

import pytest
import torch
from draft_heads import EAGLE3_TAPS, MOST, V, eagle3_tensors, eagle_tensors, folders, medusa_tensors, write  # noqa: F401 - a fixture
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture
from torch.nn import functional

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Recompute, Swap

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def hidden_states(tokens: list[int]) -> torch.Tensor:
    """After the last norm, [n, H], by transformers."""
    with torch.no_grad():
        return hf_model("llama").model(torch.tensor([tokens])).last_hidden_state[0]


def medusa_guesses(tensors: dict[str, torch.Tensor], tokens: list[int], count: int) -> list[int]:
    state, said = hidden_states(tokens)[-2], []
    for i in range(count):
        inner = functional.linear(state, tensors[f"blocks.{i}.layers.0.weight"], tensors[f"blocks.{i}.layers.0.bias"])
        head = state + functional.silu(inner)
        own = tensors.get(f"lm_heads.{i}.weight")
        if own is None:
            said.append(int(hf_model("llama").lm_head(head).argmax()))
        else:
            said.append(int(tensors["token_map"][int((own @ head).argmax())]))
    return said


def eagle_guesses(tensors: dict[str, torch.Tensor], tokens: list[int], count: int) -> list[int]:
    """By transformers' own layer, over the whole text again for every guess."""
    model, target = hf_model("llama-tied-biased").model, hf_model("llama")
    layer, said = model.layers[2], []
    states = hidden_states(tokens)[:-1]
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([*tokens[1:], *said])
            x = functional.linear(
                torch.cat([target.model.embed_tokens(ids), states], 1), tensors["fc.weight"], tensors["fc.bias"]
            )[None]
            n = x.shape[1]
            rotation = model.rotary_emb(x, torch.arange(n)[None])
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            attended = layer.self_attn(hidden_states=x, position_embeddings=rotation, attention_mask=mask)[0]
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            states = torch.cat([states, x[0, -1:]])
            said.append(int(target.lm_head(x[0, -1]).argmax()))
    return said


def eagle3_guesses(tensors: dict[str, torch.Tensor], tokens: list[int], count: int) -> list[int]:
    """By parts of transformers' own layer, over the whole text again for every guess."""
    target = hf_model("llama")
    layer = copy.deepcopy(target.model.layers[1])
    mine = {n.removeprefix("midlayer."): t for n, t in tensors.items() if n.startswith("midlayer.")}
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer.self_attn, name, torch.nn.Linear(144, mine[f"self_attn.{name}.weight"].shape[0], bias=False))
    hidden_norm, norm = (copy.deepcopy(layer.input_layernorm) for _ in range(2))
    hidden_norm.weight.data, norm.weight.data = mine.pop("hidden_norm.weight"), tensors["norm.weight"]
    layer.load_state_dict(mine)
    token_map, output = torch.arange(V), target.lm_head.weight
    if "d2t" in tensors:
        token_map, output = tensors["t2d"].nonzero()[:, 0], tensors["lm_head.weight"]
    said = []
    with torch.no_grad():
        streams = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taps = EAGLE3_TAPS if "d2t" in tensors else (2, 2, 1)
        states = functional.linear(torch.cat([streams[tap][0, :-1] for tap in taps], 1), tensors["fc.weight"])
        for _ in range(count):
            embeds = target.model.embed_tokens(torch.tensor([*tokens[1:], *said]))
            x = torch.cat([layer.input_layernorm(embeds), hidden_norm(states)], 1)[None]
            n = x.shape[1]
            rotation = target.model.rotary_emb(x, torch.arange(n)[None])
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            x = states + layer.self_attn(hidden_states=x, position_embeddings=rotation, attention_mask=mask)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            states = torch.cat([states, x[0, -1:]])
            said.append(int(token_map[(output @ norm(x[0, -1])).argmax()]))
    return said


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small-budget": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "recompute": {"preemption": Recompute(), "num_gpu_blocks": 14},
    "swap": {"preemption": Swap(60), "num_gpu_blocks": 14},
}
CASES = [("medusa", "plain"), ("medusa-own", "recompute"), ("eagle", "recompute"), ("eagle", "small-budget")]
CASES += [("eagle3", "small-budget"), ("eagle3-plain", "recompute")]
SLOW = [("medusa", "small-budget"), ("medusa-own", "swap"), ("eagle", "plain"), ("eagle", "swap")]
SLOW += [("eagle3", "swap"), ("eagle3", "recompute")]


def oracle(kind):
    if kind.startswith("eagle3"):
        return eagle3_tensors(kind == "eagle3-plain"), eagle3_guesses
    return (eagle_tensors(), eagle_guesses) if kind == "eagle" else (medusa_tensors(kind == "medusa-own"), medusa_guesses)  # fmt: skip


@pytest.mark.parametrize(("kind", "way"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_guesses_come_from_the_targets_states_and_no_answer_changes(tiny_model_path, folders, kind, way):  # noqa: F811
    path, rng = tiny_model_path("llama"), random.Random(1)
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [shared[: 7 * i] + [rng.randrange(250) for _ in range(rng.randrange(1, 30))] for i in range(6)]
    asked = [{"prompt_token_ids": p} for p in [*prompts, prompts[5], prompts[4]]]
    given = {
        "dtype": "float32",
        "max_model_len": 128,
        "attention_backend": "numba_cpu_invariant",
        "num_gpu_blocks": 400,
    }
    with LLM(path, **given) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]
    config = {
        "method": kind.split("-")[0],
        "model": str(folders[kind]),
        "num_speculative_tokens": MOST,
        "dynamic_length": False,
    }
    with LLM(path, speculative_config=config, **given | WAYS[way]) as llm:
        proposer, scheduler = llm.llm_engine.core.executor.runner.drafter.proposer, llm.llm_engine.core.scheduler
        propose, told = proposer.propose, []

        def listen(requests, view):
            drafts = propose(requests, view)
            told.extend(
                (r.token_ids.tolist(), list(d.token_ids), r.most) for r, d in zip(requests, drafts, strict=True)
            )
            return drafts

        proposer.propose = listen
        for _ in range(2):  # the second finds prefixes in the cache
            assert [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)] == plain
        assert scheduler.num_preemptions or "preemption" not in WAYS[way]
        assert llm.llm_engine.core.executor.runner.drafter.problem is None
    lost = way == "swap" and kind.startswith("eagle")  # blocks that come back are not those that the layer wrote to
    assert all(len(drafted) == most or (lost and not drafted) for _, drafted, most in told)
    told = [each for each in told if each[1]]
    assert len(told) > 60
    tensors, guesses = oracle(kind)
    for tokens, drafted, _ in told[:: len(told) // 12]:
        assert drafted == guesses(tensors, tokens, len(drafted))


def test_a_prefix_that_the_layer_never_read_gets_no_drafts_and_costs_no_request(tiny_model_path, folders):  # noqa: F811
    config = {
        "method": "eagle",
        "model": str(folders["eagle"]),
        "num_speculative_tokens": MOST,
        "dynamic_length": False,
    }
    prompt = {"prompt_token_ids": [*range(60)]}
    with LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=40, speculative_config=config) as llm:
        first = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        stats = llm.llm_engine.core.scheduler.spec_stats
        drafts = stats.num_drafts
        assert drafts > 0
        llm.llm_engine.core.executor.runner.drafter.proposer.cache._stamps[:] = 0
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == first
        assert stats.num_drafts == drafts
        assert stats.error is None


def test_the_first_names_of_medusa_are_read_too(tiny_model_path, folders, tmp_path):  # noqa: F811
    from minivllm.spec_decode.heads import _medusa_name

    old, new = medusa_tensors(True, "first"), medusa_tensors(True)
    assert {_medusa_name(name) for name in old} == set(new) - {"token_map"}
    assert all(torch.equal(tensor, new[_medusa_name(name)]) for name, tensor in old.items())


@pytest.mark.parametrize(
    ("method", "config", "change", "words"),
    [("medusa", {"num_heads": 2}, {}, "has 2 heads, too few for num_speculative_tokens=3"),
     ("medusa", {"num_heads": None}, {}, "must say num_heads and num_hidden_layers"),
     ("medusa", {}, {"blocks.1.layers.0.weight": None}, "lacks the tensor 'blocks.1.layers.0.weight'"),
     ("medusa", {}, {"blocks.1.layers.0.weight": torch.zeros(3, 3)}, r"must have shape \(72, 72\), got \(3, 3\)"),
     ("medusa", {}, {"more": torch.zeros(1)}, "has a tensor 'more'"),
     ("medusa", {}, {"token_map": torch.tensor([V])}, "token_map must hold token ids below 264"),
     ("eagle", {"vocab_size": 300}, {}, "is made for states of 72 numbers and 300 tokens; the target has 72 and 264"),
     ("eagle", {}, {"fc.weight": None}, "lacks the tensor 'fc.weight'"),
     ("eagle", {}, {"fc.bias": torch.zeros(5)}, r"'fc.bias' must have shape \(72,\), got \(5,\)"),
     ("eagle", {}, {"embed_tokens.weight": torch.zeros(9, 72)}, r"'embed_tokens.weight' must have shape \(264, 72\), got \(9, 72\)"),
     ("eagle3", {}, {"fc.bias": torch.zeros(1)}, r"'fc.bias' must have shape \(72,\), got \(1,\)"),
     ("eagle3", {}, {"embed_tokens.weight": torch.zeros(9, 72)}, r"'embed_tokens.weight' must have shape \(264, 72\), got \(9, 72\)"),
     ("eagle3", {"vocab_size": 300}, {}, "is made for states of 72 numbers and 300 tokens; the target has 72 and 264"),
     ("eagle3", {"num_hidden_layers": 2}, {}, "has 2 layers; an EAGLE-3 head with one is implemented"),
     ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "says use_aux_hidden_state=false"),
     ("eagle3", {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, {}, r"layers of the target, 0 to 3; got \[0, 2, 4\]"),
     ("eagle3", {"norm_before_residual": True}, {}, "config field norm_before_residual=True is not supported"),
     ("eagle3", {}, {"fc.weight": None}, "lacks the tensor 'fc.weight'"),
     ("eagle3", {}, {"midlayer.hidden_norm.weight": None}, "lacks the tensor 'layers.0.hidden_norm.weight'"),
     ("eagle3", {}, {"midlayer.mlp.up_proj.weight": None}, "lacks layers.0.mlp.up_proj.weight"),
     ("eagle3", {}, {"midlayer.self_attn.q_proj.weight": torch.zeros(72, 72)}, r"q_proj.weight' must have shape \(96, 144\), got \(72, 72\)"),
     ("eagle3", {}, {"more": torch.zeros(1)}, "has a tensor 'more'"),
     ("eagle3", {}, {"d2t": None}, "lacks the tensor 'd2t'"),
     ("eagle3", {}, {"lm_head.weight": None}, "lacks the tensor 'lm_head.weight'"),
     ("eagle3", {}, {"d2t": torch.full((150,), V)}, "d2t must lead to token ids below 264"),
     ("eagle3", {}, {"d2t": -torch.arange(150)}, "d2t leads to a token twice"),
     ("eagle3", {}, {"t2d": torch.ones(V, dtype=torch.bool)}, "t2d must mark the tokens that d2t leads to")],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_by_name(
    tiny_model_path,  # noqa: F811
    folders,  # noqa: F811
    tmp_path,
    method,
    config,
    change,
    words,
):
    sizes = json.loads((folders[method] / "config.json").read_text()) | config
    tensors = {n: t for n, t in (oracle(method)[0] | change).items() if t is not None}
    folder = write(tmp_path / "bad", sizes, tensors)
    spec = {"method": method, "model": str(folder), "num_speculative_tokens": MOST}
    with pytest.raises(ValueError, match=words):
        LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=40, speculative_config=spec)
