"""The table of the book and the first page say the same, and no chapter is missing from either."""

import json
import sys
from pathlib import Path

from minivllm.literate import notebook_paths

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "site"))
import contents

CHAPTERS = [chapter for part in contents.parts() for chapter in part["chapters"]]


def test_every_notebook_stands_in_the_book_once():
    listed = sorted(chapter["path"] for chapter in CHAPTERS)
    there = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix() for path in notebook_paths(ROOT)}
    assert listed == sorted(there - {"index"}), "add new notebooks to site/book.toml, then run python site/contents.py"


def test_parts_and_chapters_ask_questions():
    assert len(contents.parts()) == 12
    asked = [part["question"] for part in contents.parts()] + [chapter["question"] for chapter in CHAPTERS]
    assert [question for question in asked if not question.endswith("?")] == []
    assert len(set(asked)) == len(asked), "two chapters ask the same"


def test_the_fast_path_is_short_and_leads_through_all_that_matters():
    assert 12 <= sum(chapter.get("fast", False) for chapter in CHAPTERS) <= 17
    without = [p["title"] for p in contents.parts() if not any(c.get("fast") for c in p["chapters"])]
    assert without == ["Scale", "How the book becomes the package"]


def test_the_first_page_shows_the_table():
    stored = json.loads(contents.FIRST_PAGE.read_text())
    shown = {cell["id"]: "".join(cell["source"]) for cell in stored["cells"]}
    assert (shown["path"], shown["book"]) == (contents.path(), contents.book()), "run python site/contents.py"
