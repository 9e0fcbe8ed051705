"""A headless browser for the tests of pages, and axe-core, which judges whether everybody can use them."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

INSTALL = (
    "no Chromium here: `apt-get install chromium`, or `playwright install chromium`, or name one in MINIVLLM_CHROMIUM"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """The Chromium or Chrome named in MINIVLLM_CHROMIUM, else one on the path; None leaves it to Playwright's own."""
    named = os.environ.get("MINIVLLM_CHROMIUM")
    if named:
        if not Path(named).is_file():
            pytest.fail(f"MINIVLLM_CHROMIUM names {named}, which is not a file")
        return named
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")  # not longer: Playwright keeps an event loop running, so that asyncio.run would fail
def browser() -> Iterator[Any]:
    """A headless Chromium (playwright.sync_api.Browser). Skips, with the line that installs it, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    with api.sync_playwright() as playwright:
        path = find_chromium()
        if path is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.skip(INSTALL)
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


class Watched:
    """A browser page that remembers what went wrong: errors on the console, and requests to anywhere but this machine."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", self.hear)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def hear(self, message: Any) -> None:
        our_own = "readback operations using getImageData"  # a test reads canvases
        if message.type in ("error", "warning") and our_own not in message.text:
            self.errors.append(message.text)

    def outside(self) -> list[str]:
        """Requests that left this machine."""
        inside = ("file:", "blob:", "data:", "http://127.0.0.1", "http://localhost", "ws://127.0.0.1", "ws://localhost")
        return [url for url in self.requests if not url.startswith(inside)]

    def check(self) -> None:
        """Fail if anything went wrong."""
        assert self.errors == []
        assert self.outside() == []


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(path, width=1000, dark=False)` shows a saved page from its file:// address once all its views are ready, and
    gives the Playwright page. At the end of the test, errors on the console and requests to elsewhere fail it."""
    watched: list[Watched] = []

    def show(path: Path, width: int = 1000, height: int = 900, dark: bool = False, views: int = 1) -> Any:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
        watched.append(Watched(page))
        page.goto(path.as_uri())
        page.wait_for_function(f"document.querySelectorAll('[data-ready], .mv-problem').length >= {views}")
        return page

    yield show
    for one in watched:
        one.check()
        one.page.close()


AXE = "axe-core@4.14.1"


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, fetched with npm once into pytest's cache folder."""
    home = Path.home() / ".cache/minivllm-tests"
    script = home / f"{AXE}.js"
    if not script.is_file():
        if shutil.which("npm") is None:
            pytest.skip("axe-core comes by npm, which is not here: `apt-get install npm`")
        folder = tmp_path_factory.mktemp("axe")
        done = subprocess.run(
            ["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            pytest.skip(f"`npm pack {AXE}` failed: {done.stderr.strip()[-200:]}")
        with tarfile.open(next(folder.glob("*.tgz"))) as packed:
            content = packed.extractfile("package/axe.min.js")
            assert content is not None
            home.mkdir(parents=True, exist_ok=True)
            script.write_bytes(content.read())
    return script.read_text()


# Preloading asks for style sheets in a way that a page from a file is not allowed to.
FIND = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"], preload: false});
  return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => ({rule: one.id, where: one.nodes.map((node) => node.target.join(" ") + ": " + node.failureSummary).slice(0, 5)}));
}"""
