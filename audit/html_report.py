"""The report of an audit: one HTML page without scripts, for readers who do not know the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
from typing import Final

from audit.auditor import Audit
from audit.check_results import CHECKS, CheckResult, Verdict, summarize
from audit.own_shares import OwnShares

ZATOSHI_PER_BALLOT: Final = 12_500_000
"""Unit of the totals."""
_ZATOSHI_PER_ZEC: Final = 100_000_000

_WORDS: Final = {Verdict.PASSED: "passed", Verdict.FAILED: "failed", Verdict.NOT_CHECKED: "not checked"}
_SUMMARIES: Final = {
    Verdict.PASSED: "Every check passed. The published result is what the public votes add up to.",
    Verdict.FAILED: "At least one check failed. The published data contradicts itself or the rules of the vote.",
    Verdict.NOT_CHECKED: (
        "No check failed, but at least one could not be run, because its data was not available. "
        "This is not a proof that the result is right."
    ),
}
_LIMITS: Final = (
    "Whether voters were eligible and had the counted weight: the proofs of delegations and votes are not verified.",
    "Whether the roots of the Zcash snapshot (nc_root, nullifier_imt_root) are right: they are not rebuilt from Zcash.",
    "Whether votes were left out before they reached the chain, by block producers or by helpers.",
    "Whether validators together decrypted single votes. This would break secrecy, but not change the result.",
    (
        "What question the wallets showed to the voters. The titles and labels above are those that the nodes report: "
        "the round id does not depend on them."
    ),
)
_GROUPS: Final = (
    ("A", "The revealed votes"),
    ("B", "The sums"),
    ("C", "The key and the totals"),
    ("D", "The commitment tree and the round"),
    ("E", "Agreement of the nodes"),
)
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
  border-bottom: 1px solid #ddd } .number { text-align: right; width: 6rem;
  font-variant-numeric: tabular-nums } .id { width: 2rem } .outcome { width: 6.5rem }
code { font-size: .85rem; overflow-wrap: anywhere } .verdict { padding: .8rem 1rem; border-left: .4rem solid #777 }
.passed { border-color: #187a3c } .failed { border-color: #b3261e } .not_checked { border-color: #9a6700 }
b.passed { color: #187a3c } b.failed { color: #b3261e } b.not_checked { color: #9a6700 }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616 } th, td { border-color: #444 }
  b.passed { color: #57c785 } b.failed { color: #ff8a80 } b.not_checked { color: #e0b24a } }
"""


def create_report(audit: Audit, hashes: Mapping[str, str], command: str, *, has_own_shares: bool = False) -> str:
    """Create the page.

    Args:
        audit: the completed audit. Titles and labels in it are untrusted.
        hashes: SHA-256 of the data that was read, by name.
        command: the command that repeats the audit.
        has_own_shares: whether it shows the shares that were searched, and so which reveals are the voter's.
    """
    verdict = audit.result.verdict
    ended = datetime.fromtimestamp(min(audit.facts.vote_end_time, 253402300799), UTC)
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>Audit of a voting round</title><style>{_STYLE}</style></head><body>\n",
            "<h1>Audit of a voting round</h1>\n",
            f"<p>Round <code>{audit.result.round_id.hex()}</code>. Voting ended on {ended:%d %B %Y at %H:%M} UTC.",
            f" Blocks {audit.first_height} to {audit.last_height} were read.</p>\n",
            f'<p class="verdict {verdict.value}"><b class="{verdict.value}">{_WORDS[verdict].capitalize()}.</b>',
            f" {_SUMMARIES[verdict]} {escape(summarize(audit.result.checks))}.</p>\n",
            "<h2>What was voted</h2>\n",
            *_votes(audit),
            *(_own_shares(audit.own) if has_own_shares and audit.own is not None else ()),
            "<h2>What was checked</h2>\n",
            *(piece for prefix, title in _GROUPS for piece in _checks(audit.result.checks, prefix, title)),
            "<h2>What this audit cannot see</h2>\n<ul>",
            *(f"<li>{escape(text)}</li>" for text in _LIMITS),
            "</ul>\n<h2>How to repeat it</h2>\n",
            f"<p><code>{escape(command)}</code></p>\n<p>SHA-256 of the data that was read:</p>\n<table>",
            *(f"<tr><td>{escape(name)}</td><td><code>{digest}</code></td></tr>" for name, digest in hashes.items()),
            "</table>\n</body></html>\n",
        ]
    )


def _votes(audit: Audit) -> Iterable[str]:
    """The published totals. A ballot is 0.125 ZEC; one cast vote has up to 16 reveals."""
    yield (
        "<p>These are the published totals. They are right only if the checks below passed. "
        "Weight is counted in ballots of 0.125 ZEC. A vote is revealed in up to 16 encrypted parts, so the number of "
        "parts is not the number of voters.</p>\n"
    )
    for proposal_id, (title, labels) in sorted(audit.facts.titles.items()):
        yield f"<h3>{proposal_id}. {escape(title)}</h3>\n"
        yield '<table><tr><th>option</th><th class="number">ballots</th><th class="number">ZEC</th>'
        yield '<th class="number">revealed parts</th></tr>\n'
        for index, label in sorted(labels.items()):
            total = audit.totals.get((proposal_id, index), 0)
            zec = total * ZATOSHI_PER_BALLOT / _ZATOSHI_PER_ZEC
            yield (
                f'<tr><td>{escape(label)}</td><td class="number">{total:,}</td><td class="number">{zec:,.3f}</td>'
                f'<td class="number">{audit.counts.get((proposal_id, index), 0):,}</td></tr>\n'
            )
        yield "</table>\n"


def _own_shares(own: OwnShares) -> Iterable[str]:
    yield "<h2>Your shares</h2>\n<table><tr><th>nullifier</th><th>state</th><th>block</th><th>proposal</th>"
    yield "<th>option</th><th>proof</th></tr>\n"
    for row in own_share_rows(own):
        yield f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n"
    yield "</table>\n"


def own_share_rows(own: OwnShares) -> Iterable[tuple[str, ...]]:
    """The shares and their reveals: nullifier, state, block, proposal, option and proof, as texts."""
    for share in own.shares:
        for reveal in share.reveals:
            places = (str(reveal.height), str(reveal.proposal), str(reveal.option))
            yield share.nullifier, _words(share.state), *places, _words(reveal.proof)
        if not share.reveals:
            yield share.nullifier, _words(share.state), "", "", "", ""


def _words(state: StrEnum) -> str:
    return state.value.replace("_", " ")


def _checks(checks: Iterable[CheckResult], prefix: str, title: str) -> Iterable[str]:
    yield f'<h3>{title}</h3>\n<table><tr><th class="id"></th><th>statement</th><th class="number">items</th>'
    yield '<th class="outcome">verdict</th></tr>\n'
    for check in checks:
        if check.id.startswith(prefix):
            why = f"<br>{escape(check.why)}" if check.why else ""
            statement = CHECKS[check.id][0].upper() + CHECKS[check.id][1:]
            yield (
                f'<tr><td>{check.id}</td><td>{escape(statement)}.{why}</td><td class="number">{check.count:,}</td>'
                f'<td><b class="{check.verdict.value}">{_WORDS[check.verdict]}</b></td></tr>\n'
            )
    yield "</table>\n"
