"""Branches that edit notebooks, merged by git itself; and which side of an uncommitted difference was edited."""

import shutil
import subprocess
from pathlib import Path

import pytest

from minivllm.literate import sync

MODULE = "minivllm/pool.py"
BOOK = "nbs/demo.ipynb"
CELLS = {
    "head": "#| default_exp pool\n#| doc A demo",
    "one": "#| export\nimport os\n\n\ndef one() -> str:\n    return os.sep",
    "cls": "#| export\nclass Pool:\n    size = 4",
    "experiment": "Pool()",
    "take": "#| export\n@method(Pool)\ndef take(self) -> int:\n    return self.size",
    "last": "#| exporti\ndef last() -> int:\n    return 1",
    "inner": "#| exporti\ndef inner() -> int:\n    return 9",
}


@pytest.fixture
def git(repo, run):
    """The repository under git, its module exported and committed on `main`."""

    def command(*arguments: str, code: int = 0) -> str:
        settings = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *settings, *arguments], cwd=repo.root, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    repo.notebook(**CELLS)
    shutil.copy(Path(__file__).parents[2] / ".gitignore", repo.root)
    run("export")
    command("init", "-q", "-b", "main")
    command("add", "-A")
    command("commit", "-q", "-m", "start")
    assert sync.RECORD not in command("ls-files")
    return command


@pytest.fixture
def branches(repo, run, git):
    """Make one commit on `ours` and one on `theirs`, each a replacement in the notebook, exported; then go to `ours`."""

    def make(ours: tuple[str, str], theirs: tuple[str, str]) -> None:
        for name, (old, new) in {"theirs": theirs, "ours": ours}.items():
            git("switch", "-q", "-c", name, "main")
            repo.edit(BOOK, old, new)
            run("export")
            git("commit", "-q", "-a", "-m", name)

    return make


def test_different_cells_merge_without_a_command(repo, run, git, branches):
    branches(("size = 4", "size = 5"), ("return 1", "return 2"))
    git("merge", "-q", "--no-edit", "theirs")
    run("check", "--rebuild")
    assert "size = 5" in repo.read(MODULE)
    assert "return 2" in repo.read(MODULE)
    assert run("export") == ""
    assert git("status", "--porcelain") == ""


def test_a_conflict_in_the_module_alone_is_settled_by_export(repo, run, fails, git, branches):
    """Two new names side by side in `__all__`, told in cells that git can tell apart."""
    branches(
        ('"#| export\\n",\n    "class Pool', '"#| export\\n",\n    "A = 1\\n",\n    "class Pool'),
        ('"#| exporti\\n",\n    "def last', '"#| export\\n",\n    "def last'),
    )
    git("merge", "-q", "--no-edit", "theirs", code=1)
    assert git("diff", "--name-only", "--diff-filter=U").split() == [MODULE]
    assert f"differs from {MODULE} (git left a conflict in the module: run export)" in fails("check")
    assert "git left a conflict in the module: run export" in fails("write-back")
    assert run("export") == f"exported {MODULE}\n"
    run("check", "--rebuild")
    assert '__all__ = ["A", "Pool", "last", "one"]' in repo.read(MODULE)
    git("add", "-A")
    git("commit", "-q", "--no-edit")
    run("check")


def test_one_cell_edited_on_both_sides_is_named(repo, fails, git, branches):
    branches(("return self.size", "return 2 * self.size"), ("return self.size", "return 3 * self.size"))
    git("merge", "-q", "--no-edit", "theirs", code=1)
    message = f"{BOOK} #take: this cell was edited on both sides of a merge: choose a side"
    for command in ("check", "export", "write-back"):
        assert message in fails(command)
    assert "<<<<<<<" in repo.read(MODULE)


def test_a_first_edit_after_a_clone_needs_no_force(repo, run, git):
    """There is no record yet; git's HEAD says which side was edited."""
    (repo.root / sync.RECORD).unlink()
    repo.edit(BOOK, "return 1", "return 2")
    assert run("export") == f"exported {MODULE}\n"
    git("commit", "-q", "-a", "-m", "two")
    (repo.root / sync.RECORD).unlink()
    repo.edit(MODULE, "return 2", "return 3")
    assert run("write-back") == f"wrote {MODULE} back into {BOOK}\n"
    assert "return 3" in repo.source("last")


def test_saves_follow_each_other_without_a_commit(repo, run, git):
    for old, new in ((1, 2), (2, 3), (3, 1)):
        repo.edit(BOOK, f"return {old}", f"return {new}")
        assert run("export") == f"exported {MODULE}\n"
    repo.edit(MODULE, "return 1", "return 7")
    run("write-back")
    repo.edit(MODULE, "return 7", "return 8")
    run("write-back")
    run("check", "--rebuild")
    assert "return 8" in repo.source("last")


@pytest.mark.parametrize("record", [True, False])
def test_an_edit_on_each_side_is_refused_both_ways(repo, fails, git, record):
    if not record:
        (repo.root / sync.RECORD).unlink()
    repo.edit(BOOK, "return 1", "return 2")
    repo.edit(MODULE, "size = 4", "size = 5")
    before = repo.read(BOOK), repo.read(MODULE)
    for command in ("export", "write-back"):
        found = fails(command)
        assert "notebook and module both changed since the last export" in found
        assert "export --force keeps the notebook's side, write-back --force the module's" in found
    assert (repo.read(BOOK), repo.read(MODULE)) == before


def test_without_git_and_record_neither_side_is_trusted(repo, fails, git):
    (repo.root / sync.RECORD).unlink()
    shutil.rmtree(repo.root / ".git")
    repo.edit(BOOK, "return 1", "return 2")
    for command in ("export", "write-back"):
        assert "both changed since the last export" in fails(command)


def test_a_committed_difference_is_refused_both_ways(repo, run, fails, git):
    repo.edit(MODULE, "return 1", "return 9")
    git("commit", "-q", "-a", "-m", "an edit that was not carried back")
    (repo.root / sync.RECORD).unlink()
    for command in ("check", "export", "write-back"):
        assert "both are as in git's HEAD, where they differ" in fails(command)
    run("write-back", "--force")
    run("check", "--rebuild")
    assert "return 9" in repo.source("last")


def test_a_side_put_back_by_git_is_exported_again(repo, run, git):
    repo.edit(BOOK, "return 1", "return 2")
    run("export")
    git("checkout", "-q", "--", MODULE)
    assert run("export") == f"exported {MODULE}\n"
    git("checkout", "-q", "--", BOOK)
    assert run("export") == f"exported {MODULE}\n"
    assert "return 1" in repo.read(MODULE)


def test_what_git_has_may_break_the_rules_of_today(repo, run, git):
    """An older commit, made by an older exporter, whose notebook says nothing of its module."""
    doc = ',\n    "#| doc A demo"'
    good = repo.read(BOOK)
    repo.edit(BOOK, '\\n"' + doc, '"')
    git("commit", "-q", "-a", "-m", "no doc")
    (repo.root / sync.RECORD).unlink()
    (repo.root / BOOK).write_text(good.replace("return 1", "return 2"))
    assert run("export") == f"exported {MODULE}\n"
