"""The native module. Use it through `proofs`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_HEADER: int
"""Bytes before the first frame of a SQLite write-ahead log; they change whenever it is begun anew."""
SUBTREE_LEAVES: int
"""Leaves of one stored subtree."""
TREE_DEPTH: int
"""Levels between a leaf and the root."""

def circuits() -> list[tuple[str, int, int, str, str]]:
    """Name, K, proof length, fingerprint and crate of each circuit."""

def empty_root() -> bytes:
    """Root of a tree without leaves."""

def warm(circuit: str) -> str:
    """Makes the circuit's keys, once a process, and what else makes proofs faster; answers their fingerprint.

    Takes 0.5 to 2 s of CPU the first time. Raises `CircuitError` when the fingerprint is not the protocol's.
    """

def fingerprint(circuit: str) -> str:
    """BLAKE2b-256 of the pinned verifying key's debug text, in hex, as it is and not as it must be."""

def check_encoding(field: str, value: bytes) -> None:
    """Raises `EncodingError` (with that field name) unless the value is a canonical base field element."""

def check_point(field: str, value: bytes) -> None:
    """Raises `EncodingError` (with that field name) unless the value is a point other than the identity."""

def check_share(
    *,
    round_id: bytes,
    shares_hash: bytes,
    share_comms: bytes,
    share_index: int,
    proposal_id: int,
    vote_decision: int,
    primary_blind: bytes,
    c1: bytes,
    c2: bytes,
) -> tuple[bytes, bytes]:
    """Vote commitment and nullifier; see `proofs.check_share`."""

def json_members(body: bytes, names: list[str]) -> bytes | int:
    """See `proofs.json_members`."""

def read_shares(bodies: list[bytes]) -> list[tuple[Any, ...] | None]:
    """The fields of each share, in the order of `proofs.ReadShare`; see `proofs.read_shares`."""

def page_gap(page: bytes, number: int) -> tuple[int, int] | None:
    """Start and end of the unused gap of a SQLite b-tree page; None for any other page, and for a damaged one.

    Args:
        page: all of its bytes.
        number: its number, from 1; the first page begins with the file's header.
    """

def pages_in_log(path: Path, first: int, stop: int, page_size: int) -> tuple[list[int], list[int]]:
    """The pages whose newest copy in a SQLite write-ahead log's frames has other bytes than zeros in its gap, and those
    whose has not (read without the GIL).

    Args:
        path: the log.
        first: the first of the frames to look at, from 0.
        stop: the frame after the last of them.
        page_size: bytes of a page.

    Raises:
        OSError: the frames can not be read, or the file is shorter than they are.
    """

def row_check(key: bytes, row: tuple[object, ...]) -> bytes:
    """The 8 bytes that stand at the end of a row in a database: keyed BLAKE2b (a key has at most 64 bytes) over its
    other columns: how many there are and of which types, all integers, the lengths of all bytes and texts, and these.

    Raises `TypeError` for a column of a type that is never written, `OverflowError` for an integer beyond 64 bits.
    """

def row_checks(key: bytes, rows: Sequence[tuple[object, ...]]) -> list[bytes]:
    """The same for many rows at once, hashed without the GIL."""

def prove(
    circuit: str,
    *,
    path: bytes,
    position: int,
    share_comms: bytes,
    primary_blind: bytes,
    c1: bytes,
    c2: bytes,
    share_index: int,
    proposal_id: int,
    vote_decision: int,
    round_id: bytes,
) -> tuple[bytes, bytes, bytes]:
    """Proof, nullifier and root; see `proofs.prove`."""

def verify(
    circuit: str,
    proof: bytes,
    *,
    nullifier: bytes,
    c1: bytes,
    c2: bytes,
    proposal_id: int,
    vote_decision: int,
    root: bytes,
    round_id: bytes,
) -> bool:
    """See `proofs.verify`."""

def poseidon(*elements: bytes) -> bytes:
    """Poseidon (P128Pow5T3, constant length) of 1 to 16 elements. Raises `EncodingError` (elements[i])."""

def share_commitment(blind: bytes, c1: bytes, c2: bytes) -> bytes:
    """The commitment to one share: its blind and the compressed halves of its ciphertext."""

def shares_hash(share_comms: bytes) -> bytes:
    """The hash of the 16 share commitments of a vote (512 bytes)."""

def vote_commitment(round_id: bytes, shares_hash: bytes, proposal_id: int, vote_decision: int) -> bytes:
    """The leaf that a cast vote puts into the tree."""

def share_nullifier(vote_commitment: bytes, share_index: int, blind: bytes) -> bytes:
    """What a share's reveal publishes so that it counts once."""

def elgamal_keygen(seed: bytes | None = None) -> tuple[bytes, bytes]:
    """A secret scalar, from the seed (any length) or the system's randomness, and the public key, a point."""

def elgamal_encrypt(public: bytes, value: int, randomness: bytes | None = None) -> tuple[bytes, bytes]:
    """`(r·G, value·G + r·public)` with the given scalar r, canonical and not zero, or a random one."""

def elgamal_add(a: bytes, b: bytes) -> bytes:
    """The ciphertext (64 bytes) of the sum of two ciphertexts' values. 64 zero bytes are the sum of none."""

def elgamal_decrypt(secret: bytes, ciphertext: bytes, limit: int) -> int:
    """The value of a ciphertext, searched in 0..limit (at most 2^40) in about √limit steps.

    Raises `ProofsError` when the value is above the limit.
    """

def random_field() -> bytes:
    """A uniform base field element from the system's randomness."""

class CommitmentTree:
    """The append-only vote commitment tree, depth 24, with the root and paths of every past size.

    May be used from several threads. Raises `TreeError` for positions and sizes that it does not have.
    """

    def __init__(self) -> None:
        """An empty tree."""

    @classmethod
    def restore(cls, leaves: bytes, subtrees: bytes) -> CommitmentTree:
        """A tree from its leaves and the `subtree`s 0..k-1 stored of it, one behind the other.

        Nodes not stored are hashed again. Stored nodes are trusted: compare the root with one that you know.
        Raises `EncodingError` (leaf[i]), and `TreeError` for subtrees that cannot be this tree's.
        """

    def append(self, leaves: bytes) -> None:
        """Adds leaves of 32 bytes each: all, or none with an `EncodingError` (leaf[i]) or a full tree."""

    def __len__(self) -> int: ...
    def leaf(self, position: int) -> bytes:
        """The leaf at a position."""

    def root(self, size: int | None = None) -> bytes:
        """The root over the first `size` leaves; all of them by default."""

    def path(self, position: int, size: int | None = None) -> bytes:
        """The 24 siblings (768 bytes) of a leaf, leaf level first, in the tree of the first `size` leaves."""

    def subtree(self, index: int) -> bytes:
        """The 1023 inner nodes of the complete subtree of leaves 1024·index onwards, lowest level first."""
