"""Greedy tokens never change, whatever a proposer says and whenever requests come, hit prefixes, lose their blocks or are aborted."""

import random
from dataclasses import dataclass
from functools import partial

import pytest
from draft_heads import folders, with_layer  # noqa: F401 - fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.attention.step_buffer import StepBuffer
from minivllm.runtime.model_runner import step_bytes
from minivllm.sampling.params import RequestOutputKind
from minivllm.spec_decode.rejection import Draft

MOST, LONGEST = 3, 20
SIZES = {
    "dtype": "float32", "attention_backend": "numba_cpu_invariant", "block_size": 4, "max_model_len": 96, "max_num_seqs": 5,
    "max_num_batched_tokens": 24,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)
KINDS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp", "object")


@dataclass(frozen=True)
class Event:
    """What happens before a step: a request comes (prompt: how many shared tokens and how many more), or one is aborted."""

    wait: int
    shared: int
    own: int
    max_tokens: int
    aborts: bool


EVENTS = st.lists(
    st.builds(Event, st.integers(0, 3), st.integers(0, 28), st.integers(1, 20), st.integers(1, LONGEST), st.booleans()),
    min_size=4,
    max_size=14,
)
SHARED = [random.Random(3).randrange(250) for _ in range(28)]


def prompt_of(event: Event) -> list[int]:
    return SHARED[: event.shared] + [(7 * i + event.own) % 250 for i in range(event.own)]


class Nothing:
    def propose(self, requests, view):
        return [[] for _ in requests]


@pytest.fixture(scope="module")
def answers():
    """The greedy answer of a model to a prompt, by an engine without drafts that runs one request at a time."""
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    llms: dict[str, LLM] = {}

    def ask(path, prompt):
        key = str(path), tuple(prompt)
        if key not in known:
            if key[0] not in llms:
                llms[key[0]] = LLM(path, enable_prefix_caching=False, num_gpu_blocks=60, **SIZES)
            params = PARAMS.clone(max_tokens=LONGEST)
            [out] = llms[key[0]].generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            known[key] = list(out.outputs[0].token_ids)
        return known[key]

    yield ask
    for llm in llms.values():
        llm.llm_engine.close()


def put_right(propose, answer, rng, requests, view):
    """What a proposer says, with the truth in some places: tiny random models are hardly ever right."""
    drafts = []
    for request, said in zip(requests, propose(requests, view), strict=True):
        token_ids = list(said.token_ids if isinstance(said, Draft) else said)
        known = request.token_ids.tolist()
        truth = answer(known[: request.num_prompt_tokens])[len(known) - request.num_prompt_tokens :]
        token_ids += truth[len(token_ids) : request.most if rng.random() < 0.5 else 0]
        mixed = [right if rng.random() < 0.7 else t for t, right in zip(token_ids, truth, strict=False)]
        drafts.append([t if rng.random() < 0.9 else (t + 1) % 250 for t in mixed])
    return drafts


def load(kind, way, path, draft, folders, answer):  # noqa: F811
    config = {
        "method": Nothing() if kind == "object" else kind,
        "num_speculative_tokens": MOST,
        "dynamic_length": False,
    }
    if kind in ("draft_model", "medusa", "eagle", "eagle3"):
        config["model"] = str(draft if kind == "draft_model" else folders[kind])
    pool = {"num_gpu_blocks": 26} | ({"num_cpu_blocks": 60, "preemption_mode": "swap"} if way["swap"] else {})
    llm = LLM(path, speculative_config=config, async_scheduling=way["overlaps"], **SIZES, **pool)
    runner = llm.llm_engine.core.executor.runner
    if way["overlaps"] and way["swap"]:  # as on a GPU: launched, and finished later by the same thread
        runner.buffer = StepBuffer(step_bytes(runner.config), runner.device)
    proposer = runner.drafter.proposer
    proposer.propose = partial(put_right, proposer.propose, answer, random.Random(1))
    return llm


def play(llm, events, answer):
    """Let the requests come and go; every token must be the one that was to come."""
    engine, want, ended, to_come = llm.llm_engine, {}, {}, list(enumerate(events))
    waited = 0
    while to_come or engine.has_unfinished_requests():
        while to_come and waited >= to_come[0][1].wait:
            waited, (i, event) = 0, to_come.pop(0)
            alive = list(engine.output_processor.requests)
            if event.aborts and alive:
                engine.abort_request(alive[event.own % len(alive)])
                want.pop(alive[event.own % len(alive)])
            prompt = prompt_of(event)
            want[str(i)] = answer(prompt)[: event.max_tokens]
            engine.add_request(str(i), {"prompt_token_ids": prompt}, PARAMS.clone(max_tokens=event.max_tokens))
        for out in engine.step():
            tokens = list(out.outputs[0].token_ids)
            if out.request_id in want:
                assert tokens == want[out.request_id][: len(tokens)], out.request_id
            if out.finished:
                ended[out.request_id] = tokens
        waited += 1
    assert {name: ended[name] for name in want} == want
    scheduler = engine.core.scheduler
    while engine.core.has_requests():
        engine.step()
    assert not scheduler.requests and scheduler.kv_cache_manager.block_pool.usage == 0.0
    assert scheduler.spec_stats.error is None


WAYS = [(overlaps, swap) for overlaps in (False, True) for swap in (False, True)]
# the place in WAYS of the one that the fast tests try
QUICK = {
    "ngram": 3,
    "suffix": 2,
    "draft_model": 3,
    "medusa": 1,
    "eagle": 2,
    "eagle3": 3,
    "mtp": None,
    "object": 3,
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, i) if QUICK[kind] == i else pytest.param(kind, i, marks=pytest.mark.slow)
        for kind in KINDS
        for i in range(4)
    ],
)
def test_greedy_tokens_never_change_whatever_happens(tiny_model_path, folders, with_layer, answers, kind, way):  # noqa: F811
    overlaps, swap = WAYS[way]
    path = with_layer("qwen3-next-attention") if kind == "mtp" else tiny_model_path("llama")
    draft, answer = tiny_model_path("qwen3"), partial(answers, path)
    with load(kind, {"overlaps": overlaps, "swap": swap}, path, draft, folders, answer) as llm:
        scheduler = llm.llm_engine.core.scheduler

        @settings(max_examples=5)
        @given(EVENTS)
        def check(events):
            play(llm, events, answer)

        check()
        crowd = [Event(0, 4 * i, 20 - i, LONGEST, i == 7) for i in range(8)]
        play(llm, crowd, answer)
        stats = scheduler.spec_stats
        assert scheduler.num_preemptions > 0 and scheduler.kv_cache_manager.stats.hit_tokens > 0
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert (llm.llm_engine.core.step.__name__ == "step_drafting") == overlaps
