"""The choice of an executor."""

# Generated from nbs/runtime/executors/select.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence

from minivllm.runtime.executor import EnginePlan, Executor, UniProcExecutor, fit_memory
from minivllm.runtime.executors.mp import MultiprocExecutor
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform

__all__ = ["make_executor"]


def make_executor(
    plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
) -> Executor:
    """The executor that the plan's settings ask for, with the model loaded, and the KV cache fitted to what memory is left.

    Args:
        transforms: of the logits of every request.
        grammar: for structured outputs.

    Raises:
        ValueError: transforms cannot be handed to the executor's processes, or no memory is left.
    """
    if plan.config.args.executor == "uni":
        return UniProcExecutor(fit_memory(plan), transforms, grammar)
    if transforms:
        raise ValueError(
            "logits_processors are objects, which cannot be handed to worker processes;"
            " they need distributed_executor_backend='uni'"
        )
    return MultiprocExecutor(plan)
