"""Error classes of the helper. Each defines what an operator can do (`advice`). A `UsageError` is none of them."""

from __future__ import annotations

from typing import Final

RESTORE_ADVICE: Final = "restore the newest backup: `svote-helper db restore BACKUP --force --passphrase-file FILE`."


class UsageError(ValueError):
    """An argument of a command or a parameter of a request is invalid. The text contains its name."""


class HelperError(Exception):
    """Base class of all errors of the helper. `advice` is a suggested action for an operator."""

    advice: str = "Run `svote-helper doctor`."

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice


class ConfigError(HelperError):
    """A setting is invalid; nothing was started."""

    advice = "Fix the settings listed above, then run `svote-helper config validate`."


class ReleaseError(HelperError):
    """A release or the installed files could not be verified."""

    advice = "Compare the settings [prover] release_manifest and allowed_signers with the files of the release."


class StoreError(HelperError):
    """A database operation failed; none of its changes were stored."""

    advice = "Check the disk that holds the database; the helper continues automatically once it can write."


class StoreFull(StoreError):
    """No space is left on the disk of the database; nothing was written."""

    advice = "Free space on the disk of the database; the helper then continues automatically."


class StoreCorrupt(StoreError):
    """The database file is damaged."""

    advice = f"Stop the helper, keep the file, and {RESTORE_ADVICE}"


class StoreForeign(StoreError):
    """The file belongs to another program or to a newer version of this one."""

    advice = (
        "Set [helper] db_path to this helper's own database, or start the version that wrote it. "
        f"If it is this helper's own, it is damaged; {RESTORE_ADVICE}"
    )


class StoreLocked(StoreError):
    """Another helper has this database open."""

    advice = "Stop the other helper first, or set another db_path for this one."


class StoreDisplaced(StoreError):
    """The database or its write-ahead log is not at its path, or the database has a second name."""

    advice = (
        "Move the file back to its path; the helper then continues automatically. Do not delete the write-ahead log. "
        "If the file was deleted, do not stop the helper before it is restored."
    )


class StoreMoved(StoreError):
    """The queue was moved to another database, or its copy to this one is incomplete."""

    advice = "Start the helper with the database that holds the queue."


class StoreKeyError(StoreError):
    """The database is encrypted, and there is no key file, or it lacks a key of the database."""

    advice = "Install the same key file on every host; remove an old key only once its rounds are purged."


class LeavesMissing(StoreError):
    """The stored leaves of a tree end before the new ones: the database has lost commits."""

    def __init__(self, stored: int) -> None:
        super().__init__(f"only {stored} leaves are stored, some are missing before the new ones")
        self.stored = stored


class StoreCopyDiffers(StoreError):
    """A copy was compared with its source and differs."""

    advice = (
        "Nothing was moved; the queue remains in the source database. Run the command again. If the copy differs "
        "again, check the disk and the memory of the target machine."
    )


class StoreUnreachable(StoreError):
    """The shared database does not respond."""

    advice = "Check whether PostgreSQL is running, and whether this host can connect to it."


class StoreRefused(StoreError):
    """The shared database refuses all writes, or its sessions are not as the helper requires."""

    advice = "Check the settings of the database server, and the privileges and settings of the helper's role."


class StoreUnconfirmed(StoreError):
    """A commit is on the database server, but its synchronous standby may lack it."""

    advice = (
        "Somebody cancelled the wait for a synchronous standby. The helper continues once a commit is confirmed: "
        "restart the standby, or set synchronous_standby_names on the primary; see docs/cluster.md."
    )


class LeaseError(HelperError):
    """The state of the sender lease is unknown.

    The host sends until its current term ends, then waits.
    """

    advice = "Check whether the storage of the lease is reachable; sending resumes automatically."


class LeaseHeld(LeaseError):
    """Another host holds the sender lease."""

    advice = (
        "Run one host with the role sender (or all) and the others as api or prover; set [sender] standby = true on a "
        "host that should take over when the sender fails. If each host has its own database file, one is a copy of "
        "the other: use only one of them."
    )


class BackupError(HelperError):
    """A backup could not be created, read or restored; the database is unchanged."""

    advice = "Nothing was changed. Fix the problem and run the command again."


class BackupKeyError(BackupError):
    """The passphrase or identity does not decrypt the backup or export, or the file is damaged."""

    advice = "Use the passphrase or the identity of this file. If it is the right one, the file is damaged."


class ExportFileError(HelperError):
    """An export of the queue could not be created, or the file to import is not an export."""

    advice = "Create the export again, with a version of the helper whose exports this one can read."


class ProofBundleError(HelperError):
    """A proof bundle is invalid, or could not be created."""

    advice = "Request a new bundle, or create one from the chain: `svote-helper proof export`."


class AuditError(HelperError):
    """A round could not be audited: its data is incomplete or not readable."""

    advice = "Check the round id and the evidence file, or use other nodes."


class ActionRefused(HelperError):
    """An operator action is not possible in the current state; nothing was changed."""

    advice = "Nothing was changed."


class NotFound(ActionRefused):
    """No share or round matches, or more than one does."""

    advice = "Run `svote-helper queue list` and `svote-helper rounds`."


class BucketError(HelperError):
    """An object store operation failed, or its result is unknown."""

    advice = "Check whether the object store is reachable; the operation is retried automatically."


class BucketRefused(BucketError):
    """The object store denies access to this host, or has no such bucket."""

    advice = "Check the bucket's name, [s3] endpoint and region, the credentials and their permissions."


class BucketThrottled(BucketError):
    """The object store refuses a request because it limits their rate."""

    advice = (
        "Some stores accept one write per second to an object. The helper repeats the request; if this continues, use "
        "a longer lease or another store."
    )


class DaemonUnreachableError(HelperError):
    """The running helper does not respond."""

    advice = "Check the helper's log."


class ChainError(HelperError):
    """A request to a node of the vote chain failed."""

    advice = "Check whether the node is running and in sync."


class ChainUnavailable(ChainError):
    """No node is available: all are unreachable, syncing, stale or excluded."""


class ChainResponseError(ChainError):
    """A node's response is invalid, or contradicts itself or other responses."""


class InvalidResponse(ChainResponseError):
    """A response is an HTTP error or cannot be parsed.

    Examples of the latter are HTML, truncated JSON, and a field of the wrong type or length. The node's
    responses to other requests may still be valid.
    """


class ProverError(HelperError):
    """A proof could not be created."""

    advice = "The share is retried automatically. If this happens often, check the machine's memory and CPU."


class ProverTimeout(ProverError):
    """The proof took longer than its timeout, and its worker was killed."""

    advice = "The machine is much slower than at startup; check its load, or raise [prover] timeout_seconds."


class ProverCrashed(ProverError):
    """A prover worker exited unexpectedly (out of memory, a signal)."""

    advice = "Check the kernel log for the out-of-memory killer; lower [helper] max_concurrent_proofs."


class ProofFailed(ProverError):
    """The prover could not create a proof from the witness."""


class ProofNotNeeded(ProverError):
    """A proof was not begun, because it is no longer needed."""


class ShareRefused(HelperError):
    """A wallet's share, or a parameter of a path, was rejected for good.

    `field` is the name of the invalid field as on the wire (`enc_share.c1`, `share_comms[3]`), or `body`, if there is
    one. The message does not contain its value.
    """

    advice = "No action is needed; the response to the wallet contains the reason."

    def __init__(self, status: int, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class ClientLeft(HelperError):
    """The client disconnected, so its share was not validated."""
