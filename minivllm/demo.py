"""Command `minivllm demo`: a few prompts in a small engine, and their schedule as text."""

# Generated from nbs/demo.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from minivllm.core.events import Fold, State
from minivllm.core.trace import Trace

__all__ = ["NARROW", "QUESTIONS", "run_demo"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One step: the tokens of each request, the state while they are computed, and what else happened in the step.

    ``notes`` tell of prefix hits, preemptions and ends.
    """

    step: int
    scheduled: dict[str, int]
    state: State
    notes: list[str]

    def kind(self) -> Any:
        """Equal for steps that look alike: all requests decode one token. Any other step is like no other."""
        plain = not self.notes and set(self.scheduled.values()) == {1}
        return frozenset(self.scheduled) if plain else self.step


def moments(trace: Trace, letters: dict[str, str]) -> list[Moment]:
    """The steps of a trace that computed something, in order. ``letters``: a short name for each request id."""
    fold, step = Fold(trace.start), -1
    notes: list[str] = []
    found: list[Moment] = []
    for event in trace.events:
        fold.apply(event)
        kind = event[0]
        if kind == "step":
            step, notes = event[1], []
        elif kind == "schedule":
            found.append(Moment(step, event[1], fold.state(), notes))  # later notes of the step still join
        elif kind == "admit" and event[3]:
            notes.append(f"{letters[event[1]]} finds {event[3]} tokens cached")
        elif kind == "preempt":
            notes.append(f"{letters[event[1]]} is preempted for {letters[event[3]]}")
        elif kind == "finish":
            notes.append(f"{letters[event[1]]} ends ({event[2]})")
    return found


def draw_blocks(state: State, letters: dict[str, str]) -> str:
    """The pool in one line, without the null block."""
    signs = []
    for block in range(1, len(state.ref_cnt)):
        owners = [letters[request] for request in state.owners(block)]
        signs.append("#" if len(owners) > 1 else owners[0] if owners else "+" if state.hashes[block] else "·")
    return "".join(signs)


def step_table(trace: Trace, request_ids: Sequence[str]) -> str:
    """The steps of a trace as text: tokens of each request, and the pool. Runs of plain decoding steps are shortened."""
    letters = {request_id: chr(ord("A") + i) for i, request_id in enumerate(request_ids)}
    lines = ["step  tokens  " + "  ".join(f"{letters[r]:>2}" for r in request_ids) + "   KV blocks"]
    for _, alike in groupby(moments(trace, letters), Moment.kind):
        first, *others = alike
        lines.append(_line(first, letters))
        if others:
            more = f"{len(others)} more steps like this, each request one token" if others[1:] else "one more step"
            lines.append(f"      … {more}")
    return "\n".join(lines)


def _line(moment: Moment, letters: dict[str, str]) -> str:
    numbers = "  ".join(f"{moment.scheduled.get(r, '-'):>2}" for r in letters)
    notes = "  " + "; ".join(moment.notes) if moment.notes else ""
    picture = draw_blocks(moment.state, letters)
    return f"{moment.step:4}  {sum(moment.scheduled.values()):6}  {numbers}   {picture}{notes}"


QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write one sentence about the sea.",
    "Why is the sky blue? Explain it to a child.",
    (
        "Summarise in one sentence: The cat is a small animal that lives with people. Cats were first kept in Egypt"
        " thousands of years ago, because they caught the mice that ate the grain. Today there are hundreds of millions of"
        " cats in the world."
    ),
)
NARROW = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "num_gpu_blocks": 12}


def run_demo(model: str = "smollm2", max_tokens: int = 48, use_tqdm: bool = True, **engine_args: Any) -> str:
    """Answer `QUESTIONS` together in a narrow engine; the text of `minivllm demo`. Other engine arguments replace `NARROW`'s."""
    from minivllm.engine.llm import LLM
    from minivllm.sampling.params import SamplingParams

    with LLM(model, **{**NARROW, **engine_args}) as llm:
        with llm.record() as trace:
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            outputs = llm.chat(
                [[{"role": "user", "content": question}] for question in QUESTIONS], params, use_tqdm=use_tqdm
            )
        chosen = llm.config
        metrics = llm.get_metrics()
    answers = [
        f"{letter}  {question}\n   -> {' '.join(output.outputs[0].text.split())} ({output.outputs[0].finish_reason})"
        for letter, question, output in zip("ABCD", QUESTIONS, outputs, strict=True)
    ]
    legend = "tokens of each request in a step; one sign a KV block: its owner, # shared, + free but cached, · free"
    summary = (
        f"{chosen.model.name} in {chosen.dtype} on {chosen.device}, attention by {chosen.attention_backend};"
        f" {chosen.cache.num_gpu_blocks - 1} blocks of {chosen.cache.block_size} tokens,"
        f" {metrics['num_preemptions']:.0f} preemption(s), {metrics['prefix_cache_hits']:.0f} prompt tokens found in the cache."
    )
    table = step_table(trace, [output.request_id for output in outputs])
    return "\n\n".join(["\n".join(answers), f"What the scheduler did ({legend})", table, summary])
