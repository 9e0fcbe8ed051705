"""The choice of an executor."""

# Generated from nbs/runtime/executors/select.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence

from minivllm.core.plugins import register
from minivllm.runtime.executor import EnginePlan, Executor, UniProcExecutor, fit_memory
from minivllm.runtime.executors.external import ExternalExecutor
from minivllm.runtime.executors.mp import MultiprocExecutor
from minivllm.runtime.executors.ray_executor import RayExecutor
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform

ExecutorMaker = Callable[[EnginePlan, Sequence[Transform], GrammarCompiler | None], Executor]


def _uni(plan: EnginePlan, transforms: Sequence[Transform], grammar: GrammarCompiler | None) -> Executor:
    return UniProcExecutor(load_first(plan), transforms, grammar)


def _mp(plan: EnginePlan, transforms: Sequence[Transform], grammar: GrammarCompiler | None) -> Executor:
    _refuse_objects(plan, transforms)
    return MultiprocExecutor(plan)


def _ray(plan: EnginePlan, transforms: Sequence[Transform], grammar: GrammarCompiler | None) -> Executor:
    _refuse_objects(plan, transforms)
    return RayExecutor(plan)


def _external(plan: EnginePlan, transforms: Sequence[Transform], grammar: GrammarCompiler | None) -> Executor:
    _refuse_pictures(plan)
    return ExternalExecutor(plan, transforms, grammar)


def _refuse_objects(plan: EnginePlan, transforms: Sequence[Transform]) -> None:
    if transforms:
        raise ValueError(
            "logits_processors are objects, which cannot be handed to worker processes;"
            " they need distributed_executor_backend='uni'"
        )
    _refuse_pictures(plan)


def _refuse_pictures(plan: EnginePlan) -> None:
    if plan.model.spec.media is not None:
        raise ValueError("a model that reads pictures needs distributed_executor_backend='uni'")


_EXECUTORS: dict[str, ExecutorMaker] = {"uni": _uni, "mp": _mp, "ray": _ray, "external_launcher": _external}


def register_executor(name: str, make: ExecutorMaker) -> None:
    """Let `distributed_executor_backend` name an executor. `make`: its class, or a function of a plan, transforms and a grammar.

    Raises:
        ValueError: the name is taken.
        TypeError: `make` is neither.
    """
    register(_EXECUTORS, "executor", name, make)


def load_first(plan: EnginePlan) -> EnginePlan:
    """The plan with its model loaded, if the executor will run it in this process; else as it came."""
    if plan.config.args.executor != "uni" or plan.decoder is not None:
        return plan
    return fit_memory(plan)


def make_executor(
    plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
) -> Executor:
    """The executor that the plan's settings ask for, with the model loaded, and the KV cache fitted to what memory is left.

    Args:
        transforms: applied to the logits of every request.
        grammar: for structured outputs.

    Raises:
        ValueError: no such executor, transforms cannot be handed to its processes, or no memory is left.
    """
    kind = plan.config.args.executor
    if kind not in _EXECUTORS:
        raise ValueError(f"distributed_executor_backend must be one of {', '.join(_EXECUTORS)}; got {kind!r}")
    return _EXECUTORS[kind](plan, transforms, grammar)
