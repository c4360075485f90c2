"""Results of the audits of finished rounds in the archive, for the page."""

from __future__ import annotations

import structlog

from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.errors import HelperError, ProofBundleError
from helper.object_store.bucket import Bucket
from helper.operations.archive.object_names import AUDITS, parse_round_object
from helper.operations.archive.round_data import StoredAudit, parse_object

log = structlog.get_logger("helper.operations")


class AuditResults:
    """The stored results by round. They are read in the background, each once.

    Args:
        bucket: the archive's bucket.
        clock: the time.
        interval_seconds: seconds between two checks for new results.
    """

    def __init__(self, bucket: Bucket, *, clock: Clock, interval_seconds: float) -> None:
        self._bucket = bucket
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._results: dict[bytes, StoredAudit] = {}
        self._problem = LoggedProblem()

    def get(self, round_id: bytes) -> StoredAudit | None:
        """The result of a round, None if it is not known."""
        return self._results.get(round_id)

    async def run(self) -> None:
        """Read new results until cancelled. Errors are logged once."""
        while True:
            try:
                await self.refresh()
            except HelperError as error:
                if self._problem.note(str(error)):
                    log.warning("audit_results_unavailable", reason=str(error))
            else:
                self._problem.clear()
            await self._clock.sleep(self._interval_seconds)

    async def refresh(self) -> None:
        """Read all results that are new.

        Raises:
            ProofBundleError: a result is invalid; the others were read.
            BucketError: the object store is unreachable.
        """
        invalid: ProofBundleError | None = None
        for name in await self._bucket.list_names(AUDITS):
            round_id = parse_round_object(name)
            if round_id is None or round_id in self._results:
                continue
            stored = await self._bucket.get(name)
            if stored is not None:
                try:
                    self._results[round_id] = parse_object(StoredAudit, stored.body)
                except ProofBundleError as error:
                    invalid = ProofBundleError(f"{name}: {error}", advice=error.advice)
        if invalid is not None:
            raise invalid
