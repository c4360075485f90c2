"""Every error of the helper, in one tree.

    HelperError
    ├── ConfigError             a setting is wrong or missing
    ├── StoreError              the database did not do what was asked
    │   ├── StoreFull           no space left: nothing was written, try again when there is
    │   ├── StoreCorrupt        the file is damaged: restore a backup
    │   ├── StoreForeign        the file is not a queue of this product, or of a newer version
    │   ├── StoreLocked         another daemon has this file open
    │   ├── StoreDisplaced      the file, or its write-ahead log, is not at its path
    │   ├── StoreMoved          the queue is in another database now, or not yet wholly in this one
    │   ├── StoreCopyDiffers    a copy is not what it was made from
    │   └── StoreUnreachable    the shared database does not answer
    ├── LeaseError              whether this host may send could not be found out
    │   └── LeaseHeld           another host does
    ├── BackupError             a backup could not be made, read or restored
    │   └── BackupKeyError      the passphrase or identity does not open it
    ├── TransferError           an export can not be made or read
    ├── EvidenceError           a bundle is no evidence of a reveal
    ├── ActRefused              what an operator asked for is not done as things stand
    │   └── NothingThere        there is no such share or round
    ├── BucketError             an object store did not do what was asked
    │   └── BucketRefused       it does not let this host, or there is no such bucket
    ├── DaemonError             the running helper did not answer a command as it should
    │   └── DaemonSilent        it does not answer at all
    ├── ChainError              a node did not do what was asked
    │   ├── ChainUnavailable    no node could be asked
    │   ├── ChainAnswerError    a node answered what cannot be
    │   │   └── InvalidAnswer   it is an HTTP error, or cannot be read
    │   └── WrongChain          a node of another chain
    ├── ProverError             a proof was not made
    │   ├── ProverTimeout       it took too long; the worker was killed
    │   ├── ProverDied          the worker ended by itself (out of memory, a kill)
    │   └── ProofFailed         the circuit refused the witness
    └── ShareRefused            a wallet's share was not taken

Each class says whether the same thing may be tried again (`retryable`) and what an operator does about it (`advice`).
"""

from __future__ import annotations

from typing import ClassVar


class HelperError(Exception):
    """The root of the tree."""

    retryable: ClassVar[bool] = False
    advice: str = "Look at the log line before this one."

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice


class ConfigError(HelperError):
    """A setting is wrong; nothing was started."""

    advice = "Mend the settings named above, then check them with `svote-helper config validate`."


class StoreError(HelperError):
    """The database refused an operation; nothing of it was kept."""

    retryable = True
    advice = "Check the disk that holds the database; the helper goes on by itself once it can write."


class StoreFull(StoreError):
    """There is no space left on the disk of the database."""

    advice = "Free space on the disk of the database; the helper goes on by itself."


class StoreCorrupt(StoreError):
    """The database file is damaged."""

    retryable = False
    advice = "Stop the helper, keep the damaged file, and restore the newest backup beside it."


class StoreForeign(StoreError):
    """The file belongs to another program or to a newer version of this one."""

    retryable = False
    advice = (
        "Point [helper] db_path at this helper's own database, or start the version that wrote it; "
        "if it is this helper's own, it is damaged: restore the newest backup."
    )


class StoreLocked(StoreError):
    """Another daemon has this database open."""

    retryable = False
    advice = "Stop the other daemon first, or give this one a db_path of its own."


class StoreDisplaced(StoreError):
    """The database or its write-ahead log is not at its path, or the database has a second name."""

    retryable = False
    advice = (
        "Move the file back to its path: the helper then continues by itself. Do not delete the write-ahead log, and "
        "do not stop the helper before that if the file was deleted."
    )


class StoreMoved(StoreError):
    """This database is not where the queue is: it was moved away from here, or not yet wholly here."""

    retryable = False
    advice = "Start the helper where the queue is."


class StoreCopyDiffers(StoreError):
    """A copy was compared with what it was made from, and is not the same."""

    retryable = False
    advice = (
        "Nothing was moved: the queue is where it was. Give the command again; if they differ again, look at the disk "
        "and the memory of the target's machine."
    )


class StoreUnreachable(StoreError):
    """The shared database does not answer."""

    advice = "Look whether PostgreSQL runs, and whether this host may connect to it."


class LeaseError(HelperError):
    """Whether this host may send could not be found out: it goes on for as long as it surely may, and then waits."""

    retryable = True
    advice = "Look whether the place of the lease can be reached; sending goes on by itself once it can."


class LeaseHeld(LeaseError):
    """Another host sends; of those that share a queue, one does."""

    retryable = False
    advice = (
        "Run one host with the role sender (or all) and the others as api or prover; set [sender] standby = true on a "
        "host that is to wait and take over when the sender is gone. Where each has a file of its own, one file is a "
        "copy of the other: keep one of them."
    )


class BackupError(HelperError):
    """A backup could not be made, read or restored; the database is as it was."""

    advice = "Nothing was changed; mend what is named and run the command again."


class BackupKeyError(BackupError):
    """This passphrase or identity does not open the backup or export, or that is not what it was."""

    advice = "Give the passphrase or the identity of this very file; if it is the right one, the file is damaged."


class ExportFileError(HelperError):
    """An export of the queue could not be made, or what is to be imported is none."""

    advice = "Make the export again, with a version of the helper that this one can read."


class ProofBundleError(HelperError):
    """What should be evidence of a reveal is none, or can not be made."""

    advice = "Have the bundle made anew by whoever made it, or from the chain: `svote-helper proof export`."


class ActionRefused(HelperError):
    """What an operator asked for is not done as things stand; nothing was changed."""

    advice = "Nothing was changed."


class NothingThere(ActionRefused):
    """There is no such share or round, or more than one."""

    advice = "See `svote-helper queue list` and `svote-helper rounds`."


class BucketError(HelperError):
    """An object store did not do what was asked, or it is not known whether it did."""

    retryable = True
    advice = "See whether the object store can be reached; what was to be done there is tried again by itself."


class BucketRefused(BucketError):
    """An object store does not let this host, or has no such bucket."""

    retryable = False
    advice = "Look at the bucket's name, at [s3] endpoint and region, at the credentials and at what they permit."


class DaemonError(HelperError):
    """The running helper is there and could not answer a command."""

    advice = "Look into the helper's log."


class DaemonSilent(DaemonError):
    """What should be the running helper does not answer at all."""


class ChainError(HelperError):
    """A node of the vote chain did not do what was asked."""

    retryable = True
    advice = "See which endpoint is named and whether it is up and in step with the chain."


class ChainUnavailable(ChainError):
    """No node could be asked: unreachable, syncing, stale, or set aside."""


class ChainAnswerError(ChainError):
    """A node answered what cannot be: see `InvalidAnswer`, or what contradicts itself or other answers."""


class InvalidAnswer(ChainAnswerError):
    """The answer to a single question is an HTTP error or cannot be read (HTML, half a JSON, a wrong type or length).

    It says nothing against the node's answers to other questions.
    """


class WrongChain(ChainError):
    """A node serves another chain than the one this helper works for."""

    retryable = False
    advice = "Remove the endpoint from [chain] endpoints, or set [chain] chain_id to the chain you mean."


class ProverError(HelperError):
    """A proof was not made."""

    retryable = True
    advice = "The share is tried again; if it happens often, look at memory and CPU of the machine."


class ProverTimeout(ProverError):
    """The proof took longer than the hard limit and its worker was killed."""

    advice = "The machine is much slower than at start; look at its load, or raise [prover] timeout_seconds."


class ProverDied(ProverError):
    """A prover worker ended by itself."""

    advice = "Look for the out-of-memory killer in the kernel's log; lower [helper] max_concurrent_proofs."


class ProofFailed(ProverError):
    """The prover could not make a proof from this witness."""


class ShareRefused(HelperError):
    """A wallet's share was not taken.

    Attributes:
        status: the HTTP status that the wallet gets.
        field: the payload's field that broke a rule, as the wallet wrote it, or None.
    """

    advice = "Nothing: the wallet was told why."

    def __init__(self, status: int, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
