"""Verdicts on helpers in this process: the original one, a strict one, and one that refuses for another reason."""

from __future__ import annotations

import asyncio
import base64
import gzip
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import proofs
from conformance.checks import CheckResult
from conformance.runner import CHECKS
from conformance.shares import TestShare, decode32, encode, seal, shares_of
from helper.core.share import Share
from tests.support.clock import ScaledClock
from tests.support.conformance import describe_failures, run_kit, serve_app
from tests.support.original_helper import MAX_BODY_BYTES, Leaf, OriginalHelper

DOCUMENT = Path(__file__).parents[3] / "docs" / "conformance-kit.md"
VOTES = 14
SCALE = 20.0
CONTENT = ["FIELD", "JSON", "HASH", "KEY", "ROUND", "TIME", "SIZE-006"]
"""Topics of shares that must be refused."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
ELEMENTS = ("shares_hash", "primary_blind", "c1", "c2")
NUMBERS = ("share_index", "tree_position", "proposal_id", "vote_decision")
OF_OTHER_SERVERS = {"POST-031", "STATUS-008", "SLOW-024"}
"""CORS, HEAD, and deadlines of heads: not of the helper itself."""


@dataclass(frozen=True)
class File:
    """A file of shares as the Vizor wallet posts them, and what the chain knows of them."""

    path: Path
    shares: Sequence[TestShare]
    leaves: dict[int, Leaf]
    end: int


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    """Shares of several votes, without share_index at the top, and without it in share 0."""
    round_id, end = proofs.random_field(), int(time.time()) + 7200
    _, public = proofs.elgamal_keygen(b"kit")
    votes = [seal(round_id, public, 1, 1) for _ in range(VOTES)]
    shares = [share for position, vote in enumerate(votes, 5000) for share in shares_of(vote, position)]
    lines: list[bytes] = []
    for share in shares:
        body = share.body(end - 600, vote_end_time=end, all_enc_shares=list(share.all_enc_shares or ()))
        del body["share_index"]
        if not share.index:
            del body["enc_share"]["share_index"]
        lines.append(encode(body))
    path = tmp_path_factory.mktemp("file") / "shares.jsonl"
    path.write_bytes(b"\n".join(lines))
    hashes = {share.fields["tree_position"]: decode32(share.fields["shares_hash"]) for share in shares}
    leaves = {position: (round_id.hex(), value, 1, 1) for position, value in hashes.items()}
    return File(path, shares, leaves, end)


def failed(results: Sequence[CheckResult], level: str = "must") -> set[str]:
    """Return the failed checks of a level that are of the helper itself."""
    ids = {result.check.id for result in results if result.verdict == "failed" and result.check.level == level}
    return ids - OF_OTHER_SERVERS


def documented_failures() -> set[str]:
    """Return the checks that version 0.5.42 fails according to the document: ids and ranges of ids."""
    text = DOCUMENT.read_text().partition("Version 0.5.42 fails")[2].partition("It passes")[0]
    ids: set[str] = set()
    for topic, first, last in re.findall(r"`([A-Z]+)-(\d+)`(?:\s+to\s+`[A-Z]+-(\d+)`)?", text):
        ids |= {f"{topic}-{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)}
    return ids & {check.id for check in CHECKS}


async def test_kit_original_helper_fails_what_the_document_lists(file: File) -> None:
    original = OriginalHelper(file.leaves, file.end)
    topics = ["STATUS", "ROUTE", "ERROR", "POST", "DUP", *CONTENT, "SIZE-001", "SHARE", "QUEUE", "SUMMARY"]
    async with serve_app(original.app()) as url:
        results = await run_kit(url, shares_file=file.path, only=topics)
    assert failed(results) == documented_failures() - {"SLOW-023"}, describe_failures(results)
    should = failed(results, "should")
    lax = {f"FIELD-{field}{fault}" for field in ("01", "02", "03", "06", "07") for fault in (14, 15)}
    text_404 = {check.id for check in CHECKS if check.id.startswith("ROUTE-")} | {"SUMMARY-001"}
    assert should == lax | text_404 | {"POST-022", "ROUND-010", "ROUND-011", "SHARE-019"}
    seen = {result.check.id: result.seen for result in results}
    assert "404 page not found" in seen["ROUTE-001"]
    assert "request body too large" in seen["JSON-037"]
    assert MAX_BODY_BYTES < 1 << 20


async def test_kit_json_rpc_error_of_original_is_no_receipt(file: File) -> None:
    original = OriginalHelper(file.leaves, file.end, 1 / SCALE)
    stalls = [check.id for check in CHECKS if check.id.startswith("SLOW-") and check.id not in OF_OTHER_SERVERS]
    async with serve_app(original.app()) as url:
        clock = ScaledClock(SCALE, time.time())
        results = await run_kit(url, shares_file=file.path, only=stalls, clock=clock)
    assert failed(results) == {"SLOW-023"}
    assert failed(results, "should") == {"SLOW-001", "SLOW-009"}
    skipped = {result.check.id for result in results if result.verdict == "skipped"}
    assert skipped == {f"SLOW-{number:03}" for number in (2, 3, 4, 5, 6, 20, 22)}
    assert all('"jsonrpc"' in result.seen for result in results if result.check.id in skipped)


@dataclass
class StrictHelper:
    """Accepts valid shares of these votes only, refuses all others with one text, and keeps every body.

    Attributes:
        file: the shares.
        refusal: the text.
        status: the status of refusals.
        headers: of every response.
    """

    file: File
    refusal: str = "refused"
    status: int = 400
    headers: Mapping[str, str] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    stored: set[bytes] = field(default_factory=set)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/shielded-vote/v1/shares", self._post, methods=["POST"])])

    async def _post(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        read = proofs.read_shares([body])[0]
        if isinstance(read, proofs.InvalidShare) or len(body) > 1 << 20 or not self._is_of_vote(Share(*read.posted)):
            return JSONResponse({"status": "error", "error": self.refusal}, self.status, self.headers)
        word = "duplicate" if read.nullifier in self.stored else "queued"
        self.stored.add(read.nullifier)
        return JSONResponse({"status": word}, headers=self.headers)

    def _is_of_vote(self, share: Share) -> bool:
        vote = (share.round_id.hex(), share.shares_hash, share.proposal_id, share.vote_decision)
        return self.file.leaves.get(share.tree_position) == vote and share.submit_at <= self.file.end


def is_readable(body: bytes, share: TestShare) -> bool:
    """Whether a reader that ignores every error finds all values of a share in a body."""
    plain = gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
    text = plain.replace(b"\0", b"").decode("utf-8", "replace").replace("\\n", "").replace("\\", "")
    values = {**share.fields, **share.fields["enc_share"]}
    patterns = {name: _pattern(values[name]) for name in ELEMENTS}
    patterns["vote_round_id"] = f"({share.round_id.hex()}|{re.escape(base64.b64encode(share.round_id).decode())})"
    patterns["share_comms"] = "(?s:.*)".join(map(_pattern, values["share_comms"]))
    has_bytes = all(
        re.search(rf"\b{name}\b['\"]?\s*:(?s:[\s\[\{{'\"0:]*){pattern}", text) for name, pattern in patterns.items()
    )
    return has_bytes and all(_has_number(text, name, values[name]) for name in NUMBERS)


def _pattern(element: str) -> str:
    """Match 32 bytes in hex, or in base64 with any values of the two unused bits."""
    first = ALPHABET.index(element[42]) & ~3
    return f"({re.escape(element[:42])}[{ALPHABET[first : first + 4]}]|{decode32(element).hex()})"


def _has_number(text: str, name: str, value: int) -> bool:
    found = re.findall(rf"\b{name}\b['\"]?\s*:\s*[\['\"]*(-?\d+|true)", text)
    read = [1 if number == "true" else int(number) for number in found]
    return any(number % (1 << bits) == value for number in read for bits in (8, 24, 32, 64)) or value in read


async def test_kit_strict_helper_without_reasons_passes_and_never_gets_the_template(file: File) -> None:
    strict = StrictHelper(file)
    async with serve_app(strict.app()) as url:
        results = await run_kit(url, shares_file=file.path, only=CONTENT)
    assert failed(results) == set(), describe_failures(results)
    assert failed(results, "should") == {"ROUND-010", "ROUND-011"}, "it refuses for good what may pass later"
    template = next(share for share in file.shares if share.index)
    assert any(is_readable(body, file.shares[-1]) for body in strict.bodies)
    assert [body[:2000] for body in strict.bodies if is_readable(body, template)] == []
    assert template.nullifier not in strict.stored


@pytest.mark.parametrize(
    ("text", "status", "not_found"),
    [
        ("invalid submit_at: submit_at (9) > vote_end_time (5)", 400, ("FIELD-13", "TIME-")),
        ("the round is not active", 400, ()),
        ("unknown voting round", 400, ("FIELD-09", "ROUND-001")),
        ("refused", 404, ("FIELD-09", "ROUND-001")),
        ("helper ingress disabled: local node is catching up or stale", 400, ("FIELD-09", "ROUND-001", "ROUND-003")),
    ],
)
async def test_kit_refusal_for_another_reason_fails(
    file: File, text: str, status: int, not_found: tuple[str, ...]
) -> None:
    strict = StrictHelper(file, text, status)
    async with serve_app(strict.app()) as url:
        results = await run_kit(url, shares_file=file.path, only=CONTENT)
    refusing = [
        result
        for result in results
        if result.verdict != "skipped" and not result.check.id.startswith(("JSON-05", "TIME-006"))
    ]
    passed = {result.check.id for result in refusing if result.verdict == "passed"}
    assert {check_id for check_id in passed if not check_id.startswith(not_found)} == set()
    assert all(any(check_id.startswith(prefix) for check_id in passed) for prefix in not_found)


async def test_kit_helper_may_close_each_connection_if_it_says_so(file: File) -> None:
    async with serve_app(StrictHelper(file, headers={"Connection": "close"}).app()) as url:
        results = await run_kit(url, shares_file=file.path, only=["CONN"])
    assert failed(results) == set(), describe_failures(results)


async def test_kit_restart_command_may_start_the_helper_in_the_background(file: File) -> None:
    """What the command has started keeps its output open."""
    async with serve_app(OriginalHelper(file.leaves, file.end).app()) as url:
        run = run_kit(url, shares_file=file.path, restart_command="sleep 20 &", only=["RESTART-001"])
        async with asyncio.timeout(15):
            assert [result.verdict for result in await run] == ["passed"]
