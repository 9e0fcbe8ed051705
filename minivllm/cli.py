"""How does it feel at the terminal?

Not everybody opens a notebook.
"""

# Generated from nbs/6_serving/01_cli.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=d14a0e49152a module=7fe72c327ab2

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from minivllm.engine.arguments import add_engine_arguments, engine_args_from, with_config

__all__ = [
    "CHAT_HELP",
    "ChatSession",
    "RemoteChatSession",
    "add_sampling_arguments",
    "connect",
    "main",
    "make_parser",
    "request_fields",
    "run_chat",
    "run_collect_env",
    "run_complete",
    "run_demo_command",
    "run_elsewhere",
    "run_trace_view",
    "sampling_params_from",
    "stream_answer",
]


# %% nbs/6_serving/01_cli.ipynb #add_engine_arguments
if TYPE_CHECKING:
    from minivllm.engine.llm_engine import LLMEngine
    from minivllm.sampling.params import SamplingParams
    from minivllm.serving.client import Remote


# %% nbs/6_serving/01_cli.ipynb #add_sampling_arguments
_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; higher is more varied"),
    "top_p": (float, "keep the likeliest tokens that together reach this probability"),
    "top_k": (int, "keep the k likeliest tokens; 0 for all"),
    "min_p": (float, "keep tokens at least this times as likely as the likeliest"),
    "presence_penalty": (float, "subtracted from tokens that occurred"),
    "frequency_penalty": (float, "subtracted from tokens for each time they occurred"),
    "repetition_penalty": (float, "above 1 makes repetition less likely"),
    "max_tokens": (int, "most tokens of an answer"),
    "min_tokens": (int, "fewest tokens of an answer"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Flags for SamplingParams. What is not given comes from the model's generation config."""
    group = parser.add_argument_group("sampling")
    for name, (kind, help_text) in _SAMPLING_FLAGS.items():
        default = max_tokens if name == "max_tokens" else None
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=default, metavar=name.upper(), help=help_text
        )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def sampling_params_from(args: argparse.Namespace, defaults: SamplingParams, **more: Any) -> SamplingParams:
    """SamplingParams with what the flags say, over ``defaults``."""
    names = [*_SAMPLING_FLAGS, "stop"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return defaults.clone(**given, ignore_eos=args.ignore_eos, **more)


# %% nbs/6_serving/01_cli.ipynb #stream_answer
def stream_answer(engine: LLMEngine, prompt: Any, params: SamplingParams) -> Iterator[str]:
    """Yield the pieces of one answer. KeyboardInterrupt or an abandoned generator aborts the request.

    Raises:
        ValueError: a bad prompt or parameter. RuntimeError: the request failed.
    """
    from minivllm.engine.interrupt import deferred_interrupts
    from minivllm.sampling.params import RequestOutputKind

    request_id = "cli"
    engine.add_request(request_id, prompt, params.clone(output_kind=RequestOutputKind.DELTA))
    try:
        while engine.has_unfinished_requests():
            with deferred_interrupts():
                outputs = engine.step()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                yield output.outputs[0].text
    finally:
        engine.abort_request(request_id)


# %% nbs/6_serving/01_cli.ipynb #run_complete
def run_complete(args: argparse.Namespace, out: TextIO) -> None:
    """Print completions of one text."""
    from minivllm.engine.llm import LLM

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.url is not None:
        _complete_remotely(args, prompt, out)
        return
    with _loading(args), LLM.from_engine_args(engine_args_from(args)) as llm:
        params = sampling_params_from(args, llm.get_default_sampling_params(), n=args.n)
        if args.stream and args.n == 1:
            for piece in stream_answer(llm.llm_engine, prompt, params):
                print(piece, end="", file=out, flush=True)
            print(file=out)
            return
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        if output.error is not None:
            raise RuntimeError(output.error)
        print(("\n" + "-" * 8 + "\n").join(completion.text for completion in output.outputs), file=out)


# %% nbs/6_serving/01_cli.ipynb #remote
def connect(args: argparse.Namespace) -> Remote:
    """The server that ``--url`` names. Raises ValueError for flags of an engine, which the server has started already."""
    from dataclasses import fields

    from minivllm.core.config import EngineArgs
    from minivllm.serving.client import Remote

    for f in fields(EngineArgs):
        if getattr(args, f.name) != f.default:
            hint = "; --model-name chooses among its models" if f.name == "model" else ""
            raise ValueError(f"--{f.name.replace('_', '-')} is for an engine here, but --url asks a server{hint}")
    return Remote(args.url, args.model_name, args.api_key, args.insecure)


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the sampling flags say, as fields of a request."""
    given = {name: getattr(args, name) for name in [*_SAMPLING_FLAGS, "stop"] if getattr(args, name) is not None}
    return given | ({"ignore_eos": True} if args.ignore_eos else {})


def _complete_remotely(args: argparse.Namespace, prompt: str, out: TextIO) -> None:
    texts = [""] * args.n
    for index, piece in connect(args).complete(prompt, n=args.n, **request_fields(args)):
        texts[index] += piece
        if args.stream and args.n == 1:
            print(piece, end="", file=out, flush=True)
    print(("\n" + "-" * 8 + "\n").join(texts) if args.n > 1 or not args.stream else "", file=out)


# %% nbs/6_serving/01_cli.ipynb #ChatSession
CHAT_HELP = """/help            this text
/system TEXT     set the system message and start over
/reset           start over
/exit            leave (so does Ctrl-D); Ctrl-C stops an answer"""


class ChatSession:
    """A conversation with a model. ``out``: where answers are written, piece by piece."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, out: TextIO, system: str | None = None) -> None:
        self.engine, self.params, self.out = engine, params, out
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str = "", end: str = "\n") -> None:
        print(text, end=end, file=self.out, flush=True)

    # %% nbs/6_serving/01_cli.ipynb #ChatSession-handle
    def handle(self, line: str) -> bool:
        """Take one line of input. Returns False when the session is over."""
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/help":
            self.say(CHAT_HELP)
        elif command == "/reset":
            self.reset()
        elif command == "/system":
            self.system = rest.strip() or None
            self.reset()
        elif command.startswith("/"):
            self.say(f"unknown command {command}; /help lists them")
        elif command:
            self.answer(line.strip())
        return True

    def answer(self, text: str) -> None:
        """Put a message to the model and stream its answer. A stopped answer stays in the conversation as far as it came."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self.stream(asked):
                pieces.append(piece)
                self.say(piece, end="")
        except KeyboardInterrupt:
            self.say(" [stopped]", end="")
        except (ValueError, RuntimeError, OSError) as error:
            self.say(f"error: {error}. /reset starts over")
            return
        self.say()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        from minivllm.models.tokenizer import apply_chat_template

        _, token_ids = apply_chat_template(self.engine.tokenizer, messages)
        yield from stream_answer(self.engine, token_ids, self.params)

    # %% nbs/6_serving/01_cli.ipynb #ChatSession-run
    def run(self, read: Callable[[str], str], prompt: str) -> None:
        """Read lines until the end of the input or /exit. ``read(prompt)`` is `input`, or anything that raises EOFError at the end."""
        while True:
            try:
                line = read(prompt)
            except EOFError:
                return
            except KeyboardInterrupt:  # at the prompt: forget the line
                self.say()
                continue
            if not self.handle(line):
                return


# %% nbs/6_serving/01_cli.ipynb #ChatSession-run
def run_chat(args: argparse.Namespace, out: TextIO) -> None:
    """Talk with a model until the end of the input."""
    from minivllm.engine.llm import LLM

    interactive = sys.stdin.isatty()
    if args.url is not None:
        _chat(RemoteChatSession(connect(args), request_fields(args), out, args.system), interactive, args.url)
        return
    with _loading(args), LLM.from_engine_args(engine_args_from(args)) as llm:
        params = sampling_params_from(args, llm.get_default_sampling_params())
        session = ChatSession(llm.llm_engine, params, out, args.system)
        _chat(session, interactive, f"{llm.config.model.name}, {llm.config.dtype} on {llm.config.device}")


class RemoteChatSession(ChatSession):
    """A conversation with a model of a server. ``fields``: of every request."""

    def __init__(self, remote: Remote, fields: dict[str, Any], out: TextIO, system: str | None = None) -> None:
        self.remote, self.fields, self.out, self.system = remote, fields, out, system
        self.reset()

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        return self.remote.chat(messages, **self.fields)


def _chat(session: ChatSession, interactive: bool, with_whom: str) -> None:
    if interactive:
        import readline  # noqa: F401 - gives input() line editing and history

        session.say(f"{with_whom}. /help lists the commands.")
    session.run(input if interactive else _read_piped, "> " if interactive else "")


def _read_piped(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


# %% nbs/6_serving/01_cli.ipynb #run_elsewhere
_ELSEWHERE = {
    "serve": "minivllm.serving.app",
    "bench": "minivllm.bench",
    "run-batch": "minivllm.serving.run_batch",
}


def run_elsewhere(command: str, arguments: Sequence[str]) -> int:
    """Hand a command over to its own module. Raises RuntimeError if that is not part of this installation."""
    module = _ELSEWHERE[command]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        found = False
    if not found:
        raise RuntimeError(f"`minivllm {command}` is not part of this installation: there is no {module}")
    return int(importlib.import_module(module).main(list(arguments)) or 0)


def run_demo_command(args: argparse.Namespace, out: TextIO) -> None:
    """Four questions at once, and what the scheduler did."""
    from minivllm.demo import run_demo

    with _loading(args):
        print(run_demo(args.model, args.max_tokens, use_tqdm=sys.stderr.isatty(), dtype=args.dtype), file=out)


def run_collect_env(args: argparse.Namespace, out: TextIO) -> None:
    """Print versions and facts for a bug report."""
    from minivllm.runtime.machine import environment_report

    for name, value in environment_report().items():
        print(f"{name:16} {value}", file=out)


def run_trace_view(args: argparse.Namespace, out: TextIO) -> None:
    """Write the page of a saved trace and open it in the browser.

    Raises:
        OSError, ValueError: no such file, or not a trace that can be shown. RuntimeError: nothing happened in it.
    """
    from minivllm.core.trace import Trace
    from minivllm.viz.page import show

    if args.output is not None and args.output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output must end in .html, got {args.output.name!r}")
    trace = Trace.load(args.file)
    if args.tokenizer is not None:
        from minivllm.models.hub import resolve_model
        from minivllm.models.tokenizer import get_tokenizer

        trace.tokenizer = get_tokenizer(resolve_model(args.tokenizer))
    view = show(trace, title=args.file.name)
    if view.problem is not None:
        raise RuntimeError(f"{args.file.name}: {view.problem}")
    folder = Path(tempfile.mkdtemp(prefix="minivllm-")) if args.output is None else args.output.parent
    path = view.save(folder / (args.output.name if args.output else f"{args.file.stem}.html")).resolve()
    print(path, file=out)
    if args.open and not webbrowser.open(path.as_uri()):
        print("no browser could be started: open the file by hand", file=out)


# %% nbs/6_serving/01_cli.ipynb #_loading
class _loading:
    """Say on a terminal that the model is being loaded: the first second or two are silent otherwise."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = args.model

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            print(f"Loading {self.model} ...", file=sys.stderr)

    def __exit__(self, *error: object) -> None:
        pass


# %% nbs/6_serving/01_cli.ipynb #make_parser
def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from minivllm import __version__

    parser = argparse.ArgumentParser(prog="minivllm", description="vLLM made small enough to read.")
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    complete = commands.add_parser("complete", help="complete a text")
    complete.add_argument("prompt", help="the text; - reads it from standard input")
    complete.add_argument("--n", type=int, default=1, help="number of completions (default: 1)")
    complete.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="print as it comes")
    complete.set_defaults(run=run_complete)

    chat = commands.add_parser(
        "chat", help="talk with a model", epilog=CHAT_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.set_defaults(run=run_chat)
    for command, max_tokens in ((complete, 64), (chat, 512)):
        add_sampling_arguments(command, max_tokens)
        add_engine_arguments(command)
        remote = command.add_argument_group("server", "ask a running server instead of an engine here")
        remote.add_argument("--url", help="of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
        remote.add_argument("--model-name", metavar="NAME", help="one of its models (default: its first)")
        remote.add_argument("--api-key", metavar="KEY", help="its key")
        remote.add_argument("--insecure", action="store_true", help="do not check its certificate")
        command.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins")

    demo = commands.add_parser("demo", help="answer four questions at once and show what the scheduler did")
    demo.add_argument("--model", default="smollm2", help="alias, folder, .gguf file or hub id (default: smollm2)")
    demo.add_argument("--dtype", default="auto", help="of weights and activations (default: auto)")
    demo.add_argument("--max-tokens", type=int, default=48, help="most tokens of an answer (default: 48)")
    demo.set_defaults(run=run_demo_command)

    collect = commands.add_parser("collect-env", help="print versions and facts for a bug report")
    collect.set_defaults(run=run_collect_env)
    trace = commands.add_parser("trace", help="look at a recorded run")
    doings = trace.add_subparsers(dest="doing", required=True, metavar="view")
    view = doings.add_parser(
        "view", help="open a saved trace in the browser: blocks, queues and prefixes, step by step"
    )
    view.add_argument("file", type=Path, help="what trace.save() wrote: .jsonl or .parquet")
    view.add_argument("--output", type=Path, metavar="FILE", help="where the page goes (default: a temporary file)")
    view.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=True, help="open the page in the browser"
    )
    view.add_argument("--tokenizer", metavar="MODEL", help="show tokens as text, with this model's tokenizer")
    view.set_defaults(run=run_trace_view)
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
            return run_elsewhere(place[0], place[1:])
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


# %% nbs/6_serving/01_cli.ipynb #code-6f470b
if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
