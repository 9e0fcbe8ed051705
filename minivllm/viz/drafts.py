"""Pictures of draft tokens: acceptance by place, and the probabilities of one step's draft."""

# Generated from nbs/viz/drafts.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.trace import Trace
from minivllm.viz.palette import LIGHT
from minivllm.viz.view import legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_drafts(trace: Trace, request_id: str | None = None, step: int | None = None, ax: Any = None) -> Any:
    """How far drafts were right.

    Args:
        request_id: only drafts of this request.
        step: with a request: its draft in this step, with probabilities if the trace has samples.
        ax: matplotlib axes to draw into; None for new ones.

    Returns:
        The axes.

    Raises:
        ValueError: a step without a request, or no such draft in the trace.
    """
    import matplotlib.pyplot as plt

    if step is not None and request_id is None:
        raise ValueError(f"plot_drafts(step={step}) needs a request_id: a step has a draft for each request")
    table = trace.to_pandas()["spec_decode"]
    table = table if request_id is None else table[table.request_id == request_id]
    table = table if step is None else table[table.step == step]
    if table.empty:
        of = "" if request_id is None else f" of {request_id!r}" + ("" if step is None else f" in step {step}")
        raise ValueError(f"the trace has no draft{of}")
    ax = ax or plt.subplots(figsize=(5, 2.4), layout="constrained")[1]
    if step is None:
        _draw_places(ax, table)
    else:
        _draw_one(ax, table, trace.tokenizer)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _draw_places(ax: "Axes", table: Any) -> None:
    counts = table.groupby(["place", "outcome"]).size().unstack(fill_value=0)
    below = np.zeros(len(counts))
    for outcome, colour in (("accepted", "decode"), ("rejected", "prefill"), ("not reached", "waiting")):
        if outcome in counts:
            ax.bar(counts.index, counts[outcome], bottom=below, color=LIGHT[colour], label=outcome)
            below += counts[outcome].to_numpy()
    ax.set(xlabel="place in the draft", ylabel="draft tokens", xticks=counts.index)
    legend_above(ax, 3)


def _draw_one(ax: "Axes", table: Any, tokenizer: Any) -> None:
    def text(token: int) -> str:
        return str(token) if tokenizer is None else repr(tokenizer.decode([int(token)]))

    x, names = np.arange(len(table)), []
    for row in table.itertuples():
        more = "" if row.outcome != "rejected" or row.sampled_instead is None else f"\n→ {text(row.sampled_instead)}"
        share = f" ({row.residual_prob:.2f})" if more and row.residual_prob == row.residual_prob else ""
        names.append(f"{text(row.token_id)}\n{row.outcome}{more}{share}")
    ax.bar(x - 0.2, table.target_prob.fillna(0), 0.38, color=LIGHT["decode"], label="p, target")
    ax.bar(x + 0.2, table.draft_prob.fillna(0), 0.38, color=LIGHT["muted"], label="q, proposer")
    ax.set_xticks(x, names, fontsize="small")
    ax.set(ylabel="probability", ylim=(0, 1.02))
    legend_above(ax, 2)
