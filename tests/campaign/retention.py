"""Canaries: what two hundred shares would keep to themselves, looked for in every byte that the helper leaves anywhere.

Votes are cast behind so many leaves that a position takes three bytes, which can be looked for in a file. Half of the
shares are due some seconds after the other half. Meanwhile their bodies are posted in every wrong form, operators look
at everything, and strace (or, where there is none, a look at /proc) tells which files the service and its provers open
for writing. In the end provers and service are made to abort, where it can be done after their limit on core files was
lifted from outside; an ordinary process leaves a core file then. That they are not dumpable shows also in whose their
entries in /proc are, unless all of it runs as root (tests/unit/runtime/test_hardening.py asks the kernel itself).

What must hold: within 5 s of the confirmation of a share nothing of it is in any file of the database: no part of the
witness, no position, transaction, hash or proof, and its nullifier once only, among all spent ones. Outside the
database nothing of it ever is: not in another file, the temporary folder, the log at its most talkative, an operator's
answer, an error's body, or a core file. A piece of 12 characters of a secret in hex or base64 counts as telling it.

With PostgreSQL (`left_in_server.py`) nothing of a share is ever to be in any file of the server: tables, write-ahead
log, or the server's own log. Within 5 s of the confirmation its rows are gone, and its nullifier is one among all spent
ones.

The planted bug that it caught: `Eraser.note_deleted` did nothing, so that the write-ahead log was not truncated after a
confirmation. It printed "seconds from confirmation to erasure: 21.1203 (≤ 5)", "positions left in the database's
bytes: 450 (= 0)" and "nullifiers not exactly once in it: 48 (= 0)".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx

from devnet import ballot
from devnet.ballot import Ballot
from devnet.tx import Reveal, decode
from tests.campaign import process_monitor, promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.canaries import Eyes, Votes, held_of, malformed, nullifiers_of
from tests.campaign.postgres_remains import ServerSearch
from tests.campaign.sqlite_remains import FileSearch
from tests.campaign.wallet_clients import SHARES, Crowd
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, soon
from tests.support.process import gone
from tests.support.queue_storage import Schema

FAR = 70_000
"""Leaves before the votes."""
PROMISED = 5.0
"""Seconds from the confirmation to the erasure."""
NULL = {"/dev/null", "/dev/tty"}
Search = FileSearch | ServerSearch


async def run(setting: Setting) -> Findings:
    """Start a chain and a helper with a temporary folder of its own, and look."""
    findings = Findings()
    state, temp = setting.folder / "state", setting.folder / "temp"
    state.mkdir()
    temp.mkdir()
    async with httpx.AsyncClient(timeout=30) as http:
        chain = Chain(setting.folder, http, "--stand-in-proofs", "--block-seconds", "0.3")
        await chain.start()
        try:
            helper = Helper(state, http, chain, program=STAND_IN, cluster=setting.cluster)
            await helper.start(TMPDIR=str(temp), SQLITE_TMPDIR=str(temp))
            try:
                await helper.ready()
                await _look(findings, setting, chain, helper, temp)
            finally:
                await helper.kill()
        finally:
            await chain.kill()
    return findings


async def _look(findings: Findings, setting: Setting, chain: Chain, helper: Helper, temp: Path) -> None:
    pids = [helper.pid, *await helper.workers()]
    opened = process_monitor.OpenedFiles(pids)
    said: list[str] = []
    kept = helper.kept
    search = ServerSearch(findings, helper, kept) if isinstance(kept, Schema) else FileSearch(findings, helper)
    async with opened.watched(setting.folder / "trace"):
        votes, crowd = await _live(search, setting, chain, helper, said)
    await promise_check.judge(findings, chain, crowd.ledger)
    beside = {path for path in opened.paths if not search.of_database(path) and path not in NULL}
    validators = str(helper.db.with_name("svote-admin.db"))  # nothing of a share comes near it; it is searched below
    beside = {path for path in beside if path != str(helper.log) and not path.startswith(validators)}
    findings.figure("files opened are told by", "strace" if opened.by_strace else "looking often")
    findings.at_least("files seen to be opened for writing", len(opened.paths), 2)
    findings.exactly("files opened for writing beside the databases", ", ".join(sorted(beside)) or "none", "none")
    await _cores(findings, setting, helper, pids, temp)
    eyes = Eyes([*held_of(votes).values(), *nullifiers_of(votes).values()], [at for _, at in votes])
    others = [path for folder in (helper.db.parent, temp) for path in folder.rglob("*") if path.is_file()]
    others = [path for path in others if not search.of_database(str(path))]
    findings.exactly("hits in other files, the log at debug among them", sum(map(_seen_in(eyes), others)), 0)
    findings.at_least("lines of the log", helper.log.read_text().count("\n"), 20)
    findings.exactly("hits in answers to operators and wallets, errors among them", sum(map(eyes.seen, set(said))), 0)
    findings.at_least("answers looked at", len(said), setting.scale(500, 120))


def _seen_in(eyes: Eyes) -> Callable[[Path], int]:
    return lambda path: eyes.seen_in_bytes(path.read_bytes())


# ---------------------------------------------------------------------- the shares' life


async def _live(search: Search, setting: Setting, chain: Chain, helper: Helper, said: list[str]) -> tuple[Votes, Crowd]:
    """Two waves of shares, each looked for after its confirmation."""
    round_id = await chain.open_round()
    await chain.delegate(round_id, FAR)
    crowd = Crowd(chain, lambda: [helper.url], setting.dice("crowd"))
    votes = await crowd.vote(round_id, setting.scale(13, 3))
    await helper.knows_leaf(round_id, max(position for _, position in votes))
    half = len(votes) // 2
    due, later = (soon(search.look_seconds + seconds) for seconds in setting.scale((8, 20), (4, 10)))
    await asyncio.gather(crowd.post(votes[:half], lambda: due), crowd.post(votes[half:], lambda: later))
    search.waiting(votes)
    operators = asyncio.create_task(_operators(helper, said))
    try:
        await _wrong_posts(helper, votes, setting.dice("wrong"), said)
        waves = ((votes[:half], len(votes) - half), (votes[half:], 0))
        seconds = [await _erased(search, chain, helper, some, 16 * waiting) for some, waiting in waves]
    finally:
        operators.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await operators
    search.findings.at_most("seconds from confirmation to erasure", max(seconds), PROMISED)
    search.after(votes, await _transactions(chain, votes))
    for table, rows in {"shares": 0, "reveals": 0, "history": 0, "tombstones": len(nullifiers_of(votes))}.items():
        search.findings.exactly(f"rows in {table}", helper.rows(f"SELECT count(*) FROM {table}")[0][0], rows)
    return votes, crowd


async def _erased(search: Search, chain: Chain, helper: Helper, votes: Votes, waiting: int) -> float:
    """Wait until the votes are confirmed and nothing of them is left; how long the latter took."""
    for vote, _ in votes:
        await _until(helper, lambda vote=vote: _is_confirmed(helper, vote))  # type: ignore[misc]
    confirmed = time.monotonic()
    public = await _transactions(chain, votes)
    while True:
        looked = time.monotonic()
        if not search.left(votes, public, waiting) or looked - confirmed > 4 * PROMISED:
            return looked - confirmed
        await asyncio.sleep(0.1)


async def _until(helper: Helper, holds: Callable[[], Awaitable[bool]]) -> None:
    async with helper.patience("has confirmed a vote"):
        while not await holds():
            await asyncio.sleep(0.05)


async def _is_confirmed(helper: Helper, vote: Ballot) -> bool:
    found = [await helper.share_status(vote.round_id, share.nullifier) for share in vote.shares]
    return set(found) == {"confirmed"}


async def _transactions(chain: Chain, votes: Votes) -> dict[str, bytes]:
    """What is public of the votes' reveals, and must not stand beside what is not: bytes, proofs, hashes."""
    found: dict[str, bytes] = {}
    ours = {share.nullifier for vote, _ in votes for share in vote.shares}
    for one in await chain.transactions(votes[0][0].round_id):
        raw, digest = base64.b64decode(one["tx"]), bytes.fromhex(one["hash"])
        reveal = decode(raw)
        assert isinstance(reveal, Reveal)
        if reveal.nullifier in ours:
            found |= {f"message {digest.hex()}": raw[:200], f"proof {digest.hex()}": reveal.proof[:64]}
            found |= {f"hash {digest.hex()}": digest, f"hash in hex {digest.hex()}": digest.hex().upper().encode()}
    return found


# ---------------------------------------------------------------------- what is said


async def _operators(helper: Helper, said: list[str]) -> None:
    """Ask everything that operators may ask, again and again."""
    while True:
        listed = await helper.operator("/queue?limit=10000")
        said.append(json.dumps(listed))
        said += [json.dumps(await helper.operator(path)) for path in ("/stats", "/rounds", "/actions")]
        for entry in listed["shares"][:: max(1, len(listed["shares"]) // 20)]:
            try:
                said.append(json.dumps(await helper.operator(f"/queue/{entry['ref']}")))
            except httpx.HTTPStatusError as error:  # confirmed meanwhile
                said.append(error.response.text)
        await asyncio.sleep(0.5)


async def _wrong_posts(helper: Helper, votes: Votes, dice: random.Random, said: list[str]) -> None:
    """Bodies and addresses that are wrong in every way; all answers."""
    async with httpx.AsyncClient(base_url=helper.url, timeout=30) as http:
        for vote, position in votes:
            share = dice.choice(vote.shares)
            body = ballot.post_body(vote, share, position, 0)
            for content in malformed(body, dice):
                answer = await http.post(SHARES, content=content)
                said.append(f"{answer.headers} {answer.text}")
            blind, status = share.blind.hex(), f"/shielded-vote/v1/share-status/{vote.round_id.hex()}"
            for path in (
                f"{status}/{blind}00",
                f"{status}/{blind[:-2]}",
                f"{status}/zz{blind}",
                f"/{blind}",
                f"{SHARES}/{blind}",
            ):
                answer = await http.get(path)
                said.append(f"{answer.headers} {answer.text}")
            said.append((await http.get(f"{status}/{share.nullifier.hex()}")).text)
        for path in ("/shielded-vote/v1/status", "/shielded-vote/v1/queue-status"):
            said.append((await http.get(path)).text)


# ---------------------------------------------------------------------- the end


async def _cores(findings: Findings, setting: Setting, helper: Helper, pids: Sequence[int], temp: Path) -> None:
    """Abort a prover and the service; neither leaves a core file."""
    began = time.time() - 1
    folders = [helper.db.parent, temp, setting.folder, *(Path(f"/proc/{pid}/cwd").readlink() for pid in pids)]
    findings.exactly("limits on core files", ", ".join(process_monitor.core_limits(pids)), "0")
    findings.exactly("owners of their entries in /proc", ", ".join(map(str, process_monitor.owners(pids))), "0")
    with process_monitor.ordinary(setting.folder / "ordinary") as other:
        findings.figure("owner of an ordinary process's entry", process_monitor.owners([other.pid]).pop())
        process_monitor.aborted(other.pid)
        findings.figure("an ordinary process leaves a core file here", str(process_monitor.dumped(other.pid)))
    for pid in pids[1:]:
        process_monitor.aborted(pid)
    await gone(pids[1:])
    process_monitor.aborted(helper.pid)
    findings.exactly(
        "the service left a core file, by its parent's word", str(process_monitor.dumped(helper.pid)), "False"
    )
    cores = process_monitor.cores_since(folders, began)
    findings.exactly("core files", ", ".join(map(str, cores)) or "none", "none")
    for path in cores:
        path.unlink()


CAMPAIGN = Campaign("retention", run)
