"""The table of README that says where something is done names what is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| ([^|`]+) \| `([^`]+\.py)` \| `([\w.]+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_there_is_a_table():
    assert len(ROWS) > 8


@pytest.mark.parametrize(("question", "path", "name"), ROWS, ids=[row[0] for row in ROWS])
def test_the_name_is_defined_there(question, path, name):
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        found = [x for x in body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == part]
        assert found, f"{question}: {path} has no {name}"
        body = found[0].body
