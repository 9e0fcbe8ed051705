"""Settings of speculative decoding, and counters of drafted and accepted tokens."""

# Generated from nbs/core/speculative.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from minivllm.core.plugins import register

_ANY = ("method", "num_speculative_tokens", "dynamic_length", "rejection_sample_method", "synthetic_acceptance_rate")
_SUFFIX = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ngram", "ngram_gpu"), ("prompt_lookup_max", "prompt_lookup_min")),
    "suffix": tuple(f"suffix_decoding_{name}" for name in _SUFFIX),
    **dict.fromkeys(("draft_model", "medusa", "eagle", "eagle3"), ("model",)),
    **dict.fromkeys(("mtp", "synthetic"), ()),
}
NOT_DRAFTED = -1
"""Stands for a draft token that only the device knows, or that is missing."""
PROPOSERS: dict[str, Callable[[SpeculativeConfig], Any]] = {}
"""Classes or functions that make a proposer, for methods that do not ship with minivllm."""


def register_proposer(method: str, make: Callable[[SpeculativeConfig], Any]) -> None:
    """Let `speculative_config` name a method. `make`: gives an object with `propose(requests, view)`.

    Raises:
        ValueError: the name is taken.
        TypeError: `make` is neither a class nor a function.
    """
    if method in METHODS:
        raise ValueError(f"speculative method {method!r} exists already")
    register(PROPOSERS, "speculative method", method, make)
    METHODS[method] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and accepted. Names are vLLM's, except `dynamic_length` and the method `synthetic`.

    Attributes:
        method: a name of `METHODS`, or an object with `propose(requests, view)`. With `ngram_gpu` the GPU makes the drafts of `ngram` without the
            host, so that a step is launched before the tokens of the last one have reached the host.
        num_speculative_tokens: most draft tokens per request and step.
        model: draft model, for methods that have one: alias, folder or hub id.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that is looked up.
        suffix_decoding_max_tree_depth: most tokens of the suffix that is looked up and the draft that follows it, together.
        suffix_decoding_max_cached_requests: answers of earlier requests that are remembered; 0 for none.
        suffix_decoding_max_spec_factor: most draft tokens for each token of the match.
        suffix_decoding_min_token_prob: a draft ends where its estimated probability falls below this.
        dynamic_length: draft fewer tokens, or none, where the measured cost of a step and of the proposer is more than they will save;
            on by default, but never with `ngram_gpu` and synthetic acceptance.
        rejection_sample_method: `standard`, exact; or `synthetic`: drafts are accepted by chance, so texts are wrong.
        synthetic_acceptance_rate: the chance that a draft token is accepted, if all before it were.
    """

    method: Any
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 1000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    dynamic_length: bool = True
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rate: float | None = None

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> SpeculativeConfig:
        """Check what a user said. None, as null in JSON, is a value that is not given.

        Raises:
            TypeError: no dictionary, or a value of the wrong type.
            ValueError: a missing, unknown or misplaced name, or a value out of range.
        """
        if not isinstance(given, dict):
            raise TypeError(f"speculative_config must be a dict, got {given!r}")
        given = {name: value for name, value in given.items() if value is not None}
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"speculative_config has no entry {name!r}; {hint}")
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                raise ValueError(
                    f'speculative_config needs {name!r}, as in {{"method": "ngram", "num_speculative_tokens": 4}}'
                )
        chosen = given["method"]
        if isinstance(chosen, str) and chosen not in METHODS:
            raise ValueError(
                f"speculative_config method must be one of {', '.join(METHODS)}, or an object with propose(requests, view); got {chosen!r}"
            )
        if isinstance(chosen, type) or not isinstance(chosen, str) and not callable(getattr(chosen, "propose", None)):
            raise TypeError(
                f"speculative_config method must be a name or an object with propose(requests, view), got {chosen!r}"
            )
        own = METHODS[chosen] if isinstance(chosen, str) else ()
        for name in given:
            if name not in (*_ANY, *own):
                raise ValueError(
                    f"speculative_config entry {name!r} does not belong to method {chosen!r}; it has: {', '.join((*_ANY, *own))}"
                )
        if "model" in own and not isinstance(given.get("model"), str):
            got = repr(given["model"]) if "model" in given else "none"
            raise ValueError(f"speculative_config method {chosen!r} needs a 'model', a name or a folder; got {got}")
        fixed = chosen == "ngram_gpu" or "synthetic" in (chosen, given.get("rejection_sample_method"))
        config = cls(**{"dynamic_length": not fixed} | given)
        config._check_numbers()
        return config

    def _check_numbers(self) -> None:
        _whole("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        _whole("prompt_lookup_max", self.lookup[1], 1, 1000)
        _whole("prompt_lookup_min", self.lookup[0], 1, self.lookup[1])
        _whole("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 1000)
        _whole("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, 1_000_000)
        _real("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, 100.0)
        _real("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0)
        if self.rejection_sample_method not in ("standard", "synthetic"):
            raise ValueError(
                "speculative_config rejection_sample_method must be one of standard, synthetic;"
                f" got {self.rejection_sample_method!r}"
            )
        if not isinstance(self.dynamic_length, bool):
            raise TypeError(f"speculative_config dynamic_length must be true or false, got {self.dynamic_length!r}")
        if self.dynamic_length and (self.is_synthetic or self.method == "ngram_gpu"):
            what = "synthetic acceptance" if self.is_synthetic else "method 'ngram_gpu'"
            raise ValueError(f"speculative_config: dynamic_length cannot be true with {what}")
        if self.is_synthetic != (self.synthetic_acceptance_rate is not None):
            raise ValueError(
                "speculative_config: synthetic acceptance and synthetic_acceptance_rate go together; only one is given"
            )
        if self.synthetic_acceptance_rate is not None:
            _real("synthetic_acceptance_rate", self.synthetic_acceptance_rate, 0.0, 1.0)

    @property
    def lookup(self) -> tuple[int, int]:
        """Shortest and longest n-gram: 2 and 4; if only one of the two is given, the other equals it, as in vLLM."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return 2, 4
        return (longest if shortest is None else shortest, shortest if longest is None else longest)  # type: ignore[return-value]

    @property
    def drafts_on_device(self) -> bool:
        """Whether a GPU can make the drafts without the host."""
        return self.method in ("ngram_gpu", "synthetic")

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted by chance."""
        return self.rejection_sample_method == "synthetic" or self.method == "synthetic"


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"speculative_config {name} must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"speculative_config {name} must be in {least}..{most}, got {value}")


def _real(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"speculative_config {name} must be a number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"speculative_config {name} must be in {least:g}..{most:g}, got {value}")


@dataclass(slots=True)
class SpecDecodingStats:
    """Counters since the start.

    Attributes:
        num_drafts: drafts that were verified, at most one per request and step.
        num_draft_tokens: their tokens.
        num_accepted_tokens: those that were accepted.
        num_accepted_tokens_per_pos: accepted tokens by position in the draft.
        error: why the proposer is not called any more; None if it is.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    error: str | None = None

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (num_draft_tokens - len(per_pos))
        for i in range(num_accepted_tokens):
            per_pos[i] += 1

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens gained by a step with a draft, on average, the one of the model itself included; None before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def gauges(self) -> dict[str, float]:
        """The counters by name, one for each position, and whether the proposer has failed; nothing without speculation."""
        if not self.num_accepted_tokens_per_pos:
            return {}
        totals: dict[str, float] = {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_proposer_failed": float(self.error is not None),
        }
        per_pos = enumerate(self.num_accepted_tokens_per_pos)
        return totals | {f"spec_decode_num_accepted_tokens_per_pos:{i}": count for i, count in per_pos}
