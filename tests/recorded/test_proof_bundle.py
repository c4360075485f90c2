"""Evidence of recorded reveals: real proofs hold, and whatever was done to a bundle is found."""

from __future__ import annotations

import io
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
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
    MAX_BUNDLE,
    PROOF,
    TRANSACTION,
    ProofBundle,
    check,
    circuit_of,
    pack,
    unpack,
)
from proofs import CIRCUITS, verify
from tests.conftest import recorded_lines
from tests.recorded.test_models import message

ROOT = b64decode("6seWJ65Nj5gUfTvYPqNkC+gEWXQv8jGEYt94JCfHXRk=")


def recorded_evidence(index: int = 0) -> ProofBundle:
    """A reveal that a real chain counted."""
    row = recorded_lines("reveals.jsonl")[index]
    return ProofBundle(
        chain_id="svote-1",
        height=int(row["tx"]["height"]),
        transaction=message(row["request"]).to_tx(),
        circuit=CIRCUITS["k11"],
        root=ROOT,
    )


FIRST = recorded_evidence()
BUNDLE = pack(FIRST)


def parts(bundle: bytes = BUNDLE) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def rezip(contents: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip as a bundle is written, of whatever it is given."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as bundle:
        for name, content in contents.items():
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.create_system, about.external_attr, about.compress_type = 3, 0o644 << 16, method
            bundle.writestr(about, content)
    return written.getvalue()


def restated(**changes: Any) -> bytes:
    """A bundle whose manifest was changed, hashes and all else as they were."""
    contents = parts()
    contents[MANIFEST] = orjson.dumps(orjson.loads(contents[MANIFEST]) | changes, option=orjson.OPT_INDENT_2) + b"\n"
    return rezip(contents)


def test_a_counted_reveal_is_evidence_and_the_bytes_are_always_the_same() -> None:
    assert unpack(BUNDLE, CIRCUITS) == FIRST
    check(FIRST, verify)
    assert pack(recorded_evidence()) == BUNDLE == rezip(parts())
    assert len(BUNDLE) < MAX_BUNDLE / 4
    assert circuit_of(CIRCUITS, FIRST.message.proof).name == "k11"
    manifest = orjson.loads(parts()[MANIFEST])
    assert manifest["transaction_hash"] == "B2A95868D8CBF9BB89D07A8CD4321699F443D0C294F92EFBF33D3712E014BB72"
    assert manifest["circuit"]["fingerprint"] == CIRCUITS["k11"].fingerprint


def other(**changes: Any) -> bytes:
    """A bundle that is whole and of which one part is another's."""
    return pack(replace(FIRST, **changes))


def carrying(**changes: Any) -> bytes:
    """A bundle of another transaction."""
    return other(transaction=replace(FIRST.message, **changes).to_tx())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: other(root=b"\x01" * 32), "not valid for"),
        (lambda: other(root=b"\xff" * 32), "invalid encoding"),
        (lambda: other(circuit=CIRCUITS["k10"]), "not valid for"),
        (lambda: carrying(proof=recorded_evidence(1).message.proof), "not valid for"),
        (lambda: carrying(nullifier=recorded_evidence(1).message.nullifier), "not valid for"),
        (lambda: carrying(nullifier=b"\xff" * 32), "invalid encoding"),
        (lambda: carrying(proposal_id=2), "not valid for"),
        (lambda: carrying(vote_decision=0), "not valid for"),
        (lambda: carrying(round_id=b"\x01" * 32), "not valid for"),
        (lambda: carrying(enc_share=FIRST.message.enc_share[32:] + FIRST.message.enc_share[:32]), "not valid for"),
        (lambda: carrying(proof=FIRST.message.proof + b"\x00"), "not valid for"),
        (lambda: carrying(proof=b""), "not valid for"),
    ],
)
def test_a_whole_bundle_of_something_untrue_is_refused_by_the_verifier(make: Callable[[], bytes], says: str) -> None:
    evidence = unpack(make(), CIRCUITS)
    with pytest.raises(ProofBundleError, match=says):
        check(evidence, verify)


def swapped(name: str) -> bytes:
    """A part of another bundle in the place of this one's."""
    return rezip({**parts(), name: parts(pack(recorded_evidence(1)))[name]})


def bomb() -> bytes:
    """16 MB of nothing in 16 kB."""
    return rezip({**parts(), PROOF: bytes(16 << 20)}, method=zipfile.ZIP_DEFLATED)


def lying_about_its_size() -> bytes:
    """A central directory that tells of a gigabyte."""
    at = BUNDLE.index(b"PK\x01\x02")
    return BUNDLE[: at + 24] + (1 << 30).to_bytes(4, "little") + BUNDLE[at + 28 :]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: b"", "zip"),
        (lambda: b"PK\x05\x06" + bytes(18), "must contain exactly transaction.bin"),
        (lambda: BUNDLE[:-1], "zip"),
        (lambda: BUNDLE + b"\x00", "additional data|zip"),
        (lambda: b"\x00" + BUNDLE, "additional data"),
        (lambda: BUNDLE + BUNDLE, "additional data"),
        (lambda: BUNDLE + bytes(MAX_BUNDLE), "larger than"),
        (bomb, "compressed"),
        (lying_about_its_size, "larger than the bundle|zip|additional"),
        (lambda: rezip(parts(), method=zipfile.ZIP_DEFLATED), "compressed"),
        (lambda: rezip({**parts(), "more.txt": b""}), "must contain exactly"),
        (lambda: rezip({name: parts()[name] for name in reversed(parts())}), "must contain exactly"),
        (lambda: rezip({name: content for name, content in parts().items() if name != PROOF}), "must contain exactly"),
        (lambda: rezip({**{name.upper(): content for name, content in parts().items()}}), "must contain exactly"),
        (lambda: swapped(TRANSACTION), "transaction.bin: hash does not match the manifest"),
        (lambda: swapped(PROOF), "proof.bin: hash does not match the manifest"),
        (lambda: swapped(INPUTS), "public-inputs.json: hash does not match the manifest"),
        (lambda: swapped(MANIFEST), "transaction.bin: hash does not match the manifest"),
        (lambda: restated(transaction_hash="AB" * 32), "transaction_hash"),
        (lambda: restated(transaction_hash="ab" * 32), "manifest.json: transaction_hash"),
        (lambda: restated(format="another"), "manifest.json: format"),
        (lambda: restated(version=2), "manifest.json: version"),
        (lambda: restated(height="106"), "manifest.json: height"),
        (lambda: restated(height=0), "manifest.json: height"),
        (lambda: restated(chain_id=""), "manifest.json: chain_id"),
        (lambda: restated(more=1), "manifest.json: more"),
        (lambda: restated(sha256={}), "hash does not match the manifest"),
        (lambda: restated(circuit={"name": "k12", "fingerprint": "00" * 32, "crate": "x"}), "unknown circuit"),
        (
            lambda: restated(circuit={"name": "k11", "fingerprint": CIRCUITS["k10"].fingerprint, "crate": "x"}),
            "unknown circuit",
        ),
        (
            lambda: restated(circuit={"name": "k11", "fingerprint": CIRCUITS["k11"].fingerprint, "crate": "another"}),
            "not canonically encoded",
        ),
        (lambda: rezip({**parts(), MANIFEST: b"[" * 10_000}), "manifest.json"),
        (lambda: rezip({**parts(), MANIFEST: parts()[MANIFEST].strip()}), "not canonically encoded"),
    ],
)
def test_a_bundle_that_is_none_is_refused_with_the_reason(make: Callable[[], bytes], says: str) -> None:
    with pytest.raises(ProofBundleError, match=says):
        unpack(make(), CIRCUITS)


def with_hashes(**changed: bytes) -> bytes:
    """Parts replaced, and the manifest's hashes made to fit."""
    from hashlib import sha256  # noqa: PLC0415

    contents = {**parts(), **{{"inputs": INPUTS, "proof": PROOF}[name]: content for name, content in changed.items()}}
    manifest = orjson.loads(contents[MANIFEST])
    manifest["sha256"] = {name: sha256(contents[name]).hexdigest() for name in (TRANSACTION, PROOF, INPUTS)}
    contents[MANIFEST] = orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n"
    return rezip(contents)


def test_parts_that_do_not_belong_together_are_refused_though_their_hashes_fit() -> None:
    foreign = parts(pack(recorded_evidence(1)))
    with pytest.raises(ProofBundleError, match="does not match the proof in the transaction"):
        unpack(with_hashes(proof=foreign[PROOF]), CIRCUITS)
    with pytest.raises(ProofBundleError, match="does not match the transaction"):
        unpack(with_hashes(inputs=foreign[INPUTS]), CIRCUITS)
    with pytest.raises(ProofBundleError, match="does not match the transaction"):
        unpack(with_hashes(inputs=parts()[INPUTS].replace(b'"proposal_id": 1', b'"proposal_id": 2')), CIRCUITS)
    with pytest.raises(ProofBundleError, match=r"public-inputs\.json: root"):
        unpack(with_hashes(inputs=parts()[INPUTS].replace(b'"root": "', b'"root": "0')), CIRCUITS)


def test_a_transaction_that_is_no_reveal_is_refused() -> None:
    for raw in (b"", b"\x05" + FIRST.transaction[1:], FIRST.transaction[:40], b"\x04"):
        with pytest.raises(ProofBundleError, match="transaction"):
            pack(replace(FIRST, transaction=raw))
    short = replace(FIRST.message, enc_share=b"x" * 63).to_tx()
    with pytest.raises(ProofBundleError, match="64 bytes"):
        pack(replace(FIRST, transaction=short))
    with pytest.raises(ProofBundleError, match="no known circuit"):
        circuit_of(CIRCUITS, b"p" * 4001)


def test_another_way_to_write_the_same_reveal_is_evidence_too() -> None:
    """Another helper's transaction may carry a field that this version does not know: the chain counted it as it is."""
    wider = replace(FIRST, transaction=FIRST.transaction + b"\xf8\x01\x01")
    assert unpack(pack(wider), CIRCUITS) == wider
    assert wider.tx_hash != FIRST.tx_hash
    check(wider, verify)
    assert RevealMessage.from_tx(wider.transaction) == FIRST.message


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(BUNDLE) - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(at: int, by: int) -> None:
    broken = bytearray(BUNDLE)
    broken[at] ^= by
    with pytest.raises(ProofBundleError):
        unpack(bytes(broken), CIRCUITS)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(BUNDLE)), st.integers(0, 40))
def test_whatever_a_file_is_it_is_refused_and_nothing_else_happens(junk: bytes, at: int, cut: int) -> None:
    for hostile in (junk, BUNDLE[:at] + junk + BUNDLE[at + cut :], zlib.compress(BUNDLE)[:at]):
        if hostile != BUNDLE:
            with pytest.raises(ProofBundleError):
                unpack(hostile, CIRCUITS)
