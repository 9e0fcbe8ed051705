"""A machine of hypothesis: adapters are loaded, replaced, pinned and unloaded among requests that come, run and are aborted."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from adapters import GREEDY, SIZES, VARIANTS, greedy, peft_adapter, prompts_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, LoRARequest
from minivllm.lora.adapter import AdapterError

NAMES = ("all-linear", "rslora", "gate-only")
PROMPTS = prompts_of("base")
SLOTS = 2


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """By adapter and version: its folder and what the merged model says to each prompt. None is the base model."""
    root: Path = tmp_path_factory.mktemp("machine")
    found = {None: (None, [greedy(hf_model("llama"), prompt) for prompt in PROMPTS])}
    for i, (name, version) in enumerate(itertools.product(NAMES, (0, 1))):
        folder = root / f"{name}-{version}"
        merged = peft_adapter("llama", VARIANTS[name], folder, seed=20 + i)
        found[name, version] = str(folder), [greedy(merged, prompt) for prompt in PROMPTS]
    return found


def make_machine(llm: LLM, answers: dict[Any, Any], finished: list[str]) -> type[RuleBasedStateMachine]:
    engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
    numbers, names = itertools.count(1), st.sampled_from(NAMES)

    class Adapters(RuleBasedStateMachine):
        """`known`: what is loaded under a name, and its version. `live`: what each request must say."""

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[str, tuple[LoRARequest, int]] = {}
            self.pinned: set[str] = set()
            self.live: dict[str, list[int]] = {}
            self.trace = engine.core.scheduler.record()

        @rule(name=names, version=st.integers(0, 1))
        def load(self, name: str, version: int) -> None:
            lora = LoRARequest(name, next(numbers), answers[name, version][0])
            if name in self.known:
                with pytest.raises(AdapterError, match="is not the adapter of this name that is loaded"):
                    engine.add_lora(lora)
            else:
                assert engine.add_lora(lora)
                self.known[name] = lora, version

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def unload(self, data: Any) -> None:
            """Requests that have it go on with what they began with."""
            name = data.draw(st.sampled_from(sorted(self.known)))
            lora, _ = self.known.pop(name)
            self.pinned.discard(name)
            assert engine.remove_lora(lora.lora_int_id) and not engine.remove_lora(lora.lora_int_id)

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def pin(self, data: Any) -> None:
            name = data.draw(st.sampled_from(sorted(self.known)))
            if len(self.pinned | {name}) >= SLOTS:
                with pytest.raises(ValueError, match="cannot be pinned"):
                    engine.pin_lora(self.known[name][0].lora_int_id)
            else:
                assert engine.pin_lora(self.known[name][0].lora_int_id)
                self.pinned.add(name)

        @rule(data=st.data(), prompt=st.integers(0, len(PROMPTS) - 1))
        def ask(self, data: Any, prompt: int) -> None:
            name = data.draw(st.sampled_from([None, *sorted(self.known)]))
            lora, version = (None, 0) if name is None else self.known[name]
            request_id = f"q{next(numbers)}"
            self.live[request_id] = answers[None if name is None else (name, version)][1][prompt]
            engine.add_request(request_id, PROMPTS[prompt], GREEDY, lora_request=lora)

        @precondition(lambda self: self.live)
        @rule(data=st.data())
        def abort(self, data: Any) -> None:
            request_id = data.draw(st.sampled_from(sorted(self.live)))
            engine.abort_request(request_id)
            del self.live[request_id]

        @rule(times=st.integers(1, 6))
        def step(self, times: int) -> None:
            for _ in range(times):
                for output in engine.step():
                    if output.finished and output.request_id in self.live:
                        assert output.error is None
                        assert output.outputs[0].token_ids == self.live.pop(output.request_id)
                        finished.append(output.request_id)

        @invariant()
        def slots_hold_what_runs(self) -> None:
            slots = scheduler.adapters
            assert len(slots.slot_of) <= SLOTS and len(set(slots.slot_of.values())) == len(slots.slot_of)
            assert {r.lora_name for r in scheduler.running} - {None} <= slots.slot_of.keys()
            assert engine.list_loras() == {lora.lora_int_id for lora, _ in self.known.values()}

        def teardown(self) -> None:
            while engine.core.has_requests():
                self.step(1)
            assert not self.live and scheduler.kv_cache_manager.block_pool.usage == 0
            if any(event[0] == "step" for event in self.trace.events):
                assert self.trace.at(-1).loras == {slot: name for name, slot in scheduler.adapters.slot_of.items()}
            self.trace.check()
            for lora, _ in self.known.values():
                engine.remove_lora(lora.lora_int_id)
            scheduler.stop_recording()
            engine.reset_prefix_cache()

    return Adapters


@pytest.mark.slow
def test_load_unload_requests_and_aborts(tiny_model_path, answers):  # noqa: F811
    sizes = {**SIZES, "num_gpu_blocks": 24, "block_size": 8, "max_model_len": 72, "max_num_batched_tokens": 40}
    finished: list[str] = []
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=SLOTS, max_cpu_loras=2, **sizes) as llm:
        machine = make_machine(llm, answers, finished)
        run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None))
    assert len(finished) > 5  # about fifty
