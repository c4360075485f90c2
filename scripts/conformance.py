"""Generate docs/conformance.md: the tests that cover each rule of the protocol.

Tests declare their rules with `@pytest.mark.rule("R4", "R6")`. The markers are read from the source of the tests, so
the document cannot list tests that do not exist. The tables of clients come from simulations of them.
`python -m scripts.conformance` writes it; a test compares it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.wallets import outcomes

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "conformance.md"
MARK = "pytest.mark.rule"

RULES = {
    "R1": "`submit_at` is stored with the payload and schedules the share for that Unix second.",
    "R2": "A `submit_at` of 0 or in the past is due immediately.",
    "R3": "A `submit_at` after the round's `vote_end_time` is rejected. An equal one is accepted and reported as late "
    "([decision 25](decisions/0025-submit-at-equal-to-the-end.md)).",
    "R4": "No share is submitted before its due time.",
    "R5": "Shares of the same second are processed concurrently, up to `max_concurrent_proofs`.",
    "R6": "There are no random delays, wake-ups or jitter. A recovered share keeps its due time.",
    "R7": "Closed rounds are reported, then purged. The dispatcher sleeps until the earliest deadline, at most 30 s.",
    "R8": "A new share or a retry wakes the dispatcher immediately.",
    "R9": "At startup, shares that were being proven return to the queue, and rounds and schedules are restored.",
    "R10": "Posting the same share again, with any `submit_at`, returns `duplicate`, in a closed round too. If all of "
    "its checks pass and it still waits, the earlier due time applies, because whoever has seen it first may have "
    "posted it with the latest one ([decision 39](decisions/0039-answers-for-every-wallet.md)); the original keeps the "
    "stored time. If the stored row is damaged, the new one replaces it.",
    "R11": "After failure n a share waits 2^n s (n up to 5), then 1 min, 10 min and longer, until its round ends. "
    "Attempts survive restarts; outages spend none.",
    "R12": "A spent nullifier is a success and is never retried.",
    "R13": "Admission checks the hashes, the vote commitment, the share key and the nullifier.",
    "R14": "Witnesses are erased on confirmation, and all data of a round when it is purged after its close.",
    "R15": "A rejected or expired share is reported, not silently dropped.",
    "N1": "The published configuration may have `config_version` or `version`, no `snapshot_height`, unknown fields "
    "and 1 MiB. A static document of version 1 or 2 leads to its mirrors, which are tried in order, 30 s each.",
    "N2": "`/api/voting-config` serves the bytes of the dynamic document unchanged, also while no mirror responds.",
    "N3": "A body has 30 s from its start, and must keep growing "
    "([decision 27](decisions/0027-slow-bodies.md)). If it times out, the response is the 408 receipt if the request "
    "has exactly one valid `X-Vote-Ingress-Attempt-V1`, otherwise 503.",
    "N4": "A receipt has its four fields only, and `Cache-Control: no-store`. The token is in no log, label or header.",
    "N5": "Below `/shielded-vote/` every response is JSON and none is a redirect. A route that does not exist has 404 "
    "or 405 with only the field `error`.",
    "N6": "`status` responds within 2 s.",
    "N7": "`share-status` depends only on the nullifiers that the chain has counted, also for shares that this helper "
    "never had. It is `pending` (202, because zkool takes every 200 for confirmed) or `confirmed` (200).",
    "N8": "A limit on concurrent work returns 429 if the request names its attempt, otherwise 503, as it does before "
    "the headers are read; a pause returns 503 ([decision 39](decisions/0039-answers-for-every-wallet.md)).",
    "N9": "A wallet may post 128 shares at once.",
    "N10": "A `submit_at` from 1 to the second before the end is used exactly. A share with `submit_at` equal to the "
    "end is accepted, although it counts only if the end is postponed "
    "([decision 25](decisions/0025-submit-at-equal-to-the-end.md)).",
    "N11": "A known share in a closed round stays `duplicate`, an unknown one is refused with 400 "
    "([decision 25](decisions/0025-submit-at-equal-to-the-end.md)).",
    "N12": "`queue-summary` is served by default, without a token and with CORS, with all fields of the newest chain "
    "version ([decision 28](decisions/0028-retries-and-queue-summary.md)).",
    "N13": "`queue-status` has `ready`, `not_yet_due` and `processing`, and `pending` is their sum.",
    "N14": "Node errors with status 400, 404 and 500 are classified by their text alone.",
    "N15": "The result of a transaction is its code and height. Events of `GET tx` are not read, because nodes before "
    "v1.5.0 alter them; the message itself has round and nullifier.",
    "N16": "A reveal has a timeout of at least 75 s. A timeout and a 502 are unknown outcomes. The helper honors "
    "`Retry-After` of a 503 and checks the node's `readiness` before it sends the next reveal.",
    "N17": "Positions in the tree are never derived: a batch appends one VAN and then several vote commitments.",
    "N18": "Blocks of 5 MiB are read. All helpers together reveal at most 256 shares in a block; more wait in the "
    "mempool, and a share that waits there is neither lost nor counted twice.",
    "N19": "A share's proposal is one of its round's, from 1 to 50. Proposal 0, which is planned for delegated votes, "
    "is refused. Accepting it needs: a lower bound of 0 in `PROPOSALS` (`proofs/src/payload.rs`) and "
    "`proposal_id` (`helper/core/share.py`); a higher bound in `DECISIONS` and `vote_decision`, if options above 7 are "
    "used; and a rule for its options in `helper/ingest/admission.py` and `helper/operations/operator_actions.py`, "
    "because a round does not list it. Its reveals are followed already (N20).",
    "N20": "A `reveal_pool_share` in a block spends its nullifier like a `reveal_share`.",
    "N21": "k10 is used for every chain version from v1.3.0 on, k11 before. A version after v1.7.0 is treated like "
    "v1.7.0, but one reveal is sent as a trial first. Refused valid proofs pause the queue and spend no attempt.",
    "N22": "Shares, validation, statement and proof of a circuit generation are behind one interface.",
    "N23": "Exports of svoted's helper in versions 1 and 2 are imported, with erased, failed and corrupt rows. The "
    "nullifier of a reveal that was already sent is looked for on the chain first "
    "([decision 26](decisions/0026-queues-of-svoteds-helper.md)).",
    "N24": "An export for svoted's helper has version 1 with all its fields "
    "([decision 26](decisions/0026-queues-of-svoteds-helper.md)).",
    "N25": "A row that cannot be read, or fails its check, is never acted on. It is reported, and other rows are not "
    "affected. When its share is posted again and is valid, the new row replaces it "
    "([decision 31](decisions/0031-replacing-damaged-rows.md)).",
    "N26": "Due shares of all rounds are claimed by due time, so that no round waits for another one's queue. Shares "
    "with the same due time are ordered by a keyed hash. A share without a time is due when it arrives.",
    "N27": "A share is retried until its round ends ([decision 28](decisions/0028-retries-and-queue-summary.md)).",
    "N28": "Recording rules give counters of posted and processed shares the names and labels of the original helper. "
    "No label has a round ([decision 28](decisions/0028-retries-and-queue-summary.md) lists what is not offered).",
    "N29": "No limit on wallets depends on the client address, because many wallets share a Tor exit: when "
    "the connection limit is reached, the server closes the connection with the slowest progress. The service speaks "
    "HTTP/1.1; the proxy adds HTTP/2.",
    "N30": "The gateway forwards the listed routes, the status and the body unchanged. It waits 150 s for a POST and "
    "60 s for leaves, and never repeats a POST that may have been sent. One that a node refused because its verifying "
    "keys are not ready goes to the next node.",
    "W1": "Readiness: `GET status` is JSON with `status` `ok`. While shares are refused it is 503.",
    "W2": "An accepted share: 200, `application/json`, `status` `queued` or `duplicate`, at most 256 KiB.",
    "W3": "A share has 10 fields and no `all_enc_shares`.",
    "W4": "A 4xx other than 408 and 429 is final for this helper, so a share that may still become valid gets 429 if "
    "the request names its attempt, as the library's do. Otherwise it gets 503 with `Retry-After: 2`, because 429 is "
    "final for other wallets.",
    "W5": "A 5xx makes the outcome unknown. The library gets it only during a pause of the helper or of the share's "
    "round, if the queue cannot be written, before its headers are read, while the service stops, and after an "
    "internal error.",
    "W6": "A share whose outcome is unknown or that is overdue is posted again with `submit_at` 0, to this or another "
    "helper. Both are revealed immediately: a known one that waits is a `duplicate` and moved up.",
    "W7": "A share is confirmed once two helpers report it, whether or not they had it.",
    "W8": "A body that timed out was certainly not processed if the response is the exact 408 receipt of its attempt. "
    "Only then is it sent to the same server again at once.",
    "W9": "The reply to a vote has `tx_hash`, `code`, `log` and, for batches, `batch_digest`, and no other field. The "
    "gateway changes nothing.",
    "W10": "A transaction that does not exist is 404 with exactly `tx not found`. A failed one is 422 with all fields.",
    "W11": "A request has at most 1 MiB, and a page of leaves at most 8 MiB.",
    "W12": "A base URL may have a path, and URLs are compared after normalization.",
    "W13": "A POST is answered within 30 s, also while the chain state that decides about the share is not known yet.",
    "W14": "A wallet that votes through a gateway and two helpers over links of 20 kB/s with 2 s delay has no unknown "
    "outcome, except of a transaction whose response a node has lost.",
    "Q1": "The monitor reads `vote_servers` from `/api/voting-config`.",
    "Q2": "It asks each helper from the browser, without a token.",
    "Q3": "A helper is stale if `generated_at` is more than 300 s old, or two buckets if that is longer.",
    "Q4": "A backlog is a past bucket whose overdue and processing shares grow. Buckets are contiguous, the last one "
    "ends with the round, and `total` is the sum of the five counts. Confirmed shares are in the first bucket, "
    "all shares that are not due in the last one ([decision 28](decisions/0028-retries-and-queue-summary.md)).",
    "Q5": "The summary is served while the chain state is too old to accept shares.",
}
"""The rules that the service itself must follow, by section (first letter) and number. Rules for validator registration
and the page, R16 and R17, are not listed: every test of `admin/` and of the page belongs to them."""

SECTIONS = {
    "R": ("Rules of the original helper", ""),
    "N": ("Newer chains and wallets", "What chain versions 1.3 to 1.7 and their wallets add or change."),
    "W": ("Wallet library 5.3.0", "What the library expects of a helper and of a gateway."),
    "Q": ("Queue monitor", "What the page that monitors the queues of all helpers expects."),
}
"""Title and introduction of each section."""


def collect_marked_tests() -> dict[str, list[str]]:
    """Collect the tests of each rule as `path::name`, sorted by path."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for rule, name in _rule_marks(ast.parse(text)) if MARK in text else ():
            tests[rule].append(f"{path.relative_to(ROOT)}::{name}")
    return tests


def _rule_marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARK:
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
    for section, (title, about) in SECTIONS.items():
        lines += [f"## {title}", "", *([about, ""] if about else [])]
        for rule, text in RULES.items():
            if rule.startswith(section):
                lines += [f"### {rule}", "", text, "", *(f"- `{name}`" for name in tests[rule]), ""]
    return "\n".join([*lines, *_render_clients()])


def _render_clients() -> list[str]:
    answers = (
        "What an answer of any helper does to the votes of each client that is known, while the other helpers accept "
        f"them. {outcomes.LEGEND}"
    )
    situations = (
        "What this helper answers, with the HTTP statuses (– for none) that the client gets until it has another "
        "helper. [Decision 39](decisions/0039-answers-for-every-wallet.md) has the reasons."
    )
    best = (
        "Why no answer is better where a client has ▲. zafu takes only a 2xx, and after anything else asks no other "
        "helper, so that only 200 is better for it. It ends a request after 10 s."
    )
    tables = outcomes.render_answers(), outcomes.render_situations(), outcomes.render_reasons()
    return ["## Clients", "", answers, "", *tables[0], "", situations, "", *tables[1], "", best, "", *tables[2], ""]


if __name__ == "__main__":
    DOCUMENT.write_text(render_document())
