"""Command-line flags and YAML config files for EngineArgs."""

# Generated from nbs/engine/arguments.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import difflib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any

from minivllm.core.config import EngineArgs
from minivllm.core.plugins import load_plugins


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object. Raises ArgumentTypeError for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"it takes a JSON object such as '{{\"key\": 1}}', got {text!r}")
    return found


_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "dict": json_object}


_VLLM_FLAGS = {"num_gpu_blocks": ["--num-gpu-blocks-override"]}


"""Other names of flags, which vLLM's users know."""


def add_engine_arguments(parser: argparse.ArgumentParser, besides: Collection[str] = ()) -> None:
    """One flag for each field of EngineArgs, except those in ``besides``, which the command has itself."""
    load_plugins()  # they may add to the choices
    group = parser.add_argument_group("engine")
    for f in fields(EngineArgs):
        if f.name in besides:
            continue
        flags = ["--" + f.name.replace("_", "-"), *_VLLM_FLAGS.get(f.name, ())]
        help_text = f"{f.metadata['help']} (default: {f.default})"
        kind = str(f.type).removesuffix(" | None").partition("[")[0]
        if kind == "bool":
            group.add_argument(
                *flags, default=f.default, action=argparse.BooleanOptionalAction, help=f.metadata["help"]
            )
            continue
        choices = f.metadata["choices"] or None
        group.add_argument(
            *flags,
            default=f.default,
            type=_PARSERS[kind],
            choices=choices,
            metavar=None if choices else f.name.upper(),
            help=help_text.replace("%", "%%"),
        )


def engine_args_from(args: argparse.Namespace) -> EngineArgs:
    """The EngineArgs that the flags say."""
    return EngineArgs(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)})


def with_config(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """``argv`` followed by the flags of ``--config FILE.yaml``, except those that it has already: the command line wins.

    The file maps long flags, without the dashes in front, to values; `true` and `false` switch, a list gives several values.

    Raises:
        ValueError: no YAML, or a flag that the command does not have. OSError: no such file.
    """
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    asked.add_argument("--config")
    found, rest = asked.parse_known_args(list(argv))
    if found.config is None:
        return list(argv)
    command = _command(parser, rest)
    given = {_option(command, word.partition("=")[0]) for word in rest if word.startswith("--")}
    for key, value in _read_config(found.config).items():
        flag = "--" + str(key).replace("_", "-")
        action = command._option_string_actions.get(flag)
        if action is None or flag == "--config":
            near = difflib.get_close_matches(flag, command._option_string_actions, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0].removeprefix('--')!r}?" if near else ""
            raise ValueError(f"{found.config}: {command.prog} has no option {key!r}{hint}")
        if action not in given:
            rest += _words(flag, action, value)
    return rest


def _command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand that ``argv`` names, if there are subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for i, word in enumerate(argv):
                if word in action.choices:
                    return _command(action.choices[word], argv[i + 1 :])
    return parser


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """The action of a flag, or of an unambiguous beginning of one; None if there is none."""
    options = parser._option_string_actions
    matches = [word] if word in options else [option for option in options if option.startswith(word)]
    return options[matches[0]] if len(matches) == 1 else None


def _read_config(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if type(found) is not dict:
        raise ValueError(f"{path} must map flags to values, such as `port: 8000`; it holds {type(found).__name__}")
    return found


def _words(flag: str, action: argparse.Action, value: Any) -> list[str]:
    """A flag and its value as they would stand on the command line."""
    if isinstance(value, bool) and action.nargs == 0:
        off = [option for option in action.option_strings if option.startswith("--no-")]
        return [flag] if value else off[:1]
    if isinstance(value, list):
        if action.nargs is None:
            return [f"{flag}={item}" for item in value]
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
