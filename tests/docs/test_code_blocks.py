"""The code of README and of the guides runs as it stands."""

import os
from pathlib import Path

import pytest
import tiny_gguf
import tiny_models
from code_blocks import read_blocks, run_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "site/docs").rglob("*.md"))]
# A page that loads no model is quick.
QUICK = {"import_trace", "plugin"}
LONG = [pytest.mark.slow, pytest.mark.long]


def runs(page: Path) -> bool:
    return any(
        block.language in ("python", "bash") and block.mark != "not run" for block in read_blocks(page.read_text())
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_is_run_or_says_why_not(page):
    for block in read_blocks(page.read_text()):
        assert block.language in ("python", "bash", "text") or block.language.startswith("{"), block
        assert block.mark != "not run" or len(block.what or "") > 5, f"{page.name}, line {block.line}: no reason"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[] if page.stem in QUICK else LONG) for page in PAGES if runs(page)],
)
def test_the_code_runs(page, tmp_path, request):
    if page.stem == "load_model":
        tiny_models.save_tiny_model("llama", tmp_path / "my-model")
        tiny_gguf.write_gguf(tmp_path / "model.gguf")
    elif page.stem not in QUICK:
        request.getfixturevalue("smollm2_path")
    done = run_page(page, tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_wrong_line_is_found_and_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\n```bash\ntest -d bin\n```\n\n```python\nassert x == 2\n```\n")
    done = run_page(page, tmp_path, dict(os.environ))
    assert done.returncode == 1 and f'"{page}", line 12' in done.stderr


def test_a_failing_command_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nfalse\ntrue\n```\n")
    assert run_page(page, tmp_path, dict(os.environ)).returncode == 1


def test_an_unknown_mark_is_an_error():
    with pytest.raises(ValueError, match="unknown mark 'skip'"):
        read_blocks("<!-- skip: me -->\n```python\nx\n```\n")
