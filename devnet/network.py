"""Composition of a dev chain without ports: state, mempool, journal, block producer, request log."""

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
from devnet.blocks import rfc3339_nano, validator_json
from devnet.chain import Chain, state_counts
from devnet.eras import RECORDED, Era
from devnet.journal import Journal
from devnet.producer import BlockProducer
from devnet.proof_verifier import ProofVerifier
from devnet.request_log import RequestLog
from devnet.rounds import VALIDATOR_ADDRESS

VERSIONS = {"k10": "v1.3.0", "k11": "v1.2.0"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a dev chain; see `devnet.cli` for descriptions.

    `circuit`, `version` and `page_leaves` are those of the era if None.
    """

    chain_id: str = "svote-devnet-1"
    era: Era = RECORDED
    circuit: str | None = None
    version: str | None = None
    db: Path | None = None
    block_seconds: float = 1.0
    clock_offset_seconds: float = 0.0
    max_reveals: int = 256
    page_leaves: int | None = None
    duplicates: str = "both"
    stand_in: bool = False
    request_log: Path | None = None
    extra_nodes: int = 0
    time_scale: float = 1.0
    time_origin: float = 0.0


def machine_clock(scale: float, origin: float) -> Callable[[], int]:
    """Return a clock in Unix nanoseconds that runs `scale` times as fast since `origin` (Unix seconds)."""
    if scale == 1:
        return time.time_ns
    return lambda: int((origin + (time.time() - origin) * scale) * 1e9)


class PublishedConfig:
    """The published voting configuration, for helpers that proxy it."""

    def __init__(self) -> None:
        self._config: dict[str, Any] | None = None
        self._changed = asyncio.Event()

    def publish(self, config: dict[str, Any]) -> None:
        """Replace the published configuration."""
        self._config = config
        self._changed.set()

    async def fetch(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the configuration, waiting for at most `timeout_seconds` seconds for the first one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        return self._config


class DevNet:
    """One chain and the state that its nodes share."""

    def __init__(self, options: Options, *, now_ns: Callable[[], int] | None = None) -> None:
        self.options = options
        self.machine_time_ns = now_ns or machine_clock(options.time_scale, options.time_origin)
        self.era = options.era
        circuit = options.circuit or self.era.circuit
        era_version = self.era.version if circuit == self.era.circuit else None
        self.version = (era_version or VERSIONS[circuit]) if options.version is None else options.version
        self.page_leaves = self.era.page_leaves if options.page_leaves is None else options.page_leaves
        self.chain = Chain(options.chain_id)
        self.verifier = ProofVerifier(circuit, accepts_stand_ins=options.stand_in)
        self.admission = Admission(
            self.chain,
            self.verifier,
            max_reveals=options.max_reveals,
            max_block_bytes=self.era.max_block_bytes,
            drops_duplicates=self.era.drops_duplicates,
        )
        self.admission.filter_duplicates = options.duplicates == "filter"
        self.journal = Journal(options.db, options.chain_id)
        self.producer = BlockProducer(self.chain, self.admission, self.journal, now_ns=self.machine_time_ns)
        self.producer.offset_seconds = options.clock_offset_seconds
        self.request_log = RequestLog(options.request_log)
        self.validators: dict[str, dict[str, Any]] = json.loads(self.journal.get("validators") or "{}")
        self.published_config = PublishedConfig()
        self._producer_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Restore the chain from the journal, warm the verifier, produce a block, and start the block timer."""
        self.journal.replay(self.chain)
        if not self.options.stand_in:
            await self.verifier.warm()
        await self.producer.mine()
        if VALIDATOR_ADDRESS not in self.validators:
            born = rfc3339_nano(self.chain.blocks[0].time_ns)
            self.set_validator(validator_json(VALIDATOR_ADDRESS, "devnet", "BOND_STATUS_BONDED", born))
        if self.options.block_seconds > 0:
            self._producer_task = asyncio.create_task(self.producer.run(self.options.block_seconds))

    async def close(self) -> None:
        """Stop block production and close the files."""
        if self._producer_task is not None:
            self._producer_task.cancel()
            await asyncio.gather(self._producer_task, return_exceptions=True)
        self.verifier.close()
        self.journal.close()
        self.request_log.close()

    def height_before(self, seconds: float) -> int:
        """The chain's height this many seconds ago (at least 1)."""
        time_ns = self.producer.now_ns() - int(seconds * 1e9)
        return max(1, bisect_right(self.chain.blocks, time_ns, key=lambda block: block.time_ns))

    def set_validator(self, record: dict[str, Any]) -> None:
        """Add or replace a validator in staking."""
        self.validators[record["operator_address"]] = record
        self.journal.set("validators", json.dumps(self.validators))

    def remove_validator(self, address: str) -> None:
        """Remove a validator from staking."""
        self.validators.pop(address, None)
        self.journal.set("validators", json.dumps(self.validators))

    def stats(self) -> dict[str, Any]:
        """CPU seconds of the process and of proof verification, and statistics of the chain."""
        return {
            "cpu_seconds": time.process_time(),
            "verify_cpu_seconds": self.verifier.cpu_seconds,
            "verify_wall_seconds": self.verifier.wall_seconds,
            "proofs_checked": self.verifier.checked_count,
            "mempool": len(self.admission.mempool),
            "circuit": self.verifier.circuit,
            **state_counts(self.chain),
        }
