"""Draw the picture of README.md: a real run, who held which KV block at which step, and what each request got.

python site/picture.py site/static/run.png
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from minivllm import LLM, SamplingParams
from minivllm.core.trace import Trace

# Okabe and Ito's palette, which colour-blind readers can tell apart; white is free, light grey is free but cached.
COLORS = ["#FFFFFF", "#D9D9D9", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#000000"]
SYSTEM = "You are a helpful assistant who answers in one short sentence. Always be polite, precise and brief. "
PROMPTS = [
    SYSTEM + "What is the capital of France?",
    SYSTEM + "Why is the sky blue?",
    "Once upon a time there was a paged cache. It had many blocks, and each block had sixteen tokens. One day",
    SYSTEM + "Name three colours.",
    "def fibonacci(n):",
    SYSTEM + "How far away is the moon?",
]


def record() -> Trace:
    """Six requests, three of them with a common beginning, in a pool too small for all."""
    with LLM("smollm2", num_gpu_blocks=27, max_num_seqs=6, max_num_batched_tokens=48) as llm, llm.record() as trace:
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
        trace.check()
        return trace


def draw(trace: Trace, path: str) -> None:
    """Blocks by steps above, requests by steps below."""
    frames = trace.to_pandas()
    order = {request_id: i for i, request_id in enumerate(frames["requests"]["request_id"])}
    steps, blocks = trace.num_steps, trace.header.num_blocks
    owner, shared = np.zeros((blocks, steps), int), []
    for step, state in trace.states():
        for request_id, request in state.requests.items():
            for block in request.tables[0]:
                owner[block, step] = 2 + order[request_id]
        for block in range(1, blocks):
            if state.ref_cnt[block] > 1:
                shared.append((step + 0.5, block + 0.5))
            elif not state.ref_cnt[block] and state.hashes[block] is not None:
                owner[block, step] = 1
    fig, (top, low) = plt.subplots(2, 1, figsize=(9, 5.2), height_ratios=[3, 1.3], sharex=True, layout="constrained")
    top.pcolormesh(
        owner[1:], cmap=ListedColormap(COLORS), vmin=0, vmax=len(COLORS) - 1, edgecolors="white", linewidth=0.15
    )
    if shared:
        top.plot(*zip(*[(x, y - 1) for x, y in shared], strict=True), ".", color="white", markersize=2)
    top.set(
        ylabel="KV block",
        title="every KV block at every step (coloured: held by a request; white dot: shared; grey: free but cached)",
    )
    for row in frames["decisions"].itertuples():
        y = order.get(row.request_id)
        if row.decision in ("prefill", "decode"):
            low.barh(
                y, 1, left=row.step, color=COLORS[2 + y], alpha=1.0 if row.decision == "prefill" else 0.45, linewidth=0
            )
        elif row.decision.startswith("preempt"):
            low.text(row.step, y, "×", ha="center", va="center", fontsize=11, weight="bold")
    low.set(xlabel="step", ylabel="request", yticks=range(len(order)), xlim=(0, steps))
    low.set_title("what each request got (dark: prompt, light: decode, ×: preempted)")
    low.invert_yaxis()
    for ax in (top, low):
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(10)
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(record(), sys.argv[1])
