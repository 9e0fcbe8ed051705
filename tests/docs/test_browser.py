"""The built site in a browser: views can be moved and clicked, everybody can use it, nothing hangs over the edge."""

import json

import pytest
from browsing import FIND

KINDS = {
    "home": "index.html",
    "guide": "guides/serve.html",
    "book": "book/index.html",
    "part": "book/part_03.html",
    "chapter": "book/core/scheduler.html",
    "chapter with views": "book/viz/block_map.html",
    "gallery": "gallery/index.html",
    "replay": "gallery/preemption.html",
    "package": "api/core.html",
    "reference": "api/minivllm.core.scheduler.html",
    "source": "_modules/minivllm/core/scheduler.html",
    "features": "features.html",
    "glossary": "glossary.html",
    "benchmarks": "benchmarks.html",
}
WITH_VIEWS = {"home": 2, "chapter with views": 1, "replay": 2}


def show(open_page, site, kind, **look):
    return open_page(site / KINDS[kind], views=WITH_VIEWS.get(kind, 0), **look)


@pytest.mark.parametrize("width", [390, 900, 1600])
@pytest.mark.parametrize("kind", WITH_VIEWS)
def test_views_can_be_moved_and_clicked(kind, width, site, open_page):
    page = show(open_page, site, kind, width=width)
    slider = page.locator(".mv-slider").first
    slider.focus()
    before = slider.evaluate("(e) => e.value")
    page.keyboard.press("ArrowRight")
    assert slider.evaluate("(e) => e.value") == str(int(before) + 1)
    canvas = page.locator("canvas[data-pool=gpu]").first
    canvas.scroll_into_view_if_needed()
    card = page.locator(".mv-card").filter(has=canvas).first
    words = card.inner_text()
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 12)
    page.wait_for_timeout(200)
    assert card.inner_text() != words, "a click on a block pins it, and tells about it"


@pytest.mark.parametrize("width", [390, 900, 1600])
def test_the_home_page_opens_with_a_busy_map_above_the_fold(width, site, open_page):
    page = show(open_page, site, "home", width=width)
    page.wait_for_function("document.querySelector('.mv-slider').value > 0")
    assert page.locator("canvas[data-pool=gpu]").first.bounding_box()["y"] < 900
    assert page.locator(".doors .door").count() == 3


@pytest.mark.parametrize(
    "kind, dark",
    [(kind, False) for kind in KINDS]
    + [(kind, True) for kind in ("home", "chapter", "replay", "reference", "glossary")],
)
def test_axe_finds_nothing_serious(kind, dark, site, open_page, axe):
    page = show(open_page, site, kind, dark=dark)
    page.add_script_tag(content=axe)
    found = page.evaluate(FIND)
    assert found == [], json.dumps(found, indent=1)


def test_no_page_is_wider_than_the_window(site, open_page):
    wide = []
    for kind in KINDS:
        page = show(open_page, site, kind)
        for width in (1600, 900, 390):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(50)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append((kind, width))
    assert wide == []


def test_search_finds_a_name_from_a_file(site, open_page):
    page = open_page(site / "search.html", views=0)
    page.goto((site / "search.html").as_uri() + "?q=BlockPool")
    page.wait_for_selector("#search-results li a")
    links = page.locator("#search-results li a").evaluate_all("(all) => all.map((a) => a.href)")
    assert any("api/minivllm.core.block_pool.html" in link for link in links)
