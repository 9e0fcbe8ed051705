"""Everybody can use the views: axe-core finds nothing serious, the keyboard reaches everything, nothing is wider than the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import FIND
from viz_traces import make_trace

from minivllm.runtime.sample_record import SampleRecord
from minivllm.sampling.params import SamplingParams
from minivllm.viz import Dashboard, SamplerExplorer
from minivllm.viz.compare import Compare


class Engine:
    """An engine that has worked a little."""

    steps = 0

    def get_metrics(self) -> dict[str, float]:
        self.steps += 1
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
        )
        return dict.fromkeys(names, 1) | {
            "kv_cache_usage_perc": 0.4,
            "num_steps": self.steps,
            "generation_tokens": self.steps,
        }


def dashboard() -> Dashboard:
    made = Dashboard(Engine())
    for _ in range(20):
        made.monitor.look()
    return made


def explorer() -> SamplerExplorer:
    logits = np.random.default_rng(0).normal(0, 2, 1000).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=1)
    return SamplerExplorer(SampleRecord(logits, params, (1, 2), (), 1))


VIEWS = {
    "standard page": lambda: make_trace(num_blocks=96, steps=60, swap=24).show(),
    "comparison": lambda: Compare(make_trace(steps=40), make_trace(steps=40, budget=48)),
    "explorer": explorer,
    "dashboard": dashboard,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("views")
    return {name: make().save(folder / f"{name.replace(' ', '_')}.html") for name, make in VIEWS.items()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_axe_finds_nothing_serious(name, dark, saved, open_page, axe):
    page = open_page(saved[name], dark=dark)
    page.add_script_tag(content=axe)
    used(page)
    found = page.evaluate(FIND)
    assert found == [], json.dumps(found, indent=1)


def test_axe_would_find_a_button_without_a_name(saved, open_page, axe):
    page = open_page(saved["explorer"])
    page.add_script_tag(content=axe)
    page.evaluate(
        "document.querySelector('.mv-button').textContent = ''; document.querySelector('.mv-button').title = ''"
    )
    assert [one["rule"] for one in page.evaluate(FIND)] == ["button-name"]


def used(page: Any) -> None:
    """Pin a block if there is one, so that what opens then is looked at too."""
    if page.locator("canvas[data-pool=gpu]").count():
        canvas = page.locator("canvas[data-pool=gpu]").first
        canvas.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.wait_for_timeout(300)


@pytest.mark.parametrize("name", VIEWS)
def test_tab_reaches_every_control_and_shows_where_it_is(name, saved, open_page):
    page = open_page(saved[name])
    wanted = page.evaluate("""() => [...document.querySelectorAll("button, input, select, [tabindex='0']")]
        .filter((e) => !e.disabled && e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length).length""")
    reached = 0
    for _ in range(wanted + 30):
        page.keyboard.press("Tab")
        outline = page.evaluate("""() => {
          const at = document.activeElement;
          if (at === document.body || at.dataset.seen) return null;
          at.dataset.seen = "1";
          const style = getComputedStyle(at);
          return [at.outerHTML.slice(0, 120), style.outlineStyle, parseFloat(style.outlineWidth)];
        }""")
        if outline is None:
            break
        reached += 1
        assert outline[1] != "none" and outline[2] >= 2, f"no visible focus: {outline[0]}"
    assert reached >= wanted, f"{reached} of {wanted} reached"


@pytest.mark.parametrize("width", [900, 1600])
@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_wider_than_the_page_or_cut_off(name, width, saved, open_page):
    page = open_page(saved[name], width=width)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = page.evaluate("""() => [...document.querySelectorAll(".mv-card :is(th, td, p, h3, label, button, figcaption, li, output)")]
        .filter((e) => e.getClientRects().length && getComputedStyle(e).overflow === "hidden" && !e.closest(".mv-live") && e.scrollWidth > e.clientWidth + 1)
        .map((e) => e.outerHTML.slice(0, 150))""")
    assert cut == []


@pytest.mark.parametrize("name", VIEWS)
def test_every_picture_has_words(name, saved, open_page):
    page = open_page(saved[name])
    silent = page.evaluate("""() => [...document.querySelectorAll(".mv-card canvas")]
        .filter((e) => e.getAttribute("aria-hidden") !== "true" && !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby")).map((e) => e.className)""")
    assert silent == []
    assert page.evaluate(
        "[...document.querySelectorAll('.mv-card')].every((e) => e.querySelector('[aria-live]') && e.getAttribute('aria-labelledby'))"
    )
