"""Bring the figures that `make bench` keeps into docs/performance.md, and draw the plot of growth.

`python -m scripts.performance_docs` writes both; a test compares them, so figures and document can not part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.plot import growth
from bench.table import ROWS, Row, told

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "growth.svg"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def table() -> str:
    """The lines of the table; those without a figure say so."""
    kept = {one["name"]: one for one in _read("latest.json")}
    rows = [told(kept.get(row.name) or _missing(row)) for row in ROWS]
    lines = ["| | goal | median (spread of the runs) | holds |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _missing(row: Row) -> dict[str, Any]:
    return {"name": row.name, "goal": row.goal, "figure": None, "unit": row.unit, "holds": None, "runs": []}


def render(document: str) -> str:
    """The document with its table made anew."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def picture() -> str:
    """The plot."""
    return growth(_read("growth.json"))


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def main() -> None:
    """Write both."""
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
