"""`svote-helper audit`: nodes, evidence files, reports and exit codes."""

from __future__ import annotations

import copy
import fcntl
import json
import re
import zipfile
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

import proofs
from audit.check_results import CHECKS
from helper.chain import node_pool
from helper.chain.reveal_transaction import RevealMessage
from helper.object_store import StoredObject
from helper.operations.archived_objects import (
    IndexEntry,
    bundle_name,
    documents_name,
    encode_index,
    index_name,
    part_of_height,
)
from helper.operations.proof_bundle import ProofBundle, pack_bundle
from proofs import CIRCUITS
from tests.recorded.test_audit import heads
from tests.support.audit_rounds import MemorySource, RecordedNodes, threshold_round, verify_each_once
from tests.support.bucket import MemoryBucket
from tests.support.round_archive import archive_round
from tests.support.schemas import assert_conforms
from tests.unit.cli.test_main import run_command

ROUND = "f74341df607957080c74382fc4d5c81f2b91c5b0ae40d385d0f27f7e9c76e713"
TWO_NODES = '[chain]\nendpoints = ["http://one.test", "http://two.test"]\n'
ONE_NODE = '[chain]\nendpoints = ["http://one.test"]\nrpc = ["http://rpc.test"]\n'


CREATE_NODES = node_pool.create_nodes
CREATE_READERS = node_pool.ReadOnlyNodePool


def use_transport(monkeypatch: pytest.MonkeyPatch, transport: httpx.MockTransport) -> None:
    """Replace the network of all node clients."""
    monkeypatch.setattr(node_pool, "create_nodes", partial(CREATE_NODES, transport=transport))
    monkeypatch.setattr("audit.node_source.ReadOnlyNodePool", partial(CREATE_READERS, transport=transport))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedNodes]:
    """Two nodes that serve the recorded threshold round, in the settings of an empty directory."""
    monkeypatch.setattr("helper.observability.log_config.configure", lambda *_: None)
    monkeypatch.setattr("proofs.verify_each", verify_each_once)
    monkeypatch.setattr("audit.node_source._HEAD_SECONDS", 0.0)
    recorded = RecordedNodes(threshold_round())
    monkeypatch.setattr("audit.node_source.RETRY_SECONDS", (0.0,))
    use_transport(monkeypatch, recorded.transport())
    Path("helper.toml").write_text(TWO_NODES)
    with capture_logs():
        yield recorded


Run = Callable[..., dict[str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `audit --json`; returns the reason of each check that did not pass, by id and verdict."""

    def run(*arguments: str, code: int) -> dict[str, str]:
        capsys.readouterr()
        assert run_command("audit", *arguments, "--json") == code
        output = capsys.readouterr().out
        assert output.count("\n") == 1
        result: dict[str, Any] = json.loads(output)
        assert_conforms("audit", result)
        assert result["round"] == ROUND
        assert result["verdict"] == {0: "passed", 1: "failed", 3: "not_checked"}[code]
        assert [check["id"] for check in result["checks"]] == list(CHECKS)
        return {
            f"{check['id']} {check['verdict']}": check["why"]
            for check in result["checks"]
            if check["verdict"] != "passed"
        }

    return run


def test_audit_of_two_agreeing_nodes_passes(nodes: RecordedNodes, run: Run) -> None:
    assert run(ROUND[:6].upper(), code=0) == {}
    # No request concerns a single reveal, except for the public result of each transaction.
    nullifiers = [raw[3:35].hex() for _, _, raw in nodes.source.find(0x04)]
    paths = " ".join(path for _, path in nodes.requests)
    assert not any(nullifier in paths for nullifier in nullifiers)


def test_audit_of_one_node_with_rpc_reads_results_by_block(
    nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("helper.toml").write_text(ONE_NODE)
    assert list(run(ROUND, code=3)) == ["E not_checked"]
    assert not any("/tx/" in path for _, path in nodes.requests)
    capsys.readouterr()
    assert run_command("audit", ROUND, "--report", "report.html") == 3
    summary = "18 of 19 checks passed; not checked: E (needs a second node: "
    assert summary in capsys.readouterr().err
    assert summary in Path("report.html").read_text()


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500, json={"error": {"data": "results not found"}}),
        httpx.Response(200, json={"result": {"height": "134", "txs_results": [{"code": 5}]}}),
    ],
    ids=["error", "results of another block"],
)
def test_audit_falls_back_to_rest_for_results(nodes: RecordedNodes, run: Run, response: httpx.Response) -> None:
    Path("helper.toml").write_text(ONE_NODE)
    nodes.faults["rpc.test", "/block_results"] = response
    assert list(run(ROUND, code=3)) == ["E not_checked"]
    assert any("/tx/" in path for _, path in nodes.requests)


def test_audit_of_implausibly_many_validators_reads_no_stored_partials(nodes: RecordedNodes, run: Run) -> None:
    """A key in the store exists for each validator and option."""
    Path("helper.toml").write_text(ONE_NODE)
    validators = nodes.source.documents["round"]["round"]["ceremony_validators"]
    validators += [{"validator_address": f"v{index}", "shamir_index": index} for index in range(4, 6000)]
    assert "C2 not_checked" in run(ROUND, code=3)
    assert not any(path == "/abci_query" for _, path in nodes.requests)


def test_audit_index_of_a_validator_above_32_bits_is_an_error(
    nodes: RecordedNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("helper.toml").write_text(ONE_NODE)
    nodes.source.documents["round"]["round"]["ceremony_validators"][0]["shamir_index"] = 2**32
    assert run_command("audit", ROUND) == 1
    assert "shamir_index: 4294967296 is out of range" in capsys.readouterr().err


def test_audit_nodes_with_different_states_fails(nodes: RecordedNodes, run: Run) -> None:
    header = {"chain_id": "svote-1", "height": "287", "time": "2026-11-23T09:31:25Z", "app_hash": "b3RoZXI="}
    path = "/cosmos/base/tendermint/v1beta1/blocks/287"
    block = {"block_id": {"hash": b64encode(b"block 287").decode()}, "block": {"header": header}}
    nodes.faults["two.test", path] = httpx.Response(200, json=block)
    assert run(ROUND, code=1) == {"E failed": "nodes report different blocks or states: one.test:80, two.test:80"}


@pytest.mark.parametrize("host", ["one.test", "two.test"])
def test_audit_node_that_exchanges_the_labels_fails(nodes: RecordedNodes, run: Run, host: str) -> None:
    """No hash on the chain covers the labels."""
    known, summary = copy.deepcopy(nodes.source.documents["round"]), copy.deepcopy(nodes.source.documents["summary"])
    for proposal in (known["round"]["proposals"][0], summary["proposals"][0]):
        first, second = proposal["options"]
        first["label"], second["label"] = second["label"], first["label"]
    nodes.faults[host, f"/shielded-vote/v1/round/{ROUND}"] = httpx.Response(200, json=known)
    nodes.faults[host, f"/shielded-vote/v1/vote-summary/{ROUND}"] = httpx.Response(200, json=summary)
    assert run(ROUND, code=1) == {"E failed": "nodes report different election keys, titles or labels of the round"}


def test_audit_failed_transaction_does_not_count(nodes: RecordedNodes, run: Run) -> None:
    height, at, raw = nodes.source.find(0x04)[3]
    nodes.source.replace_tx(height, at, raw, code=1)
    assert list(run(ROUND, code=1)) == ["A1 failed", "B1 failed", "C3 failed", "C4 failed"]


def test_audit_transaction_without_result_is_not_checked(nodes: RecordedNodes, run: Run) -> None:
    height, at, raw = nodes.source.find(0x04)[3]
    nodes.source.replace_tx(height, at, raw, code=None)
    reasons = run(ROUND, code=3)
    assert reasons["A1 not_checked"] == "the results of 1 transactions are not known"


def test_audit_pruned_blocks_are_not_checked(nodes: RecordedNodes, run: Run) -> None:
    nodes.source.documents["round"]["round"]["created_at_height"] = 130
    reasons = run(ROUND, code=3)
    assert "lowest height is 135" in reasons["A1 not_checked"]
    assert {"A3 not_checked", "B1 not_checked", "C4 not_checked", "D1 not_checked"} <= reasons.keys()


@pytest.mark.parametrize(
    "refusal", [(503, "overloaded"), (400, '{"message":"height is bigger than the chain length"}')]
)
def test_audit_asks_again_for_a_block_that_no_node_returns(
    nodes: RecordedNodes, run: Run, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str]
) -> None:
    refusals = iter(range(2))  # one for each node

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/blocks/200") and next(refusals, None) is not None:
            return httpx.Response(refusal[0], text=refusal[1])
        return nodes.respond(request)

    use_transport(monkeypatch, httpx.MockTransport(respond))
    assert run(ROUND, code=0) == {}


def test_audit_other_signed_key_fails(nodes: RecordedNodes, run: Run) -> None:
    assert nodes.source
    assert list(run(ROUND, "--ea-pk", "ab" * 32, code=1)) == ["C1 failed", "C3 not_checked", "C4 not_checked"]


# ---------------------------------------------------------------------- evidence


def test_evidence_repeats_the_audit_without_nodes(nodes: RecordedNodes, run: Run) -> None:
    run(ROUND, "--evidence", "evidence.zip", code=0)
    with zipfile.ZipFile("evidence.zip") as evidence:
        assert {member.date_time[:3] for member in evidence.infolist()} == {(1980, 1, 1)}, "equal data, equal files"
    Path("helper.toml").unlink()
    nodes.requests.clear()
    assert run("--from", "evidence.zip", code=0) == {}
    assert run(ROUND[:8], "--from", "evidence.zip", code=0) == {}
    assert nodes.requests == []


def test_evidence_keeps_what_was_missing(nodes: RecordedNodes, run: Run) -> None:
    Path("helper.toml").write_text(ONE_NODE)
    nodes.source.documents.pop("summary")
    first = run(ROUND, "--evidence", "evidence.zip", code=3)
    assert run("--from", "evidence.zip", code=3) == first
    assert first["A1 not_checked"] == "summary: not served by the node"


def test_evidence_with_altered_data_fails_even_with_its_hashes(nodes: RecordedNodes, run: Run) -> None:
    run(ROUND, "--evidence", "evidence.zip", code=0)
    assert nodes.source
    repack("evidence.zip", {"documents.json": lambda text: text.replace(b'"total_value":1', b'"total_value":2')})
    assert list(run("--from", "evidence.zip", code=1)) == ["C4 failed", "C6 failed"]


def repack(name: str, changes: dict[str, Callable[[bytes], bytes]], *, fix_hashes: bool = True) -> None:
    """Change members of an evidence file; None removes one."""
    with zipfile.ZipFile(name) as old:
        members = {member: old.read(member) for member in old.namelist()}
    for member, change in changes.items():
        members[member] = change(members.get(member, b""))
    if fix_hashes:
        manifest = json.loads(members["manifest.json"])
        manifest["sha256"] = {member: sha256(members[member]).hexdigest() for member in manifest["sha256"]}
        members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(name, "w") as new:
        for member, content in members.items():
            new.writestr(member, content)


@pytest.mark.parametrize(
    ("changes", "fix_hashes", "message"),
    [
        ({"blocks.jsonl": lambda text: text + b"\n"}, False, "blocks.jsonl: the hash does not match"),
        ({"documents.json": lambda text: text + b" "}, False, "documents.json: the hash does not match"),
        ({"extra.txt": lambda _: b"x"}, True, "contains exactly"),
        ({"manifest.json": lambda text: text.replace(b'"version": 1', b'"version": 2')}, True, "newer version"),
        ({"manifest.json": lambda text: text.replace(b"round evidence", b"novel")}, True, "not an evidence file"),
        ({"manifest.json": lambda _: b"[]"}, False, "expected an object"),
        ({"documents.json": lambda _: b"{"}, True, "not readable"),
        ({"documents.json": lambda _: b"[]"}, True, "expected an object"),
        (
            {"documents.json": lambda text: text[:-1] + b',"x":[' + b",".join([b"[]"] * 50_000) + b"]}"},
            True,
            "too many values",
        ),
        ({"blocks.jsonl": lambda _: b"{\n"}, True, "not readable"),
        ({"blocks.jsonl": lambda _: b'{"height":135,"time":"1"}\n'}, True, "expected a number"),
        ({"blocks.jsonl": lambda _: b'{"height":135,"time":1,"txs":[{"tx":"?"}]}\n'}, True, "expected base64"),
    ],
)
def test_evidence_malformed_is_refused(
    nodes: RecordedNodes,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Callable[[bytes], bytes]],
    fix_hashes: bool,
    message: str,
) -> None:
    Path("evidence.zip").write_bytes(evidence_bytes(nodes, run))
    repack("evidence.zip", changes, fix_hashes=fix_hashes)
    assert run_command("audit", "--from", "evidence.zip") == 1
    assert message in capsys.readouterr().err


_EVIDENCE: dict[str, bytes] = {}


def evidence_bytes(nodes: RecordedNodes, run: Run) -> bytes:
    """The evidence of the recorded round, made once for all tests."""
    if not _EVIDENCE:
        assert nodes.source
        run(ROUND, "--evidence", "made.zip", code=0)
        _EVIDENCE["zip"] = Path("made.zip").read_bytes()
    return _EVIDENCE["zip"]


def test_evidence_truncated_is_refused(nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    content = evidence_bytes(nodes, run)
    for length in (0, 10, len(content) // 2, len(content) - 5):
        Path("cut.zip").write_bytes(content[:length])
        assert run_command("audit", "--from", "cut.zip") == 1
        assert "not readable" in capsys.readouterr().err


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_evidence_of_another_compression_is_refused(
    nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str], method: int
) -> None:
    Path("evidence.zip").write_bytes(evidence_bytes(nodes, run))
    with zipfile.ZipFile("evidence.zip") as old, zipfile.ZipFile("other.zip", "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert run_command("audit", "--from", "other.zip") == 1
    assert "unsupported compression method" in capsys.readouterr().err


def test_evidence_with_transactions_of_no_round_passes(nodes: RecordedNodes, run: Run) -> None:
    Path("evidence.zip").write_bytes(evidence_bytes(nodes, run))
    txs = b'"txs":[{"tx":"","code":0},{"tx":"CQ==","code":0},{"tx":"Bg==","code":0}]}\n'
    repack("evidence.zip", {"blocks.jsonl": lambda text: text.replace(b'"txs":[]}\n', txs, 1)})
    assert run("--from", "evidence.zip", code=0) == {}


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_evidence_of_deeply_nested_document_is_not_checked(nodes: RecordedNodes, run: Run) -> None:
    nodes.source.documents["summary"]["x"] = nest(300)
    reasons = run(ROUND, "--evidence", "evidence.zip", "--report", "report.html", code=3)
    assert reasons["C6 not_checked"] == "summary: its values are nested too deeply"
    assert run("--from", "evidence.zip", code=3) == reasons


# ---------------------------------------------------------------------- cache and follow


def blocks_read(nodes: RecordedNodes) -> set[int]:
    names = [path.rsplit("/", 1)[1] for _, path in nodes.requests if "/blocks/" in path]
    return {int(name) for name in names if name != "latest"}


def test_audit_continues_with_its_cache(nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "/cosmos/base/tendermint/v1beta1/blocks/200"
    for host in ("one.test", "two.test"):
        nodes.faults[host, fault] = httpx.Response(503, text="overloaded")
    assert run_command("audit", ROUND, "--cache", "blocks.jsonl") == 6
    assert "HTTP 503" in capsys.readouterr().err
    assert min(blocks_read(nodes)) == 135
    nodes.faults.clear()
    nodes.requests.clear()
    assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}
    assert min(blocks_read(nodes)) == 199  # blocks are read in groups of 8 from 135 on
    nodes.requests.clear()
    assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}
    assert blocks_read(nodes) == {287}


def test_audit_cache_drops_an_incomplete_line(nodes: RecordedNodes, run: Run) -> None:
    run(ROUND, "--cache", "blocks.jsonl", code=0)
    complete = Path("blocks.jsonl").read_bytes()
    assert complete.count(b"\n") == 153
    for length in (len(complete) - 1, len(complete) // 2, 10, 0):
        Path("blocks.jsonl").write_bytes(complete[:length])
        assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}
        assert Path("blocks.jsonl").read_bytes() == complete
    assert nodes.source


def test_audit_cache_that_begins_too_late_is_not_used(nodes: RecordedNodes, run: Run) -> None:
    """A node had reported a later block as that of the round's creation."""
    run(ROUND, "--cache", "blocks.jsonl", code=0)
    lines = Path("blocks.jsonl").read_bytes().splitlines(keepends=True)
    Path("blocks.jsonl").write_bytes(b"".join([lines[0], *lines[20:]]))
    nodes.requests.clear()
    assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}
    assert min(blocks_read(nodes)) == 135


def test_audit_cache_of_another_round_is_refused(nodes: RecordedNodes, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("helper.toml").read_bytes()
    assert run_command("audit", ROUND, "--cache", "helper.toml") == 1
    assert "has no blocks of this round" in capsys.readouterr().err
    assert Path("helper.toml").read_bytes() == before
    assert nodes.source


def test_audit_cache_in_use_is_refused(nodes: RecordedNodes, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("blocks.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_command("audit", ROUND, "--cache", "blocks.jsonl") == 1
    assert "is used by another audit" in capsys.readouterr().err
    assert nodes.source


def test_audit_cache_stores_no_unknown_results(nodes: RecordedNodes, run: Run) -> None:
    height, at, raw = nodes.source.find(0x04)[3]
    nodes.source.replace_tx(height, at, raw, code=None)
    run(ROUND, "--cache", "blocks.jsonl", code=3)
    nodes.source.replace_tx(height, at, raw, code=0)
    assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}


def let_round_run(nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the round begin with 50 blocks. Each request for it adds blocks, the last one also finalizes it."""
    monkeypatch.setattr("audit.live_round.FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr("audit.node_source.PROBE_SECONDS", 0.01)
    known, blocks = nodes.source.documents["round"]["round"], nodes.source.block_list
    known["status"], nodes.source.block_list = 1, blocks[:50]
    steps = iter((100, 130, len(blocks)))
    respond = nodes.respond

    def advance(request: httpx.Request) -> httpx.Response:
        response = respond(request)
        if request.url.path.endswith(f"/round/{ROUND}") and len(nodes.source.block_list) < len(blocks):
            nodes.source.block_list = blocks[: next(steps)]
            known["status"] = 3 if len(nodes.source.block_list) == len(blocks) else 1
        return response

    use_transport(monkeypatch, httpx.MockTransport(advance))


@pytest.fixture
def verified(nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The number of proofs of each verification, and whether the audit had begun (it reads the summary first)."""
    calls: list[tuple[int, bool]] = []
    verify = proofs.verify_each

    def verify_each(circuit: str, items: list[tuple[bytes, proofs.Statement]]) -> list[str | None]:
        calls.append((len(items), any("vote-summary" in path for _, path in nodes.requests)))
        return verify(circuit, items)

    monkeypatch.setattr(proofs, "verify_each", verify_each)
    return calls


@pytest.mark.parametrize("cache", [(), ("--cache", "blocks.jsonl")])
def test_audit_follows_a_running_round(
    nodes: RecordedNodes,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    verified: list[tuple[int, bool]],
    cache: tuple[str, ...],
) -> None:
    let_round_run(nodes, monkeypatch)
    assert run(ROUND, "--follow", *cache, code=0) == {}
    requested = Counter(path for _, path in nodes.requests)
    prefix = "/cosmos/base/tendermint/v1beta1/blocks"
    # each step continues after the last block that was read
    assert {height: requested[f"{prefix}/{height}"] for height in range(135, 287)} == dict.fromkeys(range(135, 287), 1)
    assert verified == [(16, True)], "few reveals are left to the audit"


def test_audit_verifies_new_reveals_of_a_running_round(
    nodes: RecordedNodes, run: Run, monkeypatch: pytest.MonkeyPatch, verified: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr("audit.live_round.VERIFY_SECONDS", 0.0)
    let_round_run(nodes, monkeypatch)
    assert run(ROUND, "--follow", "--cache", "blocks.jsonl", code=0) == {}
    assert sum(count for count, _ in verified) == 16
    assert not any(has_begun for _, has_begun in verified)
    assert run(ROUND, "--cache", "blocks.jsonl", code=0) == {}
    assert sum(count for count, _ in verified) == 32  # another audit verifies all of them itself


def test_audit_reports_a_wrong_reveal_of_a_running_round(
    nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("audit.live_round.VERIFY_SECONDS", 0.0)
    height, at, raw = nodes.source.find(0x04)[3]
    message = RevealMessage.from_tx(raw)
    altered = replace(message, proof=message.proof[:-1] + bytes([message.proof[-1] ^ 1]))
    nodes.source.replace_tx(height, at, altered.to_tx())
    let_round_run(nodes, monkeypatch)
    assert run_command("audit", ROUND, "--follow") == 1
    reported = capsys.readouterr()
    assert "A3\tfailed\t16" in reported.out
    assert f"A3 will fail: block {height}, nullifier {message.nullifier.hex()[:16]}" in reported.err


# ---------------------------------------------------------------------- archive


@pytest.fixture
def archive(nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """An archive with the bundles of the round, as the helper writes it."""
    bucket = MemoryBucket()
    root = b64decode(nodes.source.documents["roots"]["roots"][1]["root"])
    parts: dict[int, list[IndexEntry]] = {}
    for height, _, raw in nodes.source.find(0x04):
        bundle = ProofBundle("svote-1", height, raw, CIRCUITS["k11"], root)
        packed = pack_bundle(bundle)
        bucket.objects[bundle_name(nodes.source.round_id, bundle.tx_hash)] = StoredObject(packed, "tag")
        nullifier, digest = bundle.message.nullifier.hex(), sha256(packed).hexdigest()
        entry = IndexEntry(height=height, transaction=bundle.tx_hash, nullifier=nullifier, sha256=digest)
        parts.setdefault(part_of_height(height), []).append(entry)
    for part, entries in parts.items():
        bucket.objects[index_name(nodes.source.round_id, part)] = StoredObject(encode_index(entries), "tag")
    monkeypatch.setattr("helper.cli.audit.open_archive_bucket", lambda *_: bucket)
    return bucket


ONLY_REVEALS = {"A1", "A4", "A5", "C3", "C4", "C6", "C7", "D1", "D4"}


def test_audit_of_archived_reveals(nodes: RecordedNodes, run: Run, archive: MemoryBucket) -> None:
    assert len(archive.objects) == 17
    reasons = run(ROUND, "--archive", "--evidence", "evidence.zip", code=3)
    assert reasons.keys() == {f"{check_id} not_checked" for check_id in ONLY_REVEALS}
    assert reasons["A4 not_checked"] == "the source has no block times"
    assert blocks_read(nodes) == {197}
    assert run("--from", "evidence.zip", code=3) == reasons


def test_audit_of_archived_reveals_reads_partials_from_the_store(
    nodes: RecordedNodes, run: Run, archive: MemoryBucket
) -> None:
    assert archive.objects
    assert nodes.source
    Path("helper.toml").write_text(ONE_NODE)
    reasons = run(ROUND, "--archive", code=3)
    assert reasons.keys() == {f"{check_id} not_checked" for check_id in (ONLY_REVEALS | {"E"}) - {"C3", "C4"}}


def test_audit_of_archived_round_passes_without_nodes(
    nodes: RecordedNodes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.source.documents["heads"] = heads(("a", "A", "S"), ("b", "A", "S"))
    bucket = anyio.run(archive_round, nodes.source)
    monkeypatch.setattr("helper.cli.audit.open_archive_bucket", lambda *_: bucket)
    assert run(ROUND, "--archive", "--evidence", "evidence.zip", code=0) == {}
    assert run(ROUND[:6], "--archive", code=0) == {}
    assert nodes.requests == []
    assert run("--from", "evidence.zip", code=0) == {}


def test_audit_of_damaged_archived_documents_ends(
    nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = anyio.run(archive_round, nodes.source)
    monkeypatch.setattr("helper.cli.audit.open_archive_bucket", lambda *_: bucket)
    bucket.objects[documents_name(nodes.source.round_id, 0)] = StoredObject(b"damaged", "tag")
    assert run_command("audit", ROUND, "--archive") == 1
    assert "documents of the round are not readable\nUse the nodes instead" in capsys.readouterr().err


# ---------------------------------------------------------------------- own shares


def test_audit_with_own_shares_says_which_were_counted(
    nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("helper.toml").write_text(ONE_NODE)
    run(ROUND, "--evidence", "without.zip", code=3)
    requests = sorted(nodes.requests)
    nodes.requests.clear()
    nullifiers = [RevealMessage.from_tx(raw).nullifier.hex() for _, _, raw in nodes.source.find(0x04)]
    Path("mine").write_text("\n".join(nullifiers))
    files = ("--report", "report.html", "--evidence", "with.zip")
    assert run_command("audit", ROUND, "--mine", "mine", *files, "--json") == 0, "E is not checked"
    result = json.loads(capsys.readouterr().out)
    assert_conforms("audit", result)
    assert [share["nullifier"] for share in result["mine"]["shares"]] == nullifiers
    assert result["mine"]["counted"] == 16
    assert sorted(nodes.requests) == requests, "no node learns which shares are searched"
    assert nullifiers[0] not in Path("report.html").read_text()
    assert Path("with.zip").read_bytes() == Path("without.zip").read_bytes()

    Path("mine").write_text("\n".join([*nullifiers[:2], "0d" * 32]))
    own_page = ("--report", "own.html", "--report-mine")
    assert run_command("audit", "--from", "with.zip", "--mine", "mine", *own_page) == 1
    output = capsys.readouterr()
    assert f"{nullifiers[0]}\tcounted\t" in output.out
    assert f"{'0d' * 32}\tmissing\t" in output.out
    assert "3 shares: 2 counted, 1 missing, 0 counted twice, 0 not checked" in output.err
    assert {nullifiers[0], "0d" * 32} <= set(re.findall("[0-9a-f]{64}", Path("own.html").read_text()))

    Path("mine").write_text(json.dumps([{"round": "0e" * 32, "nullifier": nullifiers[0]}]))
    assert run_command("audit", "--from", "with.zip", "--mine", "mine") == 2
    assert "--mine has no share of this round" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mine", "missing"), "missing"),
        (("--mine", "helper.toml"), "--mine is not valid JSON"),
        (("--report-mine", "--report", "report.html"), "--report-mine requires --mine"),
    ],
)
def test_audit_with_unusable_share_file_reads_nothing(
    nodes: RecordedNodes, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run_command("audit", ROUND, *arguments) in (2, 5)
    assert message in capsys.readouterr().err
    assert nodes.requests == []


# ---------------------------------------------------------------------- report


def test_report_is_one_page_without_scripts(nodes: RecordedNodes, run: Run) -> None:
    for shown in (nodes.source.documents["round"]["round"], nodes.source.documents["summary"]):
        shown["proposals"][0]["title"] = "<script>alert(1)</script> & more"
    run(ROUND, "--report", "report.html", "--evidence", "evidence.zip", code=0)
    page = Path("report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "src=" not in page  # self-contained
    assert "href=" not in page
    assert '<td>Oppose</td><td class="number">1</td><td class="number">0.125</td><td class="number">16</td>' in page
    for check_id in CHECKS:
        assert f"<td>{check_id}</td>" in page
    assert "svote-helper audit --from evidence.zip" in page
    with zipfile.ZipFile("evidence.zip") as evidence:
        assert sha256(evidence.read("blocks.jsonl")).hexdigest() in page
        assert sha256(evidence.read("documents.json")).hexdigest() in page
    assert "eligible" in page


def test_report_shows_what_failed(nodes: RecordedNodes, run: Run) -> None:
    nodes.source.documents["summary"]["proposals"][0]["options"][1]["ballot_count"] = 17
    run(ROUND, "--report", "report.html", code=1)
    page = Path("report.html").read_text()
    assert '<b class="failed">Failed.</b>' in page
    assert "proposal 1, option 1: 16 reveals in the blocks, 17 published" in page
    assert f"svote-helper audit {ROUND}" in page


# ---------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "ROUND is required without --from"),
        (("f743",), 2, "at least 6"),
        (("ffffff",), 5, "0 rounds begin with ffffff"),
        (("zz" * 32,), 2, "ROUND must be 64 hex"),
        (("ab" * 32,), 5, "no such round"),
        (("--from", "x.zip", "--follow"), 2, "exclude each other"),
        (("--from", "x.zip", "--cache", "y"), 2, "exclude each other"),
        (("--from", "x.zip", "--archive"), 2, "exclude each other"),
        ((ROUND, "--cache", "x", "--archive"), 2, "exclude each other"),
        ((ROUND, "--archive"), 1, "[archive] place is not set"),
        (("ab" * 32, "--follow"), 5, "the round cannot be followed"),
        ((ROUND, "--ea-pk", "12"), 2, "--ea-pk must be 64 hex"),
        ((ROUND, "--evidence", "helper.toml"), 1, "helper.toml already exists"),
        ((ROUND, "--report", "helper.toml"), 1, "helper.toml already exists"),
        (("--from", "nowhere.zip"), 5, "nowhere.zip does not exist"),
        (("--from", "helper.toml"), 1, "not readable as a zip file"),
    ],
)
def test_audit_refused_command_lines(
    nodes: RecordedNodes, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = Path("helper.toml").read_text()
    assert run_command("audit", *arguments) == code
    assert message in capsys.readouterr().err
    assert Path("helper.toml").read_text() == before
    assert nodes.source


def test_audit_of_other_round_than_the_evidence_is_not_found(
    nodes: RecordedNodes, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("evidence.zip").write_bytes(evidence_bytes(nodes, run))
    assert run_command("audit", "ab" * 32, "--from", "evidence.zip") == 5
    assert f"the evidence is of round {ROUND}" in capsys.readouterr().err


def test_audit_unreachable_nodes_leave_no_files(nodes: RecordedNodes, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/shielded-vote/v1/vote-summary/{ROUND}"
    for host in ("one.test", "two.test"):
        nodes.faults[host, path] = httpx.Response(503, text="overloaded")
    assert run_command("audit", ROUND, "--evidence", "evidence.zip", "--report", "report.html") == 6
    assert "HTTP 503" in capsys.readouterr().err
    assert not Path("evidence.zip").exists()
    assert not Path("report.html").exists()


def test_commands_of_the_document_run(nodes: RecordedNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.source.documents["heads"] = heads(("a", "A", "S"), ("b", "A", "S"))
    bucket = anyio.run(archive_round, nodes.source)
    monkeypatch.setattr("helper.cli.audit.open_archive_bucket", lambda *_: bucket)
    document = Path(__file__).parents[3] / "docs" / "audit.md"
    commands = re.findall(r"^    \$ svote-helper (.+)$", document.read_text(), re.MULTILINE)
    assert len(commands) == 5
    nullifiers = [RevealMessage.from_tx(raw).nullifier.hex() for _, _, raw in nodes.source.find(0x04)]
    Path("shares.txt").write_text("\n".join(nullifiers))
    for command in commands:
        assert run_command(*command.split()) == 0
    assert {"report.html", "evidence.zip", "blocks.jsonl"} <= {path.name for path in Path().iterdir()}
    assert nodes.requests


def test_audit_shows_progress_on_a_terminal(
    nodes: RecordedNodes, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ROUND, "--cache", "blocks.jsonl", code=0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert run_command("audit", ROUND, "--cache", "blocks.jsonl") == 0
    assert "16/16" in capsys.readouterr().err
    assert nodes.source


def test_audit_prints_a_table(nodes: RecordedNodes, capsys: pytest.CaptureFixture[str]) -> None:
    source: MemorySource = nodes.source
    source.documents["results"]["results"][0]["total_value"] = 2
    assert run_command("audit", ROUND) == 1
    output = capsys.readouterr()
    assert "A2\tpassed\t16\tevery nullifier is canonical and was counted once" in output.out
    assert "C4\tfailed\t1\tproposal 1, option 1: the sum does not decrypt to 2" in output.out
    assert f"round {ROUND}: failed" in output.err
