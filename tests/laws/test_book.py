"""The book is the program: every module is exported from one notebook, and the check that says so is quick."""

import os
import subprocess
import sys
from pathlib import Path

from minivllm import literate
from minivllm.literate.check import check

ROOT = Path(__file__).parents[2]


def test_notebooks_and_modules_agree():
    assert check(literate.read_book(ROOT), rebuild=True) == []


def test_the_check_takes_less_than_a_second():
    """Measured in processor time, which does not depend on what else the machine does."""
    code = "import sys, time; from minivllm.literate.__main__ import main; main(['check']); print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 1.0


def test_the_exporter_exports_itself(tmp_path):
    """From its notebooks alone, without the modules that they become."""
    book = literate.read_book(ROOT)
    chapters = {name: notebook for name, notebook in book.chapters.items() if name.startswith("minivllm/literate/")}
    literate.write(tmp_path / "pyproject.toml", (ROOT / "pyproject.toml").read_text())
    literate.write(tmp_path / "bare/minivllm/__init__.py", "")
    for name, notebook in chapters.items():
        literate.write(tmp_path / notebook.name, notebook.text)
        literate.write(tmp_path / "bare" / name, "\n".join(cell.code for cell in notebook.exports))
    command = [sys.executable, "-m", "minivllm.literate", "export"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path / "bare")})
    assert len(chapters) == 12
    for name in chapters:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
