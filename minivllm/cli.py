"""Entry point of the `minivllm` command and its subcommands."""

# Generated from nbs/cli.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TextIO

from minivllm.commands import chat, complete, quantize, trace_view
from minivllm.commands.flags import say_loading
from minivllm.engine.arguments import with_config

__all__ = ["main", "make_parser"]

_ELSEWHERE = {
    "serve": "minivllm.serving.app",
    "bench": "minivllm.bench",
    "run-batch": "minivllm.serving.run_batch",
}


def run_demo_command(args: argparse.Namespace, out: TextIO) -> None:
    """Four questions at once, and what the scheduler did."""
    from minivllm.demo import run_demo

    say_loading(args.model)
    print(run_demo(args.model, args.max_tokens, use_tqdm=sys.stderr.isatty(), dtype=args.dtype), file=out)


def run_collect_env(args: argparse.Namespace, out: TextIO) -> None:
    """Print versions and facts for a bug report."""
    from minivllm.runtime.machine import environment_report

    for name, value in environment_report().items():
        print(f"{name:16} {value}", file=out)


def run_models(args: argparse.Namespace, out: TextIO) -> None:
    """List the families of models, the formats of their checkpoints, and what of them is tested."""
    from minivllm.models.families.registry import TESTED, families

    for family in families():
        print(family.about, ", ".join(family.architectures), sep="\n    ", file=out)
        print(f"    {', '.join(family.formats)}; like transformers: {TESTED[family.kind]}", file=out)
    print("Any other causal model whose attention transformers lets others compute runs by its code there.", file=out)


def run_plugins(args: argparse.Namespace, out: TextIO) -> None:
    """List the installed plugins, and whether they are loaded."""
    from minivllm.core.plugins import describe_plugins

    print(describe_plugins(), file=out)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from minivllm import __version__

    parser = argparse.ArgumentParser(prog="minivllm", description="vLLM made small enough to read.")
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (complete, chat):
        command.add_parser(commands)
    demo = commands.add_parser("demo", help="answer four questions at once and show what the scheduler did")
    demo.add_argument("--model", default="smollm2", help="alias, folder, .gguf file or hub id (default: smollm2)")
    demo.add_argument("--dtype", default="auto", help="of weights and activations (default: auto)")
    demo.add_argument("--max-tokens", type=int, default=48, help="most tokens of an answer (default: 48)")
    demo.set_defaults(run=run_demo_command)
    collect = commands.add_parser("collect-env", help="print versions and facts for a bug report")
    collect.set_defaults(run=run_collect_env)
    plugins = commands.add_parser("plugins", help="list installed plugins, and whether they are loaded")
    plugins.set_defaults(run=run_plugins)
    models = commands.add_parser("models", help="list the families of models, and how each is tested")
    models.set_defaults(run=run_models)
    trace_view.add_parser(commands)
    quantize.add_parser(commands)
    for name, what in (
        ("serve", "serve a model over the OpenAI API"),
        ("bench", "measure an engine or a server"),
        ("run-batch", "answer a file of requests"),
    ):
        commands.add_parser(name, help=what, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `minivllm`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments[:1]
    try:
        place = arguments[1:] if debug else arguments
        if place and place[0] in _ELSEWHERE:
            return int(importlib.import_module(_ELSEWHERE[place[0]]).main(place[1:]) or 0)
        parser = make_parser()
        args = parser.parse_args(with_config(arguments, parser))
        args.run(args, sys.stdout)
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        if debug:
            raise
        print(f"minivllm: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
