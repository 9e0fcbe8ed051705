"""Executor protocol and a fake executor that needs no model."""

# Generated from nbs/lab/executor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import random
from collections.abc import Sequence
from typing import Protocol

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.lab.cost import Speculative, StepWork


class Executor(Protocol):
    """What executes a decision: a fake model, or a real one."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class FakeExecutor:
    """Answers with given tokens, accepts draft tokens as far as they agree with these, and measures the work of each step.

    Args:
        block_size: tokens per KV block, to count what swapping copies.

    Attributes:
        work: what the last step consisted of.
        exhausted: requests that have said all of their answer in the last step.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.work = StepWork()
        self.exhausted: list[str] = []
        self._answers: dict[str, Sequence[int]] = {}
        self._new_answers: set[str] = set()  # since the last step
        self._rows: dict[str, list[int]] = {}

    def set_answer(self, request_id: str, token_ids: Sequence[int]) -> None:
        """What a request will say. After its end, and if nothing was set, it says 0."""
        self._answers[request_id] = token_ids
        self._new_answers.add(request_id)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one decision."""
        rows, answers = self._rows, self._answers
        for name in output.preempted:
            rows.pop(name, None)
        for name in output.finished:
            rows.pop(name, None)
            if name not in self._new_answers:  # else its id is in use again
                answers.pop(name, None)
        self._new_answers.clear()
        for new in output.new_requests:
            said = len(new.output_token_ids)
            rows[new.request_id] = [new.num_computed_tokens, len(new.prompt_token_ids) + said, said]
        sampled: dict[str, list[int]] = {}
        self.exhausted = []
        drafts = output.scheduled_spec_decode_tokens
        decode_context = prefill_context = prefill_pairs = 0
        for name, n in output.num_scheduled_tokens.items():
            row = rows[name]
            computed = row[0]
            row[0] = end = computed + n
            if n == 1:
                decode_context += end
            else:
                prefill_context += end
                prefill_pairs += n * computed + n * (n + 1) // 2
            if drafts and name in drafts:
                sampled[name] = self._verify(name, row, drafts[name])
            elif end == row[1]:
                answer, said = answers.get(name, ()), row[2]
                sampled[name] = [answer[said] if said < len(answer) else 0]
                row[1], row[2] = end + 1, said + 1
                if said + 1 >= len(answer):
                    self.exhausted.append(name)
        self.work = StepWork(
            output.total_num_scheduled_tokens, len(output.num_scheduled_tokens),
            len(sampled) + sum(map(len, drafts.values())), decode_context, prefill_context, prefill_pairs,
            (len(output.swap_out) + len(output.swap_in)) * self.block_size,
        )  # fmt: skip
        return ModelRunnerOutput(sampled)

    def _verify(self, name: str, row: list[int], drafts: list[int]) -> list[int]:
        """The drafts that are what the answer says, and one token more."""
        answer, said = self._answers.get(name, ()), row[2]
        new = [answer[i] if i < len(answer) else 0 for i in range(said, said + len(drafts) + 1)]
        accepted = next((i for i, token in enumerate(drafts) if token != new[i]), len(drafts))
        row[0] -= len(drafts) - accepted
        row[1], row[2] = row[0] + 1, said + accepted + 1
        if row[2] >= len(answer):
            self.exhausted.append(name)
        return new[: accepted + 1]


class DraftingExecutor(FakeExecutor):
    """A `FakeExecutor` whose drafts are right as often as a cost model says."""

    def __init__(self, cost: Speculative, block_size: int = 16) -> None:
        super().__init__(block_size)
        self.cost = cost
        self._luck: dict[str, list[float]] = {}  # for each place of an answer, the same in every run

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute_model(output)
        for name in output.finished:
            self._luck.pop(name, None)
        names = list(result.sampled_token_ids)
        if not names:
            return result
        n = self.cost.length(len(names), sum(self._rows[name][1] for name in names))
        for name in names if n else ():
            answer, said = self._answers.get(name, ()), self._rows[name][2]
            draft = [answer[i] if i < len(answer) else 0 for i in range(said, said + n)]
            if name not in self._luck:
                rng = random.Random(f"{self.cost.seed} {name}")
                self._luck[name] = [rng.random() for _ in range(len(answer) + self.cost.num_speculative_tokens)]
            luck = self._luck[name][said : said + n]
            result.draft_token_ids[name] = [
                token if chance < self.cost.acceptance else token + 1 for token, chance in zip(draft, luck, strict=True)
            ]
        return result
