"""From notebook to module."""

import importlib.util
from types import ModuleType

import pytest

from minivllm.literate import __main__ as cli
from minivllm.literate import fold, notebook, render

HEAD = "#| default_exp pool\n#| doc Pool of blocks: free, used"

POOL = {
    "head": HEAD,
    "cls": '''
        #| export
        import itertools
        import zlib

        class Pool(Base):
            """Blocks."""

            size: int = 4
            # a comment that ends the class

        class Other:
            pass

        AFTER = Pool.size
    ''',
    "experiment": "print(Pool())",
    "take": '''
        #| export
        import os
        from collections.abc import Iterable

        # why it is here
        @method(Pool)
        def take(self, n: int = 1) -> Iterable[int]:
            """Take blocks.

            Two paragraphs.
            """
            text = """kept
        at the margin"""
            return itertools.chain([n], [len(text)])
    ''',
    "size": """
        #| export
        @method(Pool)
        @property
        def half(self) -> int:
            return self.size // 2

        @method(Pool)
        @Pool.half.setter
        def half(self, value: int) -> None:
            self.size = 2 * value
    """,
    "make": """
        #| export
        @method(Pool)
        @classmethod
        def make(cls) -> "Pool":
            return cls()

        @method(Pool)
        @staticmethod
        def double(n: int) -> int:
            return 2 * n
    """,
}

POOL_MODULE = '''"""Pool of blocks: free, used."""

# Generated from nbs/demo.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import itertools
from collections.abc import Iterable


class Base:
    pass


class Pool(Base):
    """Blocks."""

    size: int = 4
    # a comment that ends the class

    # why it is here
    def take(self, n: int = 1) -> Iterable[int]:
        """Take blocks.

        Two paragraphs.
        """
        text = """kept
at the margin"""
        return itertools.chain([n], [len(text)])

    @property
    def half(self) -> int:
        return self.size // 2

    @half.setter
    def half(self, value: int) -> None:
        self.size = 2 * value

    @classmethod
    def make(cls) -> "Pool":
        return cls()

    @staticmethod
    def double(n: int) -> int:
        return 2 * n


class Other:
    pass


AFTER = Pool.size
'''


def load(repo, name: str = "minivllm/pool.py") -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded", repo.root / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pool(repo) -> None:
    repo.notebook(
        title="# Pool\n\nThe [pool](x.md) owns **blocks**. And more.", base="#| export\nclass Base:\n    pass", **POOL
    )


def test_the_module_reads_as_if_written_by_hand(repo, run):
    pool(repo)
    run("export")
    assert repo.read("minivllm/pool.py") == POOL_MODULE


def test_notebook_and_module_behave_alike(repo, run):
    pool(repo)
    run("export")
    module = load(repo)
    live: dict = {"method": fold.method}
    for cell in notebook.read_notebook(repo.root / "nbs/demo.ipynb", repo.root).exports:
        exec(compile(cell.code, cell.id, "exec"), live)
    for cls in (module.Pool, live["Pool"]):
        made = cls.make()
        made.half = 5
        assert (made.size, made.half, cls.double(4), list(made.take(3))) == (10, 5, 8, [3, 18])
        assert cls.take.__qualname__ == "Pool.take"
        assert cls.take.__doc__.splitlines()[0] == "Take blocks."


def test_formatting_the_module_again_changes_nothing(repo, run):
    pool(repo)
    run("export")
    text = repo.read("minivllm/pool.py")
    assert render.formatted({"minivllm/pool.py": text}, repo.root) == {"minivllm/pool.py": text}


def test_a_second_export_writes_nothing(repo, run):
    pool(repo)
    assert run("export") == "exported minivllm/pool.py\nexported minivllm/__init__.py\n"
    assert run("export") == ""


@pytest.mark.parametrize(
    ("module", "path", "packages"),
    [
        ("core.block_pool", "minivllm/core/block_pool.py", ["minivllm/__init__.py", "minivllm/core/__init__.py"]),
        ("lab.__init__", "minivllm/lab/__init__.py", ["minivllm/__init__.py"]),
        ("__init__", "minivllm/__init__.py", []),
        (
            "minivllm_kernels.a.b",
            "kernels/minivllm_kernels/a/b.py",
            [f"kernels/minivllm_kernels{d}/__init__.py" for d in ("", "/a")],
        ),
    ],
)
def test_two_roots_and_their_packages(repo, run, module, path, packages):
    repo.notebook(head=f"#| default_exp {module}", x="#| export\nX = 1")
    assert run("export").split() == [word for name in (path, *packages) for word in ("exported", name)]
    assert all(repo.read(name) == "" for name in packages)
    assert not (repo.root / "kernels/__init__.py").exists()
    run("check")


def test_overloads_stay_in_order(repo, run):
    repo.notebook(
        head=HEAD,
        cls="#| export\nclass Pool:\n    x = 1",
        get="""
            #| export
            from typing import overload

            @method(Pool)
            @overload
            def get(self, key: int) -> int: ...

            @method(Pool)
            @overload
            def get(self, key: str) -> str: ...

            @method(Pool)
            def get(self, key):
                return key
        """,
    )
    run("export")
    assert load(repo).Pool().get(3) == 3
    text = repo.read("minivllm/pool.py")
    assert text.count("    @overload\n    def get") == 2


def test_imports_keep_comments_and_future_comes_first(repo, run):
    repo.notebook(
        head=HEAD,
        a="#| export\nimport sys\nX = sys.path",
        b="#| export\nfrom __future__ import annotations\nimport antigravity  # noqa: F401\n\ndef f(x: Later) -> None: ...",
        c="#| export\nclass Later: ...",
    )
    run("export")
    body = repo.read("minivllm/pool.py").split("\n\n")
    assert body[2:4] == ["from __future__ import annotations", "import antigravity  # noqa: F401\nimport sys"]


def test_type_checking_imports_stay_where_they_are(repo, run):
    cell = "#| export\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from minivllm.x import Y\n\ndef f(y: 'Y') -> None: ..."
    repo.notebook(head=HEAD, a=cell, b="#| exporti\ndef g(): ...")
    run("export")
    text = repo.read("minivllm/pool.py")
    assert "\n\nif TYPE_CHECKING:\n    from minivllm.x import Y\n" in text
    assert '__all__ = ["f"]' in text


def test_all_of_a_package_holds_what_it_imports(repo, run):
    repo.notebook(
        head="#| default_exp lab.__init__", a="#| export\nfrom minivllm.lab.x import simulate, _hidden\n\nLEVEL = 1"
    )
    run("export")
    assert '__all__ = ["LEVEL", "simulate"]' in repo.read("minivllm/lab/__init__.py")


def test_all_leaves_out_type_variables_and_private_names(repo, run):
    source = "#| export\nfrom typing import TypeVar\nT = TypeVar('T')\n_x = 1\na, (b, c) = 1, (2, 3)\ntry:\n    d = 4\nfinally:\n    e = 5"
    repo.notebook(head=HEAD, a=source, b="#| exporti\ninternal = 6")
    run("export")
    assert '__all__ = ["a", "b", "c", "d", "e"]' in repo.read("minivllm/pool.py")


def test_a_module_without_internal_names_has_no_all(repo, run):
    repo.notebook(head=HEAD, a="#| export\ndef f(): ...", b="#| exporti\n_x = 1\n\ndef _g(): ...")
    run("export")
    assert "__all__" not in repo.read("minivllm/pool.py")


def test_what_exporti_exports_is_not_in_all(repo, run):
    repo.notebook(head=HEAD, a="#| exporti\ndef f(): ...\n\nX = 1", b="#| export\ndef g(): return f()")
    run("export")
    assert '__all__ = ["g"]' in repo.read("minivllm/pool.py")
    assert load(repo).X == 1
    repo.edit("nbs/demo.ipynb", "#| export\\n", "#| exporti\\n")
    run("export")
    assert "__all__: list[str] = []" in repo.read("minivllm/pool.py")


def test_a_long_all_takes_few_lines(repo, run):
    names = [f"a_rather_long_name_{n:02}" for n in range(20)]
    repo.notebook(head=HEAD, a="#| export\n" + "\n".join(f"{name} = 1" for name in names), b="#| exporti\nx = 1")
    run("export")
    text = repo.read("minivllm/pool.py")
    lines = text.partition("__all__ = [\n")[2].partition("]  # fmt: skip\n")[0].splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= 110
    assert load(repo).__all__ == names
    assert render.formatted({"minivllm/pool.py": text}, repo.root) == {"minivllm/pool.py": text}


def test_definitions_may_share_a_name_where_they_are_meant_to(repo, run):
    source = """
        #| export
        from functools import singledispatch

        @singledispatch
        def show(x): return "x"

        @show.register
        def _(x: int): return "int"

        @show.register
        def _(x: str): return "str"

        try:
            import nothing_of_this_name
        except ImportError:
            def other(): ...
        else:
            def other(): ...

        LEVEL = 1
        LEVEL = LEVEL + 1
    """
    repo.notebook(head=HEAD, a=source)
    run("export")
    module = load(repo)
    assert (module.show(1), module.show("a"), module.show(None), module.LEVEL) == ("int", "str", "x", 2)


def test_a_cell_can_write_all_itself(repo, run):
    repo.notebook(head=HEAD, a="#| export\n__all__ = ['f']\n\ndef f(): ...\n\ndef g(): ...")
    run("export")
    assert repo.read("minivllm/pool.py").count("__all__") == 1


def test_the_docstring_is_the_line_of_doc(repo, run):
    repo.notebook(head="#| default_exp pool\n#| doc A `pool` of blocks?", a="#| export\nX = 1")
    run("export")
    assert load(repo).__doc__ == "A `pool` of blocks?"


CLS = "#| export\nclass Pool:\n    x = 1"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"head": HEAD, "a": "#| export\nx = 1\ny = ("}, "nbs/demo.ipynb #a line 3: '(' was never closed"),
        ({"head": HEAD, "a": "#| export\n%time\nx = 1"}, "#a line 2: invalid syntax (magics cannot be exported)"),
        (
            {"head": HEAD, "a": "#| exprot\nx = 1"},
            "#a line 1: unknown directive 'exprot'; known are default_exp, doc, export, exporti, hide",
        ),
        ({"head": HEAD, "a": "#| export me\nx = 1"}, "#a line 1: export takes no argument"),
        ({"head": "#| default_exp pool\n#| doc"}, "#head line 2: doc takes one argument"),
        ({"head": "#| default_exp pool\n#| doc " + 101 * "x"}, "#head: doc is one line of at most 100 characters"),
        (
            {"head": '#| default_exp pool\n#| doc "x"'},
            "#head: doc is one line of at most 100 characters, without quotes",
        ),
        ({"head": "#| default_exp"}, "#head line 1: default_exp takes one argument"),
        ({"head": HEAD, "a": "#| export\n#| export\nx = 1"}, "#a line 2: directive 'export' stands here twice"),
        ({"head": HEAD, "a": "x = 1\n#| export"}, "#a line 2: directives belong in the first lines of a cell"),
        ({"head": HEAD, "again": HEAD}, "#again: default_exp stands twice, first in #head"),
        ({"a": "#| export\nx = 1"}, "#a: this cell is exported, but no cell says '#| default_exp module.name'"),
        ({"head": "#| default_exp minivllm.pool"}, "#head: not a module name: 'minivllm.pool'"),
        ({"head": "#| default_exp ../pool"}, "#head: not a module name: '../pool'"),
        ({"head": HEAD, "a": "#| export\nx = 1; y = 2"}, "#a line 2: two statements on one line"),
        (
            {"head": HEAD, "a": "#| export\n@method(Pool)\ndef f(self): ..."},
            "#a line 2: @method(Pool): no earlier exported cell defines",
        ),
        (
            {"head": HEAD, "a": "#| export\n@method(Pool)\ndef f(self): ...", "c": CLS},
            "#a line 2: @method(Pool): no earlier",
        ),
        ({"head": HEAD, "a": "#| export\nx = await f()"}, "#a line 2: 'await' outside function"),
        ({"head": HEAD, "a": "#| export\nif True:\n    return 3"}, "#a line 3: 'return' outside function"),
        (
            {"head": HEAD, "a": "#| export\n#| exporti\nx = 1"},
            "#a: export puts names into __all__ and exporti does not",
        ),
        ({"head": HEAD, "c": CLS, "d": "#| export\n\nPool = 3"}, "#d line 3: Pool is exported twice, first in #c"),
        (
            {"head": HEAD, "a": "#| export\ndef f(): ...", "b": "#| exporti\nasync def f(): ..."},
            "#b line 2: f is exported twice, first in #a",
        ),
        (
            {
                "head": HEAD,
                "c": CLS,
                "a": "#| export\n@method(Pool)\ndef f(self): ...",
                "b": "#| export\n@method(Pool)\ndef f(self): ...",
            },
            "#b line 2: f is exported twice, first in #a",
        ),
        ({"head": HEAD, "c": CLS, "d": CLS}, "#d line 2: Pool is exported twice, first in #c"),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@property\n@method(Pool)\ndef f(self): ..."},
            "#a line 3: @method(Cls) must be the first",
        ),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@method(Pool, 1)\ndef f(self): ..."},
            "#a line 2: @method takes one argument",
        ),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@method(Pool)\nclass F: ..."},
            "#a line 2: @method(Cls) must be the first decorator of a fun",
        ),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@method(Pool)\ndef f(self):\n    return self.__x"},
            "#a line 4: __x is renamed inside",
        ),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@method(Pool)\ndef f(self):\n    return super().f()"},
            "#a line 4: super() needs the class body",
        ),
        (
            {"head": HEAD, "c": CLS, "n": "#| export\nN = 1", "a": "#| export\n@method(Pool)\ndef f(self, n=N): ..."},
            "#a line 2: this method moves up into class Pool, where N is bound later, in #n",
        ),
        (
            {"head": HEAD, "c": CLS, "a": "#| export\n@method(Pool)\ndef f(self, other: Pool): ..."},
            "#a line 2: this method moves up into class Pool, where Pool is itself not complete",
        ),
    ],
)
def test_errors_name_notebook_cell_and_line(repo, fails, cells, message):
    repo.notebook(**cells)
    assert message in fails("export")
    assert message in fails("check")
    assert not (repo.root / "minivllm").exists()


def test_a_module_needs_one_line_that_says_what_it_is(repo, fails):
    path = repo.notebook(head=HEAD, a="#| export\nx = 1", b="#| doc Again")
    assert "nbs/demo.ipynb #b: doc stands twice, first in #head" in fails("export")
    path.write_text(
        path.read_text().replace("#| doc Again", "1").replace(',\n    "#| doc Pool of blocks: free, used"', "")
    )
    assert "nbs/demo.ipynb: no cell says what the module is, as '#| doc One technical line'\n" in fails("check")


def test_annotations_may_come_later_when_they_are_lazy(repo, run):
    repo.notebook(
        head=HEAD,
        c="#| export\nfrom __future__ import annotations\n\n" + CLS.removeprefix("#| export\n"),
        a="#| export\n@method(Pool)\ndef f(self, other: Pool, n: Late) -> Pool:\n    return other",
        n="#| export\nclass Late: ...",
    )
    run("export")
    assert load(repo).Pool().f(1, 2) == 1


def test_two_notebooks_cannot_export_one_module(repo, fails):
    repo.notebook("nbs/a.ipynb", head=HEAD, a="#| export\nx = 1")
    repo.notebook("nbs/b.ipynb", head=HEAD, a="#| export\nx = 1")
    assert "nbs/b.ipynb: default_exp pool: nbs/a.ipynb exports the same module" in fails("export")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", "nbs/bad.ipynb line 1: not a notebook"),
        ("[]", "nbs/bad.ipynb: not a notebook of format 4"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": ""}]}', "nbs/bad.ipynb: cell 0 has no id"),
        (
            '{"nbformat": 4, "cells": [{"cell_type": "code", "id": "a", "source": ""}, {"cell_type": "code", "id": "a", "source": ""}]}',
            "nbs/bad.ipynb #a: two cells have this id",
        ),
    ],
)
def test_one_bad_notebook_stops_no_other(repo, fails, text, message):
    repo.notebook("nbs/a.ipynb", head=HEAD, a="#| export\nx = 1")
    (repo.root / "nbs/bad.ipynb").write_text(text)
    assert message in fails("export")
    assert load(repo).x == 1


def test_prose_and_strings_may_speak_of_directives(repo, run):
    repo.notebook(head=HEAD, a='#| export\nx = """\n#| export\n"""', b="# a comment\nprint('#| export')")
    run("export")
    assert load(repo).x == "\n#| export\n"


def test_a_chapter_without_module_is_left_alone(repo, run):
    repo.notebook(a="x = 1", b="%time\n!ls")
    assert run("export") == ""
    run("check")


def test_export_does_not_overwrite_an_edited_module(repo, run, fails):
    pool(repo)
    run("export")
    repo.edit("minivllm/pool.py", "size: int = 4", "size: int = 5")
    assert "the module was edited since the last export: run write-back" in fails("export")
    repo.edit("nbs/demo.ipynb", "size: int = 4", "size: int = 6")
    assert "notebook and module both changed since the last export" in fails("export")
    assert "size: int = 5" in repo.read("minivllm/pool.py")
    run("export", "--force")
    assert "size: int = 6" in repo.read("minivllm/pool.py")


def test_export_does_not_overwrite_a_foreign_module(repo, run, fails):
    pool(repo)
    notebook.write(repo.root / "minivllm/pool.py", "x = 1\n")
    assert "was not exported by this tool" in fails("export")
    assert repo.read("minivllm/pool.py") == "x = 1\n"
    run("export", "--force")


def test_paths_choose_notebooks_modules_and_folders(repo, run, fails):
    repo.notebook("nbs/1_a/a.ipynb", head="#| default_exp a", a="#| export\nx = 1")
    repo.notebook("nbs/2_b/b.ipynb", head="#| default_exp b", a="#| export\nx = 1")
    repo.notebook("nbs/2_b/c.ipynb", head="#| default_exp c", a="#| export\nx = 1")
    assert "exported minivllm/a.py" in run("export", "nbs/1_a/a.ipynb")
    assert run("export", "minivllm/b.py") == "exported minivllm/b.py\n"
    assert run("export", "nbs/2_b") == "exported minivllm/c.py\n"
    assert "nothing.ipynb: neither a notebook of this book" in fails("export", "nothing.ipynb")


def test_outside_of_a_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check"]) == 1
    assert "no folder with nbs/ and pyproject.toml here or above" in capsys.readouterr().err


def test_a_missing_ruff_is_named(repo, fails, monkeypatch):
    pool(repo)
    monkeypatch.setattr(render.sysconfig, "get_path", lambda _: "nowhere")
    monkeypatch.setenv("PATH", "nowhere")
    assert fails("export") == "export: ruff is not installed: pip install ruff\n"


def test_help(capsys):
    for command in ([], ["export"], ["check"], ["write-back"], ["clean"]):
        with pytest.raises(SystemExit) as done:
            cli.main([*command, "--help"])
        assert done.value.code == 0
        assert "usage: python -m minivllm.literate" in capsys.readouterr().out
