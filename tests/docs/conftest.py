"""The scripts of the site as modules, the built site, and the browser that looks at it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import axe, browser, open_page

__all__ = ["axe", "browser", "open_page", "site"]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "site"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site: as `make site` builds it, with warnings as errors. MINIVLLM_SITE names one that is built already."""
    if built := os.environ.get("MINIVLLM_SITE"):
        return Path(built).resolve(strict=True)
    import pages

    sources, html = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("html")
    pages.main(sources)
    doctrees = str(tmp_path_factory.mktemp("doctrees"))
    options = ["-b", "html", "-W", "--keep-going", "-q", "-j", "2", "-d", doctrees, "-c", str(ROOT / "site")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sphinx", *options, str(sources), str(html)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return html
