"""How does a flag become a setting?

Every command that starts an engine takes the same flags.
"""

# Generated from nbs/5_engine/17_arguments.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=753dc1944f3b module=12bc88cc01df

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from minivllm.core.config import EngineArgs

__all__ = ["add_engine_arguments", "engine_args_from"]


# %% nbs/5_engine/17_arguments.ipynb #add_engine_arguments
_PARSERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "dict[str, Any]": json.loads}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of EngineArgs."""
    group = parser.add_argument_group("engine")
    for f in fields(EngineArgs):
        flag, help_text = "--" + f.name.replace("_", "-"), f"{f.metadata['help']} (default: {f.default})"
        kind = str(f.type).removesuffix(" | None")
        if kind == "bool":
            group.add_argument(flag, default=f.default, action=argparse.BooleanOptionalAction, help=f.metadata["help"])
            continue
        choices = f.metadata["choices"] or None
        group.add_argument(
            flag,
            default=f.default,
            type=_PARSERS[kind],
            choices=choices,
            metavar=None if choices else f.name.upper(),
            help=help_text.replace("%", "%%"),
        )


def engine_args_from(args: argparse.Namespace) -> EngineArgs:
    """The EngineArgs that the flags say."""
    return EngineArgs(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)})
