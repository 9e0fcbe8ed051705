"""Quiz view: predict the scheduler's next decision, then see it."""

# Generated from nbs/viz/predict.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING

from minivllm.core.events import Fold, FoldReader, State, read
from minivllm.core.trace import Trace
from minivllm.viz.payload import Payload
from minivllm.viz.view import TraceSource, TraceView, counted

__all__ = ["KINDS", "Predict", "questions"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Question:
    """Something that is about to happen.

    Attributes:
        kind: "preempted", "evicted" or "steps".
        step: in which it happens; situation: what can be known before it, line by line.
        text: the question; options: to choose from; answer: the number of the right one.
        because: why it is so.
    """

    kind: str
    step: int
    situation: tuple[str, ...]
    text: str
    options: tuple[str, ...]
    answer: int
    because: str

    def grade(self, choice: int) -> str:
        """`right: ...` or `no: ...`, with the reason. IndexError if there is no such option."""
        if not 0 <= choice < len(self.options):
            raise IndexError(f"there are {len(self.options)} options, 0 to {len(self.options) - 1}; got {choice}")
        if choice == self.answer:
            return f"right: {self.because}"
        return f"no, {self.options[self.answer]}: {self.because}"


KINDS = ("preempted", "evicted", "steps")


def _preempted(request: str, mode: str, needed_by: str, chosen_by: str, state: State, step: int) -> Question | None:
    if len(state.running) < 2:
        return None
    what = "its blocks are copied out" if mode == "swap" else "it loses its blocks and will compute them again"
    situation = [f"{len(state.free)} of {len(state.ref_cnt) - 1} blocks are free. Running, in order of scheduling:"]
    for name in state.running:
        its = state.requests[name]
        tokens = f"{its.num_computed_tokens} of {its.num_tokens} tokens computed"
        situation.append(f"{name}: {tokens}, {sum(map(len, its.tables))} blocks")
    why = " FCFS takes the request that was admitted last." if chosen_by == "FCFS" else ""
    text = f"{needed_by} needs a block and none is free. Who is preempted?"
    because = f"{request} is preempted, chosen by {chosen_by}; {what}.{why}"
    options = tuple(state.running)
    return Question("preempted", step, tuple(situation), text, options, options.index(request), because)


def _evicted(policy: str, block: int, fold: Fold, step: int) -> Question | None:
    cached = [b for b in fold.free_blocks if fold.now.hashes[b] is not None]
    if len(cached) < 3 or block not in cached:
        return None
    options = sorted({block, cached[0], cached[len(cached) // 2], cached[-1]})
    order = " ".join(map(str, cached[:12])) + (" …" if len(cached) > 12 else "")
    front = f"The policy {policy} chose it, though it is not at the front."
    if block == cached[0]:
        front = "It is at the front: of all free blocks with content it was given back longest ago."
    situation = f"Every free block holds something that could be reused. The free list, front first: {order}"
    because = f"{front} A leaf is given back before its prefix, so what is shared most lives longest."
    text, names = "A request needs a new block. Whose content is given up?", tuple(f"block {b}" for b in options)
    return Question("evicted", step, (situation,), text, names, options.index(block), because)


def _steps(budget: int, request: str, first: int, pieces: list[int]) -> Question | None:
    if len(pieces) < 2:
        return None
    options = sorted({len(pieces) - 1, len(pieces), len(pieces) + 1, sum(pieces)})
    situation = (
        f"{request} is admitted with {sum(pieces)} prompt tokens to compute.",
        f"A step has {budget} tokens for all requests together, and those that run already come first.",
    )
    text, names = "In how many steps is its prompt computed?", tuple(counted(n, "step") for n in options)
    because = f"it went in pieces of {', '.join(map(str, pieces))}: what the others left of the budget."
    return Question("steps", first, situation, text, names, options.index(len(pieces)), because)


class _Asker(FoldReader):
    """Turns what is about to happen into questions.

    Attributes:
        found: the questions by kind.
    """

    def begin(self) -> None:
        self.found: dict[str, list[Question]] = {kind: [] for kind in KINDS}
        # prompts under way: the step of the admission, tokens still to compute, and the pieces so far
        self._prompts: dict[str, tuple[int, int, list[int]]] = {}

    def _add(self, question: Question | None) -> None:
        if question is not None:
            self.found[question.kind].append(question)

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        self._prompts.pop(request, None)
        self._add(_preempted(request, mode, needed_by, chosen_by, self.fold.state(), self.step))

    def _on_evict(self, block: int, hash: bytes) -> None:
        self._add(_evicted(self.header.policy, block, self.fold, self.step))

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        self._prompts[request] = self.step, self.fold.now.requests[request].num_tokens - num_computed, []

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        for request, n in num_scheduled.items():
            if request in self._prompts:
                step, tokens, pieces = self._prompts[request]
                pieces.append(n)
                if sum(pieces) >= tokens:
                    del self._prompts[request]
                    self._add(_steps(self.header.settings["max_num_batched_tokens"], request, step, pieces))


def questions(trace: Trace, kinds: Iterable[str] = KINDS, most: int = 6) -> list[Question]:
    """Turning points of a run as questions: up to `most` of each kind, spread over the run.

    Raises:
        ValueError: an unknown kind.
    """
    kinds = tuple(kinds)
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    asker = _Asker()
    read(trace, asker)
    found = (asker.found[kind] for kind in kinds)
    spread = (q if len(q) <= most else [q[i * len(q) // most] for i in range(most)] for q in found)
    return sorted(chain.from_iterable(spread), key=lambda question: question.step)


class Predict(TraceView):
    """Questions about a run, asked before the answer is shown; the cursor goes to the step in question.

    Args:
        trace: a trace, or the path of a saved one.
        kinds: of questions: "preempted", "evicted", "steps".
        most: questions of each kind.
    """

    module = "predict"
    title = "What happens next?"

    def __init__(self, trace: TraceSource, kinds: Iterable[str] = KINDS, most: int = 6) -> None:
        super().__init__(trace)
        self.questions: list[Question] = [] if self.problem else questions(self.trace, kinds, most)
        if not self.problem and not self.questions:
            self.problem = "This run has no turning points: nobody was preempted, nothing evicted, no prompt cut. Make the pool or the budget smaller."

    def build(self) -> Payload:
        payload = Payload(self.header())
        payload.header["questions"] = payload.add_json([asdict(q) for q in self.questions])
        return payload

    def describe(self) -> str:
        kinds = [f"{sum(q.kind == kind for q in self.questions)} {kind}" for kind in KINDS]
        head = f"{len(self.questions)} questions about this run ({', '.join(kinds)}). "
        head += "view.questions holds them, and view.questions[0].grade(choice) judges."
        asked = enumerate(self.questions)
        return "\n".join([head, *(f"{i}. before step {q.step}: {q.text} {' / '.join(q.options)}" for i, q in asked)])

    def draw(self, axes: Axes) -> None:
        """Where in the run the questions are."""
        for row, kind in enumerate(KINDS):
            at = [q.step for q in self.questions if q.kind == kind]
            axes.plot(at, [row] * len(at), "o")
        axes.set_yticks(range(len(KINDS)), KINDS)
        axes.set(xlabel="step", xlim=(0, self.trace.num_steps), ylim=(-0.5, len(KINDS) - 0.5))
