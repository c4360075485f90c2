"""Generate docs/conformance.md: the tests that cover each rule of the protocol.

Tests declare their rules with `@pytest.mark.rule("R4", "R6")`. The markers are read from the source of the tests, so
the document cannot list tests that do not exist. `python -m scripts.conformance` writes it; a test compares it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "conformance.md"

RULES = {
    "R1": "`submit_at` is stored with the payload and schedules the share for that Unix second.",
    "R2": "A `submit_at` of 0 or in the past is due immediately.",
    "R3": "A `submit_at` after the round's `vote_end_time` is rejected. An equal one is accepted and reported as late "
    "([decision 25](decisions/0025-submit-at-equal-to-the-end.md)).",
    "R4": "No share is submitted before its due time.",
    "R5": "Shares of the same second are processed concurrently, up to `max_concurrent_proofs`.",
    "R6": "There are no random delays, wake-ups or jitter. A recovered share keeps its due time.",
    "R7": "The loop reports and purges closed rounds, dispatches due shares, and sleeps until the earliest deadline, "
    "at most 30 s.",
    "R8": "A new share or a retry wakes the dispatcher immediately.",
    "R9": "At startup, shares that were being proven return to the queue, and rounds and schedules are restored.",
    "R10": "Posting the same share again, with any `submit_at`, returns `duplicate`, in a closed round too. The stored "
    "due time is unchanged.",
    "R11": "After failure n a share waits 2^n s (n up to 5), then 1 min, 10 min and longer, until its round ends. "
    "Attempts survive restarts; outages spend none.",
    "R12": "A spent nullifier is a success and is never retried.",
    "R13": "Admission checks the hashes, the vote commitment, the share key and the nullifier.",
    "R14": "Witnesses are erased on confirmation, and all data of a round when it is purged after its close.",
    "R15": "A rejected or expired share is reported, not silently dropped.",
    "N3": "A body has 30 s from its start. If it times out, the response is the 408 receipt if the request has exactly "
    "one valid `X-Vote-Ingress-Attempt-V1`, otherwise 400.",
    "N4": "A receipt has its four fields only, and `Cache-Control: no-store`. The token is in no log, label or header.",
    "N5": "Below `/shielded-vote/` every response is JSON and none is a redirect. A route that does not exist has 404 "
    "or 405 with only the field `error`.",
    "N6": "`status` responds within 2 s.",
    "N7": "`share-status` responds `pending` or `confirmed` for any share of the chain, whoever held it, because two "
    "helpers' word ends a wallet's care.",
    "N8": "Limits on concurrent work respond 429, pauses 503.",
    "N9": "A wallet may post 128 shares at once.",
    "N30": "The gateway forwards the listed routes, the status and the body unchanged. It waits 150 s for a POST and "
    "60 s for leaves, and never repeats a POST that may have been sent. One that a node refused because its verifying "
    "keys are not ready goes to the next node.",
    "N14": "Errors of nodes with HTTP status 400, 404 and 500 are read alike, by their text.",
    "N15": "The result of a transaction is its code and height. Events of `GET tx` are not read, because nodes before "
    "v1.5.0 alter them; the message itself has round and nullifier.",
    "N16": "A reveal gets at least 75 s. A time-out and a 502 are unknown outcomes. `Retry-After` of a 503 is obeyed, "
    "and the node's `readiness` is asked before the next reveal is sent to it.",
    "N17": "Positions in the tree are never derived: a batch appends one VAN and then several vote commitments.",
    "N18": "Blocks of 5 MiB are read.",
    "N20": "A `reveal_pool_share` in a block spends its nullifier like a `reveal_share`.",
    "N19": "A share's proposal is one of its round's, from 1 to 50. Proposal 0 is refused.",
    "N21": "k10 is used for every chain version from v1.3.0 on, k11 before. A version after v1.7.0 is treated like "
    "v1.7.0, but one reveal is sent as a trial first. Refused valid proofs pause the queue and spend no attempt.",
    "N22": "Shares, validation, statement and proof of a circuit generation are behind one interface.",
    "W1": "A wallet of library 5.3.0 that votes through a gateway and two helpers over links of 20 kB/s with 2 s delay "
    "has no unknown outcome, except of a transaction whose response a node has lost.",
}
"""The rules that the service itself must follow. N: rules of newer chains and wallets. W: whole votes."""


def collect_marked_tests() -> dict[str, list[str]]:
    """Collect the tests of each rule as `path::name`, sorted by path."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for rule, name in _rule_marks(ast.parse(path.read_text())):
            tests[rule].append(f"{path.relative_to(ROOT)}::{name}")
    return tests


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
    tests = collect_marked_tests()
    lines = [
        "# Conformance",
        "",
        "The rules of the protocol and the tests that verify them. Generated by `make docs`; do not edit.",
        "",
    ]
    for rule, text in RULES.items():
        lines += [f"## {rule}", "", text, ""]
        lines += [f"- `{name}`" for name in tests.get(rule, [])] or ["- no test"]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render_document())
