"""Validation and tokenization of prompts into engine core requests."""

# Generated from nbs/engine/input_processor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import difflib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from minivllm.core.config import EngineConfig
from minivllm.core.encoder_cache import MultiModalFeatureSpec
from minivllm.core.request import Request
from minivllm.lora.adapter import LoRARequest
from minivllm.lora.store import AdapterRegistry, RegisteredAdapter
from minivllm.multimodal.inputs import embeds_prompt
from minivllm.multimodal.processor import MediaProcessor
from minivllm.sampling.params import InvalidParameter, SamplingParams, as_integers, check_text
from minivllm.sampling.pooling import PoolingParams
from minivllm.sampling.random import RequestSeeds
from minivllm.sampling.transforms import check_extra_args

PromptType = str | Sequence[int] | dict[str, Any]

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "prompt_embeds", "token_type_ids", "multi_modal_data",
                  "mm_features")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in one form: ``text``, or ``token_ids`` (then ``text`` is only for showing), or ``embeds`` [tokens, hidden_size].

    ``media``: what the markers in the text stand for, see `MediaProcessor.load`; ``features``: the same, when ``token_ids`` have the
    placeholders already.
    ``token_type_ids``: one per token, for a model that tells a first text (0) from a second (1).
    """

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    embeds: Any = None
    token_type_ids: list[int] | None = None
    media: Any = None
    features: tuple[MultiModalFeatureSpec, ...] = ()


def parse_prompt(prompt: PromptType) -> Prompt:
    """Bring any form of a prompt into one.

    Raises:
        TypeError: it is none of the forms. ValueError: a dictionary with unknown fields or without a prompt.
    """
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, dict):
        return _parse_dict(prompt)
    if (token_ids := _token_ids(prompt)) is not None:
        return Prompt(token_ids=token_ids)
    raise TypeError(
        f"a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'; got {_brief(prompt)}"
    )


def _parse_dict(prompt: dict[str, Any]) -> Prompt:
    for name in prompt:
        if name not in _PROMPT_FIELDS:
            near = difflib.get_close_matches(str(name), _PROMPT_FIELDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_PROMPT_FIELDS)}"
            raise ValueError(f"unknown field {name!r} in a prompt; {hint}")
    text, token_ids, salt, embeds, types, media, features = map(prompt.get, _PROMPT_FIELDS)
    if text is None and token_ids is None and embeds is None:
        raise ValueError(
            "a prompt dict needs 'prompt' (a string), 'prompt_token_ids' (a list of token ids) or 'prompt_embeds' (a tensor)"
        )
    if embeds is not None and not all(x is None for x in (text, token_ids, media)):
        raise ValueError("'prompt_embeds' are a whole prompt: they go with neither 'prompt' nor media nor token ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' must be a string, got {_brief(text)}")
    if token_ids is not None and (token_ids := _token_ids(token_ids)) is None:
        raise TypeError(f"'prompt_token_ids' must be a list of token ids, got {_brief(prompt['prompt_token_ids'])}")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise TypeError(f"'cache_salt' must be a non-empty string, got {_brief(salt)}")
    if types is not None:
        types = _token_ids(types)
        if types is None or token_ids is None or len(types) != len(token_ids):
            raise TypeError(
                "'token_type_ids' must be a list of numbers, one for each of 'prompt_token_ids', got"
                f" {_brief(prompt['token_type_ids'])}"
            )
    return Prompt(text, token_ids, salt, embeds, types, media, features or ())


def _token_ids(value: Any) -> list[int] | None:
    """A new list of Python ints; None if the value is not a list, tuple, range or array of whole numbers."""
    if isinstance(value, np.ndarray):
        whole = value.ndim == 1 and (np.issubdtype(value.dtype, np.integer) or value.size == 0)
        value = value.tolist() if whole else None  # a masked element becomes None
    return as_integers(value) if isinstance(value, (list, tuple, range)) else None


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


class RequestOptions(TypedDict, total=False):
    """What a request may bring besides its prompt and its parameters.

    Attributes:
        arrival_time: seconds on the engine's clock.
        priority: smaller is more urgent.
        user: owner of the request, for fair-share policies.
        cut_max_tokens: see `InputProcessor.max_tokens`.
        lora_request: the adapter to run it with.
    """

    arrival_time: float | None
    priority: int
    user: str | None
    cut_max_tokens: bool
    lora_request: LoRARequest | None


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A checked request. ``children``: the core's requests, at least one; each has its own parameters."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    children: list[Request]
    adapter: RegisteredAdapter | None = None


class InputProcessor:
    """Checks and tokenises what callers give, and makes the requests of the engine core.

    ``tokenizer`` may be None: then prompts must be token ids. ``generation_config``: the model's own end tokens and defaults.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Any | None, generation_config: dict[str, Any] | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.generation_config = generation_config or {}
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.adapters: AdapterRegistry | None = None  # set by an engine with enable_lora
        self.media: MediaProcessor | None = None  # set by an engine whose model reads media
        self.transforms_read_extra_args = False  # set by an engine that has its own transforms
        self._next_seed = RequestSeeds(config.seed)
        self._longest_token = 0  # in characters; found when it is needed

    def tokenize(self, prompt: Prompt, params: SamplingParams | PoolingParams) -> list[int]:
        """Token ids of a prompt, shortened if ``truncate_prompt_tokens`` says so. Raises ValueError if a limit is broken."""
        if prompt.embeds is not None:
            raise ValueError("prompt_embeds cannot be used here: token ids are needed")
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
        elif self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: give the prompt as a list of token ids")
        else:
            text = prompt.text or ""
            check_text(text, "prompt")
            if params.truncate_prompt_tokens is not None and not self.config.model.pooling.generates:
                keep = self.num_kept(params.truncate_prompt_tokens)
                text = text[: max(1, 2 * self.max_characters)]
                return list(self.tokenizer(text, truncation=True, max_length=keep).input_ids)
            if params.truncate_prompt_tokens is None:
                self.check_characters(text)
            elif len(text) > self.max_characters:  # the end is kept, and twice as much as can be needed of it
                text = text[-2 * self.max_characters :]
            token_ids = list(self.tokenizer(text).input_ids)
        if params.truncate_prompt_tokens is not None:
            keep = self.num_kept(params.truncate_prompt_tokens)
            token_ids = token_ids[-keep:] if self.config.model.pooling.generates else token_ids[:keep]
        self._check_tokens(token_ids)
        return token_ids

    @property
    def max_prompt_tokens(self) -> int:
        """All that fits, less the one token that a model which predicts tokens must have room for."""
        return self.config.scheduler.max_model_len - self.config.model.pooling.generates

    def num_kept(self, truncate_prompt_tokens: int) -> int:
        """Tokens that remain of a longer prompt."""
        return self.max_prompt_tokens if truncate_prompt_tokens == -1 else truncate_prompt_tokens

    @property
    def max_characters(self) -> int:
        """A longer text has more than ``max_model_len`` tokens, since no token has more characters than the longest one."""
        if self._longest_token == 0:
            self._longest_token = max(map(len, self.tokenizer.get_vocab())) if self.tokenizer is not None else 1
        return self._longest_token * self.config.scheduler.max_model_len

    def check_characters(self, text: str) -> None:
        """Refuse what cannot fit before time is spent to tokenize it. Raises ValueError."""
        max_model_len = self.config.scheduler.max_model_len
        if len(text) > max_model_len and len(text) > self.max_characters:
            raise ValueError(
                f"the prompt has {len(text)} characters; more than {self.max_characters} cannot fit in"
                f" max_model_len={max_model_len} tokens"
            )

    def read(
        self, prompt: Prompt, params: SamplingParams | PoolingParams
    ) -> tuple[list[int], tuple[MultiModalFeatureSpec, ...]]:
        """Token ids of a prompt, and what else it holds. Raises TypeError, ValueError."""
        if prompt.embeds is None:
            return self._read_media(prompt, params)
        if not self.config.args.enable_prompt_embeds:
            raise ValueError(
                "prompt_embeds are not allowed here (enable_prompt_embeds=True, or --enable-prompt-embeds, allows them)"
            )
        for name, neutral in (("truncate_prompt_tokens", None), ("prompt_logprobs", None), ("repetition_penalty", 1.0)):
            if (value := getattr(params, name, neutral)) != neutral:
                raise ValueError(f"{name}={value!r} needs a prompt of tokens; this one is of prompt_embeds")
        most = min(self.config.scheduler.encoder_limits)
        token_ids, features = embeds_prompt(prompt.embeds, self.config.model.hidden_size, most)
        self._check_tokens(token_ids)
        return token_ids, features

    def _read_media(
        self, prompt: Prompt, params: SamplingParams | PoolingParams
    ) -> tuple[list[int], tuple[MultiModalFeatureSpec, ...]]:
        """As `read`, for a prompt of tokens, with media or without."""
        if self.media is None:
            if prompt.media or prompt.features:
                raise ValueError(f"multi_modal_data: {self.config.model.name} reads text alone")
            return self.tokenize(prompt, params), ()
        if prompt.features:
            return self.tokenize(prompt, params), prompt.features
        items = self.media.load(prompt.media or {})
        if items and params.truncate_prompt_tokens is not None:
            raise ValueError("truncate_prompt_tokens could cut a picture; shorten the text")
        if prompt.token_ids is None:
            check_text(prompt.text or "", "prompt")
            expanded = Prompt(text=self.media.expand(prompt.text or "", items))
        else:
            expanded = Prompt(token_ids=self.media.expand(prompt.token_ids, items))
        token_ids = self.tokenize(expanded, params)
        return token_ids, self.media.place(token_ids, items)

    def _check_tokens(self, token_ids: list[int]) -> None:
        max_model_len, vocab_size = self.config.scheduler.max_model_len, self.config.model.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty; at least one token is needed")
        if len(token_ids) > (limit := self.max_prompt_tokens):
            more = ", and one token must be generated" if limit < max_model_len else ""
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but at most {limit} are allowed:"
                f" max_model_len={max_model_len} ({self._why_max_model_len()}){more}."
                " Shorten it, or set truncate_prompt_tokens"
            )
        with suppress(OverflowError):  # the array refuses what is negative, and numpy finds the largest of many soonest
            if np.frombuffer(array("I", token_ids), np.uintc).max() < vocab_size:
                return
        i, token = next((i, token) for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise ValueError(f"prompt_token_ids[{i}] is {token}; token ids of this model are 0..{vocab_size - 1}")

    def _why_max_model_len(self) -> str:
        return next((d.why for d in self.config.decisions if d.setting == "max_model_len"), "as configured")

    def max_tokens(self, prompt_len: int, params: SamplingParams, cut: bool = True) -> int:
        """Tokens to generate at most: ``params.max_tokens``, None for as many as fit.

        ``cut``: whether more than fit means as many as fit, as in vLLM's `LLM.generate`. Servers refuse it, as vLLM's and OpenAI's do.
        """
        limit = self.config.scheduler.max_model_len
        room = limit - prompt_len
        if params.max_tokens is None or (cut and params.max_tokens > room):
            return room
        if params.max_tokens > room:
            allowed = f"at most {room}: max_model_len={limit} tokens, of which the prompt takes {prompt_len}"
            raise InvalidParameter("max_tokens", params.max_tokens, allowed)
        return params.max_tokens

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = 0.0,
        priority: int = 0,
        user: str | None = None,
        cut_max_tokens: bool = True,
        lora_request: LoRARequest | None = None,
        completed: dict[int, SamplingParams] | None = None,
    ) -> ProcessedInput:
        """Check everything and make the core's requests; nothing is queued yet.

        ``completed``: for several requests at once, while none of their parameters changes: what was added to them, by their `id`.

        Raises:
            TypeError, ValueError: says what was given and what is allowed.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {_brief(request_id)}")
        if not isinstance(params, (SamplingParams, PoolingParams)):
            raise TypeError(f"params must be SamplingParams or PoolingParams, got {_brief(params)}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority must be a whole number (smaller is more urgent), got {_brief(priority)}")
        parsed = parse_prompt(prompt)
        adapter = None if lora_request is None else self.register(lora_request)
        about: dict[str, Any] = {"arrival_time": arrival_time or 0.0, "priority": priority, "user": user}
        about |= {"cache_salt": parsed.cache_salt, "lora_name": adapter and adapter.key}
        if isinstance(params, PoolingParams):
            return self._process_pooling(request_id, parsed, params, adapter, about)
        if not self.config.model.pooling.generates:
            tasks = ", ".join(self.config.model.pooling.tasks)
            raise ValueError(f"this model predicts no tokens (runner='pooling'); it can {tasks}")
        if parsed.token_type_ids is not None:
            raise ValueError("token_type_ids: only a model that pools prompts can have token types")
        params = self._complete(params, completed)
        token_ids, about["mm_features"] = self.read(parsed, params)
        max_tokens = self.max_tokens(len(token_ids), params, cut_max_tokens)
        if params.min_tokens > max_tokens:
            fit = f"after {len(token_ids)} prompt tokens only {max_tokens} fit"
            raise ValueError(f"min_tokens is {params.min_tokens}, but {fit}")
        children = [
            Request(
                child_id,
                token_ids,
                max_tokens=max_tokens,
                min_tokens=child.min_tokens,
                eos_token_id=child.eos_token_id,
                stop_token_ids=frozenset(child.stop_token_ids or ()),
                ignore_eos=child.ignore_eos,
                sampling_params=child,
                skip_reading_prefix_cache=child.prompt_logprobs is not None,
                **about,
            )
            for child_id, child in self._children(request_id, params)
        ]
        return ProcessedInput(parsed.text, token_ids, params, children, adapter)

    def register(self, lora_request: LoRARequest) -> RegisteredAdapter:
        """Check an adapter, or find it. Raises ValueError if it cannot be used, or the engine was made without adapters."""
        if self.adapters is None:
            raise ValueError("lora_request: this engine was made without enable_lora=True")
        return self.adapters.add(lora_request)

    def _process_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        adapter: RegisteredAdapter | None,
        about: dict[str, Any],
    ) -> ProcessedInput:
        """A request that ends when its prompt is computed. A mean needs every token's hidden state, so no cached prefix will do."""
        facts, vocab_size = self.config.model.pooling, self.config.model.vocab_size
        params = params.resolved(facts, self.config.model.hidden_size)
        token_ids, about["mm_features"] = self.read(prompt, params)
        ids = token_ids
        if prompt.token_type_ids is not None:
            types = prompt.token_type_ids[: len(token_ids)]
            if not 0 <= min(types) <= max(types) < max(1, facts.token_types):
                raise ValueError(f"token_type_ids: this model has {facts.token_types} token types, got {_brief(types)}")
            ids = np.add(token_ids, vocab_size * np.array(types)).tolist()
        about["skip_reading_prefix_cache"] = not params.reads_prefix
        request = Request(request_id, ids, max_tokens=1, sampling_params=params, **about)
        return ProcessedInput(prompt.text, token_ids, params, [request], adapter)

    def _complete(self, params: SamplingParams, completed: dict[int, SamplingParams] | None = None) -> SamplingParams:
        """A checked copy that knows what tokenizer and model say; ``completed``: see `process`."""
        if completed is not None:
            if (key := id(params)) not in completed:
                completed[key] = self._complete(params)
            return completed[key].clone()
        if params.bad_words and self.tokenizer is None:
            raise ValueError("bad_words needs a tokenizer, and this engine has none")
        params = params.clone()
        params.update_from_generation_config(self.generation_config, self.eos_token_id)
        if params.bad_words:
            params.update_from_tokenizer(self.tokenizer)
        params.verify(self.config.model.vocab_size, self.config.args.max_logprobs)
        if params.extra_args:
            check_extra_args(params, self.transforms_read_extra_args)
        return params

    def _children(self, request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
        if params.num_children == 1:
            children = [(request_id, params)]
        else:
            children = [(f"{i}_{request_id}", params.child(i)) for i in range(params.num_children)]
        for i, (_, child) in enumerate(children):
            if child.seed is None:
                child.seed = self._next_seed()
            if i > 0:
                child.prompt_logprobs = None
        return children
