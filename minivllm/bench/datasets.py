"""Benchmark requests: random prompts, shared prefixes and workload files."""

# Generated from nbs/bench/datasets.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO

import numpy as np

from minivllm.lab.readers import read_sharegpt, read_workload

_DATASETS = ("random", "sharegpt", "prefix_repetition", "workload")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send. ``arrival_time``: seconds from the beginning, if the dataset says when; None: whenever you like."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_time: float | None = None


def ordinary_tokens(tokenizer: Any) -> np.ndarray:
    """The token ids of a vocabulary that are no special tokens."""
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return np.array([token for token in range(len(tokenizer)) if token not in special])


def random_samples(
    tokens: np.ndarray, count: int, input_len: int, output_len: int, *,
    range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0,
) -> list[Sample]:  # fmt: skip
    """Independent random prompts behind one common prefix; lengths uniform in length * (1 - ratio) to length * (1 + ratio).

    Raises:
        ValueError: a ratio outside [0, 1), or a length below 1.
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"range_ratio must be in [0, 1), got {range_ratio}")
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise ValueError(f"lengths must be at least 1 (a prefix 0), got {input_len}, {output_len}, {prefix_len}")
    generator = np.random.default_rng(seed)

    def draw(length: int) -> int:
        low, high = int(length * (1 - range_ratio)), int(np.ceil(length * (1 + range_ratio)))
        return max(1, int(generator.integers(low, high + 1)))

    prefix = generator.choice(tokens, prefix_len).tolist()
    return [Sample(prefix + generator.choice(tokens, draw(input_len)).tolist(), draw(output_len)) for _ in range(count)]


def prefix_repetition_samples(
    tokens: np.ndarray, count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, *,
    seed: int = 0,
) -> list[Sample]:  # fmt: skip
    """Prompts that share one of a few beginnings, in random order."""
    if min(count, prefix_len, suffix_len, num_prefixes, output_len) < 1:
        raise ValueError("lengths and counts of prefix_repetition must be at least 1")
    generator = np.random.default_rng(seed)
    prefixes = [generator.choice(tokens, prefix_len).tolist() for _ in range(num_prefixes)]
    prompts = [prefixes[i % num_prefixes] + generator.choice(tokens, suffix_len).tolist() for i in range(count)]
    return [Sample(prompts[i], output_len) for i in generator.permutation(count)]


def _file_samples(
    name: str, path: str, count: int, tokens: np.ndarray, tokenize: Callable[[str], Sequence[int]],
    output_len: int | None = None,
) -> Iterator[Sample]:  # fmt: skip
    """The first ``count`` requests of a file. ``output_len``: instead of the file's own answers' lengths.

    Raises:
        FileNotFoundError; WorkloadFileError: a broken file, or of no known format.
    """
    workload = read_sharegpt(path, tokenize) if name == "sharegpt" else read_workload(path, tokenize=tokenize)
    for request in islice(workload, count):
        ids = np.asarray(request.prompt_token_ids(), dtype=np.int64)
        if name != "sharegpt":
            ids = tokens[ids % len(tokens)]
        moment = None if name == "sharegpt" else request.arrival_time
        yield Sample(ids.tolist(), output_len or request.num_output_tokens, moment)


def add_dataset_arguments(parser: argparse.ArgumentParser, num_prompts: int = 1000) -> None:
    """vLLM's flags for datasets, and ``workload`` for the files that the lab reads."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=_DATASETS, default="random", help="(default: random)")
    files = "for sharegpt and workload (Azure, Mooncake, BurstGPT, traces, results)"
    group.add_argument("--dataset-path", metavar="FILE", help=files)
    group.add_argument("--num-prompts", type=int, default=num_prompts, help=f"requests (default: {num_prompts})")
    group.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    for flag, default, text in (
        ("--random-input-len", 1024, "tokens of a prompt"),
        ("--random-output-len", 128, "tokens of an answer"),
        ("--random-prefix-len", 0, "tokens that all prompts begin with"),
        ("--sharegpt-output-len", None, "tokens of an answer, instead of the file's"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared beginning"),
        ("--prefix-repetition-suffix-len", 256, "tokens that follow it"),
        ("--prefix-repetition-num-prefixes", 10, "beginnings"),
        ("--prefix-repetition-output-len", 128, "tokens of an answer"),
    ):
        group.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")
    spread = "spread of random lengths, 0 to below 1 (default: 0)"
    group.add_argument("--random-range-ratio", type=float, default=0.0, help=spread)


def samples_for(args: argparse.Namespace, tokenizer: Any, max_model_len: int, out: TextIO) -> list[Sample]:
    """The requests that the flags ask for. Says in ``out`` how many were left out because they are too long.

    Raises:
        ValueError: flags that do not go together, or no request is left.
    """
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    from_file = args.dataset_name in ("sharegpt", "workload")
    if from_file != (args.dataset_path is not None):
        use = "needed" if from_file else "not used"
        raise ValueError(f"--dataset-path is {use} with --dataset-name {args.dataset_name}")
    tokens = ordinary_tokens(tokenizer)
    if args.dataset_name == "random":
        made = random_samples(
            tokens, args.num_prompts, args.random_input_len, args.random_output_len,
            range_ratio=args.random_range_ratio, prefix_len=args.random_prefix_len, seed=args.seed,
        )  # fmt: skip
    elif args.dataset_name == "prefix_repetition":
        made = prefix_repetition_samples(
            tokens, args.num_prompts, args.prefix_repetition_prefix_len, args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes, args.prefix_repetition_output_len, seed=args.seed,
        )  # fmt: skip
    else:
        length = args.sharegpt_output_len if args.dataset_name == "sharegpt" else None
        made = list(_file_samples(
            args.dataset_name, args.dataset_path, args.num_prompts, tokens,
            lambda text: tokenizer.encode(text, add_special_tokens=False), length,
        ))  # fmt: skip
    kept = [sample for sample in made if len(sample.prompt_token_ids) + sample.output_len <= max_model_len]
    if not kept:
        raise ValueError(f"no request of the dataset fits into {max_model_len} tokens, prompt and answer together")
    if len(kept) < len(made):
        print(f"{len(made) - len(kept)} requests are too long for the model and were left out", file=out)
    return kept
