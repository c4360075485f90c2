"""`rounds`, `tx lookup` and `proof`: exit codes and output."""

from __future__ import annotations

import os
import resource
import time
from hashlib import sha256
from pathlib import Path

import pytest

from helper.chain.chain_data import RoundAuthentication
from helper.cli import queue
from helper.clock import SystemClock
from helper.object_store import StoredObject
from helper.operations.archived_objects import IndexEntry, bundle_name, encode_index, index_name, part_of_height
from helper.operations.proof_bundle import pack_bundle
from helper.store import rounds
from tests.recorded.test_proof_bundle import BUNDLE, FIRST_EVIDENCE, with_foreign_parts
from tests.support.bucket import MemoryBucket
from tests.support.schemas import assert_conforms
from tests.unit.cli.live_daemon import create_queue_file, run_live_daemon
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import OperationsHarness

NULLIFIER = FIRST_EVIDENCE.message.nullifier.hex()


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use settings whose only node is unreachable."""
    monkeypatch.setattr("helper.observability.log_config.configure", lambda *_: None)
    Path("helper.toml").write_text('[chain]\nendpoints = ["http://127.0.0.1:9"]\n')
    Path("good.zip").write_bytes(BUNDLE)
    Path("bad.zip").write_bytes(with_foreign_parts(root=b"\x01" * 32))
    Path("junk.zip").write_bytes(b"junk")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tx", "lookup", "xyz"), 2, "HASH must be 64 hex"),
        (("tx", "lookup", "ab" * 32), 6, "no node is usable"),
        (("proof", "export", "ab"), 2, "NULLIFIER must be 64 hex"),
        (("proof", "export", NULLIFIER, "--round", "ab"), 2, "round must be 64 hex"),
        (
            ("wallet", "vote", "ab" * 32, "--proposal", "1", "--decision", "1", "--base", "http://127.0.0.1:9"),
            6,
            "the vote could not be cast: http://127.0.0.1:9: ",
        ),
        (("proof", "export", NULLIFIER, "--from-height", "5"), 2, "must be given together, in ascending order"),
        (
            ("proof", "export", NULLIFIER, "--from-height", "5", "--to-height", "4"),
            2,
            "must be given together, in ascending order",
        ),
        (("proof", "export", NULLIFIER), 6, "unreachable"),
        (("proof", "export", NULLIFIER, "--from", "archive"), 1, "[archive] place is not set"),
        (
            ("proof", "export", NULLIFIER, "--from", "archive", "--from-height", "5", "--to-height", "6"),
            2,
            "--from-height searches the chain and cannot be used with --from archive",
        ),
        (("proof", "verify", "nowhere.zip"), 5, "nowhere.zip"),
        (("proof", "verify", "."), 1, "cannot read file"),
        (("proof", "verify", "bad.zip"), 1, "rejected: the proof is not valid"),
        (("proof", "verify", "junk.zip"), 1, "rejected: unreadable zip file"),
        (("proof", "verify", "good.zip", "--online"), 6, "no node is usable"),
        (("proof", "verify", "bad.zip", "--online"), 1, "is not valid"),
        (("rounds",), 5, "does not exist"),
    ],
)
def test_verify_result_sets_exit_code_and_message(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == code
    assert message in capsys.readouterr().err


def test_verify_bundle_needs_neither_chain_nor_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("helper.toml").unlink()
    assert run_command("proof", "verify", "good.zip", "--json") == 0
    response = read_json(capsys)
    assert (response["ok"], response["reason"], response["online"]) == (True, None, None)
    assert (response["nullifier"], response["height"], response["circuit"]) == (NULLIFIER, 106, "k11")
    assert run_command("proof", "verify", "good.zip") == 0
    assert f"nullifier\t{NULLIFIER}" in capsys.readouterr().out
    assert run_command("proof", "verify", "bad.zip", "--json") == 1
    response = read_json(capsys)
    assert (response["ok"], response["reason"]) == (False, "the proof is not valid for these public inputs")


def test_proof_bundle_does_not_overwrite_existing_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def find(*_: object) -> object:
        return FIRST_EVIDENCE, "chain"

    monkeypatch.setattr("helper.cli.proof._find", find)
    assert run_command("proof", "export", NULLIFIER, "--json") == 0
    written = Path(read_json(capsys)["output"])
    assert written.name == f"reveal-{NULLIFIER[:12]}.zip"
    assert written.read_bytes() == pack_bundle(FIRST_EVIDENCE)
    assert run_command("proof", "export", NULLIFIER) == 0, "the same bytes again"
    assert run_command("proof", "export", NULLIFIER, "--output", "junk.zip") == 1
    assert Path("junk.zip").read_bytes() == b"junk"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as if the disk were full
    try:
        assert run_command("proof", "export", NULLIFIER, "--output", "part.zip") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not Path("part.zip").exists()


@pytest.mark.parametrize("defect", ["proof", "hash", "away", None])
def test_archive_is_used_only_when_completely_valid(
    defect: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = BUNDLE if defect != "proof" else with_foreign_parts(root=b"\x01" * 32)
    round_id, message = FIRST_EVIDENCE.message.round_id, FIRST_EVIDENCE.message
    entry = IndexEntry(
        height=FIRST_EVIDENCE.height,
        transaction=FIRST_EVIDENCE.tx_hash,
        nullifier=message.nullifier.hex(),
        sha256=("0" * 64 if defect == "hash" else sha256(bundle).hexdigest()),
    )
    bucket = MemoryBucket()
    if defect != "away":
        bucket.objects[bundle_name(round_id, FIRST_EVIDENCE.tx_hash)] = StoredObject(bundle, "1")
    bucket.objects[index_name(round_id, part_of_height(FIRST_EVIDENCE.height))] = StoredObject(
        encode_index([entry]), "2"
    )
    monkeypatch.setattr("helper.operations.archive_reader.open_bucket", lambda *_, **__: bucket)
    with Path("helper.toml").open("a") as file:
        file.write('[archive]\nplace = "s3://votes/proofs"\n')
    archive = ("proof", "export", NULLIFIER, "--json", "--from", "archive")
    if defect is None:
        assert run_command(*archive) == 0
        response = read_json(capsys)
        assert (response["source"], Path(response["output"]).read_bytes()) == ("archive", BUNDLE)
        assert_conforms("proof-export", response)
        assert run_command("proof", "export", "07" * 32, "--from", "archive") == 5
        return
    assert run_command(*archive) == 1
    assert run_command("proof", "export", NULLIFIER) == 6, "the chain is queried instead and unreachable"
    assert "archive not usable: " in capsys.readouterr().err


def test_rounds_table_shows_local_and_utc_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-5")
    time.tzset()
    try:
        with run_live_daemon(tmp_path / "svote-helper.db"):
            assert run_command("rounds", "--json") == 0
            assert read_json(capsys)["rounds"][0]["tree_size"] == 7
            assert run_command("rounds") == 0
    finally:
        monkeypatch.undo()
        os.chdir(tmp_path)
        time.tzset()
    captured = capsys.readouterr()
    header, row = (line.split("\t") for line in captured.out.splitlines())
    assert (header[-1], row[-1]) == ("authenticated", "no: not in the configuration")
    assert row[:5] == [
        ROUND_ID.hex()[:12],
        "active",
        "2026-11-21 18:36:35 +05",
        "2026-11-21 13:36:35",
        "17 min",
    ]
    assert captured.err == "1 rounds, from the daemon\n"


def test_rounds_without_helper_are_read_from_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def close_round(harness: OperationsHarness) -> None:
        await harness.store.run(rounds.mark_closed, ROUND_ID, END)
        await harness.store.run(rounds.save_leaves, ROUND_ID, 5, 0, bytes(64))

    create_queue_file(fill=close_round)
    monkeypatch.setattr(SystemClock, "now", lambda _clock: END + 5)
    assert run_command("rounds", "--json") == 0
    response = read_json(capsys)
    assert (response["source"], response["now"]) == ("file", END + 5)
    (entry,) = response["rounds"]
    assert entry["authentication"] == "unknown"
    assert (entry["round"], entry["closed"], entry["left"], entry["tree_size"]) == (ROUND_ID.hex(), True, 0, 2)


def test_rounds_has_a_text_for_every_authentication() -> None:
    assert set(queue._AUTHENTICATION_TEXTS) == set(RoundAuthentication)
