"""Difference of two runs: per request, per step, first diverging decision."""

# Generated from nbs/lab/comparison.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minivllm.core.events import Event, by_step
from minivllm.core.trace import REASONS, Trace
from minivllm.lab.simulation import Run, make_settings, trace_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What was decided in one step: tokens per request in order, and who was admitted and preempted."""

    step: int
    time: float
    scheduled: dict[str, int]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]

    def same(self, other: StepDecision) -> bool:
        """Equal in all but time."""
        return replace(self, time=other.time) == other and list(self.scheduled) == list(other.scheduled)


def decisions(trace: Trace, names: dict[str, str] | None = None) -> Iterator[StepDecision]:
    """The decision of each recorded step. `names` gives requests other names."""

    def call(name: str) -> str:
        return names.get(name, name) if names else name

    for step, events in by_step(trace.events):
        if step >= 0:
            scheduled = {call(name): n for event in events if event[0] == "schedule" for name, n in event[1].items()}
            of = {kind: tuple(call(e[1]) for e in events if e[0] == kind) for kind in ("admit", "preempt")}
            yield StepDecision(step, events[0][2], scheduled, of["admit"], of["preempt"])


def standing(trace: Trace, request_id: str, step: int) -> str:
    """Where a request stood in a recorded step, and why, in one line."""
    now, known, word, tokens, cut, lost = -1, request_id in trace.start.requests, "was under way", 0, "", -1
    for event in trace.events:
        kind = event[0]
        if kind == "step":
            if now == step:
                break
            now, tokens, cut = now + 1, 0, ""
        elif kind == "schedule" and request_id in event[1]:
            tokens = event[1][request_id]
        elif len(event) > 1 and event[1] == request_id:
            known = known or kind == "add"
            if kind == "chunk":
                cut = f" of the {event[3]} that it wanted: {REASONS.get(event[4], event[4])}"
            lost = now if kind == "preempt" else lost
            if kind != "wait" or lost != now:  # losing its blocks tells more than having to wait for that
                word = _word(event, now) or word
        elif kind == "wait" and word.startswith("waited"):
            word = f"waited behind {event[1]!r} ({REASONS.get(event[2], event[2])})"
        elif kind == "order" and request_id in event[1] and event[1].index(request_id):
            word = f"waited: {event[2]} put {event[1].index(request_id)} before it, first {event[1][0]!r}"
    if not known:
        return "had not arrived"
    if tokens:
        return f"got {tokens} token{'s' * (tokens != 1)}{cut}"
    return word


def _word(event: Event, step: int) -> str:
    kind = event[0]
    if kind == "add":
        return "waited"
    if kind == "wait":
        return f"waited: {REASONS.get(event[2], event[2])} (since step {max(step, 0)})"
    if kind == "kv_wait":
        return f"waited: {REASONS['remote_kv']} (since step {max(step, 0)})"
    if kind == "admit":
        return f"was running (since step {step}) but got no token"
    if kind == "preempt":
        return f"was preempted in step {step} ({event[2]}): request {event[3]!r} needed blocks; chosen by {event[4]}"
    if kind == "finish":
        return f"had ended in step {step} ({event[2]})" if step >= 0 else "had ended before"
    return ""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step in which two runs decided differently.

    Attributes:
        step: counted from the beginning of both recordings.
        a, b: the two decisions; None where a run was over.
        reasons: for each request that was treated differently, where it stood in a and in b; empty if only their order differs.
    """

    step: int
    a: StepDecision | None
    b: StepDecision | None
    reasons: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        lines = [f"first different decision: step {self.step} (at {_when(self.a)} in a, {_when(self.b)} in b)"]
        if self.a and self.b and self.a.scheduled == self.b.scheduled and not self.reasons:
            lines.append("  the same tokens, in another order (who comes first, keeps its blocks longest)")
            lines += [f"    {name}: {', '.join(d.scheduled)}" for name, d in (("a", self.a), ("b", self.b))]
        for name, (mine, theirs) in self.reasons.items():
            lines += [f"  request {name!r}", f"    a: {mine}", f"    b: {theirs}"]
        return "\n".join(lines)


def _when(decision: StepDecision | None) -> str:
    return "over" if decision is None else f"{decision.time:.3f} s"


def first_difference(a: Trace, b: Trace, names: dict[str, str] | None = None, most: int = 4) -> Difference | None:
    """Where two traces decided differently for the first time; None if nowhere.

    Args:
        names: what the requests of b are called in a, where that differs.
        most: for at most this many requests, reasons are given.
    """
    left, right = decisions(a), decisions(b, names)
    back = {theirs: mine for mine, theirs in (names or {}).items()}
    step = 0
    while True:
        x, y = next(left, None), next(right, None)
        if x is None and y is None:
            return None
        if x is None or y is None or not x.same(y):
            concerned = _concerned(x, y)[:most]
            reasons = {n: (standing(a, n, step), standing(b, back.get(n, n), step)) for n in concerned}
            return Difference(step, x, y, reasons)
        step += 1


def _concerned(x: StepDecision | None, y: StepDecision | None) -> list[str]:
    """Requests that were treated differently, those that got something in either run first."""
    mine, theirs = (x.scheduled if x else {}), (y.scheduled if y else {})
    names = [n for n in dict.fromkeys([*mine, *theirs]) if mine.get(n) != theirs.get(n)]
    for attribute in ("preempted", "admitted"):
        left, right = (set(getattr(d, attribute)) if d else set() for d in (x, y))
        names += sorted(left ^ right)
    return list(dict.fromkeys(names))


COMPARED = (
    "queue_time", "ttft", "tpot", "e2e", "finished", "num_cached_tokens", "num_preemptions", "num_output_tokens",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Diff:
    """Two runs of the same requests.

    Attributes:
        requests: one row per request that both have: for each measurement `x` the columns `x_a`, `x_b` and `x_delta` (b less a).
        first_difference: the first step in which they decided differently, with both reasons; None if they never did, or if one was not
            recorded.
        only_a, only_b: requests that only one of them has.
    """

    name_a: str
    name_b: str
    requests: pd.DataFrame
    first_difference: Difference | None
    compared_steps: bool
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def summary(self) -> pd.DataFrame:
        """Per measurement: median and mean in a and in b, and for how many requests it is smaller, equal, larger in b."""
        import pandas as pd

        rows = []
        for name in COMPARED:
            a, b, delta = (self.requests[f"{name}_{x}"] for x in ("a", "b", "delta"))
            signs = ((delta < 0).sum(), (delta == 0).sum(), (delta > 0).sum())
            rows.append((name, a.median(), b.median(), a.mean(), b.mean(), *signs))
        columns = ["measurement", "median_a", "median_b", "mean_a", "mean_b", "smaller", "equal", "larger"]
        return pd.DataFrame(rows, columns=columns)

    def __repr__(self) -> str:
        text = f"Diff of a: {self.name_a} and b: {self.name_b}, {len(self.requests)} requests"
        if self.only_a or self.only_b:
            text += f" ({len(self.only_a)} only in a, {len(self.only_b)} only in b)"
        if not self.compared_steps:
            return f"{text}\nsteps not compared: a run without a trace"
        return f"{text}\n{self.first_difference or 'all decisions are the same'}"


def diff(a: Run | Trace, b: Run | Trace, *, match: str = "id") -> Diff:
    """Compare two runs per request and per step.

    Args:
        match: "id" for equal request ids, "order" for the order in which they were added.

    Raises:
        ValueError: no request in common, or different numbers of requests under match="order".
    """
    left, right = _as_run(a), _as_run(b)
    frame_a, frame_b = left.requests, right.requests
    names = names_in_a(frame_a["request_id"], frame_b["request_id"], match)
    if match == "order":
        frame_b = frame_b.assign(request_id=frame_a["request_id"])
    table = frame_a.merge(frame_b, on="request_id", suffixes=("_a", "_b"), validate="one_to_one")
    if table.empty:
        raise ValueError(
            'the runs have no request id in common; with equal requests under other ids, use match="order"'
        )
    for name in COMPARED:
        table[f"{name}_delta"] = table[f"{name}_b"] - table[f"{name}_a"]
    table = table[["request_id", *(f"{name}_{x}" for name in COMPARED for x in ("a", "b", "delta"))]]
    recorded = left.trace is not None and right.trace is not None
    first = first_difference(trace_of(left), trace_of(right), names) if recorded else None
    ids_a, ids_b = set(frame_a["request_id"]), set(frame_b["request_id"])
    return Diff(
        f"{left.name} ({left.policy})", f"{right.name} ({right.policy})", table, first, recorded,
        tuple(sorted(ids_a - ids_b)), tuple(sorted(ids_b - ids_a)),
    )  # fmt: skip


def names_in_a(a: Collection[str], b: Collection[str], match: str) -> dict[str, str]:
    """What the requests of b are called in a, where that may differ. Raises ValueError: see `diff`."""
    if match not in ("id", "order"):
        raise ValueError(f'match must be "id" or "order", got {match!r}')
    if match == "order" and len(a) != len(b):
        raise ValueError(f'match="order" needs equally many requests, got {len(a)} and {len(b)}')
    return dict(zip(b, a, strict=True)) if match == "order" else {}


def _as_run(x: Any) -> Run:
    if isinstance(x, Run):
        return x
    if isinstance(x, Trace):
        return Run("recorded run", x.header.policy, make_settings(None, x.header.settings), None, x)
    raise TypeError(f"a Run or a Trace was expected, got {type(x).__name__}")
