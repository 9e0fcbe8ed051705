"""Command `minivllm chat`: interactive conversation with a local or remote model."""

# Generated from nbs/commands/chat.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from minivllm.commands import flags
from minivllm.commands.complete import stream_answer
from minivllm.commands.flags import connect, request_fields, sampling_params_from, say_loading
from minivllm.engine.arguments import engine_args_from

if TYPE_CHECKING:
    from minivllm.engine.llm_engine import LLMEngine
    from minivllm.sampling.params import SamplingParams
    from minivllm.serving.client import Remote

_CHAT_HELP = """/help            this text
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

    def handle(self, line: str) -> bool:
        """Take one line of input. Returns False when the session is over."""
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/help":
            self.say(_CHAT_HELP)
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


class RemoteChatSession(ChatSession):
    """A conversation with a model of a server. ``fields``: of every request."""

    def __init__(self, remote: Remote, fields: dict[str, Any], out: TextIO, system: str | None = None) -> None:
        self.remote, self.fields, self.out, self.system = remote, fields, out, system
        self.reset()

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        return self.remote.chat(messages, **self.fields)


def _run_chat(args: argparse.Namespace, out: TextIO) -> None:
    """Talk with a model until the end of the input."""
    interactive = sys.stdin.isatty()
    if args.url is not None:
        _chat(RemoteChatSession(connect(args), request_fields(args), out, args.system), interactive, args.url)
        return
    from minivllm.engine.llm import LLM

    say_loading(args.model)
    with LLM.from_engine_args(engine_args_from(args)) as llm:
        params = sampling_params_from(args, llm.get_default_sampling_params())
        session = ChatSession(llm.llm_engine, params, out, args.system)
        _chat(session, interactive, f"{llm.config.model.name}, {llm.config.dtype} on {llm.config.device}")


def _chat(session: ChatSession, interactive: bool, with_whom: str) -> None:
    if interactive:
        import readline  # noqa: F401 - gives input() line editing and history

        session.say(f"{with_whom}. /help lists the commands.")
    session.run(input, "> " if interactive else "")


def add_parser(commands: Any) -> None:
    """The flags of `minivllm chat`. ``commands``: what argparse's `add_subparsers` gives."""
    parser = commands.add_parser(
        "chat", help="talk with a model", epilog=_CHAT_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    flags.add_answer_arguments(parser, max_tokens=512)
    parser.set_defaults(run=_run_chat)
