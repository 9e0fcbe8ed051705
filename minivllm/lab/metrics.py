"""Tables of a run: latency percentiles, throughput, goodput, fragmentation."""

# Generated from nbs/lab/metrics.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.trace import Trace
from minivllm.lab.meter import Meter
from minivllm.lab.simulation import Run

__all__ = [
    "LATENCIES", "Occupancy", "compare", "fragmentation", "goodput", "latency", "occupancy", "requests",
    "summary", "throughput",
]  # fmt: skip

if TYPE_CHECKING:
    import pandas as pd


def _meter(x: Run | Trace | Meter) -> Meter:
    if isinstance(x, Run):
        return x.meter
    if isinstance(x, Trace):
        return Meter.of(x)
    if isinstance(x, Meter):
        return x
    raise TypeError(f"a Run, a Trace or a Meter was expected, got {type(x).__name__}")


def requests(x: Run | Trace | Meter) -> pd.DataFrame:
    """One row per request: see `Meter.to_pandas`."""
    return _meter(x).to_pandas()


LATENCIES = ("queue_time", "ttft", "tpot", "e2e")


def latency(x: Run | Trace | Meter, quantiles: Sequence[float] = (0.5, 0.9, 0.95, 0.99)) -> pd.DataFrame:
    """Percentiles in seconds. Columns: `metric`, `statistic` ("mean", "p50", ...), `seconds`.

    `queue_time`, `ttft`, `tpot`, `e2e` are over requests for which they are known; `itl` is over all gaps between tokens, to within one per
    cent.
    """
    import pandas as pd

    meter = _meter(x)
    frame, rows = meter.to_pandas(), []
    for q in quantiles:
        if not 0 <= q <= 1:
            raise ValueError(f"quantiles must be from 0 to 1, got {q}")
    for metric in LATENCIES:
        values = frame[metric].dropna()
        rows.append((metric, "mean", values.mean()))
        rows += [(metric, f"p{100 * q:g}", values.quantile(q)) for q in quantiles]
    rows.append(("itl", "mean", meter.gaps.mean))
    rows += [("itl", f"p{100 * q:g}", meter.gaps.quantile(q)) for q in quantiles]
    return pd.DataFrame(rows, columns=["metric", "statistic", "seconds"])


def throughput(x: Run | Trace | Meter) -> pd.DataFrame:
    """Rates over the time from the first arrival to the last event. Columns: `metric`, `value`.

    `requests_per_s` and `output_tokens_per_s` count what was finished and sampled, `prompt_tokens_per_s` the prompts of requests that got a first
    token, `computed_tokens_per_s` what the model computed (less what the cache saved, plus what preemption cost). `cached_share`
    is the share of those prompts' tokens that came from the cache.
    """
    import pandas as pd

    meter = _meter(x)
    frame = meter.to_pandas()
    begin = np.nanmin([frame["arrival"].min(), math.nan if meter.start is None else meter.start]) if len(frame) else 0.0
    seconds = meter.end - begin
    begun = frame[frame["first_token"].notna()]
    prompts = begun["num_prompt_tokens"].sum()
    ended = frame["finish_reason"].isin(("stop", "length")).sum()
    per_second = {
        "requests_per_s": ended,
        "output_tokens_per_s": frame["num_output_tokens"].sum(),
        "prompt_tokens_per_s": prompts,
        "computed_tokens_per_s": meter.num_tokens,
    }
    rows = [(name, float(value) / seconds if seconds > 0 else math.nan) for name, value in per_second.items()]
    rows += [
        ("seconds", float(seconds)),
        ("steps", float(meter.num_steps)),
        ("preemptions", float(meter.num_preemptions)),
        ("cached_share", float(begun["num_cached_tokens"].sum() / prompts) if prompts else math.nan),
    ]
    return pd.DataFrame(rows, columns=["metric", "value"])


def goodput(
    x: Run | Trace | Meter, *, ttft: float | None = None, tpot: float | None = None, e2e: float | None = None
) -> pd.DataFrame:
    """Requests that kept every promise. Columns: `promise`, `share` (of all requests), `requests_per_s`.

    Args:
        ttft, tpot, e2e: most seconds allowed; None for no promise. A request of one token keeps any `tpot`; one that did not finish keeps none.
    """
    import pandas as pd

    promises = {name: limit for name, limit in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)) if limit is not None}
    if not promises:
        raise ValueError("goodput needs at least one promise: ttft=, tpot= or e2e=, in seconds")
    meter = _meter(x)
    frame = meter.to_pandas()
    finished = frame["finish_reason"].isin(("stop", "length"))
    kept = {
        name: finished & ((frame[name] <= limit) | (frame[name].isna() & (name == "tpot")))
        for name, limit in promises.items()
    }
    everything = np.logical_and.reduce(list(kept.values()))
    seconds = meter.end - frame["arrival"].min() if len(frame) else math.nan
    rows = [(f"{name} <= {promises[name]:g} s", mask) for name, mask in kept.items()]
    if len(rows) > 1:
        rows.append(("all", everything))
    return pd.DataFrame(
        [(name, float(np.mean(mask)), float(np.sum(mask) / seconds)) for name, mask in rows],
        columns=["promise", "share", "requests_per_s"],
    )


def summary(x: Run | Trace | Meter) -> pd.DataFrame:
    """All of `latency` and `throughput` in one table. Columns: `metric`, `statistic`, `value`."""
    import pandas as pd

    late = latency(x).rename(columns={"seconds": "value"})
    return pd.concat(
        [late, throughput(x).assign(statistic="total")[["metric", "statistic", "value"]]], ignore_index=True
    )


def compare(runs: Mapping[str, Run | Trace | Meter]) -> pd.DataFrame:
    """The summaries of several runs in one table, with a column `run` in front."""
    import pandas as pd

    if not runs:
        raise ValueError("compare needs at least one run")
    return pd.concat([summary(x).assign(run=name) for name, x in runs.items()], ignore_index=True)[
        ["run", "metric", "statistic", "value"]
    ]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The KV cache of the running requests at the end of a step, in token slots. One slot has room for one token in one KV cache group.

    Attributes:
        step, time: which step, and when it began.
        stored: slots that hold something; those of shared blocks count for each request that holds them.
        reserved: slots set aside: with paging, and in one piece for the final length ("oracle"), for the next power of two, for the longest
            allowed request ("max_len"). A piece has slots in every group; none is given back to a window.
        empty: for each running request, the slots of its last block that are empty.
    """

    step: int
    time: float
    stored: int
    reserved: dict[str, int]
    empty: list[int]


def occupancy(trace: Trace | Run, max_model_len: int | None = None) -> Iterator[Occupancy]:
    """What is reserved and what is used, at the end of each step with running requests.

    Args:
        max_model_len: what "max_len" reserves per request; None for the recorded limit.

    Raises:
        ValueError: the run was not recorded, or no limit is recorded and none is given.
    """
    trace = _trace_of(trace)
    longest = max_model_len or trace.header.settings.get("max_model_len")
    if longest is None:
        raise ValueError("the trace does not say how long a request may be; give max_model_len=")
    block, groups = trace.header.block_size, trace.header.num_groups
    for step, time, blocks, left, computed, lengths in _held(trace):
        paged = sum(blocks.values()) * block
        stored = groups * sum(computed.values()) - block * sum(left.get(name, 0) for name in computed)
        reserved = {
            "paged": paged,
            "oracle": groups * sum(lengths[name] for name in computed),
            "power_of_two": groups * sum(1 << (max(1, n) - 1).bit_length() for n in computed.values()),
            "max_len": groups * longest * len(computed),
        }
        empty = [(blocks[name] + left.get(name, 0)) * block // groups - n for name, n in computed.items()]
        yield Occupancy(step, time, stored, reserved, empty)


def fragmentation(trace: Trace | Run, max_model_len: int | None = None) -> pd.DataFrame:
    """Memory reserved for running requests and not filled, with paging and with three ways to reserve in one piece.

    Args:
        max_model_len: what `max_len` reserves per request; None for the recorded limit.

    Returns:
        Columns `step`, `time`, `scheme` ("paged", "oracle", "power_of_two", "max_len"), `reserved_tokens`, `stored_tokens`, `waste` (share of what is
        reserved). One row per scheme and step of `occupancy`, in its token slots.
    """
    import pandas as pd

    rows = [
        (at.step, at.time, scheme, n, at.stored, 1 - at.stored / n if n else 0.0)
        for at in occupancy(trace, max_model_len)
        for scheme, n in at.reserved.items()
    ]
    return pd.DataFrame(rows, columns=["step", "time", "scheme", "reserved_tokens", "stored_tokens", "waste"])


def _trace_of(x: Trace | Run) -> Trace:
    trace = x.trace if isinstance(x, Run) else x
    if trace is None:
        raise ValueError(f"{x!r} was not recorded; simulate with record=True")
    return trace


def _held(trace: Trace) -> Any:
    """After each step: step, time, and per running request blocks held, blocks left by windows, tokens computed; and all final lengths."""
    lengths = {name: s.num_tokens for name, s in trace.start.requests.items()}
    for event in trace.events:
        if event[0] == "add":
            lengths[event[1]] = event[2] + len(event[8])
        elif event[0] == "update":
            for name, tokens in event[2].items():
                lengths[name] += len(tokens)
    running = {name: s for name, s in trace.start.requests.items() if s.status == "RUNNING"}
    computed = {name: s.num_computed_tokens for name, s in running.items()}
    blocks = {name: sum(block > 0 for table in s.tables for block in table) for name, s in running.items()}
    left = {name: sum(block == 0 for table in s.tables for block in table) for name, s in running.items()}
    step, time = -1, 0.0
    for event in trace.events:
        kind = event[0]
        if kind == "step":
            if step >= 0 and computed:
                yield step, time, blocks, left, computed, lengths
            step, time = step + 1, event[2]
        elif kind == "admit":
            computed[event[1]] = event[2]
        elif kind in ("alloc", "hit"):
            some = sum(map(bool, event[3]))
            blocks[event[1]] = blocks.get(event[1], 0) + some
            left[event[1]] = left.get(event[1], 0) + len(event[3]) - some
        elif kind == "skip":
            blocks[event[1]] -= len(event[5])
            left[event[1]] += len(event[5])
        elif kind == "free":
            for counts in (blocks, left, computed):
                counts.pop(event[1], None)
        elif kind == "schedule":
            for name, n in event[1].items():
                computed[name] += n
    if step >= 0 and computed:
        yield step, time, blocks, left, computed, lengths
