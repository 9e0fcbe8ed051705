"""Command line: export, check, write-back, clean."""

# Generated from nbs/literate/cli.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minivllm.literate.check import check
from minivllm.literate.clean import clean
from minivllm.literate.notebook import Book, LiterateError, find_root, read_book
from minivllm.literate.sync import compare, export
from minivllm.literate.write_back import write_back

__all__ = ["COMMANDS", "FLAGS", "main"]

Outcome = tuple[list[str], list[LiterateError]]


def _export(book: Book, options: argparse.Namespace) -> Outcome:
    """Write the modules of notebooks that changed. --force: those that were edited, too."""
    written, errors = export(list(book.chapters.values()), book.root, options.force)
    return [f"exported {name}" for name in written], book.errors + errors


def _check(book: Book, options: argparse.Namespace) -> Outcome:
    """Say which notebook and which cell differ from the module. --rebuild: export again even what is known to agree."""
    errors = check(book, options.rebuild)
    return [] if errors else [f"{len(book.chapters)} notebooks and their modules agree"], errors


def _write_back(book: Book, options: argparse.Namespace) -> Outcome:
    """Carry edits of modules into the cells that they belong to. --force: even where the notebook was edited too."""
    differing, errors = compare(list(book.chapters.values()), book.root)
    done, errors = [], book.errors + errors
    for notebook in map(book.chapters.__getitem__, differing):
        try:
            if write_back(notebook, book.root, options.force):
                done.append(f"wrote {notebook.target} back into {notebook.name}")
        except LiterateError as refused:
            errors.append(refused)
    return done, errors


def _clean(book: Book, options: argparse.Namespace) -> Outcome:
    """Drop execution counts, timestamps, versions and widget state from notebooks; keep outputs."""
    changed = clean([*book.chapters.values(), *book.plain])
    return [f"cleaned {name}" for name in changed], book.errors


COMMANDS = {"export": _export, "check": _check, "write-back": _write_back, "clean": _clean}
FLAGS = {"export": ["--force"], "write-back": ["--force"], "check": ["--rebuild"], "clean": []}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 1 after printing what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.literate", description="Notebooks to modules, and back.")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("paths", nargs="*", help="notebooks, modules or folders; default: the whole book")
        for flag in FLAGS[name]:
            command.add_argument(flag, action="store_true")
    options = parser.parse_args(argv)
    try:
        done, errors = COMMANDS[options.command](read_book(find_root(Path.cwd()), options.paths), options)
    except LiterateError as refused:
        done, errors = [], [refused]
    for line in done:
        print(line)
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
