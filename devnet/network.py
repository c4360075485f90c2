"""The parts of a dev chain put together, without any port: state, mempool, journal, block maker, request log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devnet.admission import Admission
from devnet.blocks import rfc3339_nano
from devnet.chain import Chain, state_figures
from devnet.journal import Journal
from devnet.producer import Producer
from devnet.proof_verifier import Verifier
from devnet.requestlog import RequestLog
from devnet.rounds import VALIDATOR
from devnet.validators import validator_json

VERSIONS = {"k10": "v1.3.0", "k11": "v1.2.0"}


@dataclass(frozen=True, slots=True)
class Options:
    """How a dev chain is set up; see `devnet.cli` for what each means."""

    chain_id: str = "svote-devnet-1"
    circuit: str = "k10"
    version: str | None = None
    db: Path | None = None
    block_seconds: float = 1.0
    clock_offset_seconds: float = 0.0
    max_reveals: int = 256
    page_leaves: int = 0
    duplicates: str = "both"
    stand_in: bool = False
    request_log: Path | None = None
    extra_nodes: int = 0
    time_scale: float = 1.0
    time_origin: float = 0.0


def machine_clock(scale: float, origin: float) -> Callable[[], int]:
    """The machine's time in unix nanoseconds, or one that goes `scale` times as fast since `origin` (unix seconds)."""
    if scale == 1:
        return time.time_ns
    return lambda: int((origin + (time.time() - origin) * scale) * 1e9)


class Published:
    """The voting configuration as it would be published on the web, for helpers that proxy it."""

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._changed = asyncio.Event()

    def publish(self, config: dict[str, Any]) -> None:
        """Put it in the last one's place."""
        self._config = config
        self._changed.set()

    async def fetch(self, patience: float) -> dict[str, Any] | None:
        """The newest, waited for so many seconds if there is none yet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._changed.wait()
        return self._config


class DevNet:
    """One chain and everything that its nodes share."""

    def __init__(self, options: Options, *, now_ns: Callable[[], int] | None = None) -> None:
        self.options = options
        self.machine_ns = now_ns or machine_clock(options.time_scale, options.time_origin)
        self.version = VERSIONS[options.circuit] if options.version is None else options.version
        self.page_leaves = options.page_leaves
        self.chain = Chain(options.chain_id)
        self.verifier = Verifier(options.circuit, stand_in=options.stand_in)
        self.admission = Admission(self.chain, self.verifier, max_reveals=options.max_reveals)
        self.admission.filter_duplicates = options.duplicates == "filter"
        self.journal = Journal(options.db, options.chain_id)
        self.producer = Producer(self.chain, self.admission, self.journal, now_ns=self.machine_ns)
        self.producer.offset_seconds = options.clock_offset_seconds
        self.log = RequestLog(options.request_log)
        self.validators: dict[str, dict[str, Any]] = json.loads(self.journal.get("validators") or "{}")
        self.published = Published()
        self._timer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bring the journal's chain back, warm the verifier, make the first block, and keep making them."""
        self.journal.replay(self.chain)
        if not self.options.stand_in:
            await self.verifier.warm()
        await self.producer.mine()
        if VALIDATOR not in self.validators:
            born = rfc3339_nano(self.chain.blocks[0].time_ns)
            self.set_validator(validator_json(VALIDATOR, "devnet", "BOND_STATUS_BONDED", born))
        if self.options.block_seconds > 0:
            self._timer = asyncio.create_task(self.producer.run(self.options.block_seconds))

    async def close(self) -> None:
        """Stop making blocks and close the files."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
        self.verifier.close()
        self.journal.close()
        self.log.close()

    def height_before(self, seconds: float) -> int:
        """The chain's height so many seconds ago (at least 1)."""
        then = self.producer.now_ns() - int(seconds * 1e9)
        return max(1, bisect_right(self.chain.blocks, then, key=lambda block: block.time_ns))

    def set_validator(self, record: dict[str, Any]) -> None:
        """Add or replace a validator in staking."""
        self.validators[record["operator_address"]] = record
        self.journal.set("validators", json.dumps(self.validators))

    def remove_validator(self, address: str) -> None:
        """Take a validator out of staking."""
        self.validators.pop(address, None)
        self.journal.set("validators", json.dumps(self.validators))

    def stats(self) -> dict[str, Any]:
        """CPU seconds of this process and of its proof checks, and what the chain holds."""
        return {
            "cpu_seconds": time.process_time(),
            "verify_cpu_seconds": self.verifier.cpu_seconds,
            "verify_wall_seconds": self.verifier.wall_seconds,
            "proofs_checked": self.verifier.checked,
            "mempool": len(self.admission.waiting),
            "circuit": self.verifier.circuit,
            **state_figures(self.chain),
        }
