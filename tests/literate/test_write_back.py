"""From an edited module back into the notebook."""

import json
from textwrap import dedent

import pytest

from minivllm.literate import module, notebook

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
}
METHOD_END = '        text = """\nmargin"""\n        yield from [n, len(text)]\n'


@pytest.fixture(autouse=True)
def exported(repo, run):
    repo.notebook(**CELLS)
    run("export")
    run("check")


def carry(repo, run) -> None:
    """Write back; then both sides agree, and exporting again from nothing gives the same module."""
    before = {raw["id"]: raw for raw in json.loads(repo.read("nbs/demo.ipynb"))["cells"]}
    edited = module.read_module(repo.read(MODULE), MODULE)
    assert run("write-back") == f"wrote {MODULE} back into nbs/demo.ipynb\n"
    run("check", "--rebuild")
    carried = module.read_module(repo.read(MODULE), MODULE)
    assert module.by_cell(carried) == module.by_cell(edited)
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
        ("#last\n", "#last\nNEW = 1\n\n\n", "last", "#| export\nNEW = 1\n\n\ndef last()"),
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
        ("\n\n# %% nbs/demo.ipynb #cls\nclass After:\n    pass\n", "", "cls", "        return 1"),
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
    repo.edit("minivllm/other.py", "__all__", "import math\n\n__all__")
    run("write-back")
    run("check", "--rebuild")
    assert repo.source("a", "nbs/other.ipynb") == "#| export\nimport math\n\n# first\nX = math.pi"


def test_an_import_below_a_marker_is_carried_too(repo, run):
    repo.edit(MODULE, "def last()", "import math\n\n\ndef last()")
    repo.edit(MODULE, "yield 1", "yield int(math.pi)")
    run("write-back")
    run("check", "--rebuild")
    assert "import math" in repo.source("first")


def test_a_new_marker_makes_a_new_cell(repo, run):
    repo.edit(
        MODULE,
        METHOD_END,
        METHOD_END + "\n    # %% nbs/demo.ipynb #give\n    def give(self) -> int:\n        return 1\n",
    )
    repo.edit(
        MODULE,
        "# %% nbs/demo.ipynb #last\n",
        "# %% nbs/demo.ipynb #early\ndef early() -> None: ...\n\n\n# %% nbs/demo.ipynb #last\n",
    )
    carry(repo, run)
    ids = [raw["id"] for raw in json.loads(repo.read("nbs/demo.ipynb"))["cells"]]
    assert ids == ["title", "head", "first", "cls", "experiment", "take", "give", "half", "early", "last"]
    assert repo.source("give") == "#| export\n@method(Pool)\ndef give(self) -> int:\n    return 1"
    assert repo.source("early") == "#| export\ndef early() -> None: ..."


@pytest.mark.parametrize("keep_marker", [True, False])
def test_a_cell_that_loses_its_code_is_removed(repo, run, keep_marker):
    text = repo.read(MODULE)
    first, last = text.index("    # why"), text.index(METHOD_END) + len(METHOD_END)
    text = text[:first] + text[last:]
    (repo.root / MODULE).write_text(text if keep_marker else text.replace("    # %% nbs/demo.ipynb #take\n", ""))
    run("write-back")
    run("check", "--rebuild")
    assert repo.cell("take") is None
    assert "Iterable" not in repo.source("first") + repo.read(MODULE)
    assert repo.cell("experiment")["outputs"]


def test_a_function_moved_below_another_marker_moves_to_that_cell(repo, run):
    repo.edit(MODULE, "LIMIT = 3  # blocks\n", "")
    repo.edit(MODULE, "    yield 1\n", "    yield 1\n\n\nLIMIT = 3  # blocks\n")
    carry(repo, run)
    assert changed(repo) == ["first", "last"]
    assert repo.source("last").endswith("yield 1\n\n\nLIMIT = 3  # blocks")


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
        ("__all__ =", "X = 1\n__all__ =", "this stands above the first marker, so it belongs to no cell"),
        ("import os\n", "# loose comment\n\nimport os\n", "comments above them have no place in the notebook"),
        (
            "        self.size = value\n",
            "        self.size = value\n\n    color = 1\n",
            "only methods can stand below the marker of a method (#half)",
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


def test_statements_in_another_order_are_refused_or_carried(repo, run, fails):
    text = repo.read(MODULE)
    text = text.replace("# %% nbs/demo.ipynb #last\n", "# %% nbs/demo.ipynb #first\n").replace(
        "#first\nclass", "#last\nclass"
    )
    (repo.root / MODULE).write_text(text)
    unchanged(repo, fails, "this edit has no place in the notebook")


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
