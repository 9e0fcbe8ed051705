"""A draft model in step with its target: its guesses are those of transformers, whatever happens to a request."""

import json
import random
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Recompute, Swap
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import SamplingState
from minivllm.sampling.transforms import take_largest
from minivllm.spec_decode.draft_model import DraftModelProposer, choose_guesses, pieces
from minivllm.spec_decode.eagle3 import Eagle3Proposer
from minivllm.spec_decode.heads import EagleProposer, MedusaProposer
from minivllm.spec_decode.proposers import DraftRequest, DraftView
from minivllm.spec_decode.rejection import Draft, RejectionSampler

MOST = 3
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def engine(target, draft: Any = None, **options: Any) -> LLM:
    config = None if draft is None else {
        "method": "draft_model", "model": str(draft), "num_speculative_tokens": MOST, "dynamic_length": False,
    }  # fmt: skip
    given = {
        "dtype": "float32",
        "max_model_len": 128,
        "attention_backend": "numba_cpu_invariant",
        "num_gpu_blocks": 400,
    }
    return LLM(target, speculative_config=config, **given | options)


def continuation(name: str, tokens: list[int], count: int) -> list[int]:
    """Greedy, by transformers, without a cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, hf_model(name)(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(tokens) :].tolist()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small-budget": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "block-4": {"block_size": 4},
    "recompute": {"preemption": Recompute(), "num_gpu_blocks": 14},
    "swap": {"preemption": Swap(60), "num_gpu_blocks": 14},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


QUICK = ("recompute", "block-4")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_every_guess_is_the_draft_models_own_and_no_answer_changes(tiny_model_path, way):  # noqa: F811
    path, draft, rng = (
        tiny_model_path("llama"),
        tiny_model_path("gemma3" if way == "block-4" else "qwen3"),
        random.Random(1),
    )
    shared = [rng.randrange(250) for _ in range(40)]
    prompts = [shared[: 8 * i] + [rng.randrange(250) for _ in range(rng.randrange(1, 30))] for i in range(6)]
    asked = [{"prompt_token_ids": p} for p in [*prompts, prompts[5], prompts[4]]]
    with engine(path, block_size=WAYS[way].get("block_size", 16)) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]
    with engine(path, draft, **WAYS[way]) as llm:
        proposer, scheduler = llm.llm_engine.core.executor.runner.drafter.proposer, llm.llm_engine.core.scheduler
        propose, told = proposer.propose, []

        def listen(requests, view):
            drafts = propose(requests, view)
            told.extend((r.token_ids.tolist(), list(d.token_ids)) for r, d in zip(requests, drafts, strict=True))
            return drafts

        proposer.propose = listen
        for turn in range(2):  # the second finds prefixes in the cache
            said = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]
            assert said == plain, turn
        if "preemption" in WAYS[way]:
            assert scheduler.num_preemptions
    assert len(told) > 60 and all(len(d) in range(1, MOST + 1) for _, d in told)
    name = draft.name
    for tokens, drafted in told[:: len(told) // 12]:
        assert drafted == continuation(name, tokens, len(drafted))


def test_a_prefix_that_the_drafter_never_saw_is_computed_and_one_that_it_saw_is_not(tiny_model_path):  # noqa: F811
    prompt = {"prompt_token_ids": [*range(60)]}
    with engine(tiny_model_path("llama"), tiny_model_path("llama")) as llm:
        proposer = llm.llm_engine.core.executor.runner.drafter.proposer
        run, computed = proposer._run, []
        proposer._run = lambda requests, spans, *rest: computed.append(spans) or run(requests, spans, *rest)
        llm.generate(prompt, GREEDY, use_tqdm=False)
        assert computed[0] == [(0, 0, 61)] and len(computed) == MOST * 3  # all guesses are right
        computed.clear()
        llm.generate(prompt, GREEDY, use_tqdm=False)
        assert computed[0] == [(0, 48, 61)]
        computed.clear()
        proposer.cache._stamps[:] = 0
        llm.generate(prompt, GREEDY, use_tqdm=False)
        assert computed[0] == [(0, 0, 61)]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.4, "top_k": 9, "top_p": 0.9}])
def test_with_the_target_as_its_own_draft_model_no_sampled_guess_is_rejected(tiny_model_path, options):  # noqa: F811
    """p equals q, so p / q is 1. Guesses are drawn, not the most likely."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True, **options})
    with engine(tiny_model_path("llama"), tiny_model_path("llama")) as llm:
        llm.generate([{"prompt_token_ids": [i, 2, 3]} for i in range(4)], params, use_tqdm=False)
        stats = llm.llm_engine.core.scheduler.spec_stats
    assert stats.num_draft_tokens > 60 and stats.num_accepted_tokens >= stats.num_draft_tokens - 1  # a tie in rounding


def test_another_vocabulary_is_refused_by_name(tiny_model_path, tmp_path):  # noqa: F811
    path = tiny_model_path("llama")
    other = shutil.copytree(path, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[7:9]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the draft model .*other' cannot draft for .*: token 7 is"):
        engine(path, other)
    config = json.loads((other / "config.json").read_text()) | {"vocab_size": 300}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="its vocabulary has 300 tokens, not 264"):
        engine(path, other)


def test_the_draft_models_memory_is_counted(tiny_model_path):  # noqa: F811
    size = {"num_gpu_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    with engine(tiny_model_path("llama"), **size) as alone, engine(tiny_model_path("llama"), tiny_model_path("qwen3"), **size) as both:  # fmt: skip
        counts = [llm.llm_engine.config.cache.num_gpu_blocks for llm in (alone, both)]
    assert counts[1] == counts[0] // 2  # as many layers of the same size


def test_pieces_keep_the_order_and_the_budget():
    rng = random.Random(0)
    for _ in range(50):
        todo = [(i, start := rng.randrange(9), start + rng.randrange(1, 30)) for i in range(rng.randrange(1, 6))]
        budget = rng.randrange(1, 20)
        made = list(pieces(todo, budget))
        assert all(sum(end - start for _, start, end in spans) == budget for spans in made[:-1])
        joined = [(i, at) for spans in made for i, start, end in spans for at in range(start, end)]
        assert joined == [(i, at) for i, start, end in todo for at in range(start, end)]


V = 12


def chi2(counts: np.ndarray, probs: np.ndarray) -> float:
    from scipy.stats import chisquare

    return chisquare(counts, probs * counts.sum()).pvalue


def filtered(logits, options) -> np.ndarray:
    """The distribution that these parameters make of logits [1, V]."""
    logits = logits / options.get("temperature", 1.0)
    if "top_k" in options:
        logits[logits < logits.topk(options["top_k"]).values[:, -1:]] = -torch.inf
    values, order = torch.softmax(logits, -1).sort(descending=True)
    logits[0, order[0][values.cumsum(-1)[0] - values[0] >= options.get("top_p", 1.0)]] = -torch.inf
    return torch.softmax(logits.double(), -1)[0].numpy()


class _Ops:
    argmax = staticmethod(take_largest)


class _Target:
    ops, spec = _Ops(), SimpleNamespace(vocab_size=V)


def proposer_of(kind: str, q: torch.Tensor):
    """A proposer of this kind whose distribution is q, [1, V], whatever it reads."""
    if kind == "medusa":
        made = MedusaProposer(_Target(), [[]], [q.T.contiguous()])
        made._states = {str(i): (0, torch.ones(1)) for i in range(5_000)}
        return made
    made = object.__new__(KINDS[kind])
    made._longest, made.decoder = 10**6, _Target()
    made.cache = SimpleNamespace(guess=lambda *about: None)
    made._begin = lambda requests, rooms: torch.ones(len(requests), 1)
    made._logits = lambda hidden: hidden @ q
    if kind == "eagle3":  # some tokens are unknown to it
        made.host, made.last_norm = SimpleNamespace(target=_Target()), lambda hidden: hidden
        made.output, made.token_map = q[:, 3:].T.contiguous(), torch.arange(3, V)
        del made._logits
    return made


KINDS = {"draft_model": DraftModelProposer, "eagle": EagleProposer, "eagle3": Eagle3Proposer}


@pytest.mark.slow
@pytest.mark.parametrize("draws", [20_000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["medusa", *KINDS])
def test_chi_squared_over_200_000_draws_of_each_proposer(kind, draws):
    """Its drafts, verified, have the target's distribution; accepted without a test, they have not."""
    p, q = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(6)) * 1.5
    many, params, target = 5_000, SamplingParams(), torch.softmax(p.double(), -1)[0].numpy()
    proposer, said, drawn = proposer_of(kind, q), np.zeros(V), np.zeros(V)
    names = [str(i) for i in range(many)]
    for turn in range(draws // many):
        state, seeds = SamplingState(many, V), range(turn * many, (turn + 1) * many)
        for name, seed in zip(names, seeds, strict=True):
            state.add(name, params, [1], [], seed)
        requests = [
            DraftRequest(name, np.ones(1, np.int32), 1, 1, params, seed)
            for name, seed in zip(names, seeds, strict=True)
        ]
        drafts = proposer.propose(requests, DraftView(turn, many, {}))
        got = RejectionSampler(Sampler()).verify(p.repeat(2 * many, 1), state.batch(names), drafts)
        said += np.bincount([g.token_ids[0] for g in got], minlength=V)
        drawn += np.bincount([draft.token_ids[0] for draft in drafts], minlength=V)
    assert said.sum() == draws and chi2(said, target) > 1e-4
    assert chi2(drawn, target) < 1e-9


@pytest.mark.parametrize(("options", "draws"), [({"top_p": 0.8, "temperature": 0.7, "top_k": 9}, 20_000), pytest.param({}, 200_000, marks=[pytest.mark.slow, pytest.mark.long])])  # fmt: skip
def test_chi_squared_over_200_000_drawn_guesses(options, draws, monkeypatch):
    """What the draft model draws and the rejection rule makes of it has the target's distribution. What it draws alone has not, and
    what the rule makes of guesses drawn with its own random numbers has not."""
    p, q = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(2)) * 1.5
    many, params, target = 5_000, SamplingParams(**options), filtered(p, options)
    names = [str(i) for i in range(many)]

    def counts(turns: int) -> tuple[np.ndarray, np.ndarray]:
        state, drawn, said = SamplingState(many, V), np.zeros(V), np.zeros(V)
        for i, name in enumerate(names):
            state.add(name, params, [1], [], i)
        for turn in range(turns):
            tokens = np.ones(1 + turn, np.int32)
            requests = [DraftRequest(name, tokens, 1, 1, params, i) for i, name in enumerate(names)]
            ids, probs = choose_guesses(q.repeat(many, 1), requests, 0, take_largest)
            drafts = [Draft([i], row[None]) for i, row in zip(ids.tolist(), probs, strict=True)]
            got = RejectionSampler(Sampler()).verify(p.repeat(2 * many, 1), state.batch(names), drafts)
            first = [g.token_ids[0] for g in got]
            drawn, said = drawn + np.bincount(ids, minlength=V), said + np.bincount(first, minlength=V)
            state = SamplingState(many, V)
            for i, name in enumerate(names):
                state.add(name, params, [1], [1] * (turn + 1), i)
        return drawn[target > 0], said[target > 0]

    drawn, said = counts(draws // many)
    assert said.sum() == draws
    assert chi2(said, target[target > 0]) > 1e-4
    assert chi2(drawn, target[target > 0]) < 1e-9
    monkeypatch.setattr("minivllm.spec_decode.draft_model.DRAW", np.uint64(RejectionSampler.ACCEPT))
    assert chi2(counts(3)[1], target[target > 0]) < 1e-9
