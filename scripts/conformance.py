"""Generate docs/conformance.md: the tests that cover each rule of the protocol.

Tests name their rules with `@pytest.mark.rule("R4", "R6")`. The names are read from the source of the tests, so the
document cannot list tests that do not exist. `python -m scripts.conformance` writes it; a test compares it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "conformance.md"

RULES = {
    "R1": "`submit_at` is kept with the payload and schedules the share for that unix second.",
    "R2": "A `submit_at` of 0, or in the past, is due at once.",
    "R3": "A `submit_at` after the round's `vote_end_time` is refused; equal is accepted, and said to be too late.",
    "R4": "A share is never submitted before its time.",
    "R5": "Shares of the same second are worked on together, up to `max_concurrent_proofs`.",
    "R6": "No random delay, wake-up or jitter; a recovered share keeps its time.",
    "R7": "The loop alerts, purges, works what is ready, and waits for its earliest deadline, at most 30 s.",
    "R8": "A new share or a retry wakes the processor at once.",
    "R9": "On start, shares that were being proven go back to the queue; rounds and schedules are restored.",
    "R10": "The same share again, whatever its `submit_at`, is `duplicate`; the stored time stands.",
    "R11": "After failure n a wait of 2^n s, at most 64; the fifth is final; restarts count on, outages cost none.",
    "R12": "A spent nullifier is success and is never retried.",
    "R13": "Four checks at the door: the hashes, the vote commitment, the key, the nullifier.",
    "R14": "Witnesses are erased once confirmed, and all of a round once it is purged after the chain closed it.",
    "R15": "A rejected or expired share is reported, not silently dropped.",
}
"""The rules that the service itself must keep, in this project's words."""


def collect_marked_tests() -> dict[str, list[str]]:
    """Collect the tests of each rule as `path::name`, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for rule, name in _rule_marks(ast.parse(path.read_text())):
            found[rule].append(f"{path.relative_to(ROOT)}::{name}")
    return found


def _rule_marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rule":
                for argument in decorator.args:
                    yield str(ast.literal_eval(argument)), node.name


def render_document() -> str:
    """Render the document."""
    found = collect_marked_tests()
    lines = [
        "# Conformance",
        "",
        "The rules of the protocol and the tests that hold this product to them. Generated from the names in the tests",
        "by `make docs`; do not edit.",
        "",
    ]
    for rule, text in RULES.items():
        lines += [f"## {rule}", "", text, ""]
        lines += [f"- `{name}`" for name in found.get(rule, [])] or ["- no test"]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render_document())
