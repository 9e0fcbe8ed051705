"""Draw README's moving picture: the stored run, step by step. Who holds which KV block, when each request runs, and in words what happens.

python site/picture.py site/static/run.gif
"""

import io
import sys

import runs
from matplotlib.axes import Axes
from PIL import Image

from minivllm.core.trace import Trace
from minivllm.viz import Timeline
from minivllm.viz.block_map import draw_blocks, request_numbers
from minivllm.viz.palette import LIGHT, owner_colour
from minivllm.viz.timeline import draw_lanes
from minivllm.viz.view import as_png, new_figure

EVERY = 2  # steps from one frame to the next, where nothing is told
FRAME_MS, TOLD_MS, PAUSE_MS = 90, 1600, 4000
PLAIN = {"prefill chunk": "prompt", "decode": "answer", "length": "finished"}  # the legend's words


def called(trace: Trace) -> dict[str, str]:
    """What the picture calls each request: the first words of its prompt; of those that begin alike, the last words too."""
    names = {}
    for request, (_, prompt) in zip(request_numbers(trace), runs.PROMPTS, strict=True):
        words = prompt.split()
        if prompt.startswith(runs.SYSTEM):
            own = prompt.removeprefix(runs.SYSTEM).split()
            words = ["You are …", *(own if len(own) <= 6 else own[-4:])]
        elif len(words) > 5:
            words = [*words[:5], "…"]
        names[request] = " ".join(words)
    return names


def told(trace: Trace, names: dict[str, str]) -> dict[int, str]:
    """In words, the steps in which a request shares blocks, is preempted or comes back."""
    lines: dict[int, str] = {}
    preempted, step = set(), -1
    for event in trace.events:
        match event:
            case ("step", *_):
                step += 1
            case ("hit", request, _, blocks):
                what = "continues, and finds" if request in preempted else "begins like an earlier request, and shares"
                lines.setdefault(step, f"“{names[request]}” {what} {len(blocks)} cached blocks")
            case ("preempt", request, *_):
                preempted.add(request)
                lines[step] = f"No block is free: “{names[request]}” is preempted"
    return lines


class Film:
    """The pictures of a run. `told`: what each step that is worth a word shows."""

    def __init__(self, trace: Trace) -> None:
        self.states = [state for _, state in trace.states()]
        self.numbers, self.names = request_numbers(trace), called(trace)
        self.told = told(trace, self.names)
        self.lanes = Timeline(trace).lanes

    def frame(self, now: int) -> Image.Image:
        """One picture: the blocks, and below them the requests, whose future is pale."""
        figure = new_figure((8.4, 5.6))
        top, low = figure.subplots(2, 1, height_ratios=[3, 2])
        draw_blocks(top, self.states[now], self.numbers)
        last = max([step for step in self.told if step <= now], default=None)
        line = self.told[last] if last is not None and now - last <= 4 else ""
        figure.suptitle(f"Step {now}   {line}", x=0.01, ha="left", fontsize=10.5, weight="bold")
        top.set_ylabel("blocks of the KV cache", fontsize=9)
        self.draw_requests(low, now)
        return Image.open(io.BytesIO(as_png(figure, 100))).convert("RGB")

    def draw_requests(self, axes: Axes, now: int) -> None:
        """The requests' lanes, each named by its prompt in the colour of its blocks."""
        draw_lanes(axes, self.lanes)
        axes.set_yticks(axes.get_yticks(), list(self.names.values()), fontsize=8.5)
        for request, label in zip(self.names, axes.get_yticklabels(), strict=True):
            label.set(color=owner_colour(self.numbers[request]), weight="bold")
        for entry in axes.get_legend().get_texts():
            entry.set_text(PLAIN.get(entry.get_text(), entry.get_text()))
        axes.axvspan(now + 1, len(self.states), color=LIGHT["panel"], alpha=0.8, lw=0, zorder=4)
        axes.axvline(now + 1, color=LIGHT["muted"], linewidth=1, zorder=5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlabel("step", fontsize=9)


def main(path: str) -> None:
    film = Film(runs.load())
    last = len(film.states) - 1
    steps = sorted({*range(0, last, EVERY), *film.told, last})
    images = [film.frame(now) for now in steps]
    palette = images[len(images) // 2].quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    times = [PAUSE_MS if now == last else TOLD_MS if now in film.told else FRAME_MS for now in steps]
    images[0].save(path, save_all=True, append_images=images[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
