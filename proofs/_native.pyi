"""The native module. Use it through `proofs`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

LOG_HEADER: int
"""Length of the header of a SQLite write-ahead log, which changes whenever the log is restarted."""
SUBTREE_LEAVES: int
"""Leaves of one stored subtree."""
TREE_DEPTH: int
"""Levels between a leaf and the root."""

def circuits() -> list[tuple[str, int, int, str, str]]:
    """Name, K, proof length, fingerprint and crate of each circuit."""

def empty_root() -> bytes:
    """Root of a tree without leaves."""

def warm(circuit: str) -> str:
    """Generate the circuit's keys and precomputed tables, once per process. Returns the fingerprint.

    The first call takes 0.5 to 2 s of CPU. Raises `CircuitError` if the fingerprint is not the protocol's.
    """

def fingerprint(circuit: str) -> str:
    """Compute BLAKE2b-256 of the verifying key's debug text, in hex. Does not check it."""

def check_encoding(field: str, value: bytes) -> None:
    """Raise `EncodingError` (with this field name) unless the value is a canonical base field element."""

def check_point(field: str, value: bytes) -> None:
    """Raise `EncodingError` (with this field name) unless the value is a point other than the identity."""

def read_shares(bodies: list[bytes]) -> list[tuple[bool, tuple[Any, ...]]]:
    """Whether each body is a valid share, and the fields of `proofs.ReadShare` or `proofs.InvalidShare`."""

def page_gap(page: bytes, number: int) -> tuple[int, int] | None:
    """Start and end of the unused gap of a SQLite b-tree page; None for other pages and damaged ones.

    Args:
        page: the page's bytes.
        number: its number, from 1; the first page begins with the database header.
    """

def pages_in_log(path: Path, first: int, stop: int, page_size: int) -> tuple[list[int], list[int]]:
    """Return the pages in frames of a SQLite WAL whose newest copy has non-zero bytes in its gap, and all other pages.

    Runs without the GIL.

    Args:
        path: the WAL.
        first: first frame to scan, from 0.
        stop: frame after the last one to scan.
        page_size: bytes of a page.

    Raises:
        OSError: the frames cannot be read, or the file is too short.
    """

def row_check(key: bytes, row: tuple[object, ...]) -> bytes:
    """The 8-byte check of a database row: keyed BLAKE2b (key of at most 64 bytes) of all other columns.

    The input is the number and types of the columns, all integers, the lengths of all bytes and texts, and their
    content. NULLs at the end of a row are left out, so that a column that is added later does not change its check.
    Raises `TypeError` for an unsupported column type, `OverflowError` for an integer that exceeds 64 bits.
    """

def row_checks(key: bytes, rows: Sequence[tuple[object, ...]]) -> list[bytes]:
    """`row_check` of many rows, without the GIL."""

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

def verify_each(
    circuit: str, items: list[tuple[bytes, bytes, bytes, bytes, int, int, bytes, bytes]]
) -> list[str | None]:
    """See `proofs.verify_each`."""

def poseidon(*elements: bytes) -> bytes:
    """Poseidon (P128Pow5T3, constant length) of 1 to 16 elements. Raises `EncodingError` (elements[i])."""

def share_commitment(blind: bytes, c1: bytes, c2: bytes) -> bytes:
    """The commitment to one share: its blind and the compressed halves of its ciphertext."""

def shares_hash(share_comms: bytes) -> bytes:
    """The hash of the 16 share commitments of a vote (512 bytes)."""

def vote_commitment(round_id: bytes, shares_hash: bytes, proposal_id: int, vote_decision: int) -> bytes:
    """The vote commitment: the leaf that a cast vote appends to the tree."""

def share_nullifier(vote_commitment: bytes, share_index: int, blind: bytes) -> bytes:
    """The nullifier of a share, which ensures that the share counts once."""

def elgamal_keygen(seed: bytes | None = None) -> tuple[bytes, bytes]:
    """Generate a secret scalar, from the seed (any length) or the system's randomness, and its public key, a point."""

def elgamal_encrypt(public: bytes, value: int, randomness: bytes | None = None) -> tuple[bytes, bytes]:
    """`(r·G, value·G + r·public)` with the given scalar r, canonical and not zero, or a random one."""

def elgamal_add(a: bytes, b: bytes) -> bytes:
    """Add two ciphertexts (64 bytes); the result encrypts the sum of their values. 64 zero bytes are the empty sum."""

def elgamal_decrypt(secret: bytes, ciphertext: bytes, limit: int) -> int:
    """Decrypt a ciphertext: searches for its value in 0..limit (at most 2^40) in about √limit steps.

    Raises `ProofsError` if the value exceeds the limit.
    """

def elgamal_sum(start: bytes, ciphertexts: list[bytes]) -> bytes:
    """Add ciphertexts of 64 bytes to `start`; 64 zero bytes are the empty sum. Takes about 0.05 ms per ciphertext."""

def sum_points(points: list[bytes]) -> bytes:
    """Add compressed points; the identity is allowed."""

def multiply_generator(scalar: bytes) -> bytes:
    """`scalar·G`, for example a commitment of the key ceremony. The scalar must be canonical."""

def decrypt_partially(share: bytes, ciphertext: bytes) -> tuple[bytes, bytes]:
    """The partial decryption of a sum with one validator's share, a scalar: the point share·C1 and its DLEQ proof."""

def check_tally(
    ciphertext: bytes, commitments: list[bytes], threshold: int, partials: list[tuple[int, bytes, bytes]], total: int
) -> tuple[list[str | None], Literal["matches", "differs", "too_few"]]:
    """See `proofs.check_tally`."""

def verify_decryption(public: bytes, ciphertext: bytes, total: int, proof: bytes) -> bool:
    """Whether a DLEQ proof (64 bytes) shows that the sum decrypts to `total` under the whole key.

    For rounds without a threshold. A malformed proof is not valid. Raises `EncodingError` for a malformed key or sum.
    """

def random_field() -> bytes:
    """A uniform base field element from the system's randomness."""

class CommitmentTree:
    """The append-only vote commitment tree, depth 24, with the root and paths of every past size.

    Thread-safe. Raises `TreeError` for invalid positions and sizes.
    """

    def __init__(self) -> None:
        """An empty tree."""

    @classmethod
    def restore(cls, leaves: bytes, subtrees: bytes) -> CommitmentTree:
        """Restore a tree from its leaves and the concatenated `subtree`s 0..k-1.

        Missing nodes are hashed again. Stored nodes are not checked: compare the root with a known one.
        Raises `EncodingError` (leaf[i]), and `TreeError` for invalid subtrees.
        """

    def append(self, leaves: bytes) -> None:
        """Append leaves of 32 bytes each. Appends none on `EncodingError` (leaf[i]) or if the tree is full."""

    def __len__(self) -> int: ...
    def leaf(self, position: int) -> bytes:
        """The leaf at a position."""

    def root(self, size: int | None = None) -> bytes:
        """The root of the tree of the first `size` leaves, by default of all."""

    def path(self, position: int, size: int | None = None) -> bytes:
        """The 24 siblings (768 bytes) of a leaf, leaf level first, in the tree of the first `size` leaves."""

    def subtree(self, index: int) -> bytes:
        """The 1023 inner nodes of the complete subtree of leaves 1024·index onwards, lowest level first."""
