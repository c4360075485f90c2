"""`chain rescan`: with a running helper, on the file, and its progress."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from helper.cli import chain
from helper.store import blocks, shares
from tests.unit.cli.live_daemon import DATABASE, SERVICE_STATUS, LiveDaemon, create_queue_file, run_live_daemon
from tests.unit.cli.test_main import read_json, run_command
from tests.unit.ingest.admission_fixtures import ROUND_ID, make_round
from tests.unit.operations.action_fixtures import NOW, OperationsHarness, nullifier_of, recorded_share

FIRST = make_round().created_at_height
LAST = FIRST + 19


pytestmark = pytest.mark.usefixtures("captured_logs")


async def read_blocks(harness: OperationsHarness) -> None:
    """Store a share and read all blocks, without finding its reveal."""
    share = recorded_share(0)
    await harness.store.run(shares.EnqueueOperation(share, nullifier_of(share), now=NOW))
    await harness.store.run(blocks.begin_ledger, 1)
    await harness.store.run(blocks.apply_blocks, [(1, LAST)], [])


@pytest.fixture
def daemon() -> Iterator[LiveDaemon]:
    with run_live_daemon(DATABASE.absolute()) as live:
        live.run(read_blocks)
        yield live


@pytest.fixture
def file() -> None:
    create_queue_file(fill=read_blocks)


def test_rescan_waits_and_reports_progress_and_pruned_blocks(
    daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def read_newest(harness: OperationsHarness) -> None:
        spent = [(ROUND_ID, nullifier_of(recorded_share(0)))]
        await harness.store.run(blocks.apply_blocks, [(LAST - 7, LAST)], spent)

    steps = iter(
        [lambda _: anyio.sleep(0), read_newest, lambda harness: harness.store.run(blocks.give_up_blocks, LAST - 8)]
    )
    monkeypatch.setattr("helper.cli.chain.time.sleep", lambda _: daemon.run(next(steps)))

    assert run_command("chain", "rescan", "--from", "1") == 3

    output = capsys.readouterr()
    assert output.err == "20 of 20 blocks left\n12 of 20 blocks left\n"
    assert output.out == (
        f"blocks {FIRST} to {LAST}: 8 read again, 1 nullifiers added, 1 shares confirmed\n"
        f"12 blocks could not be read, because every node has pruned them: {FIRST} to {LAST - 8}\n"
        "Add a node that has them to [chain] endpoints, restart the helper and repeat this command.\n"
    )
    assert next(steps, None) is None
    assert run_command("chain", "rescan", "--json") == 3
    assert read_json(capsys, "chain-rescan") == {
        "source": "daemon",
        "from": FIRST,
        "to": LAST,
        "blocks": 20,
        "left": 0,
        "read": 8,
        "pruned": 12,
        "added": 1,
        "confirmed": 1,
        "pruned_blocks": [[FIRST, LAST - 8]],
    }
    (action,) = daemon.run(lambda harness: harness.store.list_actions(limit=5))
    assert (action.what, action.wanted, action.outcome) == ("rescan", {"from": 1}, {"blocks": 20})


def test_rescan_without_progress_shows_why(daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        if "different reveals" in lines[-1]:
            raise KeyboardInterrupt

    lines: list[str] = []
    monkeypatch.setattr(chain, "print_message", lines.append)
    monkeypatch.setattr("helper.cli.chain.time.sleep", interrupt)
    problem = {"name": "blocks", "problem": "nodes report different reveals in block 7", "note": None}
    monkeypatch.setitem(SERVICE_STATUS, "checks", [{"name": "nodes", "problem": None, "note": None}, problem])
    assert run_command("chain", "rescan", "--from", str(LAST)) == 130
    assert lines[:2] == ["1 of 1 blocks left", "1 of 1 blocks left: nodes report different reveals in block 7"]
    assert "continues in the background" in lines[2]


def test_rescan_without_waiting_shows_what_is_left(daemon: LiveDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("chain", "rescan", "--from", str(LAST - 1), "--no-wait") == 0
    assert "2 blocks are left; the helper reads them in the background" in capsys.readouterr().out


@pytest.mark.usefixtures("file")
def test_rescan_without_helper_is_recorded_for_the_next_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("chain", "rescan", "--from", str(LAST)) == 0
    assert "no helper is running: it reads 1 blocks when it starts" in capsys.readouterr().out
    assert run_command("chain", "rescan", "--json") == 0
    result = read_json(capsys, "chain-rescan")
    assert (result["source"], result["from"], result["left"]) == ("file", LAST, 1)


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 5, "no rescan was requested"),
        (("--from", str(LAST + 1)), 1, f"block {LAST + 1} has not been read yet: the newest block read is {LAST}"),
        (("--from", "0"), 2, "--from"),
        (("--from", "x"), 2, "--from"),
    ],
)
def test_rescan_refusals_have_distinct_exit_codes(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("chain", "rescan", *arguments) == code
    assert message in capsys.readouterr().err
