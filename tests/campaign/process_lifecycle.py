"""One helper with many lives: it is ended again and again while wallets post to it and shares come due."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.campaign.campaign import Findings, Setting
from tests.campaign.promise_check import counted, drained, judge
from tests.campaign.wallet_clients import Crowd
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper
from tests.support.process import free_port

WORKERS = 2
SHARES = 16
AT_ONCE = 0.25
"""The part of the shares that have no time of their own."""
AHEAD = 5.0
"""Seconds, about three lives, over which the other shares of a vote fall due."""
DRAIN = 90.0
"""Seconds for what is left when the last life has begun, beside those of its proofs."""
START = 300.0
"""Seconds in which a life must be up without help, on a machine that others use too."""
FREE_DEATHS = 2
"""How many workers may die under a share before it costs the share an attempt."""
HELD = "another process uses this database under the name"
"""What a life is told that begins before the server knows of the end of the last one."""


@dataclass(slots=True)
class Lives:
    """A helper, its wallets, and what its provers began.

    Attributes:
        number: how many lives there are to be, the last that is left to live not among them.
        tally: the file with a byte for each proof that a stand-in prover began.
        again: how often a life had to be begun once more, as the last one's name was not free yet.
    """

    helper: Helper
    chain: Chain
    crowd: Crowd
    round_id: bytes
    number: int
    votes: int
    tally: Path
    seconds: float
    dice: random.Random
    again: int = 0

    @property
    def proofs_begun(self) -> int:
        """How many proofs the stand-in provers have begun."""
        return self.tally.stat().st_size if self.tally.exists() else 0

    def launch(self) -> None:
        """Begin a life."""
        self.helper.launch(STANDIN_SECONDS=str(self.seconds), STANDIN_TALLY=str(self.tally))

    async def up(self) -> None:
        """Wait until this life listens; it is begun again, as by a supervisor, where its name is not free yet."""
        while True:
            try:
                await self.helper.listening()
            except AssertionError:
                ended = self.helper.process is not None and self.helper.process.poll() is not None
                if not ended or HELD not in self.helper.tail().splitlines()[-1]:
                    raise
                self.again += 1
                self.launch()
            else:
                return

    async def ready(self) -> None:
        """Wait until this life works its queue: real provers make their keys first, and missed blocks are read."""
        await self.up()
        async with self.helper.patience("is ready", START):
            while True:
                with contextlib.suppress(AssertionError):
                    await self.helper.ready()
                    await self.helper.until("works its queue", lambda facts: facts["paused"] is None)
                    return

    async def run(self, end: Callable[[int], Awaitable[None]]) -> None:
        """All lives and the last one; `end` is called with a life's number right after its launch, and ends it.

        The votes are posted in step with the lives, so that there is work in each however slow the machine is.
        """
        votes = await self.crowd.vote(self.round_id, self.votes)
        begun = 0
        async with asyncio.TaskGroup() as group:
            for life in range(self.number):
                upto = -(-len(votes) * (life + 1) // self.number)
                for vote in votes[begun:upto]:
                    group.create_task(self.crowd.post([vote], self._due, patience=START))
                begun = upto
                self.launch()
                await end(life)
            self.launch()
            await self.ready()

    def _due(self) -> int:
        return 0 if self.dice.random() < AT_ONCE else int(time.time() + self.dice.uniform(0, AHEAD)) + 1

    async def judge(self, findings: Findings) -> None:
        """What holds whichever way the lives ended: the promise, no attempt spent, nothing left, a sound database."""
        ledger = self.crowd.ledger
        await drained(self.chain, ledger, DRAIN + self.seconds * len(ledger.posted))
        await judge(findings, self.chain, ledger)
        findings.exactly("shares posted and not acknowledged", len(ledger.posted) - len(ledger.acknowledged), 0)
        findings.exactly("shares refused", len(self.crowd.refused), 0)
        with contextlib.suppress(AssertionError):
            async with self.helper.patience("has erased all shares"):
                while self.helper.rows("SELECT count(*) FROM shares")[0][0]:
                    await asyncio.sleep(0.05)
        findings.exactly("exit status of the last life", await self.helper.stop(), 0)
        findings.exactly("shares left in the database", self.helper.rows("SELECT count(*) FROM shares")[0][0], 0)
        findings.exactly("integrity_check", self.helper.kept.integrity(), "ok")
        spent, allowed = attempts(self.helper.log)
        findings.exactly("attempts spent", spent - allowed, 0)
        findings.figure("lives refused, as the last one's name was not free", self.again)
        findings.figure("attempts that a third death of a worker cost", allowed)

    async def extra_proofs(self, findings: Findings, kills: int) -> None:
        """No more proofs were made twice than kills could interrupt; and some were, or no kill hit its mark."""
        extra = self.proofs_begun - (await counted(self.chain, [self.round_id])).total()
        findings.at_most("extra proofs", extra, kills * WORKERS)
        findings.at_least("proofs that a kill cost", extra, 1)


@contextlib.asynccontextmanager
async def lives(
    setting: Setting,
    part: str,
    *,
    number: int,
    shares: int,
    seconds: float,
    program: Sequence[str] = STAND_IN,
) -> AsyncIterator[Lives]:
    """A helper that is not started yet on a chain with an open round; all is killed in the end.

    Args:
        part: the name of its folder.
        seconds: how long a stand-in proof takes.
    """
    folder = setting.folder / part
    folder.mkdir()
    flags = ("--stand-in-proofs",) if program is STAND_IN else ()
    async with httpx.AsyncClient(timeout=30) as http:
        chain = Chain(folder, http, "--block-seconds", "1", *flags)
        await chain.start()
        port = free_port()
        settings = {"port": port, "max_concurrent_proofs": WORKERS}
        helper = Helper(folder, http, chain, program=program, cluster=setting.cluster, helper=settings)
        try:
            yield Lives(
                helper=helper,
                chain=chain,
                crowd=Crowd(chain, lambda: [f"http://127.0.0.1:{port}"], setting.dice(f"{part} wallets")),
                round_id=await chain.open_round(),
                number=number,
                votes=shares // SHARES,
                tally=folder / "tally",
                seconds=seconds,
                dice=setting.dice(f"{part} times"),
            )
        finally:
            if helper.process is not None:
                await helper.kill()
            await chain.kill()


def attempts(log: Path) -> tuple[int, int]:
    """How many attempts were spent by all lives' log, and how many of them a third death of a worker may cost."""
    spent = allowed = 0
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            spent += entry["event"] in {"reveal_retried", "share_failed"}
            allowed += entry["event"] == "prover_worker_crashed" and entry["crashes"] > FREE_DEATHS
    return spent, allowed
