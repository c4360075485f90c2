"""Copy the results of `make bench` into docs/performance.md and draw the growth plot.

`python -m scripts.performance_docs` writes both. A test compares them, so that results and document cannot diverge.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import capacity_table
from bench.plot import plot_growth
from bench.table import ROWS, TableRow, format_row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "growth.svg"
TABLE_PARTS = ("figures", "capacity")


def render_table() -> str:
    """Render the rows of the table, including those without a figure."""
    results = {result["name"]: result for result in _read("latest.json")}
    rows = [format_row(results.get(row.name) or _missing_row(row)) for row in ROWS]
    lines = ["| | goal | median (range of the runs) | met |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _missing_row(row: TableRow) -> dict[str, Any]:
    return {"name": row.name, "goal": row.goal, "figure": None, "unit": row.unit, "holds": None, "runs": []}


def render_document(document: str) -> str:
    """Render the document with new tables."""
    for part, lines in zip(
        TABLE_PARTS, (render_table(), capacity_table.format_table(_read("capacity.json"))), strict=True
    ):
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        head, _, rest = document.partition(begin)
        _, _, tail = rest.partition(end)
        document = f"{head}{begin}\n\n{lines}\n\n{end}{tail}"
    return document


def render_plot() -> str:
    """Render the plot."""
    return plot_growth(_read("growth.json"))


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return results


def main() -> None:
    """Write the document and the plot."""
    DOCUMENT.write_text(render_document(DOCUMENT.read_text()))
    PICTURE.write_text(render_plot())


if __name__ == "__main__":
    main()
