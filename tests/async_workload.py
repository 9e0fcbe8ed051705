"""Requests of all kinds, drawn at random, and what of their outputs must be the same in two runs."""

import random

import torch

from minivllm import SamplingParams
from minivllm.sampling.params import StructuredOutputsParams


def wishes(rng, i):
    """Parameters of all kinds, those that look back at the output among them."""
    common = {"max_tokens": rng.randint(1, 24), "seed": i, "ignore_eos": rng.random() < 0.7}
    return (
        rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0.8, "top_p": 0.9},
                {"temperature": 1.2, "top_k": 5, "min_tokens": 1, "stop_token_ids": list(range(0, 250, 5))},
                {"temperature": 0, "repetition_penalty": 1.6, "frequency_penalty": 0.7},
                {"temperature": 1.0, "stop": ["a", "7"], "logprobs": 2},
                {"temperature": 0.9, "bad_words": ["ab", "x"], "prompt_logprobs": 1},
                {"temperature": 1.0, "n": 2},
                {"temperature": 0.7, "structured_outputs": StructuredOutputsParams(regex="[a-f]{3,9}")},
                {"temperature": 0.7, "logits_processors": [no_repeats]},
            ]
        )
        | common
    )


def no_repeats(logits, view):
    for token in view.output_token_ids[-3:]:
        logits[token] = -torch.inf
    return logits


def workload(seed, count=14):
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(20)]
    prompts = [shared[: rng.randint(0, 20)] + [rng.randrange(250) for _ in range(rng.randint(1, 30))] for _ in range(count)]  # fmt: skip
    return prompts, [SamplingParams(**wishes(rng, i)) for i in range(count)]


def summary(outputs):
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason, near(c.logprobs)) for c in out.outputs]
        + [near(out.prompt_logprobs)]
        for out in outputs
    ]


def near(reports):
    return reports and [r and {t: round(lp.logprob, 3) for t, lp in r.items()} for r in reports]
