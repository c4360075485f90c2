"""Bundles of recorded reveals: real proofs verify, and every manipulation is detected."""

from __future__ import annotations

import io
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ProofBundleError
from helper.operations.proof_bundle import (
    INPUTS,
    MANIFEST,
    MAX_BUNDLE_BYTES,
    PROOF,
    TRANSACTION,
    ProofBundle,
    find_circuit,
    pack_bundle,
    unpack_bundle,
    verify_bundle,
)
from proofs import CIRCUITS
from tests.conftest import read_recorded_lines
from tests.recorded.test_chain_data import message_from_request

RECORDED_ROOT = b64decode("6seWJ65Nj5gUfTvYPqNkC+gEWXQv8jGEYt94JCfHXRk=")


def create_evidence(index: int = 0) -> ProofBundle:
    """Create the evidence of a reveal that a real chain confirmed."""
    row = read_recorded_lines("reveals.jsonl")[index]
    return ProofBundle(
        chain_id="svote-1",
        height=int(row["tx"]["height"]),
        transaction=message_from_request(row["request"]).to_tx(),
        circuit=CIRCUITS["k11"],
        root=RECORDED_ROOT,
    )


FIRST_EVIDENCE = create_evidence()
BUNDLE = pack_bundle(FIRST_EVIDENCE)


def read_parts(bundle: bytes = BUNDLE) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def write_zip(contents: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as bundle:
        for name, content in contents.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr, info.compress_type = 3, 0o644 << 16, method
            bundle.writestr(info, content)
    return written.getvalue()


def with_manifest_changes(**changes: Any) -> bytes:
    contents = read_parts()
    contents[MANIFEST] = orjson.dumps(orjson.loads(contents[MANIFEST]) | changes, option=orjson.OPT_INDENT_2) + b"\n"
    return write_zip(contents)


def test_bundle_of_confirmed_reveal_is_valid_and_deterministic() -> None:
    assert unpack_bundle(BUNDLE) == FIRST_EVIDENCE
    verify_bundle(FIRST_EVIDENCE)
    assert pack_bundle(create_evidence()) == BUNDLE == write_zip(read_parts())
    assert len(BUNDLE) < MAX_BUNDLE_BYTES / 4
    assert find_circuit(FIRST_EVIDENCE.message.proof).name == "k11"
    manifest = orjson.loads(read_parts()[MANIFEST])
    assert manifest["transaction_hash"] == "B2A95868D8CBF9BB89D07A8CD4321699F443D0C294F92EFBF33D3712E014BB72"
    assert manifest["circuit"]["fingerprint"] == CIRCUITS["k11"].fingerprint


def with_foreign_parts(**changes: Any) -> bytes:
    return pack_bundle(replace(FIRST_EVIDENCE, **changes))


def with_other_transaction(**changes: Any) -> bytes:
    """Create a consistent bundle with a changed transaction."""
    return with_foreign_parts(transaction=replace(FIRST_EVIDENCE.message, **changes).to_tx())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: with_foreign_parts(root=b"\x01" * 32), "not valid for"),
        (lambda: with_foreign_parts(root=b"\xff" * 32), "invalid encoding"),
        (lambda: with_foreign_parts(circuit=CIRCUITS["k10"]), "not valid for"),
        (lambda: with_other_transaction(proof=create_evidence(1).message.proof), "not valid for"),
        (lambda: with_other_transaction(nullifier=create_evidence(1).message.nullifier), "not valid for"),
        (lambda: with_other_transaction(nullifier=b"\xff" * 32), "invalid encoding"),
        (lambda: with_other_transaction(proposal_id=2), "not valid for"),
        (lambda: with_other_transaction(vote_decision=0), "not valid for"),
        (lambda: with_other_transaction(round_id=b"\x01" * 32), "not valid for"),
        (
            lambda: with_other_transaction(
                enc_share=FIRST_EVIDENCE.message.enc_share[32:] + FIRST_EVIDENCE.message.enc_share[:32]
            ),
            "not valid for",
        ),
        (lambda: with_other_transaction(proof=FIRST_EVIDENCE.message.proof + b"\x00"), "not valid for"),
        (lambda: with_other_transaction(proof=b""), "not valid for"),
    ],
)
def test_verify_complete_bundle_with_false_statement_is_refused(make: Callable[[], bytes], error: str) -> None:
    evidence = unpack_bundle(make())
    with pytest.raises(ProofBundleError, match=error):
        verify_bundle(evidence)


def with_swapped_part(name: str) -> bytes:
    """Replace a part of this bundle by that of another one."""
    return write_zip({**read_parts(), name: read_parts(pack_bundle(create_evidence(1)))[name]})


def zip_bomb() -> bytes:
    """16 MB of zeros, compressed to 16 kB."""
    return write_zip({**read_parts(), PROOF: bytes(16 << 20)}, method=zipfile.ZIP_DEFLATED)


def zip_with_false_size() -> bytes:
    """The central directory states a size of 1 GB."""
    at = BUNDLE.index(b"PK\x01\x02")
    return BUNDLE[: at + 24] + (1 << 30).to_bytes(4, "little") + BUNDLE[at + 28 :]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: b"", "zip"),
        (lambda: b"PK\x05\x06" + bytes(18), "must contain exactly transaction.bin"),
        (lambda: BUNDLE[:-1], "zip"),
        (lambda: BUNDLE + b"\x00", "additional data|zip"),
        (lambda: b"\x00" + BUNDLE, "additional data"),
        (lambda: BUNDLE + BUNDLE, "additional data"),
        (lambda: BUNDLE + bytes(MAX_BUNDLE_BYTES), "larger than"),
        (zip_bomb, "compressed"),
        (zip_with_false_size, "larger than the bundle|zip|additional"),
        (lambda: write_zip(read_parts(), method=zipfile.ZIP_DEFLATED), "compressed"),
        (lambda: write_zip({**read_parts(), "more.txt": b""}), "must contain exactly"),
        (lambda: write_zip({name: read_parts()[name] for name in reversed(read_parts())}), "must contain exactly"),
        (
            lambda: write_zip({name: content for name, content in read_parts().items() if name != PROOF}),
            "must contain exactly",
        ),
        (
            lambda: write_zip({**{name.upper(): content for name, content in read_parts().items()}}),
            "must contain exactly",
        ),
        (lambda: with_swapped_part(TRANSACTION), "proof.bin: does not match the transaction"),
        (lambda: with_swapped_part(PROOF), "proof.bin: does not match the transaction"),
        (lambda: with_swapped_part(INPUTS), "public-inputs.json: does not match the transaction"),
        (lambda: with_swapped_part(MANIFEST), "manifest.json: does not match the transaction"),
        (lambda: with_manifest_changes(transaction_hash="AB" * 32), "manifest.json: does not match"),
        (lambda: with_manifest_changes(transaction_hash="ab" * 32), "manifest.json: does not match"),
        (lambda: with_manifest_changes(format="another"), "manifest.json: format"),
        (lambda: with_manifest_changes(version=2), "manifest.json: version"),
        (lambda: with_manifest_changes(height="106"), "manifest.json: height"),
        (lambda: with_manifest_changes(height=0), "manifest.json: height"),
        (lambda: with_manifest_changes(chain_id=""), "manifest.json: chain_id"),
        (lambda: with_manifest_changes(more=1), "manifest.json: does not match"),
        (lambda: with_manifest_changes(sha256={}), "manifest.json: does not match"),
        (
            lambda: with_manifest_changes(circuit={"name": "k12", "fingerprint": "00" * 32, "crate": "x"}),
            "unknown circuit",
        ),
        (
            lambda: with_manifest_changes(
                circuit={"name": "k11", "fingerprint": CIRCUITS["k10"].fingerprint, "crate": "x"}
            ),
            "unknown circuit",
        ),
        (
            lambda: with_manifest_changes(
                circuit={"name": "k11", "fingerprint": CIRCUITS["k11"].fingerprint, "crate": "another"}
            ),
            "manifest.json: does not match",
        ),
        (lambda: write_zip({**read_parts(), MANIFEST: b"[" * 10_000}), "manifest.json"),
        (lambda: write_zip({**read_parts(), MANIFEST: read_parts()[MANIFEST].strip()}), "manifest.json: does not"),
    ],
)
def test_verify_malformed_bundle_is_refused_with_reason(make: Callable[[], bytes], error: str) -> None:
    with pytest.raises(ProofBundleError, match=error):
        unpack_bundle(make())


def with_parts_and_hashes(**changed: bytes) -> bytes:
    """Replace parts and update the hashes in the manifest."""
    contents = {
        **read_parts(),
        **{{"inputs": INPUTS, "proof": PROOF}[name]: content for name, content in changed.items()},
    }
    manifest = orjson.loads(contents[MANIFEST])
    manifest["sha256"] = {name: sha256(contents[name]).hexdigest() for name in (TRANSACTION, PROOF, INPUTS)}
    contents[MANIFEST] = orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n"
    return write_zip(contents)


def test_verify_mismatched_parts_with_valid_hashes_is_refused() -> None:
    foreign = read_parts(pack_bundle(create_evidence(1)))
    with pytest.raises(ProofBundleError, match="does not match the transaction"):
        unpack_bundle(with_parts_and_hashes(proof=foreign[PROOF]))
    with pytest.raises(ProofBundleError, match="does not match the transaction"):
        unpack_bundle(with_parts_and_hashes(inputs=foreign[INPUTS]))
    with pytest.raises(ProofBundleError, match="does not match the transaction"):
        unpack_bundle(
            with_parts_and_hashes(inputs=read_parts()[INPUTS].replace(b'"proposal_id": 1', b'"proposal_id": 2')),
        )
    with pytest.raises(ProofBundleError, match=r"public-inputs\.json: root"):
        unpack_bundle(with_parts_and_hashes(inputs=read_parts()[INPUTS].replace(b'"root": "', b'"root": "0')))


def test_verify_other_transaction_is_refused() -> None:
    for raw in (b"", b"\x05" + FIRST_EVIDENCE.transaction[1:], FIRST_EVIDENCE.transaction[:40], b"\x04"):
        with pytest.raises(ProofBundleError, match="transaction"):
            pack_bundle(replace(FIRST_EVIDENCE, transaction=raw))
    short = replace(FIRST_EVIDENCE.message, enc_share=b"x" * 63).to_tx()
    with pytest.raises(ProofBundleError, match="64 bytes"):
        pack_bundle(replace(FIRST_EVIDENCE, transaction=short))
    with pytest.raises(ProofBundleError, match="no known circuit"):
        find_circuit(b"p" * 4001)


def test_verify_reveal_with_unknown_field_is_valid() -> None:
    """Another helper's transaction may contain a field unknown to this version; the chain counted it unchanged."""
    wider = replace(FIRST_EVIDENCE, transaction=FIRST_EVIDENCE.transaction + b"\xf8\x01\x01")
    assert unpack_bundle(pack_bundle(wider)) == wider
    assert wider.tx_hash != FIRST_EVIDENCE.tx_hash
    verify_bundle(wider)
    assert RevealMessage.from_tx(wider.transaction) == FIRST_EVIDENCE.message


@settings(max_examples=300)
@given(st.integers(0, len(BUNDLE) - 1), st.integers(1, 255))
def test_verify_bundle_with_changed_byte_is_refused(at: int, change: int) -> None:
    broken = bytearray(BUNDLE)
    broken[at] ^= change
    with pytest.raises(ProofBundleError):
        unpack_bundle(bytes(broken))


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, len(BUNDLE)), st.integers(0, 40))
def test_verify_arbitrary_file_is_refused(junk: bytes, at: int, cut: int) -> None:
    for hostile in (junk, BUNDLE[:at] + junk + BUNDLE[at + cut :], zlib.compress(BUNDLE)[:at]):
        if hostile != BUNDLE:
            with pytest.raises(ProofBundleError):
                unpack_bundle(hostile)
