"""Command `minivllm complete`: stream the completion of one text."""

# Generated from nbs/commands/complete.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from minivllm.commands import flags
from minivllm.commands.flags import connect, request_fields, sampling_params_from, say_loading
from minivllm.engine.arguments import engine_args_from

__all__ = ["stream_answer"]

if TYPE_CHECKING:
    from minivllm.engine.llm_engine import LLMEngine
    from minivllm.sampling.params import SamplingParams


def stream_answer(engine: LLMEngine, prompt: Any, params: SamplingParams) -> Iterator[str]:
    """Yield the pieces of one answer. KeyboardInterrupt or an abandoned generator aborts the request.

    Raises:
        ValueError: a bad prompt or parameter. RuntimeError: the request failed.
    """
    from minivllm.engine.llm import deferred_interrupts
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


_BETWEEN = "\n" + "-" * 8 + "\n"


def run_complete(args: argparse.Namespace, out: TextIO) -> None:
    """Print completions of one text."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    texts, streams = [""] * args.n, args.stream and args.n == 1
    if args.url is None:
        pieces = _complete_here(args, prompt)
    else:
        pieces = connect(args).complete(prompt, n=args.n, **request_fields(args))
    for index, piece in pieces:
        texts[index] += piece
        if streams:
            print(piece, end="", file=out, flush=True)
    print("" if streams else _BETWEEN.join(texts), file=out)


def _complete_here(args: argparse.Namespace, prompt: str) -> Iterator[tuple[int, str]]:
    """Pieces of the completions, each with the number of its completion."""
    from minivllm.engine.llm import LLM

    say_loading(args.model)
    with LLM.from_engine_args(engine_args_from(args)) as llm:
        params = sampling_params_from(args, llm.get_default_sampling_params(), n=args.n)
        if args.stream and args.n == 1:
            yield from ((0, piece) for piece in stream_answer(llm.llm_engine, prompt, params))
            return
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        if output.error is not None:
            raise RuntimeError(output.error)
        yield from ((completion.index, completion.text) for completion in output.outputs)


def add_parser(commands: Any) -> None:
    """The flags of `minivllm complete`. ``commands``: what argparse's `add_subparsers` gives."""
    parser = commands.add_parser("complete", help="complete a text")
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    parser.add_argument("--n", type=int, default=1, help="number of completions (default: 1)")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="print as it comes")
    flags.add_answer_arguments(parser, max_tokens=64)
    parser.set_defaults(run=run_complete)
