"""A saved notebook exports its module: the hooks of the Jupyter server, the watcher, the magic."""

import json
import time
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from tornado.web import HTTPError

from minivllm.literate import jupyter


@pytest.fixture
def demo(repo) -> Path:
    return repo.notebook(head="#| default_exp pool", a="#| export\nX = 1")


def manager(root: Path) -> LargeFileManager:
    """The contents manager of JupyterLab with the options that `make lab` gives it."""
    hooks = {f"{when}_save_hook": f"minivllm.literate.{when}_save_hook" for when in ("pre", "post")}
    return LargeFileManager(root_dir=str(root / "nbs"), **hooks)


def save(contents: LargeFileManager, source: str, name: str = "demo.ipynb") -> None:
    model = contents.get(name)
    cell = model["content"]["cells"][2]
    cell["source"] = source
    cell["execution_count"] = 9
    contents.save(model, name)


def test_make_lab_passes_the_hooks(repo):
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "--FileContentsManager.pre_save_hook=minivllm.literate.pre_save_hook" in makefile
    assert "--FileContentsManager.post_save_hook=minivllm.literate.post_save_hook" in makefile


def test_saving_in_jupyter_cleans_and_exports(repo, demo, run):
    save(manager(repo.root), "#| export\nX = 2")
    assert "X = 2" in repo.read("minivllm/pool.py")
    assert repo.cell("a")["execution_count"] is None
    assert repo.cell("a")["outputs"][0]["text"] == ["output of a"]
    run("check")


def test_jupyter_shows_where_the_error_is(repo, demo):
    with pytest.raises(HTTPError, match="#a line 3: '\\(' was never closed"):
        save(manager(repo.root), "#| export\nX = 1\nY = (")
    assert repo.source("a").endswith("Y = (")


def test_saving_does_not_overwrite_an_edited_module(repo, demo, run):
    run("export")
    repo.edit("minivllm/pool.py", "X = 1", "X = 3")
    with pytest.raises(HTTPError, match="run write-back|both changed"):
        save(manager(repo.root), "#| export\nX = 2")
    assert "X = 3" in repo.read("minivllm/pool.py")


def test_other_files_are_saved_as_ever(repo, demo, tmp_path):
    contents = manager(repo.root)
    contents.save({"type": "file", "format": "text", "content": "hello"}, "note.txt")
    assert repo.read("nbs/note.txt") == "hello"
    repo.notebook("nbs/plain.ipynb", head="x = 1", a="y = 1")
    save(contents, "y = 2", "plain.ipynb")
    assert not (repo.root / "minivllm").exists()


def test_the_watcher_exports_what_changed(repo, demo):
    said: list[str] = []
    watcher = jupyter.Watcher(repo.root, said.append)
    watcher.look()
    assert said == []
    repo.edit("nbs/demo.ipynb", "X = 1", "X = 2")
    watcher.look()
    watcher.look()
    assert said == ["exported minivllm/pool.py", "exported minivllm/__init__.py"]
    repo.edit("nbs/demo.ipynb", "X = 2", "X = (")
    watcher.look()
    assert said[2:] == ["nbs/demo.ipynb #a line 2: '(' was never closed"]


def test_the_magic_starts_and_stops_the_watcher(repo, demo, capsys):
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "minivllm.literate")
    shell.run_line_magic("autoexport", "")
    repo.edit("nbs/demo.ipynb", "X = 1", "X = 2")
    end = time.monotonic() + 20
    while not (repo.root / "minivllm/pool.py").exists() and time.monotonic() < end:
        time.sleep(0.05)
    shell.run_line_magic("autoexport", "off")
    assert "X = 2" in repo.read("minivllm/pool.py")
    repo.edit("nbs/demo.ipynb", "X = 2", "X = 3")
    time.sleep(0.7)
    assert "X = 2" in repo.read("minivllm/pool.py")
    with pytest.raises(ValueError, match="takes nothing, 'on' or 'off', not 'maybe'"):
        shell.run_line_magic("autoexport", "maybe")


def test_jupyter_writes_the_canonical_spelling(repo, demo, run):
    """So that a save in JupyterLab gives no noise in a diff."""
    before = repo.read("nbs/demo.ipynb")
    contents = manager(repo.root)
    contents.save(contents.get("demo.ipynb"), "demo.ipynb")
    assert json.loads(repo.read("nbs/demo.ipynb")) == json.loads(before)
    assert repo.read("nbs/demo.ipynb") == before
