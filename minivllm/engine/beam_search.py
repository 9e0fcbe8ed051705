"""Beam search over token continuations."""

# Generated from nbs/engine/beam_search.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.engine.outputs import RequestOutput
from minivllm.sampling.params import BeamSearchParams, SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One continuation.

    tokens: prompt and continuation; the end token only with ``include_stop_str_in_output``. cum_logprob: of the continuation, end token included.
    score: what beams are ranked by. text: of ``tokens``, empty without a tokenizer. finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class Beams:
    """The search for one prompt. ``running``: (generated tokens, their log-probability), best first."""

    prompt: list[int]
    params: BeamSearchParams
    max_tokens: int
    end_ids: frozenset[int]
    running: list[tuple[list[int], float]] = field(default_factory=lambda: [([], 0.0)])
    finished: list[BeamSearchSequence] = field(default_factory=list)
    done: bool = False

    @property
    def num_candidates(self) -> int:
        """Continuations to look at in a step; each running beam must offer this many."""
        return num_candidates(self.params.beam_width, self.end_ids)

    def advance(self, logprobs: Sequence[dict[int, float]]) -> None:
        """Go on by one token. ``logprobs``: for each running beam the likeliest next tokens."""
        width, length = self.params.beam_width, len(self.running[0][0]) + 1
        candidates = [
            (total + logprob, tokens, token)
            for (tokens, total), offers in zip(self.running, logprobs, strict=True)
            for token, logprob in offers.items()
        ]
        candidates.sort(key=lambda c: -c[0])  # stable: of equal scores the better beam's first
        self.running = []
        for rank, (total, tokens, token) in enumerate(candidates[: self.num_candidates]):
            ends = token in self.end_ids
            if not ends and length < self.max_tokens:
                self.running.append(([*tokens, token], total))
            elif rank < width:
                self.finished.append(self._finish(tokens, token, total, ends))
        del self.running[width:]
        self.finished = sorted(self.finished, key=lambda s: -s.score)[:width]
        self.done = not self.running or (
            len(self.finished) == width and self._score(self.running[0][1], length) <= self.finished[-1].score
        )

    def _score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty

    def _finish(self, tokens: list[int], token: int, total: float, ends: bool) -> BeamSearchSequence:
        kept = [*self.prompt, *tokens, *([token] if not ends or self.params.include_stop_str_in_output else [])]
        score = self._score(total, len(tokens) + 1)
        return BeamSearchSequence(kept, total, score, "stop" if ends else "length", token if ends else None)


def num_candidates(beam_width: int, end_ids: Iterable[int]) -> int:
    """Continuations that one step of the search looks at."""
    return max(2, 1 + len(set(end_ids))) * beam_width


Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


def search_beams(
    searches: Sequence[Beams], generate: Generate, after_step: Callable[[], object] = lambda: None
) -> None:
    """Run searches to their end, all together. ``generate(prompts, params)`` answers token-id prompts."""
    while live := [search for search in searches if not search.done]:
        prompts = [[*search.prompt, *tokens] for search in live for tokens, _ in search.running]
        outputs = iter(generate(prompts, _one_token(live[0])))
        for search in live:
            search.advance([_offers(next(outputs)) for _ in search.running])
        after_step()


def _one_token(search: Beams) -> SamplingParams:
    temperature = search.params.temperature
    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,  # the sampled token is not used, its log-probabilities are
        logprobs=search.num_candidates,
        logprobs_mode="processed_logprobs" if temperature else "raw_logprobs",
        ignore_eos=True,
        detokenize=False,
    )


def _offers(output: RequestOutput) -> dict[int, float]:
    completion = output.outputs[0]
    if completion.finish_reason == "error" or completion.logprobs is None:
        raise RuntimeError(f"beam search: a beam failed: {output.error}")
    return {token: entry.logprob for token, entry in completion.logprobs[0].items()}


def beam_search_output(search: Beams, tokenizer: Any | None) -> BeamSearchOutput:
    """The finished beams with their text."""
    if tokenizer is None:
        return BeamSearchOutput(search.finished)
    return BeamSearchOutput(
        [replace(s, text=tokenizer.decode(s.tokens, skip_special_tokens=True)) for s in search.finished]
    )
