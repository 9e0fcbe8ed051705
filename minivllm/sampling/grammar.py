"""Structured output with llguidance: compile, mask, advance."""

# Generated from nbs/sampling/grammar.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json as json_lib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from minivllm.sampling.params import STRUCTURE_KINDS, StructuredOutputsParams

__all__ = [
    "MAX_PROPERTIES", "MAX_REFERENCES", "MAX_RULES", "MAX_TEXT", "GrammarCompiler", "GrammarError",
    "PendingGrammar", "check_limits", "grammar_text", "guided", "special_token_ids",
    "without_additional_properties",
]  # fmt: skip


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why."""


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError("structured_outputs need the package llguidance: pip install llguidance") from error
    return llguidance


def without_additional_properties(schema: Any) -> Any:
    """A copy of the schema in which every object that does not say otherwise has `additionalProperties: false`."""
    if isinstance(schema, list):
        return [without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value if key in ("enum", "const") else without_additional_properties(value)
        for key, value in schema.items()
    }
    if "properties" in schema or schema.get("type") == "object":
        out.setdefault("additionalProperties", False)
    return out


def guided(schema: Any, **options: Any) -> dict[str, Any]:
    """A JSON schema with llguidance's options in it.

    A character is written as it is, not as ``\\u0061``: else a member's name could be spelled so that it is not recognised as one
    that the schema declares, and evade its type. Control characters have no other spelling, so a schema that names one keeps it.

    Args:
        schema: a dict or a bool.
        options: further ones, such as ``whitespace_flexible``; None means the default.

    Raises:
        GrammarError: no value of finite size satisfies the schema.
    """
    if schema is False:
        raise GrammarError("the JSON schema false allows no value at all")
    if not has_finite_value(schema):
        raise GrammarError("no text of finite length satisfies it")
    schema = {} if schema is True else schema
    if not re.search(r"\\u00[01]|\x7f", json_lib.dumps(schema)):
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return {**schema, "x-guidance": {name: value for name, value in options.items() if value is not None}}


MAX_TEXT, MAX_RULES, MAX_REFERENCES, MAX_PROPERTIES = 1 << 18, 1000, 200, 1000


def check_limits(asked: Mapping[str, Any]) -> None:
    """Refuse what takes too long to compile, or overflows the stack of the grammar engine, which ends the process.

    Args:
        asked: fields of StructuredOutputsParams. Only schemas, grammars and lists of choices are looked at.

    Raises:
        GrammarError: names the limit.
    """
    characters, counts = 0, {"properties": 0, "$ref": 0}
    left = [asked.get("choice"), asked.get("regex"), asked.get("grammar")]
    for value in (asked.get("json"), asked.get("structural_tag")):
        left.append(json_lib.loads(value) if isinstance(value, str) and len(value) <= MAX_TEXT else value)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            counts["$ref"] += "$ref" in value
            if isinstance(value.get("properties"), dict):
                counts["properties"] += len(value["properties"])
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
        characters += len(value) + 2 if isinstance(value, str) else 4
        for what, count, limit in (
            ("characters", characters, MAX_TEXT),
            ("properties", counts["properties"], MAX_PROPERTIES),
            ("references ($ref)", counts["$ref"], MAX_REFERENCES),
        ):
            if count > limit:
                raise GrammarError(f"it has more than {limit} {what}, the most that is allowed")
    grammar = asked.get("grammar")
    if isinstance(grammar, str) and max(grammar.count("\n"), grammar.count("::=")) > MAX_RULES:
        raise GrammarError(f"it has more than {MAX_RULES} lines or rules, the most that is allowed")


def _from_json(params: StructuredOutputsParams) -> str:
    schema: Any = {"type": "object"} if params.json is None else params.json
    if isinstance(schema, str):
        schema = json_lib.loads(schema)
    if params.disable_additional_properties:
        schema = without_additional_properties(schema)
    flexible = not params.disable_any_whitespace
    schema = guided(schema, whitespace_flexible=flexible, whitespace_pattern=params.whitespace_pattern)
    return str(_llguidance().LLMatcher.grammar_from_json_schema(schema))


def has_finite_value(schema: Any) -> bool:
    """Whether a JSON schema can be satisfied without going round in a circle for ever.

    ``{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}`` cannot: every value needs another one. References that are not
    pointers into the schema (`#/$defs/...`) count as satisfiable; llguidance refuses them itself.
    """
    finite: set[int] = set()  # the least fixed point: a part is in it if the parts that it needs are
    parts = [part for part in _parts(schema) if isinstance(part, dict)]
    size = -1
    while size < len(finite):
        size = len(finite)
        finite |= {id(part) for part in reversed(parts) if id(part) not in finite and _is_finite(part, schema, finite)}
    return schema is not False and (schema is True or id(schema) in finite)


def _parts(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(inner)


def _is_finite(part: dict[str, Any], root: Any, finite: set[int]) -> bool:
    def known(inner: Any) -> bool:
        return inner is not False and (not isinstance(inner, dict) or id(inner) in finite)

    if "const" in part or "enum" in part:
        return True
    if "$ref" in part and not known(_target(part["$ref"], root)):
        return False
    if not all(known(inner) for inner in part.get("allOf", ())):
        return False
    if not all(any(known(inner) for inner in part[name]) for name in ("anyOf", "oneOf") if part.get(name)):
        return False
    kinds = part.get("type", "any")
    if set(kinds if isinstance(kinds, list) else [kinds]) - {"object", "array"}:  # a number, say, will do
        return True
    needed = [
        part.get("properties", {}).get(name, part.get("additionalProperties")) for name in part.get("required", ())
    ]
    first, least = part.get("prefixItems", []), part.get("minItems", 0)
    items = [*first[:least], *([part.get("items")] if least > len(first) else [])]
    return ("object" in kinds and all(map(known, needed))) or ("array" in kinds and all(map(known, items)))


def _target(reference: Any, root: Any) -> Any:
    """What a pointer such as ``#/$defs/a`` points to; True if it is none or points nowhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        try:
            root = root[int(name)] if isinstance(root, list) else root[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return True
    return root


def _from_grammar(params: StructuredOutputsParams) -> str:
    assert params.grammar is not None
    dialect = "gbnf" if "::=" in params.grammar else "lark"
    try:
        return str(_llguidance().grammar_from(dialect, params.grammar))
    except ValueError as error:
        raise GrammarError(str(error)) from error


def _tag_parts(tag: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    unknown = set(tag) - {"type", "triggers", "structures"}
    if tag.get("type") != "structural_tag" or unknown or not tag.get("triggers") or not tag.get("structures"):
        wanted = '{"type": "structural_tag", "triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}'
        raise GrammarError(f"structural_tag must have the form {wanted}, got the keys {sorted(tag)}")
    return tag["triggers"], tag["structures"]


def special_token_ids(tokenizer: Any) -> dict[str, int]:
    """{token: id} of a fast tokenizer's tokens that are not text. In a grammar, id 7 is `<[7]>`."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}


def _from_structural_tag(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    given = params.structural_tag
    triggers, structures = _tag_parts(json_lib.loads(given) if isinstance(given, str) else given or {})
    rules, names = [], []
    for i, structure in enumerate(structures):
        if set(structure) != {"begin", "schema", "end"}:
            raise GrammarError(f"structure {i} must have begin, schema and end, got {sorted(structure)}")
        begin = structure["begin"]
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            raise GrammarError(f"structure {i} begins with {begin!r}, but no trigger of {triggers} does")
        rest = " ".join(json_lib.dumps(text) for text in (begin[len(trigger) :],) if text)
        end = json_lib.dumps(structure["end"]) if structure["end"] else ""
        if trigger in special_tokens:  # one token, not text
            head = f"TEXT <[{special_tokens[trigger]}]>"
        else:
            rules.append(f"trigger_{i}[lazy]: TEXT {json_lib.dumps(trigger)}")
            head = f"trigger_{i}"
        rules.append(f"tag_{i}: {head} {rest} %json {json_lib.dumps(guided(structure['schema']))} {end}")
        names.append(f"tag_{i}")
    lines = ["%llguidance {}", f"start: ({' | '.join(names)})* TEXT", "TEXT: /(.|\\n)*/", *rules]
    return str(_llguidance().LLMatcher.grammar_from_lark("\n".join(lines)))


def grammar_text(params: StructuredOutputsParams, special_tokens: Mapping[str, int] = MappingProxyType({})) -> str:
    """The constraint as the text of an llguidance grammar. ``special_tokens``: see `special_token_ids`. GrammarError if it cannot be one."""
    match params.kind:
        case "json" | "json_object":
            return _from_json(params)
        case "regex":
            assert params.regex is not None
            return str(_llguidance().LLMatcher.grammar_from_regex(params.regex))
        case "choice":
            alternatives = " | ".join(map(json_lib.dumps, params.choice or ()))
            return str(_llguidance().LLMatcher.grammar_from_lark(f"start: {alternatives}"))
        case "grammar":
            return _from_grammar(params)
        case _:
            return _from_structural_tag(params, special_tokens)


class GrammarMatcher:
    """The position of one request in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def fill(self, bitmask_row: npt.NDArray[np.int32]) -> None:
        """Set bit t of int32 [ceil(V / 32)] if token t may come next. The end token may when the text is complete."""
        self._inner.unsafe_compute_mask_ptr(bitmask_row.ctypes.data, bitmask_row.nbytes)
        if self._inner.is_error():
            raise GrammarError(_reason(self._inner))

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False if the grammar does not allow it (and from then on every call fails)."""
        return bool(self._inner.consume_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens, as for rejected draft tokens."""
        if not self._inner.rollback(num_tokens):
            raise GrammarError(_reason(self._inner))

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one that the grammar allows as a whole."""
        return bool(self._inner.is_accepting())


def _reason(inner: Any) -> str:
    """The first line of the engine's error; the rest is its inner state."""
    reason = re.split(r"\n<|\n\s+\d+ \|", str(inner.get_error()).strip())[0].strip()
    return "no text of finite length satisfies it" if reason == "NoExtensionBias" else reason


class PendingGrammar:
    """A grammar that is being compiled. `done()` never waits; `result()` does, and raises GrammarError."""

    def __init__(self, future: "Future[Any]", timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._future, self._timeout, self._clock, self._since = future, timeout, clock, clock()

    def done(self) -> bool:
        """Whether `result()` returns or raises at once. True also when the time is up."""
        return self._future.done() or self._clock() - self._since >= self._timeout

    def result(self) -> Any:
        """The compiled grammar; waits for it, `timeout` seconds from the request at most."""
        left = max(0.0, self._timeout - (self._clock() - self._since))
        try:
            return self._future.result(left)
        except TimeoutError:
            raise GrammarError(f"compiling the grammar took longer than {self._timeout:g} s") from None


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, in threads, with a cache.

    tokenizer: a fast Hugging Face tokenizer. vocab_size: the width of the logits. eos_token_ids: all tokens that end a
    text (default: the tokenizer's own). max_bytes: the largest grammar text. timeout: seconds that a request waits. cache_size:
    compiled grammars kept, the least recently used go first.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int] | None = None,
        *,
        max_bytes: int = 1 << 20,
        timeout: float = 30.0,
        workers: int = 2,
        cache_size: int = 256,
    ) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.eos_token_ids = [tokenizer.eos_token_id] if eos_token_ids is None else list(eos_token_ids)
        self.max_bytes, self.timeout, self.cache_size = max_bytes, timeout, cache_size
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._cache: OrderedDict[str, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._engine_tokenizer: Future[Any] | None = None

    def submit(self, params: StructuredOutputsParams) -> PendingGrammar:
        """Begin to compile, unless that is done or under way. Never waits. Raises GrammarError if it is too large."""
        if len(params.key) > self.max_bytes:  # ASCII, and no shorter than the grammar's text
            raise GrammarError(f"the grammar has {len(params.key)} bytes, at most {self.max_bytes} are allowed")
        with self._lock:
            if self._engine_tokenizer is None:
                self._engine_tokenizer = self._pool.submit(self._wrap_tokenizer)
            future = self._cache.get(params.key)
            if future is None:
                future = self._cache[params.key] = self._pool.submit(self._compile, params, self._engine_tokenizer)
            self._cache.move_to_end(params.key)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return PendingGrammar(future, self.timeout)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A fresh matcher at the start of the text; waits for the compilation. GrammarError with the reason."""
        return GrammarMatcher(self.submit(params).result().deep_copy())

    def _wrap_tokenizer(self) -> Any:
        _llguidance()
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self.tokenizer, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)

    def _compile(self, params: StructuredOutputsParams, engine_tokenizer: "Future[Any]") -> Any:
        check_limits({name: getattr(params, name) for name in STRUCTURE_KINDS})
        text = grammar_text(params, special_token_ids(self.tokenizer))
        if len(text.encode()) > self.max_bytes:
            raise GrammarError(f"the grammar has {len(text.encode())} bytes, at most {self.max_bytes} are allowed")
        engine = _llguidance()
        limits = engine.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        inner = engine.LLMatcher(engine_tokenizer.result(), text, log_level=0, limits=limits)
        if inner.is_error():
            raise GrammarError(_reason(inner))
        self._try_out(GrammarMatcher(inner.deep_copy()))
        return inner

    def _try_out(self, matcher: GrammarMatcher) -> None:
        """Write a few tokens: some faults of a grammar show only then. Raises GrammarError."""
        allowed = np.zeros(-(-self.vocab_size // 32), np.int32)
        for _ in range(4):
            matcher.fill(allowed)
            tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
            token = next((int(token) for token in tokens if token not in self.eos_token_ids), None)
            if token is None:
                return
            if not matcher.accept(token):
                raise GrammarError(_reason(matcher._inner))

    def shutdown(self) -> None:
        """Stop the threads; what has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
