"""What the check finds."""

import json

import pytest

from minivllm.literate import clean, notebook, render, sync

MODULE = "minivllm/pool.py"


@pytest.fixture(autouse=True)
def exported(repo, run):
    repo.notebook(
        head="#| default_exp pool",
        one="#| export\nimport os\n\n\ndef one() -> str:\n    return os.sep  # a separator",
        cls="#| export\nclass Pool:\n    size = 4",
        take="#| export\n@method(Pool)\ndef take(self) -> int:\n    return self.size",
    )
    run("export")
    run("clean")
    run("check")
    run("check", "--rebuild")


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("os.sep", "os.linesep", " #one: "),
        ("a separator", "the separator", " #one: "),
        ("size = 4", "size = 5", " #cls: "),
        ("return self.size", "return 0", " #take: "),
        ("import os\\n", "import os.path\\n", ": imports, layout or docstring: "),
        ("doc A demo", "doc Another", ": imports, layout or docstring: "),
    ],
)
def test_a_changed_notebook_is_named_with_its_cell(repo, fails, old, new, place):
    repo.edit("nbs/demo.ipynb", old, new)
    message = "differs from minivllm/pool.py (the notebook changed since the last export: run export)"
    assert fails("check") == f"nbs/demo.ipynb{place}{message}\n"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("os.sep", "os.linesep", " #one: "),
        ("size = 4", "size = 5", " #cls: "),
        ("return self.size", "return  self.size", ": imports, layout or docstring: "),
        ("return self.size", "return 0", " #take: "),
        ("import os\n", "import os.path\n", ": imports, layout or docstring: "),
        ("A demo.", "Another.", ": imports, layout or docstring: "),
    ],
)
def test_an_edited_module_is_named_with_its_cell(repo, fails, old, new, place):
    repo.edit(MODULE, old, new)
    message = "differs from minivllm/pool.py (the module was edited since the last export: run write-back"
    found = fails("check")
    assert found.startswith(f"nbs/demo.ipynb{place}{message}")
    assert len(found.splitlines()) == 1


def test_both_changed(repo, fails):
    repo.edit(MODULE, "os.sep", "os.linesep")
    repo.edit("nbs/demo.ipynb", "size = 4", "size = 5")
    found = fails("check").splitlines()
    assert [line.split(": ")[0] for line in found] == ["nbs/demo.ipynb #one", "nbs/demo.ipynb #cls"]
    assert all("both changed" in line for line in found)


def test_a_module_that_does_not_parse(repo, fails):
    repo.edit(MODULE, "size = 4", "size = (")
    assert "minivllm/pool.py line" in fails("check")


def test_missing_module_and_missing_package(repo, fails):
    (repo.root / MODULE).unlink()
    assert "nbs/demo.ipynb: differs from minivllm/pool.py (not exported yet: run export)" in fails("check")
    (repo.root / "minivllm/__init__.py").unlink()
    assert "minivllm/__init__.py: is missing" in fails("check")


@pytest.mark.parametrize("name", ["minivllm/stray.py", "kernels/minivllm_kernels/stray.py", "kernels/stray.py"])
def test_a_module_that_no_notebook_exports(repo, fails, name):
    notebook.write(repo.root / name, "x = 1\n")
    assert fails("check").startswith(f"{name}: no notebook exports this file")


def test_code_in_an_init_needs_a_notebook(repo, fails):
    notebook.write(repo.root / "minivllm/__init__.py", "x = 1\n")
    assert "minivllm/__init__.py: no notebook exports this file" in fails("check")


def test_rebuild_believes_no_record(repo, run, fails):
    repo.edit(MODULE, "size = 4", "size = 5")
    sync.remember([notebook.read_notebook(repo.root / "nbs/demo.ipynb", repo.root)], repo.root)
    run("check")
    assert "nbs/demo.ipynb #cls: differs from minivllm/pool.py" in fails("check", "--rebuild")


def test_a_changed_exporter_makes_every_module_out_of_date(repo, run, fails, monkeypatch):
    monkeypatch.setattr(sync, "exporter_digest", lambda root: "another")
    run("check")  # it differs, but writes the same
    header = render.header
    monkeypatch.setattr(render, "header", lambda name: header(name) + "\n# and more")
    monkeypatch.setattr(sync, "exporter_digest", lambda root: "a third")
    assert "imports, layout or docstring: differs from minivllm/pool.py" in fails("check")
    assert run("export") == f"exported {MODULE}\n"


@pytest.mark.parametrize("record", [None, "", "[1]", '{"minivllm/pool.py": 3}'])
def test_a_record_that_is_lost_or_broken_is_made_again(repo, run, record):
    path = repo.root / sync.RECORD
    before = path.read_text()
    path.unlink() if record is None else path.write_text(record)
    run("check")
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text",
    ["/home/ann/x", "see /Users/ann", "C:\\Users\\Ann", "/root/x", "/tmp/ipykernel_7/1.py", "<f at 0x7f00aa11bb22>"],
)
@pytest.mark.parametrize("kind", ["stream", "execute_result", "error"])
def test_stored_outputs_belong_to_no_machine(repo, fails, text, kind):
    output = {
        "stream": {"name": "stdout", "text": [text]},
        "execute_result": {"data": {"text/html": text}, "metadata": {}, "execution_count": None},
        "error": {"ename": "E", "evalue": "", "traceback": [text]},
    }[kind]
    store(repo, {"output_type": kind, **output})
    found = fails("check")
    assert found.startswith("nbs/demo.ipynb #one: a stored output holds ")
    assert len(found.splitlines()) == 1


def test_the_repository_and_the_home_folder_are_machine_paths(repo, fails, monkeypatch, tmp_path):
    store(repo, {"output_type": "stream", "name": "stdout", "text": [f"in {tmp_path}"]})
    assert f"a stored output holds {str(tmp_path)!r}" in fails("check")
    monkeypatch.setenv("HOME", "/srv/people/ann")
    store(repo, {"output_type": "stream", "name": "stdout", "text": ["/srv/people/ann: x"]})
    assert "a stored output holds '/srv/people/ann'" in fails("check")


def test_pictures_and_ordinary_text_are_no_machine_paths(repo, run):
    data = {
        "image/png": "AAAA/root/xyz/home/abc",
        "text/plain": ["/v1/home/x", " 0x1f", " at 0x10", "the root/home of it"],
    }
    store(repo, {"output_type": "display_data", "metadata": {}, "data": data})
    run("check")


def test_notebooks_must_be_clean(repo, fails):
    repo.edit("nbs/demo.ipynb", '"nbformat_minor": 5\n', '"nbformat_minor": 5, "extra": 1\n')
    assert fails("check") == "nbs/demo.ipynb: holds metadata that changes from run to run: run clean\n"


def test_what_agreed_at_the_last_look_is_not_exported_again(repo, run, monkeypatch):
    monkeypatch.setattr(sync, "render", None)
    run("check")


def store(repo, output) -> None:
    path = repo.root / "nbs/demo.ipynb"
    data = json.loads(path.read_text())
    data["cells"][2]["outputs"] = [output]
    path.write_text(clean.notebook_text(data))


@pytest.mark.parametrize(("name", "lines"), [("pool", 61), ("minivllm_kernels.step", 121)])
def test_a_long_cell_is_refused(repo, run, fails, name, lines):
    (repo.root / MODULE).unlink()
    for count in (lines - 1, lines):
        repo.notebook(head=f"#| default_exp {name}", a="#| export\n" + "x = 1\n" * count)
        run("export")
        run("clean")
        message = f"nbs/demo.ipynb #a: an exported cell of {lines} lines; {lines - 1} are allowed: tell it in parts\n"
        assert (fails("check") == message) if count == lines else run("check")


def test_a_record_that_cannot_be_written_is_not_needed(repo, run, fails):
    (repo.root / sync.RECORD).unlink()
    (repo.root / sync.RECORD).mkdir()
    run("check")
    repo.edit(MODULE, "size = 4", "size = 5")
    assert "#cls" in fails("check")
    assert list((repo.root / sync.RECORD).iterdir()) == []
