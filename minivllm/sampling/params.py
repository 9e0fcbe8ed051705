"""SamplingParams: fields, validation, errors."""

# Generated from nbs/sampling/params.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import copy
import difflib
import json as json_lib
import logging
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Self


class InvalidParameter(ValueError):
    """A parameter has a value that is not allowed.

    `parameter` (its name), `value` (what was given) and `allowed` (what may be given, in words) are attributes.
    """

    def __init__(self, parameter: str, value: Any, allowed: str) -> None:
        super().__init__(parameter, value, allowed)
        self.parameter, self.value, self.allowed = parameter, value, allowed

    def __str__(self) -> str:
        try:
            given = repr(self.value)
        except ValueError:  # a whole number of more digits than Python prints
            given = f"a {type(self.value).__name__} of too many digits to show"
        return f"{self.parameter} must be {self.allowed}, got {given if len(given) <= 200 else given[:197] + '...'}"


@dataclass(frozen=True)
class Allowed:
    """A set of allowed values: `test(value)` decides, `text` says the same in words."""

    text: str
    test: Callable[[Any], bool]

    def check(self, parameter: str, value: Any) -> Any:
        """The value. Raises InvalidParameter if it is not allowed."""
        if not self.test(value):
            raise InvalidParameter(parameter, value, self.text)
        return value

    def __or__(self, other: "Allowed") -> "Allowed":
        return Allowed(f"{self.text} or {other.text}", lambda value: self.test(value) or other.test(value))


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def lone_surrogate(value: Any, place: str = "") -> str | None:
    """Where a text in a value holds half of a UTF-16 pair, which neither UTF-8 nor a tokenizer can take.

    Args:
        value: a text, or lists and dictionaries of texts.
        place: the name of ``value``.

    Returns:
        A path such as ``messages[0].content``, or None if all texts are whole.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return place
        return None
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{place}.{key}".lstrip("."), part) for key, inner in value.items() for part in (str(key), inner)]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{place}[{i}]", inner) for i, inner in enumerate(value)]
    return next((found for where, part in parts if (found := lone_surrogate(part, where)) is not None), None)


def check_text(value: Any, place: str) -> None:
    """Raise InvalidParameter for a lone surrogate; see `lone_surrogate`."""
    if (where := lone_surrogate(value, place)) is not None:
        raise InvalidParameter(where, value, "text without lone surrogates (half of a UTF-16 pair)")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and lone_surrogate(value) is None


def _is_real(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # finite, and greater than any float
        return True


def integer(low: int, high: int | None = None) -> Allowed:
    """An integer in [low, high]."""
    text = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    return Allowed(text, lambda value: _is_int(value) and low <= value and (high is None or value <= high))


def real(low: float, high: float = math.inf, *, above: bool = False) -> Allowed:
    """A finite number in [low, high], or in (low, high] with `above`."""
    text = f"a finite number in {'(' if above else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
    return Allowed(text, lambda value: _is_real(value) and (low < value if above else low <= value) and value <= high)


def list_of(item: Allowed, *, empty: bool = True) -> Allowed:
    """A list whose every item is allowed."""
    text = f"a {'' if empty else 'non-empty '}list, each item {item.text}"
    return Allowed(
        text, lambda value: isinstance(value, list) and (empty or bool(value)) and all(map(item.test, value))
    )


def instance(kind: type, text: str) -> Allowed:
    """An instance of a type."""
    return Allowed(text, lambda value: isinstance(value, kind))


def one_of(names: Sequence[str]) -> Allowed:
    """One of some texts."""
    return Allowed(f"one of {', '.join(names)}", lambda value: value in names)


NONE = Allowed("None", lambda value: value is None)
FLAG = Allowed("True or False", lambda value: isinstance(value, bool))
TEXT = Allowed("a non-empty string without lone surrogates", lambda value: _is_text(value) and value != "")
TOKEN_ID = integer(0)


def as_integers(values: Collection[Any]) -> list[int] | None:
    """The values as a new list of Python ints; None if one of them is a bool or not an integer.

    There may be many values, so Python code checks their types together, not each value.
    """
    types = list(map(type, values))
    if types.count(int) == len(types):  # sooner known than the set
        return list(values)
    whole = bool not in types and all(issubclass(kind, numbers.Integral) for kind in set(types))
    return list(map(int, values)) if whole else None


def list_of_ids(*, empty: bool = True) -> Allowed:
    """A list of token ids: as `list_of(TOKEN_ID)`, but without a call of Python code per id."""
    items = list_of(TOKEN_ID, empty=empty)
    return Allowed(
        items.text,
        lambda value: (
            isinstance(value, list)
            and (empty or bool(value))
            and as_integers(value) is not None
            and min(value, default=0) >= 0
        ),
    )


def reject_unknown(owner: str, given: Iterable[str], known: Sequence[str], error: type[Exception] = TypeError) -> None:
    """Raise `error` for the first name in `given` that is not in `known`, with the nearest known name."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise error(f"{owner} has no parameter {name!r}{hint}")


class CheckedParams:
    """A dataclass of parameters: an unknown keyword raises TypeError, a value out of range InvalidParameter.

    Attributes:
        allowed: the allowed values of each field.
        place: prefix of a field's name in an error.
    """

    allowed: ClassVar[dict[str, Allowed]] = {}
    place: ClassVar[str] = ""

    def __new__(cls, **given: Any) -> Self:
        reject_unknown(cls.__name__, given, [f.name for f in fields(cls) if f.init])  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in self.allowed.items():
            allowed.check(self.place + name, getattr(self, name))
        self._after_init()

    def _after_init(self) -> None:
        """Check fields against each other, and set what follows from them."""


class RequestOutputKind(Enum):
    """What each `RequestOutput` of a request carries."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # nothing until the request is finished


LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


STRUCTURE_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _is_json(value: Any, kinds: tuple[type, ...]) -> bool:
    try:
        found = json_lib.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return isinstance(found, kinds) and lone_surrogate(found) is None


_SCHEMA = Allowed(
    "a JSON schema without lone surrogates: a dict, or the text of one", lambda value: _is_json(value, (dict, bool))
)
_TAG = Allowed("a structural tag: a dict, or the text of one", lambda value: _is_json(value, (dict,)))
_STRUCTURE_ALLOWED = {
    "json": NONE | _SCHEMA,
    "regex": NONE | TEXT,
    "choice": NONE | list_of(TEXT, empty=False),
    "grammar": NONE | TEXT,
    "json_object": NONE | Allowed("True", lambda value: value is True),
    "structural_tag": NONE | _TAG,
    "disable_any_whitespace": FLAG,
    "disable_additional_properties": FLAG,
    "whitespace_pattern": NONE | TEXT,
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(CheckedParams):
    """What the output must look like: exactly one of the first six fields.

    json: a JSON schema (a dict or its text). json_object: any JSON object. regex: a regular expression that the whole
    output matches. choice: one of these strings. grammar: a context-free grammar, Lark or EBNF (GBNF) text.
    structural_tag: parts of the output that follow a schema (a dict or its text).

    disable_any_whitespace: JSON without optional white space. disable_additional_properties: objects have no members
    that the schema does not list. whitespace_pattern: a regular expression for the white space that JSON may hold.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    allowed: ClassVar[dict[str, Allowed]] = _STRUCTURE_ALLOWED
    place: ClassVar[str] = "structured_outputs."

    def _after_init(self) -> None:
        asked = [name for name in STRUCTURE_KINDS if getattr(self, name) is not None]
        if len(asked) != 1:
            raise InvalidParameter("structured_outputs", asked, f"exactly one of {', '.join(STRUCTURE_KINDS)}")
        if self.kind not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
                if getattr(self, name):
                    raise InvalidParameter(f"structured_outputs.{name}", getattr(self, name), "used with json only")

    @property
    def kind(self) -> str:
        """The name of the one field that is set."""
        return next(name for name in STRUCTURE_KINDS if getattr(self, name) is not None)

    @cached_property
    def key(self) -> str:
        """A text that is equal for equal params; compiled grammars are cached by it."""
        return json_lib.dumps({f.name: getattr(self, f.name) for f in fields(self)}, sort_keys=False)


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams(CheckedParams):
    """Stop when the output ends in `min_count` copies of one pattern of min_pattern_size..max_pattern_size tokens.

    `max_pattern_size=0` switches the detection off; `min_pattern_size=0` means 1. vLLM's names and rules.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    allowed: ClassVar[dict[str, Allowed]] = dict.fromkeys(
        ("max_pattern_size", "min_pattern_size", "min_count"), integer(0)
    )
    place: ClassVar[str] = "repetition_detection."

    def _after_init(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            allowed = f"at most max_pattern_size={self.max_pattern_size}"
            raise InvalidParameter("repetition_detection.min_pattern_size", self.min_pattern_size, allowed)
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidParameter("repetition_detection.min_count", self.min_count, "an integer >= 2")


MAX_N = 16384  # vLLM's default bound on sequences per request
MIN_TEMPERATURE = 1e-2  # smaller ones, except 0, are raised to it, as in vLLM
logger = logging.getLogger("minivllm.sampling")

_BIAS = Allowed(
    "a dict {token id: bias}, token ids integers >= 0, biases in [-100, 100]",
    lambda value: (
        isinstance(value, dict)
        and all(TOKEN_ID.test(token) and real(-100, 100).test(bias) for token, bias in value.items())
    ),
)
_NUM_LOGPROBS = NONE | Allowed("an integer >= 0, or -1 for the whole vocabulary", integer(-1).test)

ALLOWED: dict[str, Allowed] = {
    "n": integer(1, MAX_N),
    "best_of": NONE | integer(1, MAX_N),
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "repetition_penalty": real(1e-6, 1e6),
    "temperature": real(0, 2),
    "top_p": real(0, 1, above=True),
    "top_k": Allowed("0 (off) or an integer >= 1", integer(0).test),
    "min_p": real(0, 1),
    "seed": NONE | integer(-(2**63), 2**64 - 1),
    "stop": list_of(TEXT),
    "stop_token_ids": list_of_ids(),
    "bad_words": list_of(
        Allowed("a non-blank string without lone surrogates", lambda v: _is_text(v) and v.strip() != "")
    ),
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "max_tokens": NONE | integer(1),
    "min_tokens": integer(0),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _NUM_LOGPROBS),
    "logprobs_mode": NONE | one_of(LOGPROBS_MODES),
    "detokenize": FLAG,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "logits_processors": NONE | list_of(Allowed("callable", callable)),
    "truncate_prompt_tokens": NONE | integer(1) | Allowed("-1 (the longest prompt that fits)", integer(-1, -1).test),
    "output_kind": instance(RequestOutputKind, "a RequestOutputKind"),
    "structured_outputs": NONE | instance(StructuredOutputsParams, "a StructuredOutputsParams"),
    "logit_bias": NONE | _BIAS,
    "allowed_token_ids": NONE | list_of_ids(empty=False),
    "repetition_detection": NONE | instance(RepetitionDetectionParams, "a RepetitionDetectionParams"),
    "extra_args": NONE | Allowed("a dict with string keys", lambda v: isinstance(v, dict) and all(map(_is_text, v))),
}


def _as_list(value: Any) -> Any:
    """None -> [], one string -> [string], any other collection -> list without duplicates, in order."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return value
    if (whole := as_integers(value)) is not None:
        return list(dict.fromkeys(whole))
    plain = [_plain(item) for item in value]
    try:
        return [item for _, item in dict.fromkeys((type(item), item) for item in plain)]  # True is not 1 here
    except TypeError:  # an item that is no text and no number: it is refused with its list
        return plain


def _as_count(value: Any) -> Any:
    return {True: 1, False: None}[value] if isinstance(value, bool) else _plain(value)


def _as_temperature(value: Any) -> Any:
    """vLLM's rule: a temperature so low that logits divided by it might overflow is raised."""
    if not _is_real(value) or not 0 < value < MIN_TEMPERATURE:
        return _plain(value)
    logger.warning("temperature %g is raised to %g, below which logits may overflow", value, MIN_TEMPERATURE)
    return MIN_TEMPERATURE


def _plain(value: Any) -> Any:
    """A numpy scalar becomes a Python number."""
    if _is_int(value):
        return int(value)
    try:
        return float(value) if _is_real(value) else value
    except OverflowError:  # greater than any float
        return value


_NORMALISE: dict[str, Callable[[Any], Any]] = {
    "temperature": _as_temperature,
    "logit_bias": lambda value: {_plain(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value,
    "top_k": lambda value: 0 if _is_int(value) and value == -1 else _plain(value),
    "seed": lambda value: None if _is_int(value) and value == -1 else _plain(value),
    "stop": _as_list,
    "stop_token_ids": _as_list,
    "bad_words": _as_list,
    "allowed_token_ids": lambda value: value if value is None else _as_list(value),
    "logits_processors": lambda value: list(value) if isinstance(value, (list, tuple)) else value,
    "logprobs": _as_count,
    "prompt_logprobs": _as_count,
    "structured_outputs": lambda value: StructuredOutputsParams(**value) if isinstance(value, dict) else value,
    "repetition_detection": lambda value: RepetitionDetectionParams(**value) if isinstance(value, dict) else value,
}


_NESTED = ("extra_args", "bad_words_token_ids")  # fields with lists or dicts inside their list or dict
_CHANGEABLE = ("stop", "stop_token_ids", "bad_words", "logits_processors", "logit_bias", "allowed_token_ids", *_NESTED)


@dataclass(kw_only=True, repr=False)
class SamplingParams(CheckedParams):
    """All the control that a request has over its tokens; vLLM's names and defaults. Raises as `CheckedParams`.

    Attributes:
        n, best_of: outputs per prompt; generate `best_of` of them and return the `n` of the highest log probability per token.
        presence_penalty, frequency_penalty: subtracted from the logit of a token of the output so far, once or once per occurrence.
        repetition_penalty: divides a positive logit (multiplies a negative one) of a token of the prompt or the output.
        temperature: divides the logits; 0 is greedy. Between 0 and 0.01 it is raised to 0.01, as in vLLM.
        top_k, top_p, min_p: keep the k best tokens; the best that together reach probability p; those min_p times as likely as the best.
        seed: gives the same random numbers in any batch; and the same tokens with a backend that is batch-invariant. With
            others rounding may tip a close choice. Child i of n gets seed + i. -1 means None.
        stop, stop_token_ids, repetition_detection: texts, tokens and loops that end an answer.
        include_stop_str_in_output, ignore_eos: whether the text includes the stop string; whether to go on after the end token.
        max_tokens, min_tokens: bounds of the output. None: as many as fit. Before `min_tokens`, no end or stop token can be drawn.
        bad_words, allowed_token_ids, logit_bias: words that cannot be generated; the only tokens that can; {token id: bias}.
        logprobs, prompt_logprobs: how many of the best tokens to report besides the chosen one; -1 all, True means 1.
        logprobs_mode: raw or processed, logprobs or logits; None is the engine's.
        detokenize, skip_special_tokens, spaces_between_special_tokens: how token ids become text.
        logits_processors, extra_args: transforms `(logits, view) -> logits`; further ones by name, as `{"typical": 0.9}`.
        truncate_prompt_tokens: keep only this many tokens of the prompt, the last ones; -1 as many as fit.
        output_kind, structured_outputs: what each RequestOutput carries; what the output must look like.
        bad_words_token_ids, eos_token_id, all_stop_token_ids: set from tokenizer and model; `min_tokens` forbids those of the last one.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Callable[..., Any]] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None
    bad_words_token_ids: list[list[int]] | None = field(default=None, init=False)
    eos_token_id: int | None = field(default=None, init=False)
    all_stop_token_ids: frozenset[int] = field(default=frozenset(), init=False)

    @property
    def is_greedy(self) -> bool:
        """Whether the token of the largest logit is always taken."""
        return self.temperature == 0

    @property
    def num_children(self) -> int:
        """How many sequences are generated: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_children(self) -> bool:
        """Whether more sequences are generated than returned, so that the best must be found."""
        return self.num_children > self.n

    def _after_init(self) -> None:
        self._check_together()
        self.all_stop_token_ids = frozenset(self.stop_token_ids or ())

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            reject_unknown(type(self).__name__, [name], list(ALLOWED), AttributeError)
        if name in ALLOWED:
            value = ALLOWED[name].check(name, _NORMALISE.get(name, _plain)(value))
        complete = "all_stop_token_ids" in self.__dict__
        before = self.__dict__.get(name)
        self.__dict__[name] = value
        if complete and name in ALLOWED:
            self._settle(name, before)

    def _settle(self, name: str, before: Any) -> None:
        try:
            self._check_together()
        except InvalidParameter:
            self.__dict__[name] = before
            raise
        if name == "bad_words":
            self.bad_words_token_ids = None
        if name == "stop_token_ids":
            self.all_stop_token_ids = (self.all_stop_token_ids - frozenset(before)) | frozenset(
                self.stop_token_ids or ()
            )

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise InvalidParameter(
                "stop", self.stop, "empty with detokenize=False, for stop strings are found in the text"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter("best_of", self.best_of, f"at least n={self.n}")
        if self.num_children > 1 and self.is_greedy:
            name = "n" if self.n > 1 else "best_of"
            why = "1 when sampling greedily (temperature=0), for all outputs would be equal"
            raise InvalidParameter(name, getattr(self, name), why)
        if self.ranks_children and self.output_kind is RequestOutputKind.DELTA:
            why = f"n={self.n} with output_kind DELTA, for the best outputs are known at the end only"
            raise InvalidParameter("best_of", self.best_of, why)

    def __repr__(self) -> str:
        """The constructor call with the values that differ from the defaults."""
        plain = SamplingParams()
        changed = [(name, getattr(self, name)) for name in ALLOWED if getattr(self, name) != getattr(plain, name)]
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def clone(self, **changes: Any) -> "SamplingParams":
        """An independent copy, with some fields changed. Callables are shared, as they may hold state, and so are frozen values."""
        other = object.__new__(SamplingParams)
        other.__dict__.update(self.__dict__)
        for name in _CHANGEABLE:
            if (value := other.__dict__.get(name)) is not None:
                other.__dict__[name] = copy.deepcopy(value) if name in _NESTED else value.copy()
        if changes:
            reject_unknown("SamplingParams", changes, list(ALLOWED))
            other = SamplingParams(**({name: getattr(other, name) for name in ALLOWED} | changes))
            other._inherit(self, changes)
        return other

    def _inherit(self, parent: "SamplingParams", changes: dict[str, Any]) -> None:
        """Keep what tokenizer and model already told the parent, unless its source was changed."""
        self.eos_token_id = None if self.ignore_eos else parent.eos_token_id
        self.all_stop_token_ids |= parent.all_stop_token_ids - frozenset(parent.stop_token_ids or ())
        if "bad_words" not in changes:
            self.bad_words_token_ids = copy.deepcopy(parent.bad_words_token_ids)

    def child(self, index: int) -> "SamplingParams":
        """Parameters of the index-th of `num_children` sequences: n=1, seed + index (modulo 2**64)."""
        if not 0 <= index < self.num_children:
            raise IndexError(f"child index must be in [0, {self.num_children}), got {index}")
        seed = None if self.seed is None else (self.seed + index) % 2**64
        logprobs = 0 if self.ranks_children and self.logprobs is None else self.logprobs
        return self.clone(n=1, best_of=None, seed=seed, logprobs=logprobs)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Like the constructor, but None means the default (except for max_tokens), and logit_bias may have string keys."""
        reject_unknown(cls.__name__, given, list(ALLOWED))
        bias = given.get("logit_bias")
        if isinstance(bias, dict):
            try:
                given["logit_bias"] = {int(token): value for token, value in bias.items()}
            except (TypeError, ValueError):
                raise InvalidParameter("logit_bias", bias, ALLOWED["logit_bias"].text) from None
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Set `bad_words_token_ids`: the token ids of every bad word, with and without a space before it."""
        sequences: list[list[int]] = []
        for word in self.bad_words or ():
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = list(tokenizer.encode(text, add_special_tokens=False))
                if ids and ids not in sequences:
                    sequences.append(ids)
        if self.bad_words and not sequences:
            raise InvalidParameter(
                "bad_words", self.bad_words, "words that the tokenizer turns into at least one token"
            )
        self.bad_words_token_ids = sequences

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """Learn the end tokens of the model: `eos_token_id`, and those of its generation config."""
        ids = generation_config.get("eos_token_id")
        ends = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
        further = sorted(ends - {eos_token_id})
        if not self.ignore_eos:
            self.eos_token_id = eos_token_id
            self.stop_token_ids = [*(self.stop_token_ids or ()), *further]
        self.all_stop_token_ids |= frozenset(further) | ({eos_token_id} if eos_token_id is not None else frozenset())

    def ends_with(self, token_id: int) -> bool:
        """Whether the token ends the answer."""
        return token_id == self.eos_token_id or token_id in (self.stop_token_ids or ())

    def verify(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check token ids against the vocabulary, and logprobs against the engine's `max_logprobs` (-1: no limit)."""
        listed = {
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "bad_words": [token for ids in self.bad_words_token_ids or () for token in ids],
        }
        for name, ids in listed.items():
            if ids and (outside := [token for token in ids if token >= vocab_size]):
                raise InvalidParameter(name, outside, f"token ids below the vocabulary size {vocab_size}")
        limit = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and (vocab_size if asked == -1 else asked) > limit:
                raise InvalidParameter(name, asked, f"at most max_logprobs={limit}")


def best_indices(cumulative_logprobs: Sequence[float], lengths: Sequence[int], n: int) -> list[int]:
    """Indices of the n sequences with the highest log probability per token, best first; ties by index."""
    score = [total / max(1, length) for total, length in zip(cumulative_logprobs, lengths, strict=True)]
    return sorted(range(len(score)), key=lambda i: (-score[i], i))[:n]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(CheckedParams):
    """Parameters of `LLM.beam_search`; vLLM's names.

    A finished beam's score is its log probability / (number of tokens ** length_penalty), as in transformers.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    allowed: ClassVar[dict[str, Allowed]] = {
        "beam_width": integer(1, MAX_N),
        "max_tokens": integer(1),
        "ignore_eos": FLAG,
        "temperature": real(0, 2),
        "length_penalty": Allowed("a finite number", _is_real),
        "include_stop_str_in_output": FLAG,
    }
