"""Pictures of a mixture of experts: tokens of each expert, by layer or by step."""

# Generated from nbs/viz/experts.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from minivllm.core.trace import Trace


def plot_experts(trace: Trace, layer: int | None = None, ax: Any = None) -> Any:
    """How many tokens each expert took, against an equal share.

    Args:
        layer: draw its experts step by step; None for all layers, over the whole run.
        ax: matplotlib axes to draw into; None for new ones.

    Returns:
        The axes. White is an equal share, blue less, red more; the scale ends at twice that share.

    Raises:
        ValueError: the trace has no layer with experts, or not this one.
    """
    import matplotlib.pyplot as plt

    table = trace.to_pandas()["experts"]
    layers = sorted(table.layer.unique())
    if not layers or (layer is not None and layer not in layers):
        known = ", ".join(map(str, layers)) or "none"
        what = "experts" if layer is None else f"experts of layer {layer}"
        raise ValueError(f"the trace has no {what}; layers that have: {known}")
    rows, columns, experts, others = ("layer", "expert", 1, 0) if layer is None else ("expert", "step", 0, 1)
    table = table if layer is None else table[table.layer == layer]
    counts = table.groupby([rows, columns]).num_tokens.sum().unstack(fill_value=0)
    shares = counts.div(counts.mean(axis=experts), axis=others)
    ax = ax or plt.subplots(figsize=(6, 2.6), layout="constrained")[1]
    first, last = counts.columns[0] - 0.5, counts.columns[-1] + 0.5
    image = ax.imshow(
        shares, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest",
        extent=(first, last, len(counts) - 0.5, -0.5),
    )  # fmt: skip
    ax.figure.colorbar(image, ax=ax, label="times an equal share")
    ax.set(xlabel=columns, ylabel=rows)
    if len(counts) <= 16:
        ax.set_yticks(range(len(counts)), counts.index)
    return ax
