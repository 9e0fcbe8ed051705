"""How fast and how small are the views? Measured in a headless Chromium.

    python benchmarks/viz.py

Prints the size of the page of 4,096 blocks x 500 steps, without its modules (goal: below 150 kB), of a run that is twice as busy too; the
time to draw one step of them (below 1 ms) and to step forwards and backwards through 65,536 blocks (below a frame, 16 ms); and the time to
open the standard page of a 2,000-step trace (below 2 s).
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from viz_traces import make_trace

from minivllm.viz import BlockMap
from minivllm.viz.assets import pack_modules

FLAGS = ["--no-sandbox", "--disable-gpu"]
STEPS = """async () => {
  const [cursor] = globalThis.minivllmCursors.values();
  const settle = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const times = [];
  for (let step = 0; step < cursor.steps; step++) {  // the frames of a chunk are inflated when they are first asked for
    cursor.go(step);
    if (step % 50 === 0) await settle();
  }
  await settle();
  for (let step = cursor.steps - 100; step < cursor.steps; step++) {
    const begun = performance.now();
    cursor.go(step);
    document.querySelector("canvas[data-pool=gpu]").getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - begun);
  }
  return times;
}"""
WALK = """async ([from, to]) => {
  const [cursor] = globalThis.minivllmCursors.values();
  const settle = (ms) => new Promise((done) => setTimeout(done, ms));
  cursor.go(from);
  await settle(1500);
  const times = [];
  while (cursor.step !== to) {
    const begun = performance.now();
    cursor.move(Math.sign(to - from));
    document.querySelector("canvas[data-pool=gpu]").getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - begun);
    await settle(2);
  }
  return times;
}"""


def chromium(playwright):
    """A Chromium on the path, or Playwright's own."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


def opening(browser, path: Path) -> float:
    """Seconds from the address to the last view drawn."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    begun = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_function(
        "document.querySelector('.mv-card[data-ready]') && !document.querySelector('.mv-card:not([data-ready])')"
    )
    seconds = time.perf_counter() - begun
    page.close()
    return seconds


def walk(browser, path: Path, what: str, first: int, last: int) -> None:
    """Milliseconds a step, from one to another."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector(".mv-card[data-ready]")
    times = sorted(page.evaluate(WALK, [first, last]))
    line(what, statistics.median(times), "ms", 16)
    print(f"{'  95th percentile':58} {times[int(0.95 * len(times))]:9.2f} ms")
    page.close()


def line(what: str, value: float, unit: str, goal: float) -> None:
    print(f"{what:58} {value:9.2f} {unit:3} goal {goal:g}: {value / goal:.2f}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from playwright.sync_api import sync_playwright

    run = {"num_blocks": 4096, "block_size": 16, "seqs": 256, "rate": 1.2, "prompt": 400, "output": 160, "budget": 2048}
    view = BlockMap(make_trace(steps=500, **run))
    size = len(view.to_html()) - len(pack_modules(*view.modules()))
    line("page of 4,096 blocks x 500 steps, without modules", size / 1000, "kB", 150)
    busier = BlockMap(make_trace(steps=500, **(run | {"rate": 2.0, "budget": 4096})))
    line("  of a busier run", (len(busier.to_html()) - len(pack_modules(*view.modules()))) / 1000, "kB", 150)
    print(f"{'  its modules and style, deflated':58} {len(pack_modules(*view.modules())) / 1000:9.2f} kB")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = chromium(playwright)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(view.save(Path(folder) / "blocks.html").as_uri())
        page.wait_for_selector(".mv-card[data-ready]")
        times = sorted(page.evaluate(STEPS))
        line("drawing a step of 4,096 blocks, median of 100", statistics.median(times), "ms", 1)
        print(f"{'  95th percentile':58} {times[94]:9.2f} ms")
        page.close()
        large = {"num_blocks": 65536, "seqs": 1024, "rate": 2.0, "prompt": 1200, "output": 500, "budget": 8192}
        path = BlockMap(make_trace(steps=600, **(run | large))).save(Path(folder) / "large.html")
        walk(browser, path, "a step forwards in 65,536 blocks, median of 300", 250, 550)
        walk(browser, path, "a step backwards in 65,536 blocks, median of 300", 550, 250)
        begun = time.perf_counter()
        path = make_trace(steps=2000, **(run | {"rate": 0.3})).show().save(Path(folder) / "page.html")
        print(
            f"{'  running and saving a trace of 2,000 steps':58} {time.perf_counter() - begun:9.2f} s, {path.stat().st_size / 1000:.0f} kB"
        )
        seconds = statistics.median(opening(browser, path) for _ in range(3))
        line("opening the standard page of 2,000 steps, median of 3", seconds, "s", 2)
        browser.close()


if __name__ == "__main__":
    main()
