"""Command `minivllm quantize`: write a model with fewer bits."""

# Generated from nbs/commands/quantize.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from minivllm.commands.flags import say_loading

COMPRESSED_FORMATS = ("int4", "int8", "fp8")
FORMATS = (*COMPRESSED_FORMATS, "gguf-q8_0", "gguf-q4_0")


def run_quantize(args: argparse.Namespace, out: TextIO) -> None:
    """Round a model's weights, and write them."""
    from minivllm.models.loading import load_model
    from minivllm.models.quantization.writers import write_compressed, write_gguf

    for flag, value in (("--group-size", args.group_size), ("--calibration", args.calibration)):
        if value is not None and args.format != "int4":
            raise ValueError(f"{flag} goes with --format int4, not with {args.format}")
    say_loading(args.model)
    model, target = load_model(args.model), Path(args.output)
    if args.format in COMPRESSED_FORMATS:
        longest, calibration = model.spec.max_model_len, None
        if args.calibration is not None:
            calibration = partial(_by_gptq, args.model, longest, args.calibration)
        write_compressed(model, target, args.format, args.group_size, calibration)
    else:
        target = target if target.suffix == ".gguf" else target / f"{target.name}.gguf"
        write_gguf(model, target, args.format)
    files = [target] if target.is_file() else list(target.glob("*.safetensors"))
    print(f"{target}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB of weights", file=out)


TEXT_LENGTH = 512
"""Most tokens of a calibration text that are read together; what is left over at its end is not read."""


def _by_gptq(model: str, longest: int, file: Path, group: int) -> Mapping[str, Any]:
    """The weights of a model, which takes texts of this many tokens, rounded by GPTQ for what it reads in a text."""
    from minivllm.engine.llm import LLM
    from minivllm.models.quantization.gptq import calibrate
    from minivllm.sampling.params import SamplingParams

    length = min(TEXT_LENGTH, longest - 1)
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": length, "max_model_len": length + 1}
    plain: dict[str, Any] = {"attention_backend": "sdpa", "enforce_eager": True, "enable_prefix_caching": False}
    with LLM(model, **limits, **plain) as llm:
        text, tokenizer = file.read_text(encoding="utf-8"), llm.get_tokenizer()
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        pieces = [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
        if not pieces:
            raise ValueError(f"{file} has {len(tokens)} tokens; a calibration text needs at least {length}")
        prompts: list[Any] = [{"prompt_token_ids": piece} for piece in pieces]

        def read() -> None:
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)

        return calibrate(llm.llm_engine.core.executor.runner.model, read, group)  # type: ignore[attr-defined]


def add_parser(commands: Any) -> None:
    """Add the command to those of `minivllm`."""
    parser = commands.add_parser("quantize", help="write a model with fewer bits, for vLLM or llama.cpp too")
    parser.add_argument("model", help="alias, folder or hub id of a model that is not quantized")
    parser.add_argument("output", help="folder to write; or a .gguf file, in a folder that is empty")
    parser.add_argument("--format", choices=FORMATS, required=True, help="int4, int8 and fp8 are compressed-tensors")
    parser.add_argument(
        "--group-size", type=int, help="inputs that share a scale, for int4 (default: the largest that fits)"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        help="a text file: round by GPTQ for what the model reads in it, for int4 (default: to the nearest)",
    )
    parser.set_defaults(run=run_quantize)
