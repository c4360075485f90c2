"""Shares to post, and files of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import proofs
from conformance.check_failures import CheckSkipped
from conformance.http_requests import HelperClient, parse_address
from conformance.runner import run_checks, select_checks
from conformance.session import Session
from conformance.shares import SharesFileError, encode, invented_share, read_shares_file, seal, shares_of
from helper.ingest.validator import checked_share
from tests.support.clock import FakeClock

END = 1_800_000_000


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """The shares of a vote as a wallet posts them."""
    _, public = proofs.elgamal_keygen(b"kit")
    return [
        {**share.body(END - 100), "all_enc_shares": list(share.all_enc_shares or ())}
        for share in shares_of(seal(proofs.random_field(), public, 1, 1), 7)
    ]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def open_session(path: Path) -> Session:
    clock = FakeClock()
    return Session(HelperClient(parse_address("http://127.0.0.1:1"), "", clock), clock, shares_file=path)


def test_file_of_shares_is_read_without_posted_fields(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    shares, end = read_shares_file(write_lines(tmp_path / "f", [*bodies[:2], "", {**bodies[2], "vote_end_time": END}]))
    assert end == END
    assert [share.index for share in shares] == [0, 1, 2]
    assert {share.submit_at for share in shares} == {END - 100}
    read = proofs.read_shares([encode(shares[2].body(5))])[0]
    assert isinstance(read, proofs.ReadShare)
    assert (read.nullifier, read.vote_commitment) == (shares[2].nullifier, shares[2].commitment)
    assert checked_share(read).share.submit_at == 5
    assert "vote_end_time" not in shares[2].body()
    assert "all_enc_shares" not in shares[2].body()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"primary_blind": "AAAA"}, "line 2: primary_blind is not valid (length)"),
        ({}, "different rounds"),
        ({"vote_end_time": 5}, "disagree about its end"),
        ({"submit_at": END + 1}, f"a share has a submit_at after the end of its round, {END}"),
    ],
)
def test_file_of_shares_that_cannot_be_used_is_refused(
    tmp_path: Path, bodies: list[dict[str, Any]], change: dict[str, Any], message: str
) -> None:
    first = {**bodies[0], "vote_end_time": END}
    second = {**bodies[1], **change} if change else invented_share().body()
    with pytest.raises(SharesFileError, match=re.escape(message)) as caught:
        read_shares_file(write_lines(tmp_path / "f", [first, second]))
    assert not any(str(value) in str(caught.value) for value in bodies[1].values() if isinstance(value, str))


def test_file_of_too_few_shares_is_refused(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    with pytest.raises(SharesFileError, match="at least 2 shares, it has 1"):
        read_shares_file(write_lines(tmp_path / "f", ["", bodies[0], ""]))


def test_template_is_a_share_without_zeros(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    session = open_session(write_lines(tmp_path / "f", bodies[:3]))
    assert session.template.index == 1
    assert {session.take().index, session.take().index} == {0, 2}
    with pytest.raises(CheckSkipped, match="no unused share left"):
        session.take()


def test_session_of_file_keeps_times_and_needs_the_end(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    session = open_session(write_lines(tmp_path / "f", bodies[:3]))
    assert session.time_for(session.take()) == END - 100
    with pytest.raises(CheckSkipped, match="vote_end_time"):
        _ = session.end
    with pytest.raises(CheckSkipped, match="--devnet"):
        _ = session.chain


async def test_session_of_ended_round_has_no_shares(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    """All of them could be refused because of the end."""
    end = int(FakeClock().now())
    lines = [{**body, "submit_at": end, "vote_end_time": end} for body in bodies]
    session = open_session(write_lines(tmp_path / "f", lines))
    (result,) = await run_checks(session, select_checks(["POST-001"]))
    assert (result.verdict, result.seen) == ("skipped", "the round of the shares has ended")
    for take in (lambda: session.template, session.take, session.refusable, lambda: session.take_many(2)):
        with pytest.raises(CheckSkipped, match="the round of the shares has ended"):
            take()


def test_body_is_a_copy() -> None:
    share = invented_share()
    share.body()["enc_share"]["c1"] = ""
    share.body()["share_comms"].clear()
    assert isinstance(proofs.read_shares([encode(share.body())])[0], proofs.ReadShare)


def test_share_with_an_index_is_taken_once(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    session = open_session(write_lines(tmp_path / "f", bodies))
    assert session.take(index=0).index == 0
    with pytest.raises(CheckSkipped, match="no unused share with index 0 left"):
        session.take(index=0)
    assert session.take().index == 15
