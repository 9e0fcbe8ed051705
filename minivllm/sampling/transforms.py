"""Logits transforms: bias, penalties, temperature, min-p, top-k, top-p, grammar mask."""

# Generated from nbs/sampling/transforms.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.core.plugins import check_maker
from minivllm.sampling.params import InvalidParameter, SamplingParams
from minivllm.sampling.state import RequestView, SamplingBatch

__all__ = [
    "CHUNK", "DEFAULT_PLACE", "TRANSFORMS", "Stage", "Transform", "apply_bitmask", "bitmask_costs",
    "check_extra_args", "chunk_sums", "draw", "each_row", "keep_from", "min_p_threshold", "peak_and_mass",
    "place_of", "register_transform", "standard_stages", "take_largest", "takes_batch", "top_k_threshold",
    "top_p_threshold", "top_values", "transform_name", "transforms_of", "with_transforms",
]  # fmt: skip

NEVER = -math.inf

_TILE = 1 << 21  # floats


def tiles(logits: Tensor) -> Iterator[slice]:
    """Slices of rows, each about 8 MB of logits on a CPU; one slice for all on other devices."""
    step = max(1, _TILE // logits.shape[1]) if logits.device.type == "cpu" else max(1, logits.shape[0])
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


class Entries(NamedTuple):
    """Some places of the logits: rows [N] int64 and token ids [N] int64, and one value each, [N] float32 (or none)."""

    rows: Tensor
    ids: Tensor
    values: Tensor | None = None


def entries(places: Sequence[tuple[int, int]], device: torch.device, values: Sequence[float] | None = None) -> Entries:
    """Entries from (row, token id) pairs."""
    pairs = torch.tensor(places, dtype=torch.int64, device=device).reshape(-1, 2)
    given = None if values is None else torch.tensor(values, dtype=torch.float32, device=device)
    return Entries(pairs[:, 0], pairs[:, 1], given)


def forbid(logits: Tensor, at: Entries) -> Tensor:
    """Minus infinity at the entries. In place, as all functions here: logits [R, V] float32 in and out."""
    logits[at.rows, at.ids] = NEVER
    return logits


def allow_only(logits: Tensor, at: Entries) -> Tensor:
    """Minus infinity everywhere in the rows of the entries, except at the entries."""
    kept = logits[at.rows, at.ids]
    logits[at.rows.unique()] = NEVER
    logits[at.rows, at.ids] = kept
    return logits


def add_bias(logits: Tensor, at: Entries) -> Tensor:
    """Add the values of the entries (a row names a token at most once)."""
    assert at.values is not None
    logits[at.rows, at.ids] += at.values
    return logits


_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_COSTS = torch.from_numpy(np.where(_BYTES == 1, 0.0, math.inf).astype(np.float32))


def bitmask_costs(bitmask: Tensor, vocab_size: int) -> Tensor:
    """int32 [S, ceil(V / 32)] -> float32 [S, V]: 0 where the bit is 1, infinity where it is 0."""
    bytes_ = bitmask.view(torch.uint8).to(torch.int64)
    return torch.nn.functional.embedding(bytes_, _COSTS.to(bitmask.device)).flatten(1)[:, :vocab_size]


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> Tensor:
    """Minus infinity where a bit is 0. rows [S] int64: which rows of the logits the masks [S, ceil(V / 32)] belong to."""
    for tile in tiles(logits[: len(rows)]):
        logits[rows[tile]] -= bitmask_costs(bitmask[tile], logits.shape[1])
    return logits


class Seen(NamedTuple):
    """Tokens that penalised rows have seen: ids [P, L], counts in the output [P, L], in the prompt [P, L] bool."""

    ids: Tensor
    in_output: Tensor
    in_prompt: Tensor


def penalise(
    logits: Tensor, rows: Tensor, seen: Seen, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Apply the penalties [P] to the seen tokens of rows [P]. Definition: vLLM; repetition is that of CTRL (2019)."""
    x = logits[rows[:, None], seen.ids]
    counts = seen.in_output.to(x.dtype)
    occurred = (counts > 0) | seen.in_prompt
    repeated = torch.where(x > 0, x / repetition[:, None], x * repetition[:, None])
    x = torch.where(occurred, repeated, x)
    x = x - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    logits[rows[:, None], seen.ids] = x
    return logits


def keep_from(logits: Tensor, threshold: Tensor) -> Tensor:
    """Minus infinity where a logit is below its row's threshold [R]; all others as they were."""
    buffer = None
    for tile in tiles(logits):
        part = logits[tile]
        buffer = torch.empty_like(part) if buffer is None else buffer[: len(part)]
        keep = torch.ge(part, threshold[tile, None], out=buffer)  # 1.0 or 0.0
        part.sub_(keep.reciprocal_().sub_(1.0))  # minus zero, or minus infinity
    return logits


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """The logit of a token min_p [R] times as likely as the likeliest. From "Turning up the heat" (2024)."""
    return logits.amax(-1) + min_p.log()


_PIECE = 32


def top_values(logits: Tensor, k: int) -> Tensor:
    """The k largest logits of each row, largest first: [R, k]."""
    pieces = logits.shape[1] // _PIECE
    if 4 * k > pieces:
        return logits.topk(k).values
    body = logits[:, : pieces * _PIECE].unflatten(1, (pieces, _PIECE))
    best = body.amax(-1).topk(k, sorted=False).indices
    candidates = body.gather(1, best[:, :, None].expand(-1, -1, _PIECE)).flatten(1)
    return torch.cat([candidates, logits[:, pieces * _PIECE :]], 1).topk(k).values


def top_k_threshold(logits: Tensor, k: Tensor, largest_k: int) -> Tensor:
    """The k-th largest logit of each row; k [R] in [1, largest_k], largest_k <= V."""
    return top_values(logits, largest_k).gather(1, k[:, None] - 1)[:, 0]


_FEW = 128


def peak_and_mass(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [R] float32, and the sum of exp(logit - largest) [R] float64."""
    mass = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
    for tile in tiles(logits):
        p = torch.softmax(logits[tile], -1)
        mass[tile] = chunk_sums(p).sum(-1) / p.amax(-1)
    return logits.amax(-1), mass


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token of the smallest set of likeliest tokens with mass >= top_p [R] float64."""
    peak, mass = peak_and_mass(logits)
    values = top_values(logits, min(_FEW, logits.shape[1]))
    cumulative = (values - peak[:, None]).exp().double().cumsum(-1)
    short = (cumulative < (top_p * mass)[:, None]).sum(-1, keepdim=True)  # how many tokens do not reach the mass yet
    threshold = values.gather(1, short.clamp(max=values.shape[1] - 1))[:, 0]
    if values.shape[1] < logits.shape[1]:
        wide = torch.nonzero(short[:, 0] == values.shape[1])[:, 0]
        for tile in tiles(logits[: len(wide)]):
            threshold[wide[tile]] = _threshold_by_histogram(logits[wide[tile]], top_p[wide[tile]])
    return threshold


_BUCKETS, _DEPTH = 4096, 30.0  # the last bucket holds all that is e**30 times less likely than the likeliest


def _threshold_by_histogram(logits: Tensor, top_p: Tensor) -> Tensor:
    depth = logits.amax(-1, keepdim=True) - logits
    bucket = (depth * (_BUCKETS / _DEPTH)).clamp_(max=_BUCKETS - 1).to(torch.int64)
    sums = torch.zeros(len(logits), _BUCKETS, dtype=torch.float64, device=logits.device)
    p = torch.softmax(logits, -1).double()
    cumulative = sums.scatter_add_(1, bucket, p).cumsum(-1)
    target = (top_p * cumulative[:, -1])[:, None]
    crossed = (cumulative < target).sum(-1, keepdim=True)
    before = (cumulative - sums).gather(1, crossed)
    inside = bucket == crossed
    size = inside.sum(-1, keepdim=True)
    values = top_values(torch.where(inside, logits, NEVER), int(size.max()))
    likeliest = p.amax(-1, keepdim=True)
    mass = before + ((values - logits.amax(-1, keepdim=True)).exp().double() * likeliest).cumsum(-1)
    short = (mass < target).sum(-1, keepdim=True)
    return values.gather(1, torch.minimum(short, size - 1))[:, 0]


CHUNK = 128


def chunk_sums(weights: Tensor) -> Tensor:
    """Sums of each 128 neighbours, the rest last: [R, V] float32 -> [R, ceil(V / 128)] float64."""
    body = weights.shape[1] // CHUNK * CHUNK
    sums = [weights[:, :body].unflatten(1, (-1, CHUNK)).sum(-1)] if body else []
    if body < weights.shape[1]:
        sums.append(weights[:, body:].sum(-1, keepdim=True))
    return torch.cat(sums, 1).double()


_BELOW_ONE = 1.0 - 2.0**-53


def _find(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry of each row that exceeds the target: it has a positive weight."""
    return (cumulative <= target[:, None]).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)


def draw(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, in the order of the token ids.

    u [R] float64 in [0, 1). Returns token ids [R] int64, and whether the row had a distribution [R] bool: at least one finite
    logit, no NaN, no plus infinity. A row's result depends on that row alone.
    """
    sums = torch.cat([chunk_sums(torch.softmax(logits[tile], -1)) for tile in tiles(logits)])
    cumulative = sums.cumsum(-1)
    target = u * cumulative[:, -1]
    chunk = _find(cumulative, target)
    inside = (target - (cumulative - sums).gather(1, chunk)[:, 0]) / sums.gather(1, chunk)[:, 0]  # in [0, 1)
    at = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    exists = at < logits.shape[1]
    weights = torch.softmax(
        logits.gather(1, at.clamp(max=logits.shape[1] - 1)).masked_fill_(~exists, NEVER).double(), -1
    )
    cumulative_inside = weights.cumsum(-1)
    token = _find(cumulative_inside, inside.clamp(0.0, _BELOW_ONE) * cumulative_inside[:, -1])
    return at.gather(1, token)[:, 0], cumulative[:, -1] > 0


def take_largest(logits: Tensor) -> Tensor:
    """The argmax of each row, of equals the first, [R] int64; -1 where the largest number is infinite or one is NaN."""
    values, ids = logits.max(-1)
    return torch.where(values.abs() < math.inf, ids, -1)


@dataclass(frozen=True)
class Stage:
    """One transform of the list. `prepare(batch)` -> data, or None: skip. `apply(logits, data, batch)` -> logits."""

    name: str
    does: str
    prepare: Callable[[SamplingBatch], Any]
    apply: Callable[[Tensor, Any, SamplingBatch], Tensor]

    def __repr__(self) -> str:
        return f"{self.name}: {self.does}"


def _unusual(batch: SamplingBatch) -> Iterator[tuple[int, RequestView]]:
    return ((int(i), batch.requests[i]) for i in np.flatnonzero(batch.column("unusual")))


def _prepare_grammar(batch: SamplingBatch) -> tuple[Tensor, list[RequestView], np.ndarray] | None:
    rows = [(i, view) for i, view in _unusual(batch) if view.matcher is not None]
    if not rows:
        return None
    bitmask = np.zeros((len(rows), -(-batch.vocab_size // 32)), np.int32)
    return torch.tensor([i for i, _ in rows], device=batch.device), [view for _, view in rows], bitmask


def _apply_grammar(logits: Tensor, data: tuple[Tensor, list[RequestView], np.ndarray], batch: SamplingBatch) -> Tensor:
    rows, views, bitmask = data
    for view, bits in zip(views, bitmask, strict=True):
        assert view.matcher is not None
        try:
            view.matcher.fill(bits)
        except ValueError as error:  # this request alone fails
            view.error, bits[:] = view.error or f"grammar: {error}", -1
    return apply_bitmask(logits, rows, torch.from_numpy(bitmask).to(logits.device, non_blocking=True))


def _prepare_allowed(batch: SamplingBatch) -> Entries | None:
    places = [(i, token) for i, view in _unusual(batch) for token in view.params.allowed_token_ids or ()]
    return entries(places, batch.device) if places else None


def _prepare_bias(batch: SamplingBatch) -> Entries | None:
    given = {(i, t): b for i, view in _unusual(batch) for t, b in (view.params.logit_bias or {}).items()}
    return entries(list(given), batch.device, list(given.values())) if given else None


def _prepare_bad_words(batch: SamplingBatch) -> list[tuple[int, list[int], RequestView]] | None:
    words = [(i, ids, view) for i, view in _unusual(batch) for ids in view.params.bad_words_token_ids or ()]
    return words or None


def _apply_bad_words(logits: Tensor, words: list[tuple[int, list[int], RequestView]], batch: SamplingBatch) -> Tensor:
    places = [
        (i, ids[-1]) for i, ids, view in words if len(ids) == 1 or view.output_token_ids[-(len(ids) - 1) :] == ids[:-1]
    ]
    return forbid(logits, entries(places, logits.device)) if places else logits


def _prepare_min_tokens(batch: SamplingBatch) -> tuple[Entries, np.ndarray, np.ndarray] | None:
    wanted = batch.column("min_tokens")
    places = [
        (int(i), token)
        for i in np.flatnonzero(wanted > batch.column("num_output_tokens"))
        for token in sorted(batch.requests[i].params.all_stop_token_ids)
        if token < batch.vocab_size
    ]
    if not places:
        return None
    rows = np.array([i for i, _ in places])
    return entries(places, batch.device), rows, wanted[rows]


def _apply_min_tokens(logits: Tensor, data: tuple[Entries, np.ndarray, np.ndarray], batch: SamplingBatch) -> Tensor:
    at, rows, wanted = data
    active = torch.from_numpy(wanted > batch.column("num_output_tokens")[rows]).to(logits.device, non_blocking=True)
    return forbid(logits, Entries(at.rows[active], at.ids[active]))


def _prepare_penalties(batch: SamplingBatch) -> tuple[Tensor, np.ndarray, list[Tensor]] | None:
    rows = np.flatnonzero(batch.column("penalised"))
    if len(rows) == 0:
        return None
    slots = np.array([batch.state.counts.slot[row] for row in batch.rows[rows].tolist()])
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    there = torch.from_numpy(rows).to(batch.device, non_blocking=True)
    return there, slots, [batch.tensor(name, rows) for name in names]


def _apply_penalties(logits: Tensor, data: tuple[Tensor, np.ndarray, list[Tensor]], batch: SamplingBatch) -> Tensor:
    rows, slots, penalties = data
    counts = batch.state.counts
    length = counts.length[slots]
    column = np.arange(int(length.max()))
    column = np.where(column < length[:, None], column, 0)  # past the end: the first entry again
    tables = (table[slots[:, None], column] for table in (counts.ids, counts.in_output, counts.in_prompt))
    seen = Seen(*(torch.from_numpy(table).to(logits.device, non_blocking=True) for table in tables))
    return penalise(logits, rows, seen, *penalties)


class Picked(NamedTuple):
    """The rows [P] int64 that want a filter (None: all), their values [P], and the largest value."""

    rows: Tensor | None
    values: Tensor
    largest: int


def _pick(batch: SamplingBatch, name: str, wanted: np.ndarray) -> Picked | None:
    rows = np.flatnonzero(wanted)
    if len(rows) == 0:
        return None
    where = None if len(rows) == len(batch) else torch.from_numpy(rows).to(batch.device, non_blocking=True)
    return Picked(where, batch.tensor(name, rows), int(batch.column(name)[rows].max()))


def _filter(logits: Tensor, picked: Picked, threshold: Callable[[Tensor], Tensor]) -> Tensor:
    if picked.rows is None:
        return keep_from(logits, threshold(logits))
    part = logits[picked.rows]
    logits[picked.rows] = keep_from(part, threshold(part))
    return logits


LADDER = (128, 1024, 8192)


def _prepare_top_k(batch: SamplingBatch) -> list[Picked] | None:
    k = batch.column("top_k")
    k = np.where(k < batch.vocab_size, k, 0)
    steps = [0, *LADDER, batch.vocab_size]
    groups = [_pick(batch, "top_k", (low < k) & (k <= high)) for low, high in pairwise(steps)]
    return [group for group in groups if group is not None] or None


def _apply_top_k(logits: Tensor, groups: list[Picked], batch: SamplingBatch) -> Tensor:
    for group in groups:
        logits = _filter(logits, group, partial(top_k_threshold, k=group.values, largest_k=group.largest))
    return logits


def _prepare_temperature(batch: SamplingBatch) -> Tensor | None:
    return batch.tensor("temperature")[:, None] if (batch.column("temperature") != 1).any() else None


def standard_stages() -> list[Stage]:
    """The transforms in the order of vLLM. A new list: insert, remove or reorder as you like."""
    return [
        Stage("grammar", "forbids what the grammar does not allow next", _prepare_grammar, _apply_grammar),
        Stage(
            "allowed_token_ids", "forbids all other tokens", _prepare_allowed, lambda x, at, batch: allow_only(x, at)
        ),
        Stage("logit_bias", "adds a bias to some tokens", _prepare_bias, lambda x, at, batch: add_bias(x, at)),
        Stage("bad_words", "forbids the last token of a bad word", _prepare_bad_words, _apply_bad_words),
        Stage("min_tokens", "forbids an early end", _prepare_min_tokens, _apply_min_tokens),
        Stage(
            "penalties", "repetition, frequency, presence of tokens that occurred", _prepare_penalties, _apply_penalties
        ),
        Stage("temperature", "divides by the temperature", _prepare_temperature, lambda x, t, batch: x.div_(t)),
        Stage(
            "min_p",
            "keeps tokens at least min_p times as likely as the likeliest",
            lambda batch: _pick(batch, "min_p", batch.column("min_p") > 0),
            lambda x, picked, batch: _filter(x, picked, partial(min_p_threshold, min_p=picked.values)),
        ),
        Stage("top_k", "keeps the k likeliest tokens", _prepare_top_k, _apply_top_k),
        Stage(
            "top_p",
            "keeps the likeliest tokens with probability p in all",
            lambda batch: _pick(batch, "top_p", batch.column("top_p") < 1),
            lambda x, picked, batch: _filter(x, picked, partial(top_p_threshold, top_p=picked.values)),
        ),
    ]


class Transform(Protocol):
    """A user's transform. Optional attribute `after`: the name of the stage that it follows (default "penalties")."""

    def __call__(self, logits: Tensor, view: Any, /) -> Tensor:
        """Logits in, logits out, of the same shape; changing them in place is fine."""


DEFAULT_PLACE = "penalties"


def place_of(transform: Callable[..., Any]) -> str:
    """The name of the stage that the transform follows."""
    return getattr(transform, "after", DEFAULT_PLACE)


def transform_name(transform: Any) -> str:
    """What a transform is called in messages."""
    return getattr(transform, "__name__", type(transform).__name__)


def takes_batch(transform: Callable[..., Any]) -> bool:
    """Whether a transform is one of the whole batch: its second parameter is called `batch`."""
    return [*inspect.signature(transform).parameters, "", ""][1] == "batch"


def each_row(transform: Transform) -> Transform:
    """A transform of the engine that applies a transform of a request, `(logits [V], view)`, to every row."""

    def rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
        for row, view in zip(logits, batch.requests, strict=True):
            new = transform(row, view)
            if new is not row:
                row.copy_(new)
        return logits

    rows.__name__, rows.after = transform_name(transform), place_of(transform)  # type: ignore[attr-defined]
    return rows


def _apply_to_batch(transform: Transform, logits: Tensor, data: Any, batch: SamplingBatch) -> Tensor:
    new = transform(logits, batch)
    if not isinstance(new, Tensor) or new.shape != logits.shape:
        got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise ValueError(
            f"transform {transform_name(transform)} must return logits {list(logits.shape)}, returned {got}"
        )
    return new


def with_transforms(stages: Sequence[Stage], transforms: Sequence[Transform]) -> list[Stage]:
    """The stages with an engine's own transforms put in their places, in the given order.

    Raises:
        TypeError: a transform of a single row. ValueError: a transform wants to follow a stage that does not exist.
    """
    out = list(stages)
    for transform in transforms:
        names = [stage.name for stage in out]
        if not takes_batch(transform):
            raise TypeError(
                f"transform {transform_name(transform)} takes one request's row [V], and an engine's takes all [R, V]: call its second"
                f" parameter `batch` if it does, or give each_row({transform_name(transform)})"
            )
        if place_of(transform) not in names:
            raise ValueError(f"transform {transform!r} wants to run after {place_of(transform)!r}; stages: {names}")
        stage = Stage(
            transform_name(transform), "an engine transform", lambda batch: (), partial(_apply_to_batch, transform)
        )
        at = names.index(place_of(transform)) + 1
        while at < len(out) and out[at].does == stage.does:
            at += 1
        out.insert(at, stage)
    return out


TRANSFORMS: dict[str, Callable[..., Transform]] = {}


def register_transform(name: str, make: Callable[..., Transform]) -> None:
    """Let requests ask for a transform by name, in `SamplingParams.extra_args`. Registering a name again replaces it.

    Args:
        name: the key in `extra_args`.
        make: called for each request with the value (a dict as keywords); returns a transform of a row. Raises ValueError for a bad value.

    Raises:
        TypeError: `make` is neither a class nor a function.
    """
    check_maker(f"transform {name!r}", make)
    TRANSFORMS[name] = make


def transforms_of(params: SamplingParams) -> list[Transform]:
    """A request's own transforms: `logits_processors`, then those that `extra_args` names.

    Raises:
        InvalidParameter: a value that a named transform refuses, or a transform of the whole batch.
    """
    own = list(params.logits_processors or ())
    for name, value in (params.extra_args or {}).items():
        if name in TRANSFORMS:
            try:
                own.append(TRANSFORMS[name](**value) if isinstance(value, dict) else TRANSFORMS[name](value))
            except (TypeError, ValueError) as error:
                raise InvalidParameter(f"extra_args[{name!r}]", value, f"what the transform takes ({error})") from error
    for transform in own:
        if takes_batch(transform):
            raise InvalidParameter(
                "logits_processors", transform_name(transform), "of one row (logits [V], view); it takes a batch"
            )
    return own


def check_extra_args(params: SamplingParams, is_read: bool = False) -> None:
    """Raise InvalidParameter if a transform in `extra_args` refuses its value; or for any other name, unless a transform reads it."""
    transforms_of(params)
    for name in params.extra_args or ():
        if name not in TRANSFORMS and not is_read and not params.logits_processors:
            near = difflib.get_close_matches(name, TRANSFORMS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidParameter(
                "extra_args", name, f"a dict whose keys are transforms: {', '.join(TRANSFORMS)}{hint}"
            )
