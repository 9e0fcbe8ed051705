"""Does batching pay? 64 requests together, against one by one, against transformers' padded batch, in one run.

    python benchmarks/throughput.py [--model smollm2] [--dtype float32] [--requests 64] [--rounds 1]

All greedy, the same weights, prompts and output lengths, end tokens ignored. Only tokens that were asked for count: a padded batch
computes more. The three take turns, and the median round of each is shown. One by one runs a quarter of the requests
(a rate needs no more).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams


def make_requests(tokenizer, count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """(prompt of 16 to 128 tokens, output length of 16 to 64 tokens), drawn from a fixed seed."""
    text = "In the beginning the machine was slow, and the people waited. Then somebody thought of batching, and it was good. "
    book, rng = tokenizer.encode(text * 40), random.Random(seed)
    requests = []
    for _ in range(count):
        length, start = rng.randint(16, 128), rng.randrange(500)
        requests.append((book[start : start + length], rng.randint(16, 64)))
    return requests


def run_ours(llm: LLM, requests: list[tuple[list[int], int]]) -> int:
    """All requests in one call; returns the output tokens."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    return sum(len(out.outputs[0].token_ids) for out in outputs)


def run_one_by_one(llm: LLM, requests: list[tuple[list[int], int]]) -> int:
    return sum(run_ours(llm, [request]) for request in requests)


@torch.inference_mode()
def run_padded(model, requests: list[tuple[list[int], int]]) -> int:
    """transformers: one batch, padded on the left, run until the longest output is done."""
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(requests):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    new = max(n for _, n in requests)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    assert out.shape == (len(requests), longest + new)
    return sum(n for _, n in requests)


def measure(run: Callable[[], int]) -> float:
    """Output tokens per second."""
    start = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=512,
        max_num_seqs=args.requests,
        num_gpu_blocks=12 * args.requests + 33,
    )
    model = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=getattr(torch, args.dtype)).eval()
    requests = make_requests(llm.get_tokenizer(), args.requests)
    runs: dict[str, Callable[[], int]] = {
        "minivllm, one by one": lambda: run_one_by_one(llm, requests[: max(1, args.requests // 4)]),
        "minivllm, all together": lambda: run_ours(llm, requests),
        "transformers generate, padded batch": lambda: run_padded(model, requests),
    }
    run_ours(llm, requests[:2])  # whatever is done once, is done now
    run_padded(model, [(prompt, 2) for prompt, _ in requests[:2]])
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            rates[name].append(measure(run))

    single = statistics.median(rates["minivllm, one by one"])
    tokens = sum(n for _, n in requests)
    print(
        f"{args.requests} requests, {sum(len(p) for p, _ in requests)} prompt tokens, {tokens} output tokens, {args.dtype},"
    )
    print(f"attention {llm.config.attention_backend}, {torch.get_num_threads()} threads, median of {args.rounds}\n")
    print(f"{'':38}{'output tok/s':>14}{'ratio':>8}")
    for name, found in rates.items():
        rate = statistics.median(found)
        print(f"{name:38}{rate:14.1f}{rate / single:8.2f}")


if __name__ == "__main__":
    main()
