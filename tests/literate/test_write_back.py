"""From an edited module back into the notebook."""

import json
import re
from textwrap import dedent

import pytest

from minivllm.literate import notebook, render

MODULE = "minivllm/pool.py"
CELLS = {
    "head": "#| default_exp pool\n#| doc A demo",
    "first": '''
        #| export
        import os
        from collections.abc import Iterable, Iterator


        def first() -> str:
            """Say where."""
            return os.sep


        LIMIT = 3  # blocks
        OTHER = 4
    ''',
    "cls": '''
        #| export
        class Pool:
            """Blocks."""

            size = 4

            def base(self) -> int:
                return 1


        class After:
            pass
    ''',
    "experiment": "Pool()",
    "take": '''
        #| export
        # why
        @method(Pool)
        def take(self, n: int) -> Iterable[int]:
            """Take.

            More.
            """
            text = """
        margin"""
            yield from [n, len(text)]
    ''',
    "half": """
        #| export
        @method(Pool)
        @property
        def half(self) -> int:
            return 2


        @method(Pool)
        @Pool.half.setter
        def half(self, value: int) -> None:
            self.size = value
    """,
    "last": """
        #| export
        def last() -> Iterator[int]:
            yield 1
    """,
    "inner": "#| exporti\ndef inner() -> None: ...",
}
METHOD_END = '        text = """\nmargin"""\n        yield from [n, len(text)]\n'


@pytest.fixture(autouse=True)
def exported(repo, run):
    repo.notebook(**CELLS)
    run("export")
    run("check")


def body(text: str) -> str:
    """A module without `__all__`, which is computed."""
    return re.sub(r"^__all__ = \[[^]]*\](  # fmt: skip)?$", "", text, flags=re.MULTILINE)


def carry(repo, run) -> None:
    """Write back; then both sides agree, and exporting again from nothing gives the same module, letter for letter."""
    before = {raw["id"]: raw for raw in json.loads(repo.read("nbs/demo.ipynb"))["cells"]}
    edited = body(render.formatted({MODULE: repo.read(MODULE)}, repo.root)[MODULE])
    assert run("write-back") == f"wrote {MODULE} back into nbs/demo.ipynb\n"
    run("check", "--rebuild")
    assert body(repo.read(MODULE)) == edited
    for raw in json.loads(repo.read("nbs/demo.ipynb"))["cells"]:
        same = raw["id"] in before and raw["source"] == before[raw["id"]]["source"]
        assert not same or raw == before[raw["id"]]
        assert same or raw["outputs"] == []
    assert run("write-back") == ""


def changed(repo) -> list[str]:
    """Ids of the cells that are not as at first."""
    now = {raw["id"]: "".join(raw["source"]) for raw in json.loads(repo.read("nbs/demo.ipynb"))["cells"]}
    now.pop("title")
    first = {cell: dedent(source).strip("\n") for cell, source in CELLS.items()}
    assert list(now) == [*(cell for cell in first if cell in now)] or set(now) - set(first)
    return [cell for cell in {**first, **now} if now.get(cell) != first.get(cell)]


@pytest.mark.parametrize(
    ("old", "new", "cell", "in_cell"),
    [
        ("return os.sep", "return os.sep * 2", "first", "    return os.sep * 2\n"),
        ("Say where.", "Say\n    it.", "first", '    """Say\n    it."""\n'),
        ("LIMIT = 3  # blocks", "LIMIT = 5  # many", "first", "\n\nLIMIT = 5  # many\nOTHER = 4"),
        ("size = 4", "size = 5\n    more = 6", "cls", "    size = 5\n    more = 6\n"),
        ("return 1", "return  7", "cls", "        return 7\n"),
        ("yield from [n", "yield 0\n        yield from [n", "take", 'margin"""\n    yield 0\n    yield from [n'),
        ("# why", "# because", "take", "#| export\n# because\n@method(Pool)\ndef take("),
        ("        More.", "        Much\n        more.", "take", "    Much\n    more.\n"),
        (
            "self.size = value",
            "self.size = value * 2",
            "half",
            "@Pool.half.setter\ndef half(self, value: int) -> None:\n    self.size = value * 2",
        ),
        ("    @property\n", "    @property\n    @cache\n", "half", "@method(Pool)\n@property\n@cache\ndef half"),
        (
            "def last() -> Iterator[int]:\n",
            "async def last() -> Iterator[int]:\n",
            "last",
            "#| export\nasync def last()",
        ),
        # new functions and methods
        (
            "LIMIT = 3",
            "def new(x: int) -> int:\n    return x\n\n\nLIMIT = 3",
            "first",
            "os.sep\n\n\ndef new(x: int) -> int:\n    return x\n\n\nLIMIT",
        ),
        (
            "    yield 1\n",
            "    yield 1\n\n\ndef new() -> None: ...\n",
            "last",
            "    yield 1\n\n\ndef new() -> None: ...",
        ),
        (
            "def last()",
            "# why\nNEW = 1\n\n\ndef last()",
            "cls",
            "class After:\n    pass\n\n\n# why\nNEW = 1",
        ),
        ("\n\n\ndef first()", "\n\nNEW = 1\n\n\ndef first()", "first", "Iterator\n\nNEW = 1\n\n\ndef first()"),
        (
            "    @property\n",
            "    # why\n    def new(self) -> None: ...\n\n    @property\n",
            "take",
            "\n\n\n# why\n@method(Pool)\ndef new(self) -> None: ...",
        ),
        # other names
        ("def last()", "# why\ndef final()", "last", "#| export\n# why\ndef final()"),
        ("    def take(", "    def fetch(", "take", "#| export\n# why\n@method(Pool)\ndef fetch("),
        ("LIMIT = 3  # blocks", "MOST = 3  # blocks", "first", "\n\nMOST = 3  # blocks\nOTHER = 4"),
        # blank lines
        ("# blocks\nOTHER", "# blocks\n\nOTHER", "first", "\n\nLIMIT = 3  # blocks\n\nOTHER = 4"),
        (
            METHOD_END,
            METHOD_END + "\n    def new(self) -> int:\n        return 1\n",
            "take",
            "\n\n\n@method(Pool)\ndef new(self) -> int:\n    return 1",
        ),
        (
            "        return 1\n",
            "        return 1\n\n    def new(self) -> int:\n        return 2\n",
            "cls",
            "        return 2\n\n\nclass After",
        ),
        # deleted ones
        ("OTHER = 4\n", "", "first", "LIMIT = 3  # blocks"),
        ("\n\nclass After:\n    pass\n", "", "cls", "        return 1"),
        (
            "    @half.setter\n    def half(self, value: int) -> None:\n        self.size = value\n",
            "",
            "half",
            "    return 2",
        ),
        # imports
        ("import os\n", "import os as system\n", "first", "#| export\nimport os as system\nfrom collections"),
    ],
)
def test_an_edit_lands_in_its_cell(repo, run, old, new, cell, in_cell):
    if "os as system" in new:
        repo.edit(MODULE, "return os.sep", "return system.sep")
    if "@cache" in new:
        repo.edit(MODULE, "from collections", "from functools import cache\nfrom collections")
    repo.edit(MODULE, old, new)
    carry(repo, run)
    assert in_cell in repo.source(cell)
    assert changed(repo) == (["first", "half"] if "@cache" in new else [cell])


def test_a_changed_line_changes_one_line(repo, run):
    before = repo.source("take").splitlines()
    repo.edit(MODULE, "yield from [n,", "yield from [n + 1,")
    carry(repo, run)
    assert [line for line in repo.source("take").splitlines() if line not in before] == [
        "    yield from [n + 1, len(text)]"
    ]


def test_a_used_import_is_added_where_the_imports_are(repo, run):
    repo.edit(MODULE, "import os\n", "import json\nimport os\n")
    repo.edit(MODULE, "yield 1", "yield len(json.dumps(1))")
    carry(repo, run)
    assert repo.source("first").startswith(
        "#| export\nimport json\nimport os\nfrom collections.abc import Iterable, Iterator\n"
    )
    assert changed(repo) == ["first", "last"]


def test_an_unused_import_is_dropped_as_ever(repo, run):
    repo.edit(MODULE, "import os\n", "import json\nimport os\n")
    run("write-back")
    run("check", "--rebuild")
    assert "json" not in repo.read(MODULE)
    assert changed(repo) == []


def test_a_removed_import_leaves_the_others_of_its_line(repo, run):
    repo.edit(MODULE, "from collections.abc import Iterable, Iterator", "from collections.abc import Iterable")
    repo.edit(MODULE, "-> Iterator[int]", "-> Iterable[int]")
    carry(repo, run)
    assert repo.source("first").startswith("#| export\nimport os\nfrom collections.abc import Iterable\n")


def test_the_first_import_of_a_notebook(repo, run):
    repo.notebook("nbs/other.ipynb", head="#| default_exp other", a="#| export\n# first\nX = 1")
    run("export")
    repo.edit("minivllm/other.py", "X = 1", "X = math.pi")
    repo.edit("minivllm/other.py", "# first", "import math\n\n# first")
    run("write-back")
    run("check", "--rebuild")
    assert repo.source("a", "nbs/other.ipynb") == "#| export\nimport math\n\n# first\nX = math.pi"


def test_an_import_in_the_middle_rises_to_the_others(repo, run):
    repo.edit(MODULE, "def last()", "import math\n\n\ndef last()")
    repo.edit(MODULE, "yield 1", "yield int(math.pi)")
    run("write-back")
    run("check", "--rebuild")
    assert "import math" in repo.source("first")


def test_a_cell_that_loses_its_code_is_removed(repo, run):
    text = repo.read(MODULE)
    first, last = text.index("    # why"), text.index(METHOD_END) + len(METHOD_END)
    (repo.root / MODULE).write_text(text[:first] + text[last:])
    run("write-back")
    run("check", "--rebuild")
    assert repo.cell("take") is None
    assert "Iterable" not in repo.source("first") + repo.read(MODULE)
    assert repo.cell("experiment")["outputs"]


def test_a_constant_moved_in_the_module_moves_to_the_cell_of_its_neighbour(repo, run):
    repo.edit(MODULE, "LIMIT = 3  # blocks\n", "")
    repo.edit(MODULE, "    yield 1\n", "    yield 1\n\n\nLIMIT = 3  # blocks\n")
    carry(repo, run)
    assert changed(repo) == ["first", "last"]
    assert repo.source("last").endswith("yield 1\n\n\nLIMIT = 3  # blocks")


def test_a_method_moved_in_the_module_is_found_by_name(repo, run):
    """Below the setter, in another cell: its comment travels, the cell that it leaves is empty."""
    text = repo.read(MODULE)
    first, last = text.index("    # why"), text.index(METHOD_END) + len(METHOD_END)
    taken, setter = text[first:last], "        self.size = value\n"
    text = text[:first] + text[last:].lstrip("\n")
    (repo.root / MODULE).write_text(text.replace(setter, setter + "\n" + taken))
    carry(repo, run)
    assert changed(repo) == ["take", "half"]
    assert repo.cell("take") is None
    assert "self.size = value\n\n\n# why\n@method(Pool)\ndef take(self, n: int)" in repo.source("half")


def test_a_method_moved_between_cells_of_the_notebook_is_found_by_name(repo, run):
    half = repo.source("half")
    repo.notebook(**{cell: text for cell, text in CELLS.items() if cell != "half"}, late=half)
    assert run("export") == ""
    repo.edit(MODULE, "return 2", "return 3")
    run("write-back")
    run("check", "--rebuild")
    assert repo.source("late") == half.replace("return 2", "return 3")


def test_a_renamed_class_takes_its_methods_along(repo, run):
    text = repo.read(MODULE)
    (repo.root / MODULE).write_text(text.replace("class Pool", "class Store"))
    carry(repo, run)
    assert changed(repo) == ["cls", "take", "half"]
    assert "# why\n@method(Store)\ndef take(" in repo.source("take")
    assert "@method(Store)\n@Store.half.setter\ndef half" in repo.source("half")


def test_a_class_whose_methods_have_cells_stays_in_its_cell(repo, run, fails):
    constants = "A = 1\nB = 2\nC = 3\nD = 4\nE = 5\n"
    cells = {
        "cls": "#| export\nclass Few:\n    x = 1",
        "get": "#| export\n@method(Few)\ndef get(self): ...",
        "last": "#| export\n" + constants,
    }
    repo.notebook("nbs/other.ipynb", head="#| default_exp other", **cells)
    run("export")
    text = repo.read("minivllm/other.py")
    begin, end = text.index("class Few"), text.index("A = 1")
    (repo.root / "minivllm/other.py").write_text(text[:begin] + constants + "\n\n" + text[begin:end].strip() + "\n")
    before = repo.read("nbs/other.ipynb")
    assert "class Few has methods in cells of their own: move its cell in the notebook" in fails("write-back")
    assert repo.read("nbs/other.ipynb") == before


def test_a_function_after_the_folded_methods_goes_to_the_cell_of_the_class(repo, run):
    repo.edit(MODULE, "        self.size = value\n", "        self.size = value\n\n\ndef free() -> None: ...\n")
    run("write-back")
    run("check", "--rebuild")
    assert changed(repo) == ["cls"]
    assert "return 1\n\n\ndef free() -> None: ...\n\n\nclass After" in repo.source("cls")


def test_a_loose_layout_is_formatted_on_the_way(repo, run):
    repo.edit(MODULE, "return os.sep", "return   os.sep+'x'")
    carry(repo, run)
    assert 'return os.sep + "x"' in repo.source("first")


def test_long_lines_of_methods_fit_at_the_margin_of_a_cell(repo, run):
    """In the class the call is wrapped; in the cell, four columns further left, it fits."""
    call = f"print({'x' * 53}, {'y' * 52})"
    assert len(f"        {call}") == 120 + 2
    repo.edit(MODULE, "        self.size = value\n", f"        {call}\n")
    carry(repo, run)
    assert f"    {call}" in repo.source("half").splitlines()


def test_an_untidy_cell_is_changed_only_where_the_edit_is(repo, run):
    repo.notebook(
        "nbs/other.ipynb",
        head="#| default_exp other",
        a="#| export\ndef f( x ):\n    return [ x,\n      x ]\n\nY = {'a' :1}\n\ndef g(): return 1",
    )
    run("export")
    repo.edit("minivllm/other.py", "return 1", "return 2")
    run("write-back")
    run("check", "--rebuild")
    source = repo.source("a", "nbs/other.ipynb")
    assert source == "#| export\ndef f( x ):\n    return [ x,\n      x ]\n\nY = {'a' :1}\n\ndef g():\n    return 2"


def unchanged(repo, fails, message: str) -> None:
    before = repo.read("nbs/demo.ipynb"), repo.read(MODULE)
    assert message in fails("write-back")
    assert (repo.read("nbs/demo.ipynb"), repo.read(MODULE)) == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("A demo.", "Another.", "minivllm/pool.py line 1: the docstring (`#| doc`) and __all__ are computed"),
        ('"After", ', "", "minivllm/pool.py line 1: the docstring (`#| doc`) and __all__ are computed"),
        ("size = 4", "size = (", "minivllm/pool.py line "),
        ("__all__ =", "X = 1\n__all__ =", "minivllm/pool.py line 8: code stands above __all__"),
        ("import os\n", "# loose comment\n\nimport os\n", "comments above them have no place in the notebook"),
        (
            "        self.size = value\n",
            "        self.size = value\n\n    color = 1\n",
            "only methods can stand below a method that has its own cell (#half)",
        ),
        ("return 2", "return 2; x = 3; @", "minivllm/pool.py line "),
    ],
)
def test_an_edit_without_a_place_is_refused_and_nothing_is_written(repo, fails, old, new, message):
    repo.edit(MODULE, old, new)
    unchanged(repo, fails, message)


def test_a_private_name_in_a_method_is_refused(repo, fails):
    repo.edit(MODULE, "self.size = value", "self.__size = value")
    unchanged(repo, fails, "#half line 11: __size is renamed inside a class")


def test_both_sides_changed(repo, run, fails):
    repo.edit(MODULE, "size = 4", "size = 5")
    repo.edit("nbs/demo.ipynb", "yield 1", "yield 2")
    unchanged(
        repo,
        fails,
        "notebook and module both changed since the last export: export --force keeps the notebook's side, write-back --force",
    )
    run("write-back", "--force")
    run("check", "--rebuild")
    assert "size = 5" in repo.source("cls")
    assert "yield 1" in repo.source("last")


def test_prose_and_experiments_may_change_meanwhile(repo, run):
    repo.edit(MODULE, "size = 4", "size = 5")
    repo.edit("nbs/demo.ipynb", '"Pool()"', '"Pool().size"')
    carry(repo, run)
    assert repo.source("experiment") == "Pool().size"


def test_nothing_to_do(repo, run, fails):
    assert run("write-back") == ""
    repo.edit("nbs/demo.ipynb", "yield 1", "yield 2")
    assert run("write-back") == ""
    assert "yield 2" in repo.source("last")
    notebook.write(repo.root / MODULE, "x = 1\n")
    assert "was not exported by this tool" in fails("write-back")


def test_blank_lines_between_what_stays_are_not_touched(repo, run):
    repo.notebook(
        "nbs/other.ipynb",
        head="#| default_exp other",
        a="#| export\nA = 1\n\nB = 2\n\n\ndef f(): ...\n\n\nC = 3\nD = 4\n\nE = 5",
    )
    run("export")
    repo.edit("minivllm/other.py", "C = 3\n", "")
    repo.edit("minivllm/other.py", "B = 2\n", "B = 2\n\n\ndef g(): ...\n")
    run("write-back")
    source = repo.source("a", "nbs/other.ipynb")
    assert source == "#| export\nA = 1\n\nB = 2\n\n\ndef g(): ...\n\n\ndef f(): ...\n\n\nD = 4\n\nE = 5"
