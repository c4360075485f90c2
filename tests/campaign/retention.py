"""Searches every byte that the helper writes for secrets of two hundred shares.

Method. Votes are cast after so many leaves that a position takes three bytes, which can be found in a file. Half of the
shares are due a few seconds after the other half. In the meantime their bodies are posted in every malformed way,
operators read everything, and strace (or, without it, polling of /proc) records which files the service and its provers
open for writing. At the end provers and service are aborted, where possible after their limit on core files was lifted
from outside; an ordinary process leaves a core file then. The owner of their entries in /proc also shows that they are
not dumpable, unless everything runs as root (tests/unit/runtime/test_process_security.py queries the kernel directly).

Requirements. Within 5 s of the confirmation of a share no data of it is in any database file: no part of the
witness, no position, transaction, hash or proof, and its nullifier only once, among all spent ones. Outside the
database no data of it ever appears: not in another file, the temporary directory, the log at its most verbose, an
operator's response, an error body, or a core file. A piece of 12 characters of a secret in hex or base64 counts as a
leak.

With PostgreSQL (`postgres_remains.py`) no data of a share may ever be in any file of the server: tables, write-ahead
log, or the server's own log. Within 5 s of the confirmation its rows are deleted, and its nullifier is one among all
spent ones.

Injected fault that it caught: `Eraser.record_deletion` did nothing, so that the write-ahead log was not truncated after
a confirmation. It printed "seconds from confirmation to erasure: 21.1203 (≤ 5)", "positions left in the database's
bytes: 450 (= 0)" and "nullifiers not exactly once in it: 48 (= 0)".
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from devnet.tx import Reveal, decode
from tests.campaign import process_monitor, promise_check
from tests.campaign.attack_clients import SHARES_PATH
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.canaries import SecretScanner, Votes, collect_nullifiers, malformed_bodies, stored_secrets
from tests.campaign.postgres_remains import PostgresSearch
from tests.campaign.sqlite_remains import SqliteSearch
from tests.campaign.wallet_clients import WalletGroup
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_chain, run_helper, unix_time_in
from tests.support.process import wait_until_gone
from tests.support.queue_storage import PostgresSchema
from tests.support.tasks import running

FAR_POSITION = 70_000
"""Number of leaves before the votes."""
PROMISED_ERASURE_SECONDS = 5.0
"""Maximum seconds from confirmation to erasure."""
IGNORED_PATHS = {"/dev/null", "/dev/tty"}
RemainsSearch = SqliteSearch | PostgresSearch


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    state, temp = setting.directory / "state", setting.directory / "temp"
    state.mkdir()
    temp.mkdir()
    environment = {"TMPDIR": str(temp), "SQLITE_TMPDIR": str(temp)}
    async with (
        run_chain(setting.directory, "--stand-in-proofs", "--block-seconds", "0.3") as chain,
        run_helper(state, chain.http, chain, cluster=setting.cluster, env=environment) as helper,
    ):
        await _run_checks(findings, setting, chain, helper, temp)
    return findings


async def _run_checks(
    findings: Findings, setting: CampaignRun, chain: DevChain, helper: HelperProcess, temp: Path
) -> None:
    pids = [helper.pid, *await helper.worker_pids()]
    opened = process_monitor.OpenedFiles(pids)
    responses: list[str] = []
    storage = helper.storage
    search = (
        PostgresSearch(findings, helper, storage)
        if isinstance(storage, PostgresSchema)
        else SqliteSearch(findings, helper)
    )
    async with opened.watch(setting.directory / "trace"):
        votes, wallets = await _run_waves(search, setting, chain, helper, responses)
    await promise_check.check_promises(findings, chain, wallets.ledger)
    other_files = {path for path in opened.paths if not search.is_database_file(path) and path not in IGNORED_PATHS}
    validators = str(helper.db.with_name("svote-admin.db"))  # contains no share data; it is searched below
    other_files = {path for path in other_files if path != str(helper.log) and not path.startswith(validators)}
    findings.record_figure("open files observed with", "strace" if opened.uses_strace else "polling")
    findings.require_at_least("files opened for writing", len(opened.paths), 2)
    findings.require_none("files opened for writing other than databases", other_files)
    await _check_core_dumps(findings, setting, helper, pids, temp)
    scanner = SecretScanner(
        [*stored_secrets(votes).values(), *collect_nullifiers(votes).values()], [at for _, at in votes]
    )
    others = [path for directory in (helper.db.parent, temp) for path in directory.rglob("*") if path.is_file()]
    others = [path for path in others if not search.is_database_file(str(path))]
    findings.require_equal(
        "hits in other files, including the debug log", sum(map(_count_secrets_in_files(scanner), others)), 0
    )
    findings.require_at_least("lines of the log", helper.log.read_text().count("\n"), 20)
    findings.require_equal(
        "hits in responses to operators and wallets, including errors",
        sum(map(scanner.count_in_text, set(responses))),
        0,
    )
    findings.require_at_least("responses searched", len(responses), setting.scale(500, 120))


def _count_secrets_in_files(scanner: SecretScanner) -> Callable[[Path], int]:
    return lambda path: scanner.count_in_bytes(path.read_bytes())


# -------------------------------------------------------------------- waves of shares


async def _run_waves(
    search: RemainsSearch, setting: CampaignRun, chain: DevChain, helper: HelperProcess, responses: list[str]
) -> tuple[Votes, WalletGroup]:
    """Post two waves of shares, and search after the confirmation of each."""
    round_id = await chain.open_round()
    await chain.delegate(round_id, FAR_POSITION)
    wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random("crowd"))
    votes = await wallets.cast_votes(round_id, setting.scale(13, 3))
    await helper.wait_for_leaf(round_id, max(position for _, position in votes))
    half = len(votes) // 2
    due, later = (unix_time_in(search.search_seconds + seconds) for seconds in setting.scale((8, 20), (4, 10)))
    await asyncio.gather(
        wallets.post_shares(votes[:half], lambda: due), wallets.post_shares(votes[half:], lambda: later)
    )
    search.check_waiting_shares(votes)
    async with running(_query_operator_views(helper, responses)):
        await _post_malformed(helper, votes, later, setting.seeded_random("wrong"), responses)
        waves = ((votes[:half], len(votes) - half), (votes[half:], 0))
        seconds = [
            await _measure_erasure(search, chain, helper, wave, ballot.SHARE_COUNT * waiting) for wave, waiting in waves
        ]
    search.findings.require_at_most("seconds from confirmation to erasure", max(seconds), PROMISED_ERASURE_SECONDS)
    search.check_after_confirmation(votes, await _public_values(chain, votes))
    for table, rows in {"shares": 0, "reveals": 0, "history": 0, "tombstones": len(collect_nullifiers(votes))}.items():
        search.findings.require_equal(f"rows in {table}", helper.count_rows(table), rows)
    return votes, wallets


async def _measure_erasure(
    search: RemainsSearch, chain: DevChain, helper: HelperProcess, votes: Votes, waiting: int
) -> float:
    """Wait until the votes are confirmed and erased; return the seconds of the erasure."""
    for vote, _ in votes:
        await helper.wait_for("has confirmed a vote", partial(_is_confirmed, helper, vote))
    confirmed = time.monotonic()
    public = await _public_values(chain, votes)
    while True:
        checked_at = time.monotonic()
        if not search.find_remains(votes, public, waiting) or checked_at - confirmed > 4 * PROMISED_ERASURE_SECONDS:
            return checked_at - confirmed
        await asyncio.sleep(0.1)


async def _is_confirmed(helper: HelperProcess, vote: Ballot) -> bool:
    statuses = [await helper.share_status(vote.round_id, share.nullifier) for share in vote.shares]
    return set(statuses) == {"confirmed"}


async def _public_values(chain: DevChain, votes: Votes) -> dict[str, bytes]:
    """Return public values of the reveals that must not remain in the database: bytes, proofs, hashes."""
    values: dict[str, bytes] = {}
    own_nullifiers = {share.nullifier for vote, _ in votes for share in vote.shares}
    for transaction in await chain.find_transactions(votes[0][0].round_id):
        raw, digest = base64.b64decode(transaction["tx"]), bytes.fromhex(transaction["hash"])
        reveal = decode(raw)
        assert isinstance(reveal, Reveal)
        if reveal.nullifier in own_nullifiers:
            values |= {f"message {digest.hex()}": raw[:200], f"proof {digest.hex()}": reveal.proof[:64]}
            values |= {f"hash {digest.hex()}": digest, f"hash in hex {digest.hex()}": digest.hex().upper().encode()}
    return values


# -------------------------------------------------------------------- responses


async def _query_operator_views(helper: HelperProcess, responses: list[str]) -> None:
    while True:
        listed = await helper.operator_get("/queue?limit=10000")
        responses.append(json.dumps(listed))
        responses += [json.dumps(await helper.operator_get(path)) for path in ("/stats", "/rounds", "/actions")]
        for entry in listed["shares"][:: max(1, len(listed["shares"]) // 20)]:
            try:
                responses.append(json.dumps(await helper.operator_get(f"/queue/{entry['ref']}")))
            except httpx.HTTPStatusError as error:  # confirmed in the meantime
                responses.append(error.response.text)
        await asyncio.sleep(0.5)


async def _post_malformed(
    helper: HelperProcess, votes: Votes, submit_at: int, rng: random.Random, responses: list[str]
) -> None:
    """Send malformed bodies and URLs; record all responses.

    Some of them are accepted as duplicates, so an earlier `submit_at` would move a share's due time up.
    """
    async with httpx.AsyncClient(base_url=helper.url, timeout=30) as http:
        for vote, position in votes:
            share = rng.choice(vote.shares)
            body = ballot.post_body(vote, share, position, submit_at)
            for content in malformed_bodies(body, rng):
                response = await http.post(SHARES_PATH, content=content)
                responses.append(f"{response.headers} {response.text}")
            blind, status = share.blind.hex(), f"/shielded-vote/v1/share-status/{vote.round_id.hex()}"
            for path in (
                f"{status}/{blind}00",
                f"{status}/{blind[:-2]}",
                f"{status}/zz{blind}",
                f"/{blind}",
                f"{SHARES_PATH}/{blind}",
            ):
                response = await http.get(path)
                responses.append(f"{response.headers} {response.text}")
            responses.append((await http.get(f"{status}/{share.nullifier.hex()}")).text)
        for path in ("/shielded-vote/v1/status", "/shielded-vote/v1/queue-status"):
            responses.append((await http.get(path)).text)


# -------------------------------------------------------------------- core files


async def _check_core_dumps(
    findings: Findings, setting: CampaignRun, helper: HelperProcess, pids: Sequence[int], temp: Path
) -> None:
    """Abort a prover and the service, and check that neither leaves a core file."""
    since = time.time() - 1
    directories = [helper.db.parent, temp, setting.directory, *(Path(f"/proc/{pid}/cwd").readlink() for pid in pids)]
    findings.require_equal("core file limits", ", ".join(process_monitor.read_core_limits(pids)), "0")
    findings.require_equal(
        "owners of their entries in /proc", ", ".join(map(str, process_monitor.proc_owners(pids))), "0"
    )
    with process_monitor.start_unhardened_process(setting.directory / "ordinary") as other:
        findings.record_figure("owner of an ordinary process's entry", process_monitor.proc_owners([other.pid]).pop())
        process_monitor.abort_process(other.pid)
        findings.record_figure(
            "an ordinary process leaves a core file here", str(process_monitor.wait_for_core_dump(other.pid))
        )
    for pid in pids[1:]:
        process_monitor.abort_process(pid)
    await wait_until_gone(pids[1:])
    process_monitor.abort_process(helper.pid)
    findings.require_equal(
        "the service left a core file, according to its parent",
        str(process_monitor.wait_for_core_dump(helper.pid)),
        "False",
    )
    cores = process_monitor.find_core_files(directories, since)
    findings.require_none("core files", cores)
    for path in cores:
        path.unlink()
