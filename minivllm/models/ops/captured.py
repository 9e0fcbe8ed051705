"""Steps of few tokens on a CPU by one launch: captured once, replayed, thrown away when a part changes."""

# Generated from nbs/models/ops/captured.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.attention.backend import Plan
from minivllm.attention.numba_cpu import NumbaCPUPlan
from minivllm.attention.state import Sequences, StatePlan
from minivllm.core.module import capture_problem, generation
from minivllm.models.ops.base import ForwardContext
from minivllm.models.rope import Rope, Rotation
from minivllm_kernels.cpu.planning import COUNTERS, STEP_ARGS
from minivllm_kernels.cpu.program import LAUNCHER, Program, Scratch, aligned

__all__ = ["MOST_ROWS", "CapturedCPUSteps"]


class Arena:
    """Memory for the tensors of captured steps. The memory of a tensor that is gone is given to another one, and never freed."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that is not initialised."""
        size = -(-max(math.prod(shape) * dtype.itemsize, 1) // 64) * 64
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else aligned(size)
        # torch holds this object as long as the tensor's storage lives
        view = memory[: math.prod(shape) * dtype.itemsize]
        weakref.finalize(view, free.append, memory)
        return torch.from_numpy(view).view(dtype).view(*shape)


class NotCapturable(Exception):
    """A step cannot be captured; says why."""


class _OnlyKernels(TorchDispatchMode):
    """While layers are captured: tensors are made in the arena, views are let through, and any other operation of torch,
    which a replay would leave out, is refused."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler, a second of every start, for a mode that is never compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("empty", "new_empty", "empty_like"):
            shape = args[0].shape if name == "empty_like" else args[-1]
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if name == "empty" else args[0].dtype)
            return self.arena.empty(shape, dtype)
        schema = func._schema
        if not schema.is_mutable and all(returned.alias_info is not None for returned in schema.returns):
            out = func(*args, **kwargs)
            made = out if isinstance(out, list | tuple) else [out]
            if all(x.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr() for x in made):
                return out
        raise NotCapturable(f"torch computes {name}, which is no kernel of ours")


MOST_ROWS = 128
"""The most tokens of a step that is captured. For more, Python's share is small."""


@dataclass
class _Captured:
    """A program; for each KV cache group, which of its kernels are attention, or None if it has states; the tensor that it writes."""

    program: Program
    attentions: list[Any]
    result: Tensor


class CapturedCPUSteps:
    """Runs steps of up to `MOST_ROWS` tokens, and no more than any linear method's `max_rows`, by one launch each. It
    captures one program for each number of tokens, with adapters and without.

    A replay launches the same kernels on the same numbers as the layers do, so the results are the same to the bit.
    Whatever was captured is thrown away when `generation` says that a part of some model was changed.

    Args:
        model: whose layers are captured; has `embedding`, `embed`, `linears`, `lora` and `ropes`.
        run: its layers.

    Attributes:
        problem: why no step of the model can be captured as it is now, or None.
        refused: why a step of this many tokens cannot.
    """

    def __init__(self, model: Any, run: Callable[[Tensor, ForwardContext], Tensor]) -> None:
        self.model, self.layers = model, run
        self.problem: str | None = None
        self.refused: dict[int, str] = {}
        self._arena, self._scratch, self._busy = Arena(), Scratch(), threading.Lock()
        self._programs: dict[tuple[int, bool], _Captured | None] = {}
        self._generation, self._bound_to = -1, list[object]()
        self._most_rows: float = MOST_ROWS

    def run(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], plans: Sequence[Plan]
    ) -> Tensor | None:
        """See `CapturedSteps`.

        Raises:
            RuntimeError: another Python thread is in the middle of a step of this model.
        """
        rows = len(token_ids)
        if rows > MOST_ROWS:
            return None
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a decoder makes one step at a time, and another thread is in the middle of one")
        try:
            if not self._valid(kv_caches, plans) or rows > self._most_rows:
                return None
            key = rows, self.model.lora is not None and self.model.lora.active  # without adapters less is launched
            if key not in self._programs:
                self._programs[key] = self._capture(rows, kv_caches, plans)
            captured = self._programs[key]
            return None if captured is None else self._replay(captured, token_ids, positions, plans)
        finally:
            self._busy.release()

    def _valid(self, kv_caches: Sequence[Tensor], plans: Sequence[Plan]) -> bool:
        """Whether steps of the model can be captured as it is now. What was captured of it before a change is dropped."""
        if self._generation != generation():
            self.problem, self.refused = capture_problem(self.model), {}
            self._generation, self._bound_to = generation(), []
            if self.problem is None:
                methods = [linear.method.innermost for linear in self.model.linears()]
                self._most_rows = min((getattr(m, "max_rows", MOST_ROWS) for m in methods), default=MOST_ROWS)
        if self.problem is not None or not all(_can_replay(plan) for plan in plans):
            return False
        bound_to: list[object] = [torch.get_num_threads()]  # each thread has memory in a program
        bound_to += [cache.data_ptr() for cache in kv_caches]
        bound_to += [plan.step.kernel for plan in plans if isinstance(plan, NumbaCPUPlan)]
        if bound_to != self._bound_to:
            self._bound_to, self._programs = bound_to, {}
            self._make_inputs(len(plans))
        return True

    def _make_inputs(self, groups: int) -> None:
        model = self.model
        with torch.inference_mode(False):  # they are written to later, in that mode or not
            self._stream = torch.empty(MOST_ROWS, model.embedding.shape[1], dtype=model.embedding.dtype)
            self._slots = torch.zeros(groups, MOST_ROWS, dtype=torch.int64)
            self._blocks = torch.zeros(2, groups, MOST_ROWS, dtype=torch.int64)
            self._counts = torch.arange(MOST_ROWS + 1)
            self._tables = [
                None if rope is None else torch.empty(2, MOST_ROWS, 1, rope.spec.dim, dtype=model.embedding.dtype)
                for rope in model.ropes
            ]
            self._rotations = [
                None if rope is None or rope.spec.kind == "dynamic" else _rotations(rope, model.embedding.dtype)
                for rope in model.ropes  # the last bits of dynamic ones depend on how many are computed at once
            ]

    @torch.no_grad()
    def _capture(self, rows: int, kv_caches: Sequence[Tensor], plans: Sequence[Any]) -> _Captured | None:
        """Run the layers for this many tokens, and keep what they launch."""
        program, rotations = Program(self._scratch), list[Rotation | None]()
        for rope, tables in zip(self.model.ropes, self._tables, strict=True):
            rotation = None if rope is None else Rotation(rope, self._slots[0, :rows], self._stream.dtype)
            if rotation is not None and tables is not None:
                rotation.cos_sin = (tables[0, :rows], tables[1, :rows])  # filled in by each replay
            rotations.append(rotation)
        fixed = [self._fixed(i, plan, rows) for i, plan in enumerate(plans)]
        context = ForwardContext(rotations, kv_caches, fixed, self._slots[0, :rows])
        stream = self._stream[:rows]
        try:
            with LAUNCHER.capture(program), _OnlyKernels(self._arena):
                result = self.layers(stream, context)
        except NotCapturable as why:
            self.refused[rows] = str(why)
            return None
        program.finalize()
        attentions = [
            np.ix_(np.flatnonzero(program.args[:, COUNTERS] == plan.step.args[COUNTERS]), STEP_ARGS)
            if isinstance(plan, NumbaCPUPlan)
            else None
            for plan in plans
        ]
        return _Captured(program, attentions, result)

    def _fixed(self, group: int, plan: Any, rows: int) -> Plan:
        """A plan whose tensors are in places that a replay fills in."""
        if isinstance(plan, StatePlan):
            read, write = self._blocks[:, group, :rows]
            return replace(plan, rows=self._counts[:rows], decodes=Sequences(read, write, self._counts[: rows + 1]))
        return replace(plan, slot_mapping=self._slots[group, :rows])

    @torch.no_grad()
    def _replay(self, captured: _Captured, token_ids: Tensor, positions: Tensor, plans: Sequence[Any]) -> Tensor:
        model, rows, program = self.model, len(token_ids), captured.program
        model.embed(token_ids, positions, self._stream[:rows])
        for rope, rotations, tables in zip(model.ropes, self._rotations, self._tables, strict=True):
            if rotations is not None and tables is not None and positions.dim() == 1:
                torch.index_select(rotations, 1, positions, out=tables[:, :rows])
            elif rope is not None and tables is not None:
                tables[0, :rows], tables[1, :rows] = rope(positions, model.embedding.dtype)
        threads = torch.get_num_threads()
        for group, (plan, where) in enumerate(zip(plans, captured.attentions, strict=True)):
            if where is None:
                self._blocks[0, group, :rows], self._blocks[1, group, :rows] = plan.decodes.read, plan.decodes.write
                continue
            self._slots[group, :rows] = plan.slot_mapping
            program.args[where] = [plan.step.args[field] for field in STEP_ARGS]
            threads = min(threads, plan.step.threads)  # those it has memory for
        program(threads)
        return captured.result.clone()


def _rotations(rope: Rope, dtype: torch.dtype) -> Tensor:
    """The cos and sin of a `Rope` for every position: [2, max_positions, 1, dim]. To look some up takes a replay less time than to compute them.

    Computed in pieces: the float32 angles of all positions at once would take much memory.
    """
    pieces = torch.arange(rope.max_positions).split(8192)
    return torch.cat([torch.stack(rope(positions, dtype)) for positions in pieces], 1)


def _can_replay(plan: Plan) -> bool:
    """Whether a group's part of a step is kernels alone. Of states only decodes are; a step's pieces depend on each other."""
    return isinstance(plan, NumbaCPUPlan) or (isinstance(plan, StatePlan) and not plan.pieces)
