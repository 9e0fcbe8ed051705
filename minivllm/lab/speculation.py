"""Speculation at a load: whether drafts pay, simulated."""

# Generated from nbs/lab/speculation.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.lab.cost import CostModel, Speculative
from minivllm.lab.simulation import simulate

if TYPE_CHECKING:
    import pandas as pd


def speculation_pays(
    source: Any, cost_model: CostModel, *, lengths: Sequence[int] = (2, 4, 8), acceptance: Sequence[float] = (0.7,),
    draft_seconds: float = 0.0, dynamic_length: bool = False, **options: Any,
) -> "pd.DataFrame":  # fmt: skip
    """What drafts would gain at this load.

    Args:
        source: what `simulate` takes: a workload, a trace, a run.
        cost_model: of steps, without drafts.
        lengths: draft tokens of a request in a step, at most.
        acceptance, draft_seconds, dynamic_length: see `Speculative`.
        options: of `simulate`.

    Returns:
        One row for each combination, and a first one without drafts: means of `tpot` and `e2e` in seconds, output tokens a second,
        `speedup` (tpot without drafts over tpot with), and `tokens_per_step`, computed.
    """
    import pandas as pd

    rows = []
    for n, chance in [(0, 0.0), *((n, chance) for chance in acceptance for n in lengths)]:
        cost = Speculative(cost_model, chance, n, draft_seconds, dynamic_length and n > 0)
        run = simulate(source, cost_model=cost, record=False, **options)
        done = run.requests
        rows.append({
            "num_speculative_tokens": n, "acceptance": chance, "tpot": done.tpot.mean(), "e2e": done.e2e.mean(),
            "tokens_per_second": done.num_output_tokens.sum() / run.seconds,
            "tokens_per_step": run.meter.num_tokens / run.meter.num_steps,
        })  # fmt: skip
    table = pd.DataFrame(rows)
    table.insert(4, "speedup", table.tpot[0] / table.tpot)
    return table
