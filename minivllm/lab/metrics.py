"""Tables of a run: latency percentiles, throughput, goodput, fragmentation."""

# Generated from nbs/lab/metrics.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.events import FoldReader, RequestSnapshot, read
from minivllm.core.trace import Trace
from minivllm.lab.meter import Meter
from minivllm.lab.simulation import Run, trace_of

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
    counts = {"requests": ended, "output_tokens": frame["num_output_tokens"].sum(), "prompt_tokens": prompts}
    counts["computed_tokens"] = meter.num_tokens
    values = {f"{name}_per_s": count / seconds if seconds > 0 else math.nan for name, count in counts.items()}
    values |= {"seconds": seconds, "steps": meter.num_steps, "preemptions": meter.num_preemptions}
    values["cached_share"] = begun["num_cached_tokens"].sum() / prompts if prompts else math.nan
    return pd.DataFrame(list(values.items()), columns=["metric", "value"]).astype({"value": float})


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
    shares = [(name, float(np.mean(mask)), float(np.sum(mask) / seconds)) for name, mask in rows]
    return pd.DataFrame(shares, columns=["promise", "share", "requests_per_s"])


def summary(x: Run | Trace | Meter) -> pd.DataFrame:
    """All of `latency` and `throughput` in one table. Columns: `metric`, `statistic`, `value`."""
    import pandas as pd

    late = latency(x).rename(columns={"seconds": "value"})
    total = throughput(x).assign(statistic="total")
    return pd.concat([late, total[["metric", "statistic", "value"]]], ignore_index=True)


def compare(runs: Mapping[str, Run | Trace | Meter]) -> pd.DataFrame:
    """The summaries of several runs in one table, with a column `run` in front."""
    import pandas as pd

    if not runs:
        raise ValueError("compare needs at least one run")
    table = pd.concat([summary(x).assign(run=name) for name, x in runs.items()], ignore_index=True)
    return table[["run", "metric", "statistic", "value"]]


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


class OccupancyReader(FoldReader):
    """Notes the occupancy at the end of each step: `read(trace, reader)`, then `reader.occupancies()`.

    Args:
        max_model_len: what "max_len" reserves per request; None for the recorded limit.
    """

    def __init__(self, max_model_len: int | None = None) -> None:
        super().__init__()
        self.longest = max_model_len

    def begin(self) -> None:
        """Raises ValueError if no limit is recorded and none is given."""
        self.longest = self.longest or self.header.settings.get("max_model_len")
        if self.longest is None:
            raise ValueError("the trace does not say how long a request may be; give max_model_len=")
        self.time = 0.0
        self._found: list[tuple[Occupancy, list[RequestSnapshot]]] = []

    def _on_step(self, step: int, time: float) -> None:
        self.time = time

    def end_step(self) -> None:
        running = [self.fold.now.requests[name] for name in self.fold.now.running]
        if not running:
            return
        size, groups = self.header.block_size, self.header.num_groups
        computed = [request.num_computed_tokens for request in running]
        slots = [size * sum(map(len, request.tables)) for request in running]
        left = size * sum(table.count(0) for request in running for table in request.tables)  # behind windows
        reserved = {
            "paged": sum(slots) - left,
            "oracle": 0,  # not known yet
            "power_of_two": groups * sum(1 << (max(1, n) - 1).bit_length() for n in computed),
            "max_len": groups * int(self.longest or 0) * len(running),
        }
        empty = [n // groups - tokens for n, tokens in zip(slots, computed, strict=True)]
        stored = groups * sum(computed) - left
        self._found.append((Occupancy(self.step, self.time, stored, reserved, empty), running))

    def occupancies(self) -> Iterator[Occupancy]:
        """What was noted. The final lengths are those that the fold has counted up to now."""
        for at, running in self._found:
            at.reserved["oracle"] = self.header.num_groups * sum(request.num_tokens for request in running)
            yield at


def occupancy(trace: Trace | Run, max_model_len: int | None = None) -> Iterator[Occupancy]:
    """What is reserved and what is used, at the end of each step with running requests.

    Args:
        max_model_len: what "max_len" reserves per request; None for the recorded limit.

    Raises:
        ValueError: the run was not recorded, or no limit is recorded and none is given.
    """
    reader = OccupancyReader(max_model_len)
    read(trace_of(trace), reader)
    yield from reader.occupancies()


def fragmentation(trace: Trace | Run, max_model_len: int | None = None) -> pd.DataFrame:
    """Memory reserved for running requests and not filled, with paging and with three ways to reserve in one piece.

    Returns:
        Columns `step`, `time`, `scheme` ("paged", "oracle", "power_of_two", "max_len"), `reserved_tokens`, `stored_tokens`, `waste` (share of what is
        reserved). One row per scheme and step of `occupancy`, in its token slots and with its arguments.
    """
    import pandas as pd

    found = occupancy(trace, max_model_len)
    rows = [(at.step, at.time, scheme, n, at.stored) for at in found for scheme, n in at.reserved.items()]
    table = pd.DataFrame(rows, columns=["step", "time", "scheme", "reserved_tokens", "stored_tokens"])
    return table.assign(waste=(1 - table.stored_tokens / table.reserved_tokens).fillna(0.0))
