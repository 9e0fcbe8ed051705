"""Workloads, simulation, replay, metrics: the lab's public names."""

# Generated from nbs/lab/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from minivllm.lab.comparison import Diff, diff
from minivllm.lab.cost import Constant, CostModel, Roofline
from minivllm.lab.history import ReplayDivergence, fork, replay
from minivllm.lab.hits import hit_rates
from minivllm.lab.parallel import Link, Parallel, Transfers
from minivllm.lab.readers import WorkloadFileError, read_workload
from minivllm.lab.replicas import simulate_pd, simulate_replicas
from minivllm.lab.simulation import Run, simulate
from minivllm.lab.speculation import speculation_pays
from minivllm.lab.sweep import sweep
from minivllm.lab.workload import Workload, WorkloadRequest

__all__ = [
    "Constant", "CostModel", "Diff", "Link", "Parallel", "ReplayDivergence", "Roofline", "Run", "Transfers", "Workload", "WorkloadFileError", "WorkloadRequest",
    "diff", "fork", "hit_rates", "read_workload", "replay", "simulate", "simulate_pd", "simulate_replicas",
    "speculation_pays", "sweep",
]  # fmt: skip
