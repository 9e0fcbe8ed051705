"""What does a step of the sampler cost? 256 requests, against torch.softmax + torch.multinomial on the same logits.

    python benchmarks/sampler.py [--rows 256] [--rounds 3] [--device cpu] [--vocab 49152 151936]

A row of the table: the wishes of all requests; milliseconds of a step (the best round); the ratio to the same work by
torch's two calls (the goal for plain requests is at most 1.5). `state` is the bookkeeping of a step: taking the batch
and appending the tokens. Logits: probabilities fall like rank**-1.5 in a random order, about what a language model
says; for "flat", all tokens are nearly equally likely, the worst case of top-p.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import SamplingBatch, SamplingState

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
WISHES = {
    "greedy": [{"temperature": 0}],
    "plain": [{}],
    "temperature": [{"temperature": 0.8}],
    "top-k 50": [{"temperature": 0.8, "top_k": 50}],
    "top-p 0.95": [{"temperature": 0.8, "top_p": 0.95}],
    "top-k 50, top-p 0.95": [{"temperature": 0.8, "top_k": 50, "top_p": 0.95}],
    "min-p 0.05": [{"temperature": 0.8, "min_p": 0.05}],
    "penalties, 1,000 tokens": [PENALTIES],
    "logprobs 5": [{"logprobs": 5}],
    "a mix of these": [
        {"temperature": 0},
        {"temperature": 0.8},
        {"top_k": 50},
        {"top_p": 0.95},
        {"min_p": 0.05} | PENALTIES,
    ],
    "flat, top-p 0.95": [{"top_p": 0.95}],
}


def falling_logits(rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ranked = -1.5 * torch.arange(1, vocab_size + 1).log()
    return torch.stack([ranked[torch.randperm(vocab_size, generator=generator)] for _ in range(rows)])


def flat_logits(rows: int, vocab_size: int) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 0.5


def new_batch(wishes: list[dict], rows: int, vocab_size: int, device: str) -> SamplingBatch:
    state, names = SamplingState(rows, vocab_size, device), [str(i) for i in range(rows)]
    for i, name in enumerate(names):
        prompt = [(i * 7919 + j * 104_729) % vocab_size for j in range(1000)]
        state.add(name, SamplingParams(**wishes[i % len(wishes)]), prompt, [], seed=i)
    return state.batch(names)


def best(function: Callable[[], object], before: Callable[[], object], rounds: int, device: str) -> float:
    """Seconds of the fastest of `rounds` calls after one to warm up; `before` runs ahead of each, untimed."""
    times = []
    for _ in range(rounds + 1):
        before()
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def state_step(batch: SamplingBatch) -> None:
    again = batch.state.batch(batch.request_ids)
    for name in again.request_ids:
        batch.state.append(name, 17)


def measure(vocab_size: int, rows: int, rounds: int, device: str) -> None:
    """Print the table of one vocabulary."""
    falling = falling_logits(rows, vocab_size).to(device)
    flat = flat_logits(rows, vocab_size).to(device)
    logits = torch.empty_like(falling)

    def by_torch() -> Tensor:
        return torch.multinomial(torch.softmax(logits, -1), 1)

    torch_seconds = best(by_torch, lambda: logits.copy_(falling), rounds, device)
    print(f"\nvocabulary {vocab_size:,}\n{'':26}{'ms a step':>10}{'ratio':>8}{'state, ms':>11}")
    print(f"{'torch softmax+multinomial':26}{torch_seconds * 1e3:10.1f}{1:8.2f}")
    for name, wishes in WISHES.items():
        source = flat if name.startswith("flat") else falling
        batch, sampler = new_batch(wishes, rows, vocab_size, device), Sampler()
        seconds = best(partial(sampler, logits, batch), partial(logits.copy_, source), rounds, device)
        bookkeeping = best(partial(state_step, batch), lambda: None, rounds, "cpu")
        print(f"{name:26}{seconds * 1e3:10.1f}{seconds / torch_seconds:8.2f}{bookkeeping * 1e3:11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    args = parser.parse_args()
    print(f"{args.rows} requests on {args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for vocab_size in args.vocab:
        measure(vocab_size, args.rows, args.rounds, args.device)


if __name__ == "__main__":
    main()
