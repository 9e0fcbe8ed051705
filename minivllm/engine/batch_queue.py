"""Queue of scheduled steps whose results are still outstanding."""

# Generated from nbs/engine/batch_queue.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput

__all__ = ["BatchQueue"]


# %% nbs/engine/batch_queue.ipynb #BatchQueue
if TYPE_CHECKING:
    from minivllm.runtime.executor import Executor


class BatchQueue:
    """Steps that were decided and whose results were not taken in yet, oldest first.

    size: 1, and a step is carried out when its result is wanted; 2, and it is begun when it is put, so that another can be
    decided meanwhile.
    """

    def __init__(self, executor: "Executor", size: int) -> None:
        self.executor, self.size = executor, size
        self._steps: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, output: SchedulerOutput) -> None:
        """Add a decision. Raises what the executor raises when it begins."""
        self._steps.append((output, partial(self.executor.execute, output)))
        if self.size > 1:  # it stands in the queue already, in case it cannot begin
            self._steps[-1] = output, self.executor.submit(output).result

    def take(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Wait for the oldest step. Raises what the executor raises; the step stays in the queue then."""
        output, result = self._steps[0]
        made = result()
        self._steps.popleft()
        return output, made

    def clear(self) -> list[SchedulerOutput]:
        """Forget all steps; returns what was decided."""
        outputs = [output for output, _ in self._steps]
        self._steps.clear()
        return outputs
