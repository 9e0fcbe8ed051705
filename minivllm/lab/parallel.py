"""Cost models of several ranks: tensor, pipeline and expert parallelism, and copies of KV blocks."""

# Generated from nbs/lab/parallel.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, replace

from minivllm.core.config import rank_heads
from minivllm.core.output import SchedulerOutput
from minivllm.lab.cost import DEVICES, MODELS, CostModel, Device, ModelShape, Roofline, StepWork, known


@dataclass(frozen=True)
class Link:
    """What connects each two ranks.

    Attributes:
        bandwidth: bytes per second, one way.
        latency: seconds of a message, however short.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(f"a link needs bandwidth > 0 and latency >= 0, got {self}")

    def send(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency + num_bytes / self.bandwidth

    def all_gather(self, num_bytes: float, ranks: int) -> float:
        """Seconds until every rank has `num_bytes`, of which each brings its share."""
        return (ranks - 1) * self.send(num_bytes / ranks)

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Seconds until every rank has the sum of `num_bytes` from each."""
        return 2 * self.all_gather(num_bytes, ranks)

    def all_to_all(self, num_bytes: float, ranks: int) -> float:
        """Seconds until each rank has sent its share of its `num_bytes` to every other one."""
        return self.all_gather(num_bytes, ranks)


# data sheets, and latencies as collectives of few bytes have them
LINKS = {
    "nvlink": Link(450e9, 3e-6),
    "pcie": Link(25e9, 8e-6),
    "ethernet-100": Link(12e9, 25e-6),
    "ethernet-10": Link(1.2e9, 50e-6),
}


class Parallel(CostModel):
    """Step times of a model on several ranks.

    Args:
        device: of each rank; a name in `DEVICES`, or a `Device`.
        model: a name in `MODELS`, or a `ModelShape`.
        tensor: ranks that share every layer. Heads and MLPs that do not divide are padded; see `rank_heads`.
        pipeline: stages, each of `tensor` ranks.
        link: between ranks; a name in `LINKS`, or a `Link`.
        by_expert: ranks hold whole experts of a mixture, instead of a slice of each.
        dispatch: how tokens come to experts on other ranks: `all_reduce`, where each rank adds what its experts say, or
            `all_to_all`, where only the tokens of an expert travel, there and back (see `all2all_backend` of `EngineArgs`).

    Attributes:
        stages: pipeline stages, for `simulate`.

    Raises:
        ValueError: an unknown name, experts that do not divide, or a model that does not fit into the memory of the ranks.
    """

    def __init__(
        self, device: str | Device = "h100", model: str | ModelShape = "llama-3.1-8b", *, tensor: int = 1, pipeline: int = 1,
        link: str | Link = "nvlink", by_expert: bool = False, dispatch: str = "all_reduce",
    ) -> None:  # fmt: skip
        self.device, self.model = known(device, DEVICES, "device"), known(model, MODELS, "model")
        self.link = known(link, LINKS, "link")
        self.tensor, self.stages, self.by_expert, self.dispatch = tensor, pipeline, by_expert, dispatch
        m = self.model
        if dispatch not in ("all_reduce", "all_to_all") or (by_expert and not m.num_experts):
            raise ValueError(
                f"dispatch must be all_reduce or all_to_all, and by_expert needs experts; got {dispatch!r} for {m.name}"
            )
        if dispatch == "all_to_all" and not by_expert:
            raise ValueError("dispatch='all_to_all' needs by_expert=True")
        if tensor < 1 or (by_expert and m.num_experts % tensor):
            what = f"{m.num_experts} experts of" if by_expert else "the layers of"
            raise ValueError(f"{what} {m.name} cannot be split among {tensor} ranks equally")
        if not 1 <= pipeline <= m.num_layers:
            raise ValueError(f"{m.num_layers} layers of {m.name} cannot be {pipeline} stages")
        heads = rank_heads(m.num_heads, m.num_kv_heads, tensor)
        rank = replace(
            m, name=f"a rank's part of {m.name}", num_layers=-(-m.num_layers // pipeline), state_layers=-(-m.state_layers // pipeline),
            num_heads=heads.queries, num_kv_heads=heads.keys, vocab_size=-(-m.vocab_size // tensor),
        )  # fmt: skip
        if by_expert:
            rank = replace(rank, num_experts=m.num_experts // tensor, experts_per_token=m.experts_per_token / tensor)
        else:
            rank = replace(rank, intermediate_size=-(-m.intermediate_size // tensor))
        self.rank = Roofline(self.device, rank)

    def __repr__(self) -> str:
        return f"Parallel({self.device.name!r}, {self.model.name!r}, tensor={self.tensor}, pipeline={self.stages})"

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds of a step by part: those of `Roofline.parts`, `joins` within stages and `sends` between them."""
        one, m = self.rank.parts(work), self.model
        parts = {name: seconds * (1 if name == "logits" else self.stages) for name, seconds in one.items()}
        hidden = work.num_tokens * m.hidden_size * m.dtype_bytes
        parts["joins"] = parts["sends"] = 0.0
        if work.num_tokens and self.tensor > 1:
            sums, link = 2 * m.num_layers + 1, self.link
            if self.by_expert and self.dispatch == "all_to_all":
                sums -= m.num_layers
                there = link.all_to_all(hidden * m.experts_per_token / self.tensor, self.tensor)
                parts["joins"] += m.num_layers * (2 * there + link.all_gather(hidden, self.tensor))
            parts["joins"] += sums * link.all_reduce(hidden, self.tensor)
            parts["joins"] += link.all_gather(4 * work.num_sampled * m.vocab_size, self.tensor)
        if work.num_tokens:
            parts["sends"] = (self.stages - 1) * self.link.send(2 * hidden)
        return parts

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        return sum(self.parts(work).values())

    def num_gpu_blocks(self, block_size: int) -> int:
        """Blocks that fit beside a rank's weights; every rank has its part of each."""
        return self.rank.num_gpu_blocks(block_size)


@dataclass(frozen=True)
class Transfers(CostModel):
    """A cost model with the copies of a KV connector: saves happen beside the step, loads too with `load_async`; else they are waited for.

    Attributes:
        base: seconds of a step without them.
        link: over which blocks come.
        block_bytes: of a block, over all layers.
    """

    base: CostModel
    link: Link
    block_bytes: int

    @property
    def stages(self) -> int:
        """See `Parallel`."""
        return getattr(self.base, "stages", 1)

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        meta = output.kv_connector_metadata
        loads = 0 if meta is None else len(meta.loads)
        return self.base.seconds(output, work) + (self.transfer_seconds(loads) if loads else 0.0)

    def transfer_seconds(self, num_blocks: int) -> float:
        """Seconds of one message with `num_blocks` blocks."""
        return self.link.send(num_blocks * self.block_bytes)

    def num_gpu_blocks(self, block_size: int) -> int | None:
        return self.base.num_gpu_blocks(block_size)
