"""Draw README's moving picture: the stored run, step by step. Who holds which KV block, and what each request gets.

python site/picture.py site/static/run.gif
"""

import io
import sys
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import runs
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from PIL import Image

from minivllm.core.trace import Trace

# Okabe and Ito's palette, which colour-blind readers can tell apart; white is free, light grey is free but cached.
COLORS = ["#FFFFFF", "#D9D9D9", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#B8A900", "#000000"]
FREE, CACHED, FIRST_OWNER = 0, 1, 2
EVERY = 2  # steps from one frame to the next
FRAME_MS, PAUSE_MS = 90, 4000


@dataclass
class Film:
    """All steps of a run. `owner`: colour of each block at each step, [blocks, steps]. `shared`: (step, block) held by several."""

    owner: np.ndarray
    shared: np.ndarray
    order: dict[str, int]
    spans: list[tuple[int, int, str]]  # step, row, decision


def read(trace: Trace) -> Film:
    """Colours and spans out of a trace."""
    frames = trace.to_pandas()
    order = {request_id: i for i, request_id in enumerate(frames["requests"]["request_id"])}
    blocks = trace.header.num_blocks
    owner, shared = np.full((blocks, trace.num_steps), FREE), []
    for step, state in trace.states():
        for request_id, request in state.requests.items():
            for block in request.tables[0]:
                owner[block, step] = FIRST_OWNER + order[request_id]
        for block in range(1, blocks):
            if state.ref_cnt[block] > 1:
                shared.append((step, block))
            elif not state.ref_cnt[block] and state.hashes[block] is not None:
                owner[block, step] = CACHED
    spans = [(row.step, order[row.request_id], row.decision) for row in frames["decisions"].itertuples()]
    return Film(owner, np.array(shared), order, spans)


def draw_blocks(ax: Axes, film: Film, now: int) -> None:
    """Blocks by steps, up to `now`."""
    shown = film.owner[1:].copy()
    shown[:, now + 1 :] = FREE
    ax.pcolormesh(shown, cmap=ListedColormap(COLORS), vmin=0, vmax=len(COLORS) - 1)
    x, y = film.shared[film.shared[:, 0] <= now].T
    ax.plot(x + 0.5, y - 0.5, ".", color="white", markersize=1.6)
    ax.set(ylabel="KV block", title="who holds each block (white dot: shared; grey: free, still cached)")


def draw_requests(ax: Axes, film: Film, now: int) -> None:
    """Requests by steps, up to `now`."""
    for step, row, decision in film.spans:
        if step > now:
            continue
        if decision in ("prefill", "decode"):
            ax.barh(
                row, 1, left=step, color=COLORS[FIRST_OWNER + row], alpha=1 if decision == "prefill" else 0.45, lw=0
            )
        elif decision.startswith("preempt"):
            ax.text(step, row, "×", ha="center", va="center", fontsize=12, weight="bold")
    ax.set(xlabel="step", ylabel="request", yticks=range(len(film.order)), ylim=(len(film.order) - 0.4, -0.6))
    ax.set_title("what each request gets (dark: prompt, light: one token a step, ×: gives way)")


def frame(film: Film, now: int) -> Image.Image:
    """One picture."""
    figure, (top, low) = plt.subplots(2, 1, figsize=(8, 4.8), height_ratios=[3, 1.6], sharex=True, layout="constrained")
    draw_blocks(top, film, now)
    draw_requests(low, film, now)
    for ax in (top, low):
        ax.set_xlim(0, film.owner.shape[1])
        ax.axvline(now + 1, color="#888888", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    plt.close(figure)
    return Image.open(buffer).convert("RGB")


def main(path: str) -> None:
    film = read(runs.load())
    last = film.owner.shape[1] - 1
    images = [frame(film, now) for now in [*range(0, last, EVERY), last]]
    palette = images[-1].quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    times = [FRAME_MS] * (len(images) - 1) + [PAUSE_MS]
    images[0].save(path, save_all=True, append_images=images[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
