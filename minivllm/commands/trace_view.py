"""Command `minivllm trace view`: open a saved trace in the browser."""

# Generated from nbs/commands/trace_view.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import tempfile
import webbrowser
from pathlib import Path
from typing import Any, TextIO


def _run_trace_view(args: argparse.Namespace, out: TextIO) -> None:
    """Write the page of a saved trace and open it in the browser.

    Raises:
        OSError: no such file. RuntimeError: not a trace, or nothing happened in it. ValueError: another ending than .html.
    """
    from minivllm.viz.page import show

    if args.output is not None and args.output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output must end in .html, got {args.output.name!r}")
    trace, other = _opened(args.file), args.other and _opened(args.other)
    if args.tokenizer is not None:
        from minivllm.models.hub import resolve_model
        from minivllm.models.tokenizer import get_tokenizer

        trace.tokenizer = get_tokenizer(resolve_model(args.tokenizer))
    title = args.file.name if other is None else f"{args.file.name} and {args.other.name}"
    view = show(trace, title=title, other=other)
    folder = Path(tempfile.mkdtemp(prefix="minivllm-")) if args.output is None else args.output.parent
    path = view.save(folder / (args.output.name if args.output else f"{args.file.stem}.html")).resolve()
    print(path, file=out)
    if args.open and not webbrowser.open(path.as_uri()):
        print("no browser could be started: open the file by hand", file=out)


def _opened(path: Path) -> Any:
    from minivllm.viz.view import open_trace

    trace, problem = open_trace(path)
    if problem is not None:
        raise RuntimeError(problem if path.name in problem else f"{path.name}: {problem}")
    return trace


def add_parser(commands: Any) -> None:
    """The flags of `minivllm trace`. ``commands``: what argparse's `add_subparsers` gives."""
    trace = commands.add_parser("trace", help="look at a recorded run")
    doings = trace.add_subparsers(dest="doing", required=True, metavar="view")
    view = doings.add_parser(
        "view", help="open a saved trace in the browser: blocks, queues and prefixes, step by step"
    )
    view.add_argument("file", type=Path, help="what trace.save() wrote: .jsonl or .parquet")
    view.add_argument("other", type=Path, nargs="?", help="a second run of the same requests: both are compared")
    view.add_argument("--output", type=Path, metavar="FILE", help="where the page goes (default: a temporary file)")
    view.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=True, help="open the page in the browser"
    )
    view.add_argument("--tokenizer", metavar="MODEL", help="show tokens as text, with this model's tokenizer")
    view.set_defaults(run=_run_trace_view)
