"""Flags shared by the commands: sampling parameters, remote server, engine."""

# Generated from nbs/commands/flags.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from minivllm.engine.arguments import add_engine_arguments

if TYPE_CHECKING:
    from minivllm.sampling.params import SamplingParams
    from minivllm.serving.client import Remote

_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy; higher is more varied"),
    "top_p": (float, "keep the most likely tokens that together reach this probability"),
    "top_k": (int, "keep the k most likely tokens; 0 for all"),
    "min_p": (float, "keep tokens at least this times as likely as the most likely one"),
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
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=default, metavar=name.upper(), help=help_text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the sampling flags say, as fields of a request; also as SamplingParams names them."""
    given = {name: getattr(args, name) for name in [*_SAMPLING_FLAGS, "stop"] if getattr(args, name) is not None}
    return given | ({"ignore_eos": True} if args.ignore_eos else {})


def sampling_params_from(args: argparse.Namespace, defaults: SamplingParams, **more: Any) -> SamplingParams:
    """SamplingParams with what the flags say, over ``defaults``."""
    return defaults.clone(**request_fields(args), **more)


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that name a server."""
    group = parser.add_argument_group("server", "ask a running server instead of an engine here")
    group.add_argument("--url", help="of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    group.add_argument("--model-name", metavar="NAME", help="one of its models (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help="its key")
    group.add_argument("--insecure", action="store_true", help="do not check its certificate")


def add_answer_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """The flags of a command that gets answers from an engine here, or from a server."""
    add_sampling_arguments(parser, max_tokens)
    add_engine_arguments(parser)
    add_remote_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins")


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


def say_loading(model: str) -> None:
    """On a terminal: the first second or two would be silent otherwise."""
    if sys.stderr.isatty():
        print(f"Loading {model} ...", file=sys.stderr)
