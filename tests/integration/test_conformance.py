"""The conformance kit: our own helper passes, and every planted fault is found without a false alarm."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from conformance.runner import CHECKS
from conformance.shares import encode, seal, shares_of
from devnet.postgres import find_binaries
from tests.support.conformance import describe_failures, failed_ids, open_kit_chain, restart_on_request, run_kit
from tests.support.devnet import NEW_ERA, DevChain, era_flags
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_chain_and_helper, unix_time_in
from tests.support.process import find_free_port
from tests.support.wrong_helper import TOKEN, Fault, run_wrong_helper

CLUSTERS = ["cluster"] if find_binaries() is not None else []
WITHIN_SECONDS = 40.0
"""Limit for the reveals of a share that a fault has lost; long enough for all others on a busy machine."""
NOT_OF_PROXY = {"CONN-022", "SIZE-002", "SLOW-024", "SMUGGLE-020", "LOAD-003", "LOAD-005"}
"""Recommendations that the proxy of the wrong helper does not follow: half-closed connections, a body that is announced
as too large, deadlines of heads, a required `Host`, and the times of a burst, which the proxy doubles."""


@pytest.mark.parametrize("store", ["sqlite", *CLUSTERS])
async def test_kit_own_helper_passes_every_check(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, era: str
) -> None:
    cluster = None if store == "sqlite" else request.getfixturevalue(store)
    flags = ("--stand-in-proofs", *era_flags(era))
    settings = {"port": find_free_port(), "api_token": TOKEN}
    async with (
        run_chain_and_helper(
            tmp_path, *flags, program=STAND_IN_PROGRAM, cluster=cluster, helper=settings
        ) as (chain, helper),
        restart_on_request(helper, tmp_path) as restart,
    ):  # fmt: skip
        results = await run_kit(helper.url, chain_url=chain.url, restart_command=restart, token=TOKEN)
    assert failed_ids(results, "must") == set(), describe_failures(results)
    assert failed_ids(results, "should") == set(), describe_failures(results)
    assert {result.check.id: result.seen for result in results if result.verdict == "skipped"} == {}
    assert len(results) == len(CHECKS)


class Target:
    """A chain and a helper that several tests check one after another."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.processes: list[HelperProcess | DevChain] = []

    async def start(self, http: httpx.AsyncClient) -> None:
        if self.processes:
            return
        path = Path(self.directory.name)
        chain = DevChain(path, http, "--block-seconds", "0.3", "--stand-in-proofs", *era_flags(NEW_ERA))
        await chain.start()
        self.processes.append(chain)
        helper = HelperProcess(path, http, chain, program=STAND_IN_PROGRAM)
        await helper.start()
        self.processes.append(helper)
        await helper.wait_until_ready()

    async def stop(self) -> None:
        for process in reversed(self.processes):
            await process.kill()

    @property
    def chain_url(self) -> str:
        return self.processes[0].url

    @property
    def helper_url(self) -> str:
        return self.processes[1].url


@pytest.fixture(scope="module")
def shared_target() -> Iterator[Target]:
    target = Target()
    yield target
    anyio.run(target.stop)
    target.directory.cleanup()


@pytest.fixture
async def target(shared_target: Target, http: httpx.AsyncClient) -> Target:
    await shared_target.start(http)
    return shared_target


def restart_command(url: str) -> str:
    """Return a command that makes a wrong helper forget what a restart loses."""
    code = f"import urllib.request as r; r.urlopen(r.Request('{url}/restart', method='POST'))"
    return f'{sys.executable} -c "{code}"'


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        topics: the checks that run apart from the topics of those that find it.
        found_by: the checks that fail. No other check of level `must` fails.
        if_slow: checks that, if the machine is slow, fail too, or are skipped although they find it.
    """

    topics: Sequence[str]
    found_by: set[str]
    if_slow: frozenset[str] = frozenset()

    @property
    def found_topics(self) -> set[str]:
        """The topics of the checks that find it, whose other checks must not fail; none if `topics` are single."""
        return {check_id.partition("-")[0] for check_id in self.found_by} if self.topics is NEIGHBORS else set()


def numbered(topic: str, *numbers: int) -> set[str]:
    return {f"{topic}-{number:0{4 if topic == 'FIELD' else 3}}" for number in numbers}


POSTS = ("STATUS", "CORS", "ROUTE", "ERROR", "POST", "DUP", "FIELD", "HASH", "KEY", "TIME", "SHARE", "SUMMARY")
NEIGHBORS = [next(check.id for check in CHECKS if check.id.startswith(f"{topic}-")) for topic in POSTS]
"""The first check of each of these topics."""
STALLS = [check.id for check in CHECKS if check.id.startswith("SLOW-") and check.id not in ("SLOW-023", "SLOW-024")]
"""The checks of slow bodies, which run concurrently, without the slowest two."""

LATER = [f"ROUND-{number:03}" for number in (1, 3, 10, 11)]

PLANTED = {
    Fault.REPEAT_IS_QUEUED: Planted(
        NEIGHBORS, numbered("DUP", *range(1, 12)) | numbered("KEY", *range(1, 7)) | {"TIME-006"}
    ),
    Fault.ALTERED_IS_DUPLICATE: Planted(
        NEIGHBORS, numbered("KEY", *range(1, 7)) | numbered("FIELD", 507), frozenset({"FIELD-0801"})
    ),
    Fault.UNKNOWN_ROUND_IS_500: Planted(["ROUND-001", "ROUND-002", "ROUND-003"], {"ROUND-001", "ROUND-002"}),
    Fault.HTML_404: Planted(NEIGHBORS, numbered("ROUTE", *range(1, 6), *range(11, 17))),
    Fault.SLASH_REDIRECT: Planted(NEIGHBORS, numbered("ROUTE", 4, 5)),
    Fault.TEXT_ERRORS: Planted(NEIGHBORS, numbered("ERROR", 1, 2, 3, 5)),
    Fault.NON_CANONICAL_ACCEPTED: Planted(NEIGHBORS, numbered("FIELD", 220, 221, 222)),
    Fault.HASH_MISMATCH_ACCEPTED: Planted(NEIGHBORS, numbered("HASH", 1, 3, 4, 5, 17) | {"KEY-003"}),
    Fault.INTEGERS_WRAP: Planted(NEIGHBORS, numbered("FIELD", 833, 834, 1033, 1034, 1133, 1134)),
    Fault.LATE_ACCEPTED: Planted(NEIGHBORS, numbered("TIME", 1, 2, 3)),
    Fault.OVERSIZE_IS_500: Planted(
        ["ERROR", "JSON", "SIZE-001", "SIZE-006"], numbered("JSON", 37, 38) | numbered("SIZE", 1, 6)
    ),
    Fault.NO_CORS: Planted(NEIGHBORS, numbered("CORS", 1, 2, 3, 5, 8, 9, 10) | {"POST-031", "SUMMARY-002"}),
    Fault.STATUS_SLOW: Planted(
        ["STATUS-001", "STATUS-004", "LOAD-001", "LOAD-004", "LOAD-005"], {"STATUS-004", "LOAD-005"}
    ),
    Fault.UNKNOWN_SHARE_IS_500: Planted(NEIGHBORS, numbered("SHARE", 1, 2, 6)),
    Fault.LATER_IS_429: Planted(LATER, {"ROUND-010"}),
    Fault.LATER_IS_400: Planted(LATER, {"ROUND-010", "ROUND-011"}),
    Fault.LATER_IN_MINUTES: Planted(LATER, {"ROUND-010", "ROUND-011"}),
    Fault.LATER_WITHOUT_TIME: Planted(LATER, {"ROUND-010", "ROUND-011"}),
    Fault.SLOW_BODY_IS_400: Planted(STALLS, {"SLOW-009"}),
    Fault.PENDING_IS_200: Planted(NEIGHBORS, {"SHARE-019"}),
    Fault.OVERLOADED_IS_503: Planted(["POST", "LOAD"], numbered("LOAD", 1, 4)),
    Fault.RECEIPT_WITH_MORE: Planted(STALLS, numbered("SLOW", 2, 3, 20, 22)),
    Fault.RECEIPT_FOR_ANY_TOKEN: Planted(STALLS, numbered("SLOW", *range(11, 19))),
    Fault.STORED_BEFORE_RECEIPT: Planted(STALLS, numbered("SLOW", 21, 26)),
    Fault.CONFIRMED_EARLY: Planted(["CHAIN"], numbered("CHAIN", 10, 11), if_slow=frozenset({"CHAIN-010"})),
    Fault.REVEALED_EARLY: Planted(["CHAIN"], numbered("CHAIN", 2, 10), if_slow=frozenset({"CHAIN-010"})),
    Fault.TIME_MOVED: Planted(["CHAIN"], numbered("CHAIN", 2), if_slow=frozenset({"CHAIN-010"})),
    Fault.SENT_AGAIN: Planted(["CHAIN"], numbered("CHAIN", 14)),
    Fault.SHARE_LOST: Planted(["CHAIN"], numbered("CHAIN", 1)),
    Fault.REVEALED_IS_FORGOTTEN: Planted(["CHAIN"], numbered("CHAIN", 13)),
    Fault.OPTION_0_REFUSED: Planted([f"ROUND-{number:03}" for number in (4, 5, 9)], {"ROUND-009"}),
    Fault.INDEX_NEEDED: Planted(NEIGHBORS, {"POST-023"}),
    Fault.BLOCKED_BY_REFUSED: Planted(NEIGHBORS, {"KEY-007"} | numbered("HASH", 11, 12)),
    Fault.TOKEN_BEGINNING: Planted(["TOKEN"], {"TOKEN-006"}),
    Fault.STORED_AFTER_RECEIPT: Planted(STALLS, numbered("SLOW", 26), frozenset({"SLOW-021"})),
    Fault.STORED_WITHOUT_END: Planted(STALLS, numbered("SLOW", 25, 27)),
    Fault.LOST_ON_RESTART: Planted(["RESTART"], numbered("RESTART", 2, 3, 4)),
    Fault.NODE_ASKED_ON_ARRIVAL: Planted(["LEAK-001", "LEAK-002", "LEAK-006", "LEAK-020"], {"LEAK-001"}),
    Fault.NODE_ASKED_FOR_NULLIFIER: Planted(["LEAK-001", "LEAK-002", "LEAK-020", "LEAK-022"], {"LEAK-001", "LEAK-020"}),
}  # fmt: skip


TIMED = [fault for fault, planted in PLANTED.items() if planted.topics in (STALLS, ["CHAIN"], ["RESTART"])]
"""Faults whose checks wait for times of shares or of bodies, and do not depend on what else happens on the chain."""


def test_every_fault_is_planted() -> None:
    assert PLANTED.keys() == set(Fault) - {Fault.NONE}
    assert len(PLANTED) >= 20


async def find_fault(target: Target, fault: Fault) -> str:
    """Check a helper with this fault. Returns how the failed checks differ from the expected ones, or nothing."""
    planted = PLANTED[fault]
    async with run_wrong_helper(target.helper_url, target.chain_url, fault) as url:
        results = await run_kit(
            url,
            chain_url=target.chain_url,
            restart_command=restart_command(url),
            within=WITHIN_SECONDS,
            token=TOKEN,
            only=[*planted.topics, *planted.found_topics],
            measures_responses=fault is Fault.STATUS_SLOW,
        )
    must, should = failed_ids(results, "must"), failed_ids(results, "should")
    skipped = {result.check.id for result in results if result.verdict == "skipped"}
    missed = planted.found_by - must - should - (planted.if_slow & skipped)
    false_alarms = must - planted.found_by - planted.if_slow
    if not missed and not false_alarms:
        return ""
    found = f"missed {sorted(missed)}, false alarms {sorted(false_alarms)}"
    return f"{fault.name}: {found}\n{describe_failures(results)}"


@pytest.mark.parametrize(
    "fault", [fault for fault in PLANTED if fault not in TIMED], ids=lambda fault: fault.name.lower()
)
async def test_kit_finds_planted_fault_without_false_alarm(target: Target, fault: Fault) -> None:
    assert await find_fault(target, fault) == ""


async def test_kit_finds_planted_faults_that_take_time_without_false_alarm(target: Target) -> None:
    """At the same time, because the checks mostly wait."""
    differences = await asyncio.gather(*(find_fault(target, fault) for fault in TIMED))
    assert "\n".join(text for text in differences if text) == ""


async def test_kit_with_file_of_shares_passes(target: Target, tmp_path: Path) -> None:
    """Six votes, whose shares are posted with the times in the file."""
    file, due = tmp_path / "shares.jsonl", unix_time_in(1000)
    async with open_kit_chain(target.chain_url) as chain:
        opened = await chain.open_round(3600)
        votes = [seal(opened.round_id, opened.ea_pk, 1, 1) for _ in range(6)]
        positions = await chain.cast(opened.round_id, [vote.commitment for vote in votes])
        lines = [
            encode({**share.body(due), "vote_end_time": opened.end})
            for vote, position in zip(votes, positions, strict=True)
            for share in shares_of(vote, position)
        ]
        file.write_bytes(b"\n".join(lines))
        results = await run_kit(target.helper_url, shares_file=file, only=[*POSTS, "QUEUE", "CONN", "ROUND", "LOAD"])
        await chain.end_round(opened.round_id)
    assert failed_ids(results, "must") == set(), describe_failures(results)
    reasons = {result.check.id: result.seen for result in results if result.verdict == "skipped"}
    assert reasons["ROUND-002"] == "needs a dev chain (--devnet)"
    assert reasons["LOAD-001"].startswith("needs 128 unused shares")
    assert reasons["TIME-005"] == "would change the time of a real share"
    posts = [result for result in results if result.check.id.startswith(("POST-", "DUP-", "FIELD-", "HASH-", "KEY-"))]
    assert {result.verdict for result in posts} == {"passed"}


async def test_kit_wrong_helper_without_fault_passes(target: Target) -> None:
    """The faults alone make the wrong helper fail, not the proxy."""
    chosen = [check.id for check in CHECKS if check.id not in NOT_OF_PROXY]
    async with run_wrong_helper(target.helper_url, target.chain_url) as url:
        command = restart_command(url)
        results = await run_kit(url, chain_url=target.chain_url, restart_command=command, only=chosen)
    assert failed_ids(results, "must") == set(), describe_failures(results)
    assert failed_ids(results, "should") == set(), describe_failures(results)
