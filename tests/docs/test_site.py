"""The built site: every notebook is there, as readers should see it; no link is broken; nothing is fetched from elsewhere."""

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import replays

from minivllm import literate

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """The anchors of a page, where it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value is not None}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag == "link" and "href" in found:
            self.loads.add(found["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "audio") and "src" in found:
            self.loads.add(found["src"])


@cache
def read(page: Path) -> Links:
    return Links(page.read_text(encoding="utf-8"))


def broken(page: Path, target: str, root: Path) -> str | None:
    """What is wrong with a link from a page, or None. Links to other sites are not followed."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not path.is_relative_to(root):
        return f"{target} leaves the site"
    if not path.is_file():
        return f"there is no {target}"
    anchor = unquote(parts.fragment)
    if anchor and path.suffix == ".html" and anchor not in read(path).ids:
        return f"{target} has no such anchor"
    return None


@pytest.mark.parametrize(
    "target, problem",
    [
        ("b.html#here", None),
        ("b.html", None),
        ("#top", None),
        ("https://example.org/x", None),
        ("b.html#there", "no such anchor"),
        ("c.html", "there is no"),
        ("../../x.html", "leaves the site"),
    ],
)
def test_the_crawler_tells_a_broken_link(tmp_path, target, problem):
    (tmp_path / "a.html").write_text("<h1 id=top>a</h1>")
    (tmp_path / "b.html").write_text("<h1 id=here>b</h1>")
    found = broken(tmp_path / "a.html", target, tmp_path)
    assert found is None if problem is None else problem in found


RAW = {
    "book": r"&lt;Figure size|object at 0x",
    "api": r"&lt;(?:factory|function|lambda|locals|class)|>~[a-z]|Alias for field number|built-in function",
}


@pytest.mark.parametrize("folder", RAW)
def test_pages_show_no_raw_objects(site, folder):
    shown = {
        page.name: re.findall(f".{{40}}(?:{RAW[folder]})", page.read_text()) for page in (site / folder).rglob("*.html")
    }
    assert {name: found for name, found in shown.items() if found} == {}


def test_no_link_is_broken(site):
    found = [
        f"{page.relative_to(site)}: {problem}"
        for page in sorted(site.rglob("*.html"))
        if "_static" not in page.parts  # the theme keeps a template there
        for target in sorted(read(page).links | read(page).loads)
        if (problem := broken(page, target, site)) is not None
    ]
    assert found == []


def test_pages_and_styles_load_nothing_from_elsewhere(site):
    found = [f"{page.name}: {load}" for page in site.rglob("*.html") for load in read(page).loads if "//" in load]
    for style in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(\s*|@import\s*)[\"']?((?:https?:)?//[^\"')\s]+)", style.read_text(encoding="utf-8"))
        found += [f"{style.name}: {url}" for url in urls]
    assert found == []


def test_every_notebook_has_a_page_that_shows_no_directives(site):
    for path in literate.notebook_paths(ROOT):
        page = site / "book" / path.relative_to(ROOT / "nbs").with_suffix(".html")
        assert page.exists()
        assert "default_exp" not in page.read_text() or page.parent.name == "literate"


def test_every_public_name_is_described_with_its_source(site):
    page = (site / "api/minivllm.core.scheduler.html").read_text()
    assert 'id="minivllm.core.scheduler.Scheduler.schedule"' in page
    assert "_modules/minivllm/core/scheduler.html#Scheduler.schedule" in page
    assert "../book/core/scheduler.html" in page


def test_the_gallery_shows_a_picture_of_each_replay(site):
    loads = read(site / "gallery/index.html").loads
    for replay in replays.REPLAYS:
        assert any(re.fullmatch(rf"\.\./_images/{replay.name}\w*\.png", load) for load in loads), replay.name


def test_formulas_need_no_script(site):
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert any('<math xmlns="http://www.w3.org/1998/Math/MathML"' in page for page in pages)
    assert not any(re.search(r"<script[^>]*mathjax", page, re.IGNORECASE) for page in pages)
