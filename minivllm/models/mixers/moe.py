"""Mixture of experts, as a block of a layer."""

# Generated from nbs/models/mixers/moe.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.module import ModuleList, capture_problem, generation
from minivllm.models.linear.base import GroupedLinear
from minivllm.models.linear.cuda import FewRowsLinear
from minivllm.models.linear.layer import Linear, TorchLinear
from minivllm.models.mixers.base import Builder, LinearSpec, Mixer, MixerSpec, build_mixer, register_mixer
from minivllm.models.mixers.mlp import ClampedMLP, GatedMLP, GatedMLPSpec
from minivllm.models.parallel import Share, SplitBlock


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a token chooses its experts.

    Attributes:
        top_k: experts per token.
        score: `softmax` over all experts, or `sigmoid` of each.
        normalize: divide the weights of the chosen by their sum (plus `epsilon`).
        scale: factor on the weights.
        groups, top_groups: experts form `groups` groups, and only those of the best `top_groups` can be chosen.
        group_score: members of a group whose scores add up to the group's: 1 (the best) or 2.
        bias: the scores have a bias of the matmul.
        on_input: the weights are factors on what the experts read, not on what they give.
        float32: the matmul is float32, whatever the model is.
        name: name of the weight in a checkpoint, after the layer's prefix.
        correction: name of a vector that is added to the scores for the choice, and not for the weights; None for none.
    """

    top_k: int
    score: str = "softmax"
    normalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: int = 1
    bias: bool = False
    on_input: bool = False
    float32: bool = False
    name: str = "mlp.gate"
    correction: str | None = None

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"router score {self.score!r} is not supported; supported: softmax, sigmoid")
        for name in ("top_k", "groups", "top_groups"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"router {name} must be a whole number of at least 1, got {value!r}")


def route(scores: Tensor, spec: RouterSpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token.

    Args:
        scores: float32 [T, num_experts], after softmax or sigmoid.
        correction: float32 [num_experts], see `RouterSpec`.

    Returns:
        Weights, float32 [T, top_k], and the experts' numbers, int64 [T, top_k].
    """
    choice = scores if correction is None else scores + correction
    if spec.groups > 1:
        members = choice.unflatten(-1, (spec.groups, -1))
        best = members.topk(spec.group_score, -1).values.sum(-1).topk(spec.top_groups, -1).indices
        allowed = torch.zeros_like(members[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        choice = members.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(spec.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.epsilon)
    return weights * spec.scale, ids


def numbered(spec: Any, number: int) -> Any:
    """The spec with `{}` in its names replaced by a number."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return replace(spec, **{name: v.format(number) for name, v in values.items() if isinstance(v, str)})


@dataclass(frozen=True, kw_only=True)
class MoESpec(MixerSpec):
    """Parameters of `MoE`.

    Attributes:
        num_experts: how many there are.
        router: how a token chooses among them.
        expert: the spec of each expert, with `{}` for its number in the names of its weights.
        shared: the spec of the expert that every token visits, or None.
        shared_gate: name of the weight of the gate that the shared expert goes through; None for no gate.
        held: (first, count) of the experts that are here, if the others are on other ranks.
    """

    num_experts: int
    router: RouterSpec
    expert: GatedMLPSpec
    shared: GatedMLPSpec | None = None
    shared_gate: str | None = None
    held: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_counts("num_experts")
        count, router = self.num_experts, self.router
        if count % router.groups or router.top_groups > router.groups:
            raise ValueError(f"{count} experts, {router.groups} groups, {router.top_groups} of them: that does not go")
        if router.top_k > count // router.groups * router.top_groups:
            raise ValueError(f"a token cannot have {router.top_k} experts of {count}")

    @property
    def experts(self) -> list[GatedMLPSpec]:
        """One for each expert that is here."""
        first, count = self.held or (0, self.num_experts)
        return [numbered(self.expert, e) for e in range(first, first + count)]

    def split(self, share: Share) -> SplitBlock:
        """See `MixerSpec`. A rank has a part of every expert, or with `by_expert` some experts; the router is on all, and with
        `all_to_all` the shared expert is, too."""
        blocks, local = {}, self
        if share.by_expert:
            count, rest = divmod(self.num_experts, share.size)
            if rest:
                raise ValueError(f"{self.num_experts} experts cannot be split among {share.size} ranks equally")
            local = replace(self, held=(share.rank * count, count))
            blocks["expert"] = SplitBlock(self.expert, {})
        else:
            blocks["expert"] = self.expert.split(share)
        if self.shared is not None:
            blocks["shared"] = SplitBlock(self.shared, {}) if share.all_to_all else self.shared.split(share)
        return SplitBlock(replace(local, **{name: block.spec for name, block in blocks.items()}), blocks)

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        """See `MixerSpec`. The router's, and that of the shared expert's gate; experts are blocks themselves."""
        router = {"router": LinearSpec(hidden_size, {self.router.name: self.num_experts}, self.router.bias)}
        gate = {"shared_gate": LinearSpec(hidden_size, {self.shared_gate: 1})} if self.shared_gate else {}
        return router | gate

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes = MixerSpec.weight_shapes(self, hidden_size)
        if self.router.correction is not None:
            shapes[self.router.correction] = (self.num_experts,)
        for block in (*self.experts, self.shared):
            shapes |= block.weight_shapes(hidden_size) if block is not None else {}
        return shapes


def groups_experts(builder: Builder) -> bool:
    """Whether experts are computed by grouped matmuls, in which the rounding of a row depends on the other rows."""
    return builder.device.type == "cuda" and builder.dtype == torch.bfloat16 and not builder.ops.batch_invariant


@register_mixer(MoESpec)
class MoE(Mixer):
    """A router, experts, and a shared expert if there is one.

    Attributes:
        experts: one block for each.
        stacked: gate-up [E, 2 n, hidden_size] and down [E, hidden_size, n] of all experts, where one grouped matmul
            computes them; the experts' own weights are views of them. Not used while an expert computes anything else.
        all2all: the ranks, if each sends its part of the tokens to those of their experts; None if a rank computes with all tokens.
        loads: gets the number of tokens of each expert, int64 [E], of every call; None while they are not recorded.
    """

    spec: MoESpec
    router: Linear
    shared_gate: Linear

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Whether a CUDA graph can record it: the host must not need the experts' numbers of rows. Grouped matmuls from Hopper on do not;
        before, torch asks for them. Where tokens travel, ranks must know how many before they send them."""
        if self.all2all is not None or not self.stacked:
            return False
        fast = torch.cuda.get_device_capability(self.stacked[0].device) >= (9, 0)
        return fast and bool(self._grouped_linears())

    def __init__(self, spec: MoESpec, builder: Builder) -> None:
        plain = "batch_invariant" if builder.ops.batch_invariant else "torch"  # a router is small, and never quantized
        own = replace(builder, linear_method=plain, dtype=torch.float32 if spec.router.float32 else builder.dtype)
        super().__init__(spec, own)
        self.ranks = builder.group
        self.all2all = self.ranks if builder.share.all_to_all else None
        self.experts = ModuleList(build_mixer(expert, builder.inner("expert")) for expert in spec.experts)
        self.shared = None if spec.shared is None else build_mixer(spec.shared, builder.inner("shared"))
        self.correction: Tensor | None = None
        if spec.router.correction is not None:
            self.correction = torch.empty(spec.num_experts, device=builder.device)
        self.grouped = groups_experts(builder)
        self.stacked: list[Tensor] = []
        self.loads: list[Tensor] | None = None
        self._found: list[Any] = [-1, []]  # the `generation` of the last look-up, and the `_grouped_linears` found then

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same shape."""
        weights, ids = self.route(x)
        gate = self._sigmoid(self.shared_gate(x)) if self.spec.shared_gate else None
        if self.all2all is None:
            total = self._visit(x, weights, ids, gate)
            return total if self.ranks is None else self.ranks.all_reduce(total)
        return self._dispatched(x, weights, ids, gate)

    def _visit(
        self, x: Tensor, weights: Tensor, ids: Tensor, gate: Tensor | None, table: Tensor | None = None
    ) -> Tensor:
        """The outputs of the experts that are here, and of the shared one, for tokens [T, hidden_size]; with a `table` (see `_exchange`), of all experts."""
        first, here = self.spec.held or (0, self.spec.num_experts)
        first = first if table is None else 0
        order = (ids - first) % self.spec.num_experts if first else ids  # the experts that are here come first
        rows, places, counts = self.ops.moe_permute(x, order, self.spec.num_experts)
        if self.loads is not None:
            self.loads.append(counts.roll(first) if table is None else table.sum(0))
        if self.spec.router.on_input:
            factors = torch.empty_like(weights).flatten().index_copy_(0, places.flatten(), weights.flatten())
            rows, weights = rows * factors[:, None].to(x.dtype), torch.ones_like(weights)
        out = self._by_expert(rows, counts[:here]) if table is None else self._exchange(rows, table)
        total = self.ops.moe_unpermute(out, places, weights)
        return total if self.shared is None else total + (self.shared(x) if gate is None else self.shared(x) * gate)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, top_k], and experts, int64 [T, top_k], of tokens [T, hidden_size]."""
        logits = self.router(x.to(self.router.dtype)).float()
        scores = torch.softmax(logits, -1) if self.spec.router.score == "softmax" else self._sigmoid(logits)
        return route(scores, self.spec.router, self.correction)

    def _sigmoid(self, x: Tensor) -> Tensor:
        by_row = self.ops.batch_invariant and x.device.type == "cpu"  # see `TorchOps.gated_linear`
        return torch.stack([row.sigmoid() for row in x]) if by_row else x.sigmoid()

    def _by_expert(self, x: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs of rows that are sorted by expert. counts: int64, rows of each expert that is here; zeros of the others."""
        if self.spec.held is None:
            return self._by_expert_here(x, counts)
        # leaves the other rows as they are: the number of rows stays on the device
        if self.stacked and self._grouped_linears():
            elsewhere = torch.arange(len(x), device=x.device) >= counts.sum()
            return self._by_expert_here(x, counts).masked_fill_(elsewhere[:, None], 0)
        here, out = int(counts.sum()), torch.zeros_like(x)
        out[:here] = self._by_expert_here(x[:here], counts)
        return out

    def _dispatched(self, x: Tensor, weights: Tensor, ids: Tensor, gate: Tensor | None) -> Tensor:
        """The outputs for tokens [T, hidden_size]; each rank sends every `size`-th token to its experts."""
        assert self.all2all is not None
        rank, size = self.all2all.share[:2]
        by_rank = torch.arange(len(x), device=x.device)[:, None] % size * self.spec.num_experts + ids
        table = by_rank.flatten().bincount(minlength=size * self.spec.num_experts).view(size, -1)
        mine = slice(rank, None, size)
        gate = None if gate is None else gate[mine]
        total = self._visit(x[mine].contiguous(), weights[mine], ids[mine], gate, table)
        total = F.pad(total, (0, 0, 0, -(-len(x) // size) - len(total)))
        return self.all2all.all_gather(total).view(-1, x.shape[1])[: len(x)]  # row by row, a token of each rank

    def _exchange(self, rows: Tensor, table: Tensor) -> Tensor:
        """Outputs of rows that go to the ranks of their experts (dispatch), and come back (combine).

        table: int64 [ranks, num_experts], how many rows each rank has for each expert.
        """
        assert self.all2all is not None
        rank, size = self.all2all.share[:2]
        counts = table.view(size, size, -1)  # from, to, expert
        there, here = torch.stack((counts[rank], counts[:, rank])).sum(2).tolist()
        came, mine = self.all2all.all_to_all(rows, there, here), counts[:, rank]  # by rank, and of a rank by expert
        out = torch.empty_like(came)
        if len(came):
            order = torch.arange(mine.numel(), device=rows.device) % mine.shape[1]
            order = order.repeat_interleave(mine.flatten()).argsort(stable=True)
            out[order] = self._by_expert_here(came[order], mine.sum(0))
        return self.all2all.all_to_all(out, here, there)

    def _by_expert_here(self, x: Tensor, counts: Tensor) -> Tensor:
        if grouped := self._grouped_linears():
            ends = counts.cumsum(0, dtype=torch.int32)
            gate_up, down = (partial(linear, ends=ends) for linear in grouped)
            return self.experts[0].compute(x, gate_up, down)
        segments = zip(self.experts, x.split(counts.tolist()), strict=True)
        return torch.cat([x[:0], *(expert(rows) for expert, rows in segments if len(rows))])

    def _whole_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Gate-up and down of each expert, if all are gated MLPs that nothing was added to; else nothing."""
        found = []
        for expert in self.experts if self._are_alike() else ():
            methods = [expert.gate_up.method, expert.down.method]
            if any(type(m) not in (TorchLinear, FewRowsLinear) or set(m.weights) != {"weight"} for m in methods):
                return []
            found.append((methods[0].weight, methods[1].weight))
        return found

    def _are_alike(self) -> bool:
        """Whether all experts are the same computation with other weights, and nothing was added to one."""
        first = self.experts[0]
        return all(
            type(expert) is type(first) and type(expert) in (GatedMLP, ClampedMLP) and capture_problem(expert) is None
            and (expert.activation, expert.ops) == (first.activation, self.ops)
            and type(expert.gate_up) is type(expert.down) is Linear
            for expert in self.experts
        )  # fmt: skip

    def process_weights_after_loading(self) -> None:
        """See `Mixer`. Stacks the experts if a grouped matmul can compute them: gated MLPs with whole weights, no bias."""
        weights = self._whole_weights() if self.grouped else []
        if not weights or any(size % 8 for weight in weights[0] for size in weight.shape):
            return
        self.stacked = [torch.stack(each) for each in zip(*weights, strict=True)]
        for expert, gate_up, down in zip(self.experts, *self.stacked, strict=True):
            expert.gate_up.method.weights["weight"], expert.down.method.weights["weight"] = gate_up, down

    def _grouped_linears(self) -> list[GroupedLinear]:
        """Gate-up and down of all experts at once; none while an expert computes something else. Looked for again once a part
        of some model was changed."""
        if self._found[0] != generation():
            self._found[:] = generation(), self._stacked_linears() if self.stacked else self._linears_together()
        return self._found[1]

    def _stacked_linears(self) -> list[GroupedLinear]:
        views = list(zip(*self.stacked, strict=True))
        now, then = ([tuple(w.data_ptr() for w in each) for each in all_] for all_ in (views, self._whole_weights()))
        return [partial(_multiply_stacked, weights=each.transpose(1, 2)) for each in self.stacked if now == then]

    def _linears_together(self) -> list[GroupedLinear]:
        if not self._are_alike():
            return []
        linears = ([expert.gate_up.method for expert in self.experts], [expert.down.method for expert in self.experts])
        found = [methods[0].together(methods) for methods in linears]
        return [each for each in found if each is not None and None not in found]

    def _blocks(self) -> list[Mixer]:
        return [*self.experts, *([] if self.shared is None else [self.shared])]

    def linears(self) -> list[Linear]:
        return [*Mixer.linears(self), *(linear for block in self._blocks() for linear in block.linears())]

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        yield from Mixer.targets(self)  # of `linears`
        if (name := self.spec.router.correction) is not None and self.correction is not None:
            yield name, self.correction.copy_


def _multiply_stacked(rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weights, offs=ends)


class ExpertLoads:
    """Counts the tokens of each expert of a model, step by step, while it is switched on.

    model: has `layers`, some of them with an `mlp` that is a `MoE`.
    counts: whether there is something to count: then the layers must be run, not a graph of them.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.on, self.counts, self._blocks = model, False, False, dict[int, MoE]()

    def switch(self, on: bool) -> None:
        """Begin or end."""
        for block in self._blocks.values():
            block.loads = None
        blocks = ((i, getattr(layer, "mlp", None)) for i, layer in enumerate(self.model.layers)) if on else ()
        self.on, self._blocks = on, {i: block for i, block in blocks if isinstance(block, MoE)}
        self.counts = bool(self._blocks)
        for block in self._blocks.values():
            block.loads = []

    def take(self) -> list[tuple[int, Tensor]]:
        """(layer, tokens of each of its experts, int64 [E]) of the newest step."""
        return [(layer, block.loads.pop()) for layer, block in self._blocks.items() if block.loads]
