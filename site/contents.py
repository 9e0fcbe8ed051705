"""Write the parts of the book and the two-hour path, which `book.toml` says, into the first page.

python site/contents.py
"""

import json
import tomllib
from pathlib import Path

from minivllm import literate

ROOT = Path(__file__).parents[1]
FIRST_PAGE = ROOT / "nbs/index.ipynb"


def parts() -> list[dict]:
    """The parts of the book: title, question, chapters (path, question, fast)."""
    return tomllib.loads((ROOT / "site/book.toml").read_text())["parts"]


def link(chapter: dict) -> str:
    """A chapter as its question."""
    return f"[{chapter['question']}]({chapter['path']}.ipynb)"


def path() -> str:
    """The two-hour path."""
    fast = [(part, chapter) for part in parts() for chapter in part["chapters"] if chapter.get("fast")]
    lines = [f"{i}. {link(chapter)} *({part['title']})*" for i, (part, chapter) in enumerate(fast, 1)]
    intro = (
        "Each chapter answers one question. These make up a path of about two hours through the whole engine: read the"
        " questions, the pictures and the first version of each idea, and do the first exercise."
    )
    start = "To run and change the cells, clone the repository: `make lab` there opens the book in JupyterLab; this page is `index.ipynb`."
    return "\n".join(["## The two-hour path", "", intro, "", start, "", *lines])


def book() -> str:
    """All chapters in reading order. Those on the path are bold."""
    lines = ["## The whole book", "", "In reading order; the chapters on the path are **bold**."]
    for i, part in enumerate(parts(), 1):
        lines += ["", f"### {i}. {part['title']}", "", part["question"], ""]
        lines += [f"- **{link(c)}**" if c.get("fast") else f"- {link(c)}" for c in part["chapters"]]
    return "\n".join(lines)


def filled(notebook: dict) -> dict:
    """The first page with both lists as the table says."""
    for cell in notebook["cells"]:
        if cell["id"] in ("path", "book"):
            cell["source"] = {"path": path, "book": book}[cell["id"]]().splitlines(keepends=True)
    return notebook


if __name__ == "__main__":
    FIRST_PAGE.write_text(literate.notebook_text(filled(json.loads(FIRST_PAGE.read_text()))))
