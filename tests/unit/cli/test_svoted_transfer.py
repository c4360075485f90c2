"""`queue import --from-svoted` and `queue export --for-svoted`, with a running helper and on the file."""

from __future__ import annotations

import io
import json
import random
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from devnet.ballot import seal_ballot
from helper.cli.operator_api import OperatorApi
from helper.store import shares
from tests.support.schemas import assert_conforms
from tests.support.svoted import ballot_shares, erased_row, svoted_file, svoted_row
from tests.unit.cli.live_daemon import DATABASE, create_queue_file, run_live_daemon
from tests.unit.cli.test_main import read_json, read_last_json, run_command
from tests.unit.cli.test_queue_actions import read_states
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import NOW, OperationsHarness, recorded_share

FILE = Path("queue.json")
IMPORT = ("queue", "import", "--from-svoted")


pytestmark = pytest.mark.usefixtures("captured_logs")


@pytest.fixture(params=["daemon", "file"])
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty queue that knows the round, in a running helper or in a file."""
    create_queue_file()
    if request.param == "file":
        yield "file"
        return
    with run_live_daemon(DATABASE.absolute()):
        yield "daemon"


def write_file(*rows: dict[str, Any], mode: int = 0o600, **changes: Any) -> None:
    FILE.write_bytes(svoted_file(ROUND_ID, list(rows), **changes))
    FILE.chmod(mode)


def waiting_rows(number: int = 2) -> list[dict[str, Any]]:
    return [svoted_row(recorded_share(index, submit_at=END - 100)) for index in range(number)]


def test_import_from_svoted_reports_each_row(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt = svoted_row(recorded_share(2), corrupt=True)
    write_file(erased_row(recorded_share(3)), *waiting_rows(), corrupt)

    assert run_command(*IMPORT, "queue.json", "--dry-run", "--json") == 3
    preview = read_json(capsys)
    assert run_command(*IMPORT, "queue.json", "--yes", "--json") == 3
    result = read_json(capsys)

    assert_conforms("queue-import", result)
    assert {**preview, "dry_run": False} == result
    assert (result["source"], result["taken"], result["invalid"], result["submitted"]) == (source, 2, 1, 1)
    assert result["left"] == [{"number": 4, "ref": None, "round": None, "reason": "invalid"}]
    assert read_states(capsys) == {"received": 2}
    assert FILE.exists(), "a file with a share that was not imported is kept"


def test_share_with_other_content_at_a_position_is_imported_but_not_exported_together(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    share = recorded_share(0, submit_at=END - 100)
    ballot = seal_ballot(
        round_id=ROUND_ID,
        ea_pk=share.c1,  # any point
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        weight=5,
        rng=random.Random(1),
    )
    for other in (ballot_shares(ballot, share.tree_position, END - 100)[share.share_index], share):
        write_file(svoted_row(other))
        assert run_command(*IMPORT, "queue.json", "--yes", "--delete-file") == 0

    assert read_states(capsys) == {"received": 2}
    assert run_command("queue", "export", "--for-svoted", "--output", "out.json", "--yes") == 1
    assert "two shares of one position" in capsys.readouterr().err
    assert source


@pytest.mark.parametrize(
    ("flags", "answer", "is_kept"),
    [(["--delete-file"], None, False), (["--keep-file"], None, True), ([], True, False), ([], False, True)],
)
def test_file_is_deleted_only_on_request(
    source: str, monkeypatch: pytest.MonkeyPatch, *, flags: list[str], answer: bool | None, is_kept: bool
) -> None:
    write_file(*waiting_rows())
    questions: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        questions.append(question)
        return answer is not False or "Delete" not in question

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", confirm)

    assert run_command(*IMPORT, "queue.json", *flags) == 0

    assert FILE.exists() == is_kept
    assert any("Delete" in question for question in questions) == (answer is not None)
    assert source


def test_import_from_svoted_reads_standard_input(
    source: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = svoted_file(ROUND_ID, waiting_rows())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    assert run_command(*IMPORT, "-") == 2
    assert run_command(*IMPORT, "-", "--yes", "--delete-file") == 0

    assert read_states(capsys) == {"received": 2}
    assert source


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("queue.json",), 4, "other users can access queue.json (mode 640)"),
        (("others.json",), 4, "other users can access others.json (mode 604)"),
        (("none.json",), 5, "none.json does not exist"),
        (("queue.json", "x.age"), 2, "specify either"),
    ],
)
def test_unusable_source_is_refused(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(*waiting_rows(), mode=0o604)
    FILE.rename("others.json")
    write_file(*waiting_rows(), mode=0o640)

    assert run_command(*IMPORT, *arguments, "--yes") == code

    assert message in capsys.readouterr().err


def test_source_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "import", "--yes") == 2
    assert run_command("queue", "import", "x.age", "--delete-file", "--yes") == 2
    assert run_command("queue", "export", "--for-svoted", "--output", "x", "--passphrase-file", "p") == 2
    assert "not encrypted" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [({"version": 3}, "has version 3"), ({"rows": 5}, "rows is")])
def test_unreadable_file_fails_and_changes_nothing(
    source: str, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    write_file(*waiting_rows(), **change)

    assert run_command(*IMPORT, "queue.json", "--yes", "--delete-file") == 1

    assert message in capsys.readouterr().err
    assert FILE.exists()
    assert read_states(capsys) == {}
    assert source


# ---------------------------------------------------------------------- export


@pytest.mark.rule("N24")
def test_export_for_svoted_moves_shares_and_back(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(*waiting_rows())
    assert run_command(*IMPORT, "queue.json", "--yes", "--delete-file") == 0
    assert not FILE.exists()

    assert run_command("queue", "export", "--for-svoted", "--output", "queue.json", "--move", "--yes", "--json") == 0

    result = read_last_json(capsys)
    assert_conforms("queue-export", result)
    assert (result["source"], result["shares"], result["moved"]) == (source, 2, 2)
    assert stat.S_IMODE(FILE.stat().st_mode) == 0o600
    content = json.loads(FILE.read_bytes())
    assert (content["version"], content["round_id"], len(content["rows"])) == (1, ROUND_ID.hex(), 2)
    assert content["round"]["vote_end_time"] == END
    assert read_states(capsys) == {"failed": 2}
    assert run_command("queue", "export", "--for-svoted", "--output", "queue.json") == 5, "nothing is left to export"
    assert run_command(*IMPORT, "queue.json", "--yes", "--json") == 0
    assert read_last_json(capsys)["revived"] == 2
    assert read_states(capsys) == {"received": 2}


@pytest.mark.parametrize("move", [False, True])
def test_interrupted_export_for_svoted_leaves_the_only_copy_of_moved_shares_and_no_other(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], move: bool
) -> None:
    write_file(*waiting_rows())
    assert run_command(*IMPORT, "queue.json", "--yes", "--delete-file") == 0
    before = {*Path().iterdir()}

    def interrupt(*_: object) -> None:
        assert Path("queue.json").stat().st_size > 0, "no share may be marked as moved without its file"
        raise KeyboardInterrupt

    monkeypatch.setattr(OperatorApi, "post", interrupt)
    flags = ("--move", "--yes") if move else ()
    assert run_command("queue", "export", "--for-svoted", "--output", "queue.json", *flags) == 130
    left = [file.name for file in {*Path().iterdir()} - before if not file.name.startswith(DATABASE.name)]
    assert left == (["queue.json"] if move else [])
    assert ("keep this file" in capsys.readouterr().err) is move


def test_export_for_svoted_of_several_rounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    async def enqueue_in_two_rounds(harness: OperationsHarness) -> None:
        share = recorded_share(0)
        for queued in (share, replace(share, round_id=bytes(32))):
            await harness.store.run(shares.EnqueueOperation(queued, queued.round_id, now=NOW))

    create_queue_file(fill=enqueue_in_two_rounds)

    assert run_command("queue", "export", "--for-svoted", "--output", "x.json") == 2
    assert "use --round" in capsys.readouterr().err
    assert run_command("queue", "export", "--for-svoted", "--output", "x.json", "--round", "0" * 64) == 1
    assert "the end of the round is not known" in capsys.readouterr().err
    assert run_command("queue", "export", "--for-svoted", "--output", "x.json", "--round", ROUND_ID.hex()) == 0
