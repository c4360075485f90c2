"""Batches of proofs: one is verified while the next one is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

import proofs
from audit import round_checks
from audit.auditor import audit_round
from audit.check_results import CHECKS, Findings
from audit.documents import parse_round_facts
from audit.round_checks import RevealChecks
from audit.source import AuditBlock
from helper.chain.reveal_transaction import REVEAL, RevealMessage
from helper.errors import ChainUnavailable
from tests.support.audit_rounds import MemorySource, threshold_round
from tests.support.process import TIMEOUT_SECONDS


class SlowVerifier:
    """Verifies nothing until it is released, then rejects the first batch. Replaces `proofs.verify_each`."""

    def __init__(self) -> None:
        self.started, self.released = threading.Event(), threading.Event()
        self.sizes: list[int] = []

    def __call__(self, _: str, items: list[object]) -> list[str | None]:
        self.sizes.append(len(items))
        is_first = len(self.sizes) == 1
        self.started.set()
        assert self.released.wait(TIMEOUT_SECONDS)
        return ["not valid" if is_first else None for _ in items]


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> SlowVerifier:
    monkeypatch.setattr(round_checks, "BATCH_REVEALS", 6)
    verifier = SlowVerifier()
    monkeypatch.setattr(proofs, "verify_each", verifier)
    return verifier


async def test_add_continues_while_a_batch_is_verified(verifier: SlowVerifier) -> None:
    source = threshold_round()
    findings = {check_id: Findings() for check_id in CHECKS}
    reveals = [(height, RevealMessage.from_tx(raw)) for height, _, raw in source.find(0x04)]
    roots = dict.fromkeys((message.anchor_height for _, message in reveals), bytes(32))
    checks = RevealChecks(parse_round_facts(source.documents["round"]), roots, findings)
    for height, message in reveals[:15]:
        await checks.add(message, height, 0.0)
    assert await asyncio.to_thread(verifier.started.wait, TIMEOUT_SECONDS)
    assert checks.verified == 0
    assert list(checks.sums) == list(checks.counts)
    assert findings["A2"].count == 15, "three reveals were added after the first two batches"
    verifier.released.set()
    for height, message in reveals[15:]:
        await checks.add(message, height, 0.0)
    await checks.verify_pending()
    assert (sorted(verifier.sizes), checks.verified) == ([4, 6, 6], 16)
    assert (findings["A3"].count, findings["A3"].problem_count) == (16, verifier.sizes[0])
    assert sum(checks.counts.values()) == 16


async def test_audit_that_ends_early_leaves_no_task(verifier: SlowVerifier) -> None:
    class FailingSource(MemorySource):
        async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
            reveals = 0
            async for block in super().blocks(first):
                yield block
                reveals += sum(tx.raw[0] == REVEAL for tx in block.txs)
                if reveals >= round_checks.BATCH_REVEALS:
                    assert await asyncio.to_thread(verifier.started.wait, TIMEOUT_SECONDS)
                    verifier.released.set()
                    raise ChainUnavailable("away")

    recorded = threshold_round()
    source = FailingSource(recorded.round_id, recorded.documents, recorded.block_list)
    before = asyncio.all_tasks()
    with pytest.raises(ChainUnavailable):
        await audit_round(source, source.round_id)
    assert asyncio.all_tasks() == before
