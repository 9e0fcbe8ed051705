"""The gallery: runs to step through, one page each. The first is the stored run of a real model; the others are made by the lab."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import runs
from book import toctree

from minivllm.core.config import KVCacheConfig, KVCacheSpec, make_kv_cache_groups
from minivllm.core.policy import FCFS, ShortestFirst
from minivllm.core.scheduler import Swap
from minivllm.core.trace import Trace
from minivllm.lab import Constant, simulate
from minivllm.lab.workload import Workload, poisson
from minivllm.literate import write
from minivllm.viz import BlockMap, Compare, Page, PrefixTree, Timeline, View

ABOUT = (
    "Recorded runs to step through: drag the slider or use the arrow keys, click a block to pin it and read what happened to it. The first is a"
    " run of a real model. The others are made by the [lab](/book/lab/simulation.ipynb): the same scheduler and the same KV cache, on a virtual"
    " clock and without a model, so their seconds are those of a simple cost model."
)
COST = Constant(per_step=0.01, per_token=0.0005)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "block_size": 8}


@dataclass(frozen=True)
class Replay:
    """A page of the gallery. `look`: what to look for, in Markdown. `picture`: which of its views stands in the gallery as a small picture."""

    name: str
    title: str
    look: str
    make: Callable[[], View]
    picture: int = 0


def crowd() -> Workload:
    """Twenty-four requests that come faster than they can be answered."""
    return poisson(20.0, 24, (16, 96), (8, 64), seed=3)


def simulated(blocks: int, **more) -> Trace:
    """The crowd in a pool of this many blocks."""
    run = simulate(crowd(), config={**LIMITS, "num_gpu_blocks": blocks}, cost_model=COST, **more)
    assert run.trace is not None
    return run.trace


def sharing() -> View:
    trace = runs.load()
    return Page([BlockMap(trace), PrefixTree(trace)], "Prefix sharing")


def preemption() -> View:
    trace = simulated(48)
    return Page([BlockMap(trace), Timeline(trace)], "Preemption")


def swapping() -> View:
    trace = simulated(48, preemption=Swap(64))
    return Page([BlockMap(trace), Timeline(trace)], "Swap")


def window() -> View:
    size, blocks = LIMITS["block_size"], 120
    specs = [KVCacheSpec("sliding_window" if i else "full", size, 1, 64, window=32 if i else None) for i in range(2)]
    trace = simulated(blocks, kv_cache=KVCacheConfig(blocks, size, make_kv_cache_groups(specs)))
    return Page([BlockMap(trace), Timeline(trace)], "A sliding window")


def policies() -> View:
    return Compare(simulated(64, policy=FCFS()), simulated(64, policy=ShortestFirst()), names=("FCFS", "ShortestFirst"))


REPLAYS = [
    Replay(
        "sharing",
        "Prefix sharing",
        "SmolLM2 answers eight requests, five of which begin with the same system prompt. Blocks with a hole are read by several requests: the"
        " beginning is computed once. Click a block to read its tokens, and who used it before.",
        sharing,
    ),
    Replay(
        "preemption",
        "Preemption by recomputation",
        "More requests come than fit. When a running request needs a block and none is free, the one that came last is preempted: its blocks are"
        " freed and it starts over, though what is still cached is not computed again. The timeline marks where.",
        preemption,
        picture=1,
    ),
    Replay(
        "swap",
        "Preemption by swapping",
        "The same requests in the same pool, but a preempted request's blocks are copied to the CPU's memory (the second map) and back later:"
        " nothing is computed twice.",
        swapping,
        picture=1,
    ),
    Replay(
        "window",
        "A sliding window",
        "Two groups of layers share one pool: one sees everything, the other only the last 32 tokens. Blocks that have left the window are given"
        " back while the request still runs, and the table points to the null block in their place.",
        window,
    ),
    Replay(
        "policies",
        "Two policies",
        "The same requests under first come, first served, and under shortest first. The view finds the first step in which the two decide"
        " differently, and gives both reasons.",
        policies,
    ),
]


def thumbnail(view: View, number: int) -> bytes:
    """A small picture of a page's view, or of the view itself, as PNG."""
    one = view.views[number] if isinstance(view, Page) else view
    return one.to_png(dpi=110)


def replay_page(replay: Replay, view: View) -> str:
    """The page of one replay."""
    return "\n".join(
        [
            f"# {replay.title}",
            "",
            replay.look,
            "",
            f"<p class='alone'><a href='../replays/{replay.name}.html'>This view alone, in the whole window</a></p>",
            "",
            "```{raw} html",
            view.to_html(),
            "```",
            "",
        ]
    )


def card(replay: Replay) -> list[str]:
    """One replay in the gallery: its picture, its title and what it shows."""
    page = f"/gallery/{replay.name}.md"
    return [
        ":::{container} door",
        f"[![Picture of the run: {replay.title}]({replay.name}.png)]({page})",
        "",
        f"**[{replay.title}]({page})**",
        "",
        replay.look,
        ":::",
        "",
    ]


def first_page() -> str:
    """The page of all replays."""
    return "\n".join(
        [
            "# Gallery",
            "",
            ABOUT,
            "",
            "::::{container} doors pictures",
            "",
            *(line for replay in REPLAYS for line in card(replay)),
            "::::",
            "",
            'Each is what `view.save("run.html")` writes of a trace: one file that needs neither a kernel nor a network.',
            "",
            toctree(replay.name for replay in REPLAYS),
        ]
    )


def make_gallery(target: Path, alone: Path) -> None:
    """Write the gallery's pages into `target`, and every view as a page of its own into `alone`."""
    alone.mkdir(parents=True, exist_ok=True)
    for replay in REPLAYS:
        view = replay.make()
        view.save(alone / f"{replay.name}.html")
        write(target / f"{replay.name}.md", replay_page(replay, view))
        (target / f"{replay.name}.png").write_bytes(thumbnail(view, replay.picture))
    write(target / "index.md", first_page())
