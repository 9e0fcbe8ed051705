"""The lab in one line.

What the chapters built, under one name:
"""

# Generated from nbs/lab/index.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=f5fa016b09db module=2644c6aea87c

from minivllm.lab.comparison import Diff, diff
from minivllm.lab.cost import Constant, CostModel, Roofline
from minivllm.lab.history import ReplayDivergence, fork, replay
from minivllm.lab.hits import hit_rates
from minivllm.lab.readers import WorkloadFileError, read_workload
from minivllm.lab.simulation import Run, simulate
from minivllm.lab.workload import Workload, WorkloadRequest

# %% nbs/lab/index.ipynb #exports
__all__ = [
    "Constant", "CostModel", "Diff", "ReplayDivergence", "Roofline", "Run", "Workload", "WorkloadFileError", "WorkloadRequest",
    "diff", "fork", "hit_rates", "read_workload", "replay", "simulate",
]  # fmt: skip
