"""A circuit generation with other shares and another statement needs an entry in the registry and nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from base64 import b64decode
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from helper import circuits
from helper.chain.chain_data import Anchor, Proposal, Round, RoundStatus
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.round_registry import to_stored_round
from helper.circuits import GENERATIONS, circuit_for_version
from helper.cli import offline
from helper.clock import SystemClock
from helper.core.share import ShareState
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import CheckedShare, ShareValidator, checked_share
from helper.operations.export_format import ExportHeader, encode_header, encode_share_line, parse_share_line
from helper.operations.proof_bundle import ProofBundle, find_circuit, pack_bundle, unpack_bundle, verify_bundle
from helper.reveal.prover_pool import ProverPool, WorkerProcess
from helper.server.wallet_routes import WalletApi, create_wallet_edge
from helper.store import blocks, rounds
from helper.store.exported_shares import ExportedShare
from helper.store.row_encryption import UNENCRYPTED
from helper.store.sqlite.store import SqliteStore
from tests.support import hidden_choice
from tests.support.edge_client import create_edge_client
from tests.support.fakes import BAD_PROOF_REPLY, CHAIN_ID, ROUND, START_TIME, wait_until
from tests.support.hidden_choice import NAME, PROOF_BYTES, HiddenChoiceGeneration
from tests.support.queue_pipeline import Pipeline, open_pipeline
from tests.unit.ingest.admission_fixtures import FakeChain, FakeClock, create_body

SHARES_PATH = "/shielded-vote/v1/shares"
POSITION = 5
OPTION_COUNT = 3
ROOT_PATH = bytes(24 * 32)


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> HiddenChoiceGeneration:
    generation = HiddenChoiceGeneration()
    monkeypatch.setitem(GENERATIONS, NAME, generation)
    return generation


def create_payload(**changes: Any) -> dict[str, Any]:
    return {**hidden_choice.create_payload(ROUND, position=POSITION, option_count=OPTION_COUNT), **changes}


def read_share(payload: dict[str, Any]) -> CheckedShare:
    (result,) = circuits.read_shares([json.dumps(payload).encode()])
    return checked_share(result)


@pytest.fixture
async def pipeline(tmp_path: Path) -> AsyncIterator[Pipeline]:
    pool = ProverPool(
        workers=1,
        circuits=(NAME,),
        clock=SystemClock(),
        nice=0,
        spawn=partial(WorkerProcess.spawn, command=(sys.executable, "-m", "tests.support.hidden_choice")),
    )
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    try:
        await pool.wait_ready()
        async with open_pipeline(tmp_path / "queue.db", prover=pool) as pipeline:
            root = hidden_choice.tree_root(read_share(create_payload()).vote_commitment, ROOT_PATH)
            pipeline.trees.newest = Anchor(height=90, size=1000, root=root)
            pipeline.circuits.select_initial(CHAIN_ID, "v1.7.0", None)
            yield pipeline
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def create_client(pipeline: Pipeline) -> httpx.AsyncClient:
    """Create a client of the wallet API over the pipeline's queue."""
    leaf = read_share(create_payload()).vote_commitment
    proposals = (Proposal(1, tuple(range(OPTION_COUNT))),)
    chain = FakeChain(
        FakeClock(),
        rounds={ROUND: Round(ROUND, RoundStatus.ACTIVE, START_TIME + 3600, proposals, 50)},
        leaves={(ROUND, POSITION): leaf},
    )
    admission = AdmissionController(
        store=pipeline.store,
        rounds=chain.registry,
        trees=chain.trees,
        validator=ShareValidator(circuits),
        clock=pipeline.clock,
        wake=pipeline.dispatcher.wake_if_due,
        get_pause_reason=lambda: None,
        get_round_pause_reason=lambda _: None,
    )
    return create_edge_client(create_wallet_edge(WalletApi(admission=admission, is_ready=lambda: True)))


@pytest.mark.rule("N22")
async def test_third_generation_share_is_accepted_stored_proven_and_sent(
    pipeline: Pipeline, generation: HiddenChoiceGeneration
) -> None:
    payload = create_payload()
    async with create_client(pipeline) as client:
        assert "vote_decision" not in payload
        assert (await client.post(SHARES_PATH, json=payload)).json() == {"status": "queued"}
        assert (await client.post(SHARES_PATH, json=payload)).json() == {"status": "duplicate"}
    stored = "field(witness, 'kind'), length(field(witness, 'extra'))"
    assert pipeline.read_share(POSITION, stored) == ("hidden-choice", 1 + 7 * 64)

    async with pipeline.run_dispatcher():
        await wait_until(lambda: pipeline.circuits.current == NAME)

    (_, body), *others = pipeline.nodes.posts
    assert not others
    sent = json.loads(body)
    (transaction,) = pipeline.query_rows("SELECT substr(message, 33) FROM reveals WHERE circuit = ?", NAME)[0]
    message = RevealMessage.from_tx(transaction)
    assert (message.to_json(), message.vote_decision, len(message.proof)) == (sent, 0, PROOF_BYTES)
    assert pipeline.trees.newest is not None
    statement = generation.create_statement(message, pipeline.trees.newest.root)
    assert len(statement.public_inputs()) == 37
    assert generation.verify(b64decode(sent["proof"]), statement)
    assert message.nullifier == read_share(payload).nullifier
    assert not pipeline.circuits.is_current_unproven


@pytest.mark.rule("N21", "N22")
async def test_third_generation_refused_valid_proof_pauses_without_attempts(pipeline: Pipeline) -> None:
    pipeline.set_replies(BAD_PROOF_REPLY)
    async with create_client(pipeline) as client:
        assert (await client.post(SHARES_PATH, json=create_payload())).status_code == 200
    async with pipeline.run_dispatcher():
        await wait_until(lambda: len(pipeline.nodes.posts) == 1)
    for _ in range(3):
        await pipeline.next_block()
    assert str(pipeline.circuits.pause_reason) == f"the chain rejects valid proofs of {NAME}: check its nodes"
    assert pipeline.read_share(POSITION, "attempts") == (0,)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"option_count": 9}, "option_count: must be from 2 to 8"),
        ({"option_count": 4}, "option_count: is not the number of the proposal's options"),
        ({"primary_blind": "A" * 43 + "="}, "enc_shares: do not match their commitment"),
    ],
)
async def test_third_generation_invalid_share_is_refused(
    pipeline: Pipeline, changes: dict[str, Any], error: str
) -> None:
    async with create_client(pipeline) as client:
        response = await client.post(SHARES_PATH, json=create_payload(**changes))
    assert (response.status_code, response.json()["error"]) == (400, error)


async def test_shares_of_both_kinds_in_one_batch_are_read_in_order() -> None:
    hidden = json.dumps(create_payload()).encode()
    single = create_body()
    results = [checked_share(result) for result in circuits.read_shares([single, hidden, single])]
    assert [result.share.kind for result in results] == ["", "hidden-choice", ""]


def export_share(checked: CheckedShare) -> ExportedShare:
    return ExportedShare(checked.share, 1, ShareState.WAITING, 2, 0, 0, None, "accepted", "")


async def test_third_generation_share_line_of_export_is_read_back() -> None:
    checked = read_share(create_payload())
    exported = export_share(checked)
    assert parse_share_line(circuits, encode_share_line(exported)) == (exported, checked.nullifier)


async def test_third_generation_share_is_imported_while_no_helper_runs(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    store = SqliteStore(path)
    await store.open()
    await store.run(blocks.set_meta, "chain_id", CHAIN_ID)
    proposals = (Proposal(1, tuple(range(OPTION_COUNT))),)
    await store.run(
        rounds.save_rounds,
        [to_stored_round(Round(ROUND, RoundStatus.ACTIVE, START_TIME + 3600, proposals, 50))],
        START_TIME,
    )
    await store.close()
    header = encode_header(ExportHeader(chain_id=CHAIN_ID, made_at=5, shares=1))
    body = header + encode_share_line(export_share(read_share(create_payload())))
    _, response = await offline._request(path, "/queue/import", body, UNENCRYPTED)
    assert json.loads(response)["taken"] == 1


async def test_third_generation_proof_bundle_is_verified(generation: HiddenChoiceGeneration) -> None:
    checked = read_share(create_payload())
    job = generation.create_job(checked.share, ROOT_PATH)
    proved = generation.prove({key: value.hex() if isinstance(value, bytes) else value for key, value in job.items()})
    fields = generation.get_reveal_fields(checked.share)
    message = RevealMessage(
        checked.nullifier, fields.enc_share, 1, fields.vote_decision, proved["proof"], ROUND, anchor_height=90
    )
    bundle = ProofBundle(CHAIN_ID, 100, message.to_tx(), find_circuit(message.proof), proved["root"])
    unpacked = unpack_bundle(pack_bundle(bundle))
    assert unpacked == bundle
    verify_bundle(unpacked)


async def test_generation_without_version_is_not_selected_by_version() -> None:
    assert circuit_for_version("v99.0.0") == "k10"
