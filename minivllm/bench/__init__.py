"""Command `minivllm bench`: serve, throughput and latency."""

# Generated from nbs/bench/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from minivllm.engine.arguments import add_engine_arguments, engine_args_from, with_config

__all__ = ["main", "make_parser"]


def _run_throughput(args: argparse.Namespace, out: TextIO) -> int:
    """`bench throughput`: all requests at once, offline. Returns the exit status."""
    from minivllm.bench.datasets import samples_for
    from minivllm.engine.llm import LLM
    from minivllm.sampling.params import SamplingParams

    if args.input_len is not None:
        args.random_input_len = args.input_len
    if args.output_len is not None:
        args.random_output_len = args.sharegpt_output_len = args.prefix_repetition_output_len = args.output_len
    common = {"ignore_eos": True, "temperature": args.temperature, "detokenize": not args.disable_detokenize}
    with LLM.from_engine_args(engine_args_from(args)) as llm:
        samples = samples_for(args, llm.get_tokenizer(), llm.config.scheduler.max_model_len, out)
        prompts = [sample.prompt_token_ids for sample in samples]
        params = [SamplingParams(max_tokens=sample.output_len, **common) for sample in samples]
        llm.generate(prompts[0], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)  # warm up
        llm.llm_engine.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - begin
    new = sum(len(output.outputs[0].token_ids) for output in outputs)
    total = new + sum(map(len, prompts))
    rates = {"requests": len(samples) / seconds, "total tokens": total / seconds, "output tokens": new / seconds}
    print("Throughput:", ", ".join(f"{rate:.2f} {what}/s" for what, rate in rates.items()), file=out)
    names = ("requests_per_second", "tokens_per_second", "output_tokens_per_second")
    result = {"elapsed_time": seconds, "num_requests": len(samples), "total_num_tokens": total}
    _write(args.output_json, result | dict(zip(names, rates.values(), strict=True)))
    return 0


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(result), encoding="utf-8")


_PERCENTILES = (10, 25, 50, 75, 90, 99)


def _run_latency(args: argparse.Namespace, out: TextIO) -> int:
    """`bench latency`: the time of one batch. Returns the exit status. Raises ValueError for counts below 1."""
    import numpy as np

    from minivllm.bench.datasets import ordinary_tokens, random_samples
    from minivllm.engine.llm import LLM
    from minivllm.sampling.params import SamplingParams

    if args.num_iters < 1 or args.num_iters_warmup < 0 or args.batch_size < 1:
        raise ValueError("--num-iters and --batch-size must be at least 1, --num-iters-warmup at least 0")
    with LLM.from_engine_args(engine_args_from(args)) as llm:
        tokens = ordinary_tokens(llm.get_tokenizer())
        samples = random_samples(tokens, args.batch_size, args.input_len, args.output_len, seed=args.seed)
        lengths = {"ignore_eos": True, "max_tokens": args.output_len}
        params = SamplingParams(n=args.n, temperature=1.0, detokenize=not args.disable_detokenize, **lengths)

        def once() -> float:
            llm.llm_engine.reset_prefix_cache()
            begin = time.perf_counter()
            llm.generate([sample.prompt_token_ids for sample in samples], params, use_tqdm=False)
            return time.perf_counter() - begin

        for _ in range(args.num_iters_warmup):
            once()
        seconds = np.array([once() for _ in range(args.num_iters)])
    found = {str(p): float(np.percentile(seconds, p)) for p in _PERCENTILES}
    print(f"Avg latency: {seconds.mean()} seconds", file=out)
    for name, value in found.items():
        print(f"{name}% percentile latency: {value} seconds", file=out)
    result = {"avg_latency": float(seconds.mean()), "latencies": seconds.tolist(), "percentiles": found}
    _write(args.output_json, result)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags of `minivllm bench`."""
    from minivllm.bench.datasets import add_dataset_arguments
    from minivllm.bench.serve import add_serve_arguments, run_serve

    parser = argparse.ArgumentParser(prog="minivllm bench", description="Measure an engine or a server.")
    commands = parser.add_subparsers(dest="measure", required=True, metavar="throughput | latency | serve")
    throughput = commands.add_parser("throughput", help="tokens a second of many requests at once")
    add_dataset_arguments(throughput)
    throughput.add_argument("--input-len", type=int, help="tokens of a random prompt")
    throughput.add_argument("--output-len", type=int, help="tokens of an answer")
    throughput.add_argument("--temperature", type=float, default=1.0, help="(default: 1)")
    throughput.set_defaults(run=_run_throughput)
    latency = commands.add_parser("latency", help="seconds of one batch")
    for flag, default, text in (
        ("--input-len", 32, "tokens of a prompt"), ("--output-len", 128, "tokens of an answer"), ("--batch-size", 8, "prompts"),
        ("--n", 1, "answers to a prompt"), ("--num-iters-warmup", 10, "runs before"), ("--num-iters", 30, "runs that count"),
    ):  # fmt: skip
        latency.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    latency.set_defaults(run=_run_latency)
    for command in (throughput, latency):
        command.add_argument("--output-json", metavar="FILE", help="write the result there")
        command.add_argument("--disable-detokenize", action="store_true", help="make no text")
        add_engine_arguments(command, besides=("seed",) if command is throughput else ())
    serve = commands.add_parser("serve", help="load a running server")
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)
    for command in (throughput, latency, serve):
        command.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `minivllm bench`; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(with_config(sys.argv[1:] if argv is None else argv, parser))
    return int(args.run(args, sys.stdout))
