"""Many simulations side by side, in processes or on a Ray cluster."""

# Generated from nbs/lab/sweep.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from minivllm.core.ray_cluster import join_cluster, leave_cluster
from minivllm.lab.simulation import Run, simulate

if TYPE_CHECKING:
    import pandas as pd


def summary(run: Run) -> dict[str, float]:
    """What a sweep keeps of a run by default: means, quantiles and rates, in seconds and tokens."""
    done = run.requests
    return {
        "ttft_median": done.ttft.median(), "ttft_p99": done.ttft.quantile(0.99), "tpot_median": done.tpot.median(),
        "tokens_per_second": done.num_output_tokens.sum() / run.seconds,
        "hit_rate": done.num_cached_tokens.sum() / done.num_prompt_tokens.sum(),
        "num_preemptions": run.meter.num_preemptions, "seconds": run.seconds,
    }  # fmt: skip


def _one(
    source: Any, options: dict[str, Any], keep: Callable[[Run], dict[str, Any]], point: dict[str, Any]
) -> dict[str, Any]:
    """A point of the grid. Names that `simulate` does not have are settings."""
    own = {name: value for name, value in point.items() if name in ("policy", "cost_model", "preemption", "workload")}
    settings = {name: value for name, value in point.items() if name not in own}
    config = options.get("config")
    if settings:
        if not isinstance(config, dict | None):
            raise TypeError(f"a grid of settings needs config as a dict, got {config!r}")
        config = {**(config or {}), **settings}
    source = own.pop("workload", source)
    return keep(simulate(source, record=False, **{**options, **own, "config": config}))


_JOB: Any = None  # what forked processes find; a workload is made of functions, which pickle cannot send


def _point(number: int) -> dict[str, Any]:
    one, points = _JOB
    return dict(one(points[number]))


def sweep(
    grid: Mapping[str, Sequence[Any]], source: Any = None, *, on: str = "processes", workers: int | None = None,
    keep: Callable[[Run], dict[str, Any]] = summary, **options: Any,
) -> pd.DataFrame:  # fmt: skip
    """Simulate every combination of some values.

    Args:
        grid: values by name: settings (`num_gpu_blocks`, `max_num_seqs`, ...), `policy`, `cost_model`, `preemption`, or `workload`.
        source: what is simulated, if `grid` has no `workload`.
        on: "processes" of this machine, "ray" for the cluster that `core.ray_cluster` finds, or "here", one after the other.
        workers: number of processes, for on="processes"; None for as many as there are cores.
        keep: makes a row of the table from a run.
        options: of `simulate`, for all.

    Returns:
        One row for each combination, the last name of the grid varying fastest: its values, and what `keep` returned.

    Raises:
        ValueError: an unknown `on`, `workers` without processes, no source, or processes on a system that cannot fork.
        TypeError: a grid of settings, and a `config` that is no dict. What a simulation raises.
    """
    import pandas as pd

    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if source is None and "workload" not in grid:
        raise ValueError('sweep needs a source, or "workload" in its grid')
    ways = {"here": _here, "processes": _in_processes, "ray": _on_ray}
    if on not in ways:
        raise ValueError(f"on must be one of {', '.join(ways)}; got {on!r}")
    if workers is not None and on != "processes":
        raise ValueError(f'workers goes with on="processes", not with on={on!r}')
    rows = ways[on](partial(_one, source, options, keep), points, workers or os.cpu_count() or 1)
    named = [{name: getattr(value, "name", value) for name, value in point.items()} for point in points]
    return pd.DataFrame([name | row for name, row in zip(named, rows, strict=True)])


Rows = list[dict[str, Any]]


def _here(one: Callable[[Any], dict[str, Any]], points: Rows, workers: int) -> Rows:
    return list(map(one, points))


def _in_processes(one: Callable[[Any], dict[str, Any]], points: Rows, workers: int) -> Rows:
    global _JOB
    if sys.platform == "win32":
        raise ValueError('on="processes" needs a system that can fork; use on="here" or on="ray"')
    _JOB = one, points
    try:
        with ProcessPoolExecutor(min(workers, len(points)) or 1, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_point, range(len(points))))
    finally:
        _JOB = None


def _on_ray(one: Callable[[Any], dict[str, Any]], points: Rows, workers: int) -> Rows:
    ray = join_cluster()
    try:
        task, shared = ray.remote(lambda one, point: one(point)), ray.put(one)
        return list(ray.get([task.remote(shared, point) for point in points]))
    finally:
        leave_cluster()
