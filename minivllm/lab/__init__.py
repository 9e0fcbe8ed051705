"""Workloads, simulation, replay, metrics: the lab's public names."""

# Generated from nbs/lab/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from minivllm.lab.comparison import Diff, diff
from minivllm.lab.cost import Constant, CostModel, Roofline
from minivllm.lab.history import ReplayDivergence, fork, replay
from minivllm.lab.hits import hit_rates
from minivllm.lab.readers import WorkloadFileError, read_workload
from minivllm.lab.simulation import Run, simulate
from minivllm.lab.speculation import speculation_pays
from minivllm.lab.workload import Workload, WorkloadRequest

__all__ = [
    "Constant", "CostModel", "Diff", "ReplayDivergence", "Roofline", "Run", "Workload", "WorkloadFileError", "WorkloadRequest",
    "diff", "fork", "hit_rates", "read_workload", "replay", "simulate", "speculation_pays",
]  # fmt: skip
