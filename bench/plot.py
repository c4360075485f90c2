"""The plot of growth as an SVG: costs as the sizes grow, both in logarithms, each beside its own smallest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 250, 24, 48
COLOURS = ("#0b6e99", "#c0392b", "#2e7d32", "#8e44ad", "#b7791f", "#444444")
LOWEST, HIGHEST = -1, 2
"""Powers of ten that the vertical axis shows: a tenth to a hundred times the cost at the smallest size."""


def growth(curves: Sequence[Mapping[str, Any]]) -> str:
    """The picture.

    Args:
        curves: `{name, power, points}`, as `bench/results/growth.json` has them; a power of -1 marks rates.
    """
    drawn = [curve for curve in curves if curve["points"]]
    sizes = [size for curve in drawn for size, _ in curve["points"]] or [1, 10]
    first, last = floor(log10(min(sizes))), ceil(log10(max(sizes)))

    def x(size: float) -> float:
        return LEFT + (log10(size) - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def y(times: float) -> float:
        level = min(HIGHEST, max(LOWEST, log10(max(times, 1e-9))))
        return HEIGHT - BOTTOM - (level - LOWEST) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="12">',
        "<title>How costs grow with the size of the queue, of the tree, and of what awaits confirmation</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(first, last + 1):
        parts.append(_line(x(10**power), TOP, x(10**power), HEIGHT - BOTTOM))
        parts.append(_text(x(10**power), HEIGHT - BOTTOM + 16, f"{10**power:,}", "middle"))
    for power in range(LOWEST, HIGHEST + 1):
        parts.append(_line(LEFT, y(10**power), WIDTH - RIGHT, y(10**power)))
        parts.append(_text(LEFT - 6, y(10**power) + 4, f"{10.0**power:g} ×", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "size", "middle"))
    for number, curve in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        smallest = curve["points"][0][1]
        dots = [(x(size), y((value / smallest) ** curve["power"])) for size, value in curve["points"] if value > 0]
        path = " ".join(f"{at_x:.1f},{at_y:.1f}" for at_x, at_y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{colour}"/>' for at_x, at_y in dots]
        row = TOP + 12 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{row - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 28, row, str(curve["name"]), "start"))
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{escape(text)}</text>'
