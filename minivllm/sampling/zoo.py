"""Further samplers: typical-p, top-n-sigma, XTC, DRY, Mirostat."""

# Generated from nbs/sampling/zoo.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.params import integer, real
from minivllm.sampling.random import as_seed, uniforms
from minivllm.sampling.state import RequestView
from minivllm.sampling.transforms import register_transform

__all__ = ["DRY", "XTC", "Mirostat", "TopNSigma", "TypicalP"]

NEVER = -math.inf


class TypicalP:
    """Keeps the tokens whose surprise is nearest to the entropy, up to a mass in (0, 1]."""

    after = "temperature"

    def __init__(self, mass: float) -> None:
        self.mass = real(0, 1, above=True).check("mass", mass)

    def __call__(self, logits: Tensor, view: RequestView) -> Tensor:
        logp = torch.log_softmax(logits, -1)
        entropy = -(logp.exp() * logp).nansum()
        order = (-logp - entropy).abs().argsort()
        mass = logp[order].exp().cumsum(0)
        last = int((mass < self.mass).sum())
        logits[order[last + 1 :]] = NEVER
        return logits


class TopNSigma:
    """Keeps logits within n standard deviations below the largest."""

    def __init__(self, n: float) -> None:
        self.n = real(0).check("n", n)

    def __call__(self, logits: Tensor, view: RequestView) -> Tensor:
        sigma = logits[logits > NEVER].std(correction=0)
        return logits.masked_fill_(logits < logits.max() - self.n * sigma, NEVER)


class XTC:
    """With the given probability, forbids every token above the threshold but the least likely of them."""

    after = "temperature"

    def __init__(self, threshold: float = 0.1, probability: float = 0.5) -> None:
        self.threshold = real(0, 1).check("threshold", threshold)
        self.probability = real(0, 1).check("probability", probability)

    def __call__(self, logits: Tensor, view: RequestView) -> Tensor:
        seed = as_seed(view.seed ^ 0x587443)  # another stream than the draw's
        u = uniforms(np.array([seed]), np.array([len(view.output_token_ids)]))[0]
        p = torch.softmax(logits, -1)
        likely = torch.nonzero(p >= self.threshold)[:, 0]
        if u < self.probability and len(likely) > 1:
            logits[likely[likely != likely[p[likely].argmin()]]] = NEVER
        return logits


class DRY:
    """Subtracts multiplier * base ** (n - allowed_length) from a token that would extend a repetition of n tokens.

    breakers: token ids that no repetition reaches across (the end of a line, the marks of a chat turn).
    """

    def __init__(
        self, multiplier: float = 0.8, base: float = 1.75, allowed_length: int = 2, breakers: Collection[int] = ()
    ) -> None:
        self.multiplier, self.base = real(0).check("multiplier", multiplier), real(0, above=True).check("base", base)
        self.allowed_length, self.breakers = integer(1).check("allowed_length", allowed_length), set(breakers)

    def __call__(self, logits: Tensor, view: RequestView) -> Tensor:
        ids = [*view.prompt_token_ids, *view.output_token_ids]
        longest: dict[int, int] = {}
        for end in range(len(ids) - 1):  # ids[end] is where an earlier occurrence of the last tokens may end
            n = 0
            while n <= end and ids[end - n] == ids[-1 - n] and ids[end - n] not in self.breakers and n < 50:
                n += 1
            if n >= self.allowed_length:
                longest[ids[end + 1]] = max(n, longest.get(ids[end + 1], 0))
        for token, n in longest.items():
            logits[token] -= self.multiplier * self.base ** (n - self.allowed_length)
        return logits


class Mirostat:
    """Holds the average surprise near tau bits. eta: how fast the limit mu is corrected."""

    after = "temperature"

    def __init__(self, tau: float = 5.0, eta: float = 0.1) -> None:
        self.tau, self.eta = real(0, above=True).check("tau", tau), real(0).check("eta", eta)
        self._memory: dict[str, tuple[float, Tensor]] = {}

    def __call__(self, logits: Tensor, view: RequestView) -> Tensor:
        mu, before = self._memory.pop(view.request_id, (2 * self.tau, None))
        if before is not None and view.output_token_ids:
            mu -= self.eta * (float(before[view.output_token_ids[-1]]) - self.tau)
        surprise = torch.log_softmax(logits, -1) / -math.log(2)
        logits = logits.masked_fill_(surprise > max(mu, float(surprise.min())), NEVER)
        left = torch.log_softmax(logits, -1) / -math.log(2)
        self._memory[view.request_id] = (mu, left)
        if len(self._memory) > 1024:  # of requests that ended long ago
            self._memory.pop(next(iter(self._memory)))
        return logits


register_transform("typical", TypicalP)
register_transform("top_n_sigma", TopNSigma)
register_transform("xtc", XTC)
register_transform("dry", DRY)
register_transform("mirostat", Mirostat)
