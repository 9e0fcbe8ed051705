"""Helpers of the sampling tests: a batch from parameters, and the logits that the draw sees."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler, SamplerOutput
from minivllm.sampling.state import SamplingBatch, SamplingState


def make_batch(
    params: Sequence[SamplingParams],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
    matchers: Sequence | None = None,
) -> SamplingBatch:
    """A batch of requests named "0", "1", ...; request i has the seed i unless its parameters say another."""
    state = SamplingState(len(params), vocab_size)
    ids = [str(i) for i in range(len(params))] if names is None else list(names)
    for i, name in enumerate(ids):
        prompt = prompts[i] if prompts else [0]
        output = outputs[i] if outputs else []
        state.add(name, params[i], prompt, output, i, matchers[i] if matchers else None)
    return state.batch(ids)


def processed(
    logits: Tensor, params: SamplingParams | Sequence[SamplingParams], sampler: Sampler | None = None, **batch: Sequence
) -> Tensor:
    """The logits [R, V] after all transforms, just before the draw; the given ones stay as they are."""
    several = [params] * len(logits) if isinstance(params, SamplingParams) else params
    seen: list[Tensor] = []
    run = sampler or Sampler()
    run(logits.clone(), make_batch(several, logits.shape[1], **batch), lambda name, x: seen.append(x.clone()))
    return seen[-1]


def sample(logits: Tensor, params: Sequence[SamplingParams], **batch: Sequence) -> SamplerOutput:
    """One step of a fresh sampler; the given logits stay as they are."""
    return Sampler()(logits.clone(), make_batch(params, logits.shape[1], **batch))


def spread(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Random logits."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
