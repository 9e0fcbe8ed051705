"""All decoder layers of a small CPU step captured into one launch."""

# Generated from nbs/models/cpu_step.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.numba_cpu import NumbaCPUBackend, NumbaCPUPlan
from minivllm.models import cpu_pointwise
from minivllm.models.cpu_linear import FewRows, HasProduct, Packed, launch_product
from minivllm.models.cpu_quantized import Quantized
from minivllm.models.decoder import Attention, Decoder, DecoderLayer
from minivllm.models.layers import GatedMLP, QKNorm, RMSNorm
from minivllm.models.linear import Linear
from minivllm_kernels.cpu.planning import STEP_ARGS
from minivllm_kernels.cpu.program import Program, Scratch

__all__ = ["MOST_ROWS", "STANDS_FOR", "CPUStep", "Places", "is_as_written", "step_problem"]

"""Steps of few tokens on a CPU by a single launch."""

Places = tuple[np.ndarray, ...]
MOST_ROWS = 64
"""Tokens of a step that is made by one launch, at most. For more, Python's share is small."""
STANDS_FOR: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((DecoderLayer, Attention, GatedMLP, QKNorm, Linear, FewRows, Packed, Quantized), ("__call__",)),
    RMSNorm: ("__call__", "add"),
    NumbaCPUBackend: ("attend", "write"),
}
"""The functions whose work a launch does in their place."""


def is_as_written(cls: type, names: Sequence[str]) -> bool:
    """Whether these functions of a class are those of its module, and none that somebody has put in their place."""
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    codes = [getattr(cls.__dict__.get(name), "__code__", None) for name in names]
    written = [(file, f"{cls.__qualname__}.{name}") for name in names]
    return [(code.co_filename, code.co_qualname) for code in codes if code is not None] == written


_MODULES = ("attention", "mlp", "attention_norm", "mlp_norm")


_LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


_PRODUCTS = tuple(f"{linear}._run" for linear in _LINEARS)


_code_of_layer = attrgetter(*_MODULES, *_LINEARS, *_PRODUCTS)


def step_problem(decoder: Decoder) -> str | None:
    """Why the layers of a decoder cannot be one launch, or None."""
    try:
        return _problem(decoder)
    except AttributeError as error:
        return f"a part of it is somebody's own: {error}"


def _problem(decoder: Decoder) -> str | None:
    backend = decoder.backend
    if type(backend) is not NumbaCPUBackend or any(layer.attention.backend is not backend for layer in decoder.layers):
        return f"the attention backend is {backend.name}, not numba_cpu for all layers"
    if any(type(getattr(linear, "_run", None)) not in STANDS_FOR for linear in decoder.linears()):
        return "some products are not by numba"
    if any(getattr(linear._run, "out_dtype", decoder.dtype) != decoder.dtype for linear in decoder.linears()):
        return "some products give another dtype than the model's"
    strangers = [cls for cls, names in STANDS_FOR.items() if not is_as_written(cls, names)]
    strangers += [type(part) for part in _parts(decoder) if type(part) not in STANDS_FOR]
    if strangers or vars(backend).keys() & {"attend", "write"}:
        return f"{(*strangers, type(backend))[0].__name__} has code of somebody's own"
    if any(rope is None or rope.spec.dim != decoder.spec.head_dim for rope in decoder.ropes):
        return "some heads are not rotated, or only a part of them"
    for layer in decoder.layers:
        norms = [layer.attention_norm, layer.mlp_norm, decoder.final_norm]
        if not all((layer.attention.fused, layer.mlp.fused, *(norm.fused for norm in norms))):
            return "norms, rotations and activations are torch's"
        if layer.attention_post_norm is not None or layer.mlp_post_norm is not None:
            return "norms of a layer's results have no kernel"
        if layer.mlp.activation is not F.silu:
            return "only SiLU has a kernel"
        weights = [norm.weight for norm in (*norms, layer.attention.qk_norm) if norm is not None]
        if any(weight.dtype != decoder.dtype for weight in weights):
            return "the weights of the norms have another dtype than the model"
    return None


def _parts(decoder: Decoder) -> list[Any]:
    """What a decoder's layers are made of: everything that has code."""
    parts: list[Any] = [decoder.final_norm]
    for layer in decoder.layers:
        parts += (layer, *_code_of_layer(layer))
        if layer.attention.qk_norm is not None:
            parts.append(layer.attention.qk_norm)
    return parts


class _Noted(NamedTuple):
    """A program; where in its arguments each group's attention is described; and which argument of the last kernel is the result's
    address."""

    program: Program
    attentions: list[Places]
    result: int


class CPUStep:
    """All layers of a decoder by one launch, for steps of few tokens. The kernels are those that `Decoder.forward` calls one by
    one, so the results are the same to the bit.

    Args:
        decoder: loaded, prepared and bound; `step_problem` must be None.

    Attributes:
        most: tokens of a step, at most.

    Raises:
        ValueError: `step_problem`.
    """

    def __init__(self, decoder: Decoder) -> None:
        if problem := step_problem(decoder):
            raise ValueError(f"a step cannot be one launch: {problem}")
        self.decoder, spec = decoder, decoder.spec
        self.most = rows = _few_rows(decoder, MOST_ROWS)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

        def memory(*shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=decoder.dtype)

        with torch.inference_mode(False):  # it is written to later, in that mode or not
            self.stream, self.normed, self.out = (memory(spec.hidden_size) for _ in range(3))
            self.qkv, self.q, self.k = memory(heads + 2 * kv_heads, dim), memory(heads, dim), memory(kv_heads, dim)
            self.attended, self.gate_up = memory(heads * dim), memory(2 * spec.intermediate_size)
            self.inner = memory(spec.intermediate_size)
            self.tables = [(memory(1, dim), memory(1, dim)) for _ in decoder.ropes]
            self.slots = torch.zeros(max(decoder.layer_to_group) + 1, rows, dtype=torch.int64)
        self._scratch, self._busy = Scratch(), threading.Lock()
        self._few, self._seen, self._bound_to = 0, list[object](), list[object]()
        self._programs: dict[int, _Noted] = {}

    @torch.no_grad()
    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], plans: Sequence[NumbaCPUPlan]
    ) -> Tensor:
        """See `Decoder.forward`.

        Raises:
            RuntimeError: another Python thread is in the middle of a step of this decoder.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a decoder makes one step at a time, and another thread is in the middle of one")
        try:
            return self._step(token_ids, positions, kv_caches, plans)
        finally:
            self._busy.release()

    def _step(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], plans: Sequence[NumbaCPUPlan]
    ) -> Tensor:
        decoder, rows = self.decoder, len(token_ids)
        program, attentions, result = self._program(rows, kv_caches, plans)
        out = torch.empty_like(self.normed[:rows])
        torch.index_select(decoder.embedding, 0, token_ids, out=self.stream[:rows])
        if decoder.embedding_scale != 1.0:
            self.stream[:rows] *= decoder.embedding_scale
        for rope, (cos, sin) in zip(decoder.ropes, self.tables, strict=True):
            assert rope is not None
            cos[:rows], sin[:rows] = rope(positions, decoder.dtype)
        for slots, plan, where in zip(self.slots, plans, attentions, strict=True):
            slots[:rows] = plan.slot_mapping
            program.args[where] = [plan.step.args[field] for field in STEP_ARGS]
        program.args[-1, result] = out.data_ptr()
        program(min(torch.get_num_threads(), *(plan.step.threads for plan in plans)))  # a plan has memory for so many
        return out

    def _note(self, rows: int, kv_caches: Sequence[Tensor], plans: Sequence[NumbaCPUPlan]) -> _Noted:
        """The program for so many tokens."""
        decoder, program = self.decoder, Program(self._scratch)
        attentions: list[list[int]] = [[] for _ in plans]
        x, stream, normed = self.out[:rows], self.stream[:rows], self.normed[:rows]

        def norm(part: RMSNorm) -> None:
            new, joined = (x, stream) if len(program) else (stream, None)
            cpu_pointwise.add_norm(new, joined, part.weight, part.eps, normed, program)

        for i, layer in enumerate(decoder.layers):
            norm(layer.attention_norm)
            launch_product(_product(layer.attention.qkv), normed, self.qkv[:rows], program)
            self._rotate_and_write(program, rows, i, kv_caches)
            attentions[decoder.layer_to_group[i]].append(len(program))
            where = (self.q.data_ptr(), self.attended.data_ptr(), kv_caches[decoder.layer_to_cache[i]].data_ptr())
            plans[decoder.layer_to_group[i]].step.run(*where, program)
            launch_product(_product(layer.attention.o), self.attended[:rows], x, program)
            norm(layer.mlp_norm)
            launch_product(_product(layer.mlp.gate_up), normed, self.gate_up[:rows], program)
            cpu_pointwise.gated_silu(self.gate_up[:rows], self.inner[:rows], program)
            launch_product(_product(layer.mlp.down), self.inner[:rows], x, program)
        norm(decoder.final_norm)
        program.seal()
        (result,) = np.flatnonzero(program.args[-1] == normed.data_ptr()).tolist()
        return _Noted(program, [np.ix_(kernels, STEP_ARGS) for kernels in attentions], result)

    def _rotate_and_write(self, program: Program, rows: int, i: int, kv_caches: Sequence[Tensor]) -> None:
        decoder, heads, kv_heads = self.decoder, self.q.shape[1], self.k.shape[1]
        cos, sin = (table[:rows] for table in self.tables[decoder.layer_to_rope[i]])
        qkv, q, k = self.qkv[:rows], self.q[:rows], self.k[:rows]
        cpu_pointwise.rotate(qkv, cos, sin, heads, kv_heads, decoder.layers[i].attention.qk_norm, (q, k), program)
        slots, cache = self.slots[decoder.layer_to_group[i], :rows], kv_caches[decoder.layer_to_cache[i]]
        assert isinstance(decoder.backend, NumbaCPUBackend)
        decoder.backend.write(k, qkv[:, heads + kv_heads :], cache, slots, program)

    def takes(self, rows: int) -> bool:
        """Whether a step of so many tokens can be made here, by the decoder as it is now."""
        try:
            state = _state(self.decoder)
        except AttributeError:  # something that is not like the package's own
            return False
        if state != self._seen:
            self._seen, self._programs, self._few = state, {}, 0
            if step_problem(self.decoder) is None:
                self._few = _few_rows(self.decoder, self.most)
        return rows <= self._few

    def _program(self, rows: int, kv_caches: Sequence[Tensor], plans: Sequence[NumbaCPUPlan]) -> _Noted:
        """As `_note`, which is asked only once."""
        bound_to: list[object] = [torch.get_num_threads()]  # each thread has memory in a program
        bound_to += [(cache.data_ptr(), cache.shape, cache.dtype) for cache in kv_caches]
        bound_to += [plan.step.kernel for plan in plans]
        if bound_to != self._bound_to:
            self._bound_to, self._programs = bound_to, {}
        if rows not in self._programs:
            self._programs[rows] = self._note(rows, kv_caches, plans)
        return self._programs[rows]


def _product(linear: Linear) -> HasProduct:
    assert isinstance(linear._run, HasProduct)
    return linear._run


def _few_rows(decoder: Decoder, most: int) -> int:
    """Rows, up to `most`, for which every product is numba's."""
    return int(min(most, *(_product(linear).few for linear in decoder.linears())))


_state_of_layer = attrgetter(
    *("__class__", "attention.backend", "attention.fused", "attention.qk_norm", "attention_post_norm", "mlp_post_norm"),
    *("mlp.fused", "mlp.activation", "attention_norm.eps", "attention_norm.fused", "mlp_norm.eps", "mlp_norm.fused"),
    *(name for part in (*_MODULES, *_LINEARS, *_PRODUCTS) for name in (part, f"{part}.__class__")),
    *(f"{product}.few" for product in _PRODUCTS),
)


def _state(decoder: Decoder) -> list[object]:
    """What programs depend on, but for caches, threads and numbers in memory (which they read anew)."""
    last = decoder.final_norm
    state = [last, type(last), last.weight.data_ptr(), last.eps, last.fused, decoder.backend, *vars(decoder.backend)]
    state += [cls.__dict__.get(name) for cls, names in STANDS_FOR.items() for name in names]
    for layer in decoder.layers:
        state += _state_of_layer(layer)
        state += (layer, layer.attention_norm.weight.data_ptr(), layer.mlp_norm.weight.data_ptr())
        if (heads := layer.attention.qk_norm) is not None:
            state += (type(heads), heads.weight.data_ptr(), heads.eps)
    return [*state, *decoder.ropes, *decoder.layer_to_rope, *decoder.layer_to_cache, *decoder.layer_to_group]
