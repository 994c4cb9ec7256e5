"""The picture of `python -m moe_patch load`: layers by experts, and how uneven each layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .load import ExpertLoad

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(load: ExpertLoad, title: str) -> Figure:
    """Left a heat map: choices of each expert over its layer's mean. Right, layer for layer, the
    busiest expert's."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    counts = load.counts.double()
    relative = (counts / counts.mean(1, keepdim=True)).cpu()
    layers, experts = relative.shape
    size = 4 + min(12, experts / 12), 1.6 + min(10, layers / 5)
    drawing = Figure(figsize=size, layout="constrained")
    heat, curve = drawing.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    image = heat.imshow(relative, aspect="auto", interpolation="nearest", vmin=0, cmap="viridis")
    heat.set(title=title, xlabel="expert", ylabel="MoE layer")
    drawing.colorbar(image, ax=heat, label="choices over the layer's mean")
    curve.plot(load.imbalance.cpu(), range(layers), marker="o", ms=3)
    curve.axvline(1, color="black", lw=1, ls="--")
    curve.set(xlabel="max / mean", xlim=(0, None))
    curve.grid(alpha=0.3)
    return drawing
