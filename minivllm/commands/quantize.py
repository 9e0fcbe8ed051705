"""Command `minivllm quantize`: write a model with fewer bits."""

# Generated from nbs/commands/quantize.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
from pathlib import Path
from typing import Any, TextIO

from minivllm.commands.flags import say_loading

COMPRESSED_FORMATS = ("int4", "int8", "fp8")
FORMATS = (*COMPRESSED_FORMATS, "gguf-q8_0", "gguf-q4_0")


def run_quantize(args: argparse.Namespace, out: TextIO) -> None:
    """Round a model's weights, and write them."""
    from minivllm.models.loading import load_model
    from minivllm.models.quantization.writers import write_compressed, write_gguf

    if args.group_size is not None and args.format != "int4":
        raise ValueError(f"--group-size goes with --format int4, not with {args.format}")
    say_loading(args.model)
    model, target = load_model(args.model), Path(args.output)
    if args.format in COMPRESSED_FORMATS:
        write_compressed(model, target, args.format, args.group_size)
    else:
        target = target if target.suffix == ".gguf" else target / f"{target.name}.gguf"
        write_gguf(model, target, args.format)
    files = [target] if target.is_file() else list(target.glob("*.safetensors"))
    print(f"{target}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB of weights", file=out)


def add_parser(commands: Any) -> None:
    """Add the command to those of `minivllm`."""
    parser = commands.add_parser("quantize", help="write a model with fewer bits, for vLLM or llama.cpp too")
    parser.add_argument("model", help="alias, folder or hub id of a model that is not quantized")
    parser.add_argument("output", help="folder to write; or a .gguf file, in a folder that is empty")
    parser.add_argument("--format", choices=FORMATS, required=True, help="int4, int8 and fp8 are compressed-tensors")
    parser.add_argument(
        "--group-size", type=int, help="inputs that share a scale, for int4 (default: the largest that fits)"
    )
    parser.set_defaults(run=run_quantize)
