"""Plots the growth of costs with size as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

TITLE = "Growth of costs with the size of the queue, the size of the tree and the number of unconfirmed shares"


def plot_growth(curves: Sequence[Mapping[str, Any]]) -> str:
    """Draw each curve relative to its value at the smallest size, with both axes logarithmic.

    Args:
        curves: `{name, power, points}` as in `bench/results/growth.json`. A power of -1 marks rates. Curves without
            points are omitted.

    Returns:
        The SVG document.
    """
    # Keep text as text. Equal data must produce an identical file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "svote-helper", "font.size": 9}):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot(
            xlabel="size", ylabel="cost relative to the smallest size", xscale="log", yscale="log"
        )
        for curve in curves:
            points = [(size, value) for size, value in curve["points"] if value > 0]
            if points:
                costs = [(value / points[0][1]) ** curve["power"] for _, value in points]
                axes.plot([size for size, _ in points], costs, marker="o", markersize=4, label=curve["name"])
        axes.set_ylim(0.1, 100)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g} ×")
        axes.grid(color="#dddddd")
        figure.legend(loc="outside right upper", frameon=False)
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Title": TITLE})
    return svg.getvalue()
