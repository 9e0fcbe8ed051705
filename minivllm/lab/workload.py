"""Synthetic workloads: Poisson, bursts, shared prefixes, chats, closed loop."""

# Generated from nbs/lab/workload.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from minivllm.core.encoder_cache import MultiModalFeatureSpec, block_keys
from minivllm.core.prefix import root_hash
from minivllm.core.request import Request

if TYPE_CHECKING:
    import pandas as pd

    from minivllm.core.trace import Trace

_POSITION_BITS = 24
_PASSED_ON = (
    "arrival_time", "priority", "user", "cache_salt", "lora_name", "extra_keys", "mm_features", "skip_reading_prefix_cache",
)  # fmt: skip


def text(space: int, num_tokens: int, start: int = 0) -> range:
    """Token ids `start` to `start + num_tokens` of a made-up document. Documents of different `space` share no token id."""
    if start + num_tokens > 1 << _POSITION_BITS:
        raise ValueError(f"a made-up document has at most {1 << _POSITION_BITS} tokens, got {start + num_tokens}")
    first = (space << _POSITION_BITS) + start
    return range(first, first + num_tokens)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
        request_id: unique within the workload.
        arrival_time: seconds from the beginning of the workload.
        prompt: pieces of token ids, ranges or sequences; together at least one token.
        output: token ids of the answer, at least one.
        max_tokens: what the user allows; None for exactly the answer's length (a policy that reads it knows the future then).
        user: whom it belongs to.
        session: the conversation that it belongs to.
        priority: smaller is more urgent.
        cache_salt, lora_name, extra_keys, mm_features, skip_reading_prefix_cache: see `minivllm.core.request.Request`.
        ends_with_stop: the last token of the answer is a stop token; None: if `max_tokens` allows more than the answer.
        stop_token_id: that token as the request's own stop token; None: as the end of the text.
        follow_up: moment of the last token -> the request that comes after it.
    """

    request_id: str
    arrival_time: float
    prompt: tuple[Sequence[int], ...]
    output: Sequence[int]
    max_tokens: int | None = None
    user: str | None = None
    session: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] = ()
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()
    skip_reading_prefix_cache: bool = False
    ends_with_stop: bool | None = None
    stop_token_id: int | None = None
    follow_up: Callable[[float], WorkloadRequest | None] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival_time):
            raise ValueError(f"request {self.request_id!r}: arrival_time must be finite, got {self.arrival_time}")
        if not any(len(piece) for piece in self.prompt):
            raise ValueError(f"request {self.request_id!r}: the prompt is empty")
        if not len(self.output):
            raise ValueError(f"request {self.request_id!r}: the answer is empty; at least one token is needed")
        if self.max_tokens is not None and self.max_tokens < len(self.output):
            raise ValueError(
                f"request {self.request_id!r}: the answer has {len(self.output)} tokens, more than max_tokens={self.max_tokens}"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(map(len, self.prompt))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.output)

    def prompt_token_ids(self) -> list[int]:
        """The prompt, spelled out."""
        return list(chain.from_iterable(self.prompt))

    def to_request(self) -> Request:
        """The request as the scheduler takes it. It ends after its answer, by length or by a stop token."""
        length = len(self.output)
        most = length if self.max_tokens is None else self.max_tokens
        stops = most > length if self.ends_with_stop is None else self.ends_with_stop
        own = self.stop_token_id is not None
        return Request(
            self.request_id, self.prompt_token_ids(), max_tokens=most, min_tokens=length if stops else 0,
            eos_token_id=self.output[-1] if stops and not own else None,
            stop_token_ids=frozenset([self.output[-1]]) if stops and own else frozenset(),
            **{name: getattr(self, name) for name in _PASSED_ON},
        )  # fmt: skip

    def block_names(self, block_size: int) -> list[bytes]:
        """A name for each block of the prompt, the last one included even if it is not full. Equal names, equal prefixes."""
        ids = np.concatenate([_as_array(piece) for piece in self.prompt])
        name, names = root_hash(cast(Request, self)), []
        for start in range(0, len(ids), block_size):
            keys = block_keys(self.mm_features, start, start + block_size)
            content = name + ids[start : start + block_size].tobytes()
            name = sha256(content + repr(keys).encode() if keys else content).digest()
            names.append(name)
        return names


def _as_array(ids: Sequence[int]) -> np.ndarray:
    if isinstance(ids, range):
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    return np.asarray(ids, dtype=np.int64)


class Workload:
    """Requests in the order of arrival. Iterating starts again each time and yields the same requests.

    Args:
        name: what it is, for tables and pictures.
        make: a function that begins to generate the requests.

    Attributes:
        skipped: what the last walk left out and why, counted. Only readers of recorded files leave something out.
    """

    def __init__(self, name: str, make: Callable[[Workload], Iterable[WorkloadRequest]]) -> None:
        self.name = name
        self._make = make
        self.skipped: Counter[str] = Counter()

    @classmethod
    def of(cls, requests: Iterable[WorkloadRequest], name: str = "requests") -> Workload:
        """A workload of given requests, sorted by arrival."""
        listed = sorted(requests, key=lambda r: r.arrival_time)
        return cls(name, lambda _: listed)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """The requests that come by themselves; their follow-ups hang on them."""
        self.skipped = Counter()
        return iter(self._make(self))

    def __repr__(self) -> str:
        return f"Workload({self.name!r})"

    def unrolled(self) -> Iterator[WorkloadRequest]:
        """All requests, follow-ups too, in the order in which they would arrive if every answer were complete at once."""
        later: list[tuple[float, int, WorkloadRequest]] = []
        ticket = count()
        for first in self:
            heapq.heappush(later, (first.arrival_time, next(ticket), first))
            while later and later[0][0] <= first.arrival_time:
                yield from _answer(later, ticket)
        while later:
            yield from _answer(later, ticket)

    def map(self, change: Callable[[WorkloadRequest], WorkloadRequest], name: str | None = None) -> Workload:
        """Every request changed by a function, follow-ups too."""
        return self._wrap(name or self.name, lambda inner: (_change(request, change) for request in inner))

    def _wrap(self, name: str, change: Callable[[Iterator[WorkloadRequest]], Iterable[WorkloadRequest]]) -> Workload:
        def make(outer: Workload) -> Iterable[WorkloadRequest]:
            inner = iter(self)
            outer.skipped = self.skipped
            return change(inner)

        return Workload(name, make)

    def head(self, num_requests: int) -> Workload:
        """The first requests, with their follow-ups."""
        _check_count("head: num_requests", num_requests)
        return self._wrap(self.name, lambda inner: islice(inner, num_requests))

    def faster(self, factor: float) -> Workload:
        """The same requests arriving `factor` times as fast. Think times stay as they are."""
        if not 0 < factor < math.inf:
            raise ValueError(f"faster() needs a finite factor above 0, got {factor}")
        return self._wrap(
            f"{self.name} x{factor:g}",
            lambda inner: (replace(request, arrival_time=request.arrival_time / factor) for request in inner),
        )

    def arriving(self, rate: float, burstiness: float = 1.0, seed: int = 0) -> Workload:
        """The same requests with other arrival times: a Poisson process, or bursts.

        Args:
            rate: requests per second.
            burstiness: shape of the gamma distribution of the gaps, as in vLLM's benchmark: 1 is Poisson, smaller comes in bursts.
        """
        moments = _moments(rate, burstiness, seed)  # checks its arguments now, not at the first walk
        return self._wrap(
            f"{self.name} at {rate:g}/s",
            lambda inner: (replace(request, arrival_time=t) for request, t in zip(inner, moments(), strict=False)),
        )

    def allowing(self, max_tokens: int) -> Workload:
        """Users who allow `max_tokens` whatever they get: answers end with a stop token, longer ones are cut. No policy knows lengths then."""

        def change(request: WorkloadRequest) -> WorkloadRequest:
            if len(request.output) > max_tokens:
                return replace(request, output=request.output[:max_tokens], max_tokens=max_tokens, ends_with_stop=False)
            return replace(request, max_tokens=max_tokens)

        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        return self.map(change)

    def in_vocabulary(self, low: int, high: int) -> Workload:
        """Token ids from `low` to `high` - 1, as a real model needs them. Equal ids stay equal; different ones rarely meet."""
        if not 0 <= low < high:
            raise ValueError(f"in_vocabulary needs 0 <= low < high, got {low} and {high}")

        def spell(ids: Sequence[int]) -> Sequence[int]:
            return (low + (_scramble(_as_array(ids)) % np.uint64(high - low)).astype(np.int64)).tolist()

        return self.map(lambda r: replace(r, prompt=tuple(spell(p) for p in r.prompt), output=spell(r.output)))

    def to_pandas(self) -> pd.DataFrame:
        """One row per request, follow-ups too: arrival, lengths, user, session."""
        import pandas as pd

        columns = ["request_id", "arrival", "num_prompt_tokens", "num_output_tokens", "max_tokens", "user", "session"]
        rows = [
            (r.request_id, r.arrival_time, r.num_prompt_tokens, r.num_output_tokens, r.max_tokens, r.user, r.session)
            for r in self.unrolled()
        ]
        return pd.DataFrame(rows, columns=columns)

    @classmethod
    def from_trace(cls, trace: Trace) -> Workload:
        """The requests of a recorded run, with their recorded answers. Times count from the first arrival."""
        recorded = recorded_requests(trace)
        skipped = Counter({"ended without a token": sum(not r.answered for r in recorded)})
        skipped["under way when the recording began"] = len(trace.start.requests)
        requests = [r.request for r in recorded if r.answered]
        first, names = min((r.arrival_time for r in requests), default=0.0), Counter[str]()
        for i, r in enumerate(requests):
            names[r.request_id] += 1
            again = f"#{names[r.request_id]}" if names[r.request_id] > 1 else ""
            stops = r.ends_with_stop or None  # one that was cut off ends where it was cut
            moment = r.arrival_time - first
            requests[i] = replace(r, request_id=r.request_id + again, arrival_time=moment, ends_with_stop=stops)
        requests.sort(key=lambda r: r.arrival_time)

        def make(workload: Workload) -> Iterable[WorkloadRequest]:
            workload.skipped.update(+skipped)
            return requests

        return cls("recorded run", make)


def _answer(later: list[tuple[float, int, WorkloadRequest]], ticket: Iterator[int]) -> Iterator[WorkloadRequest]:
    _, _, request = heapq.heappop(later)
    yield request
    after = request.follow_up(request.arrival_time) if request.follow_up else None
    if after is not None:
        heapq.heappush(later, (after.arrival_time, next(ticket), after))


def _change(request: WorkloadRequest, change: Callable[[WorkloadRequest], WorkloadRequest]) -> WorkloadRequest:
    follow_up = request.follow_up
    if follow_up is None:
        return change(request)

    def changed(moment: float) -> WorkloadRequest | None:
        after = follow_up(moment)
        return after and _change(after, change)

    return replace(change(request), follow_up=changed)


def _check_count(name: str, count: int, least: int = 0) -> None:
    """Raise ValueError unless a parameter is a whole number, at least `least`."""
    if not isinstance(count, int | np.integer) or count < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {count!r}")


def _moments(rate: float, burstiness: float, seed: int) -> Callable[[], Iterator[float]]:
    """Arrival times without end: gaps of mean 1 / rate, drawn from a gamma distribution."""
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests per second, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0 (1 is Poisson, smaller comes in bursts), got {burstiness}")

    def walk() -> Iterator[float]:
        generator, now = np.random.default_rng([seed, 1]), 0.0
        while True:
            for gap in generator.gamma(burstiness, 1 / (rate * burstiness), 1024).tolist():
                now += gap
                yield now

    return walk


def _scramble(ids: np.ndarray) -> np.ndarray:
    """A 64-bit mix of each number (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Lengths = int | tuple[int, int] | Callable[[np.random.Generator], int]


def lognormal(median: float, sigma: float, most: int) -> Callable[[np.random.Generator], int]:
    """Lengths around a median with a long tail. `sigma` is the spread of their logarithm; none is below 1 or above `most`."""
    if not (median > 0 and sigma >= 0 and most >= 1):
        raise ValueError(f"lognormal needs median > 0, sigma >= 0 and most >= 1, got {median}, {sigma} and {most}")
    mean = math.log(median)
    return lambda generator: min(most, max(1, round(generator.lognormal(mean, sigma))))


PROMPTS: Lengths = lognormal(500, 1.0, 4000)
ANSWERS: Lengths = lognormal(150, 0.7, 1000)


def _drawing(name: str, lengths: Lengths) -> Callable[[np.random.Generator], int]:
    """A function that draws a length, at least 1."""
    if callable(lengths):
        return lengths
    match lengths:
        case (int() | np.integer() as low, int() | np.integer() as high) if 1 <= low <= high:
            return lambda generator: int(generator.integers(low, high + 1))
        case int() | np.integer() as length if length >= 1:
            return lambda generator: int(generator.integers(length, length + 1))
    raise ValueError(f"{name} must be at least 1, or a pair (low, high) with 1 <= low <= high; got {lengths!r}")


def poisson(
    rate: float, num_requests: int, prompt_tokens: Lengths = PROMPTS, output_tokens: Lengths = ANSWERS, *,
    burstiness: float = 1.0, num_users: int = 1, seed: int = 0,
) -> Workload:  # fmt: skip
    """Independent requests that share nothing, at random moments.

    Args:
        rate: requests per second, on average.
        num_requests: how many.
        prompt_tokens, output_tokens: a number, a pair (low, high) for anything in between, or a function of a numpy generator.
        burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, smaller comes in bursts.
        num_users: requests are dealt to this many users at random.
        seed: same seed, same workload.
    """
    _check_count("num_requests", num_requests)
    _check_count("num_users", num_users, 1)
    draw_prompt, draw_output = _drawing("prompt_tokens", prompt_tokens), _drawing("output_tokens", output_tokens)
    moments = _moments(rate, burstiness, seed)

    def make(_: Workload) -> Iterator[WorkloadRequest]:
        generator = np.random.default_rng([seed, 0])
        for i, moment in zip(range(num_requests), moments(), strict=False):
            prompt, output = text(2 * i, draw_prompt(generator)), text(2 * i + 1, draw_output(generator))
            user = f"user-{generator.integers(num_users)}" if num_users > 1 else None
            yield WorkloadRequest(str(i), moment, (prompt,), output, user=user)

    return Workload(f"{'Poisson' if burstiness == 1 else 'bursts'} at {rate:g}/s", make)


def bursts(rate: float, num_requests: int, *args: Any, burstiness: float = 0.2, **kwargs: Any) -> Workload:
    """Requests that come in bursts: `poisson` with a `burstiness` well below 1."""
    return poisson(rate, num_requests, *args, burstiness=burstiness, **kwargs)


def shared_prefix(
    rate: float, num_requests: int, num_prefixes: int, prefix_tokens: Lengths = 1024,
    prompt_tokens: Lengths = (16, 256), output_tokens: Lengths = ANSWERS, *,
    skew: float = 1.0, burstiness: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Requests that begin with one of a few long texts: system prompts, documents, few-shot examples.

    Args:
        num_prefixes: different beginnings.
        prefix_tokens: their lengths.
        prompt_tokens: what each request adds.
        skew: how unequal the beginnings are in demand: the k-th is drawn with a weight of 1 / k**skew (Zipf); 0 for equal.
    """
    draw_prefix, draw_output = _drawing("prefix_tokens", prefix_tokens), _drawing("output_tokens", output_tokens)
    draw_prompt, moments = _drawing("prompt_tokens", prompt_tokens), _moments(rate, burstiness, seed)
    _check_count("num_requests", num_requests)
    _check_count("num_prefixes", num_prefixes, 1)
    if not math.isfinite(skew):
        raise ValueError(f"skew must be finite, got {skew}")

    def make(_: Workload) -> Iterator[WorkloadRequest]:
        lengths = np.random.default_rng([seed, 2])
        prefixes = [text(2 * k, draw_prefix(lengths)) for k in range(num_prefixes)]
        weights = 1 / np.arange(1, num_prefixes + 1) ** skew
        generator, bounds = np.random.default_rng([seed, 0]), np.cumsum(weights / weights.sum())
        for i, moment in zip(range(num_requests), moments(), strict=False):
            k = min(int(np.searchsorted(bounds, generator.random(), side="right")), num_prefixes - 1)
            own, output = draw_prompt(generator), draw_output(generator)
            space = 2 * (num_prefixes + i)
            yield WorkloadRequest(
                str(i), moment, (prefixes[k], text(space, own)), text(space + 1, output), session=f"prefix-{k}"
            )

    return Workload(f"{num_prefixes} shared prefixes at {rate:g}/s", make)


def chat(
    rate: float, num_sessions: int, turns: Lengths = (1, 8), think_time: float = 10.0, system_tokens: int = 0,
    prompt_tokens: Lengths = (16, 256), output_tokens: Lengths = ANSWERS, *, burstiness: float = 1.0, seed: int = 0,
) -> Workload:  # fmt: skip
    """Conversations. Each turn's prompt is everything said before, and a new message.

    Args:
        rate: new conversations per second.
        turns: questions per conversation.
        think_time: mean seconds from an answer to the next question, exponentially distributed.
        system_tokens: length of a beginning that all conversations share.
    """
    _check_count("num_sessions", num_sessions)
    moments = _moments(rate, burstiness, seed)
    start = _conversation(turns, think_time, system_tokens, prompt_tokens, output_tokens, seed)
    return Workload(
        f"chat at {rate:g}/s",
        lambda _: (start(s, moment) for s, moment in zip(range(num_sessions), moments(), strict=False)),
    )


def closed_loop(
    num_users: int, requests_per_user: int, think_time: float = 1.0, prompt_tokens: Lengths = PROMPTS,
    output_tokens: Lengths = ANSWERS, *, seed: int = 0,
) -> Workload:  # fmt: skip
    """Users who ask, wait for the answer, think, and ask something else. All begin at time 0."""
    _check_count("num_users", num_users)
    start = _conversation(requests_per_user, think_time, 0, prompt_tokens, output_tokens, seed, remember=False)
    return Workload(f"{num_users} users in a closed loop", lambda _: (start(s, 0.0) for s in range(num_users)))


_MOST_TURNS = 1 << 16


def _conversation(
    turns: Lengths, think_time: float, system_tokens: int, prompt_tokens: Lengths, output_tokens: Lengths,
    seed: int, remember: bool = True,
) -> Callable[[int, float], WorkloadRequest]:  # fmt: skip
    """A function that starts the s-th conversation at a moment. Without `remember`, a turn's prompt is its own message alone."""
    _check_count("system_tokens", system_tokens)
    draw_turns = _drawing("turns", turns)
    draw_prompt, draw_output = _drawing("prompt_tokens", prompt_tokens), _drawing("output_tokens", output_tokens)
    if not 0 <= think_time < math.inf:
        raise ValueError(f"think_time must be finite, at least 0 seconds, got {think_time}")
    system: tuple[range, ...] = (text(0, system_tokens),) if system_tokens else ()

    def start(session: int, moment: float) -> WorkloadRequest:
        most = min(draw_turns(np.random.default_rng([seed, 2, session])), _MOST_TURNS)
        return turn(session, 0, most, moment, system)

    def turn(session: int, i: int, most: int, moment: float, history: tuple[range, ...]) -> WorkloadRequest:
        generator = np.random.default_rng([seed, 3, session, i])
        space = 2 + 2 * (session * _MOST_TURNS + i)
        prompt, output = (*history, text(space, draw_prompt(generator))), text(space + 1, draw_output(generator))
        pause = float(generator.exponential(think_time)) if think_time else 0.0
        after = (*prompt, output) if remember else system
        name = f"{session}" if remember else f"user-{session}"

        def follow_up(finished: float) -> WorkloadRequest:
            return turn(session, i + 1, most, finished + pause, after)

        more = follow_up if i + 1 < most else None
        return WorkloadRequest(f"{session}-{i}", moment, prompt, output, user=name, session=name, follow_up=more)

    return start


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that was added during a recording.

    Attributes:
        request: with its recorded answer, its times on the recording's clock. A request that got no token has the answer `[0]`.
        reason: why it ended, or "unfinished".
        answered: it got at least one token.
    """

    request: WorkloadRequest
    reason: str
    answered: bool


def recorded_requests(trace: Trace) -> list[Recorded]:
    """The requests that were added during a recording, in that order. An id can occur again after its request has ended."""
    found: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}
    for event in trace.events:
        kind = event[0]
        if kind == "add":
            found.append({"added": event, "answer": array("q"), "end": ("unfinished", None), "attributes": {}})
            latest[event[1]] = found[-1]
        elif kind == "attributes":
            latest[event[1]]["attributes"] = event[2]
        elif kind == "update":
            for request_id, tokens in event[2].items():
                if request_id in latest:
                    latest[request_id]["answer"].extend(tokens)
        elif kind == "finish" and event[1] in latest:
            latest[event[1]]["end"] = event[2:]
    return [_recorded(**values) for values in found]


def _recorded(added: tuple[Any, ...], answer: array[int], end: tuple[str, Any], attributes: dict[str, Any]) -> Recorded:
    _, request_id, _, max_tokens, arrival, priority, user, prompt = added[:8]
    reason, stop_reason = end
    features = tuple(MultiModalFeatureSpec.from_tuple(values) for values in attributes.get("mm_features", ()))
    request = WorkloadRequest(
        request_id, arrival, (prompt,), answer or [0], max_tokens=max_tokens, user=user, priority=priority,
        ends_with_stop=reason == "stop", stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
        **attributes | {"mm_features": features},
    )  # fmt: skip
    return Recorded(request, reason, bool(answer))
