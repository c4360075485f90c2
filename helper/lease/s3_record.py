"""Content and observed age of the lease object in an object store. No I/O."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_LEASE_SECONDS: Final = 300.0
"""Longest accepted lease in seconds, so that an incorrect object cannot block all hosts indefinitely."""
_MAX_BYTES: Final = 4096


class LeaseRecord(BaseModel):
    """One version of the lease object.

    Attributes:
        format: identifies the object as a lease.
        holder: random identifier of the holding process, drawn at its start (hex).
        host: name of its host, for display.
        fence: fencing token of this acquisition; a version without a holder has one below all later tokens.
        beat: number of versions this process has written.
        mark: random for each version (hex), so that all versions differ, even if the machine was cloned.
        seconds: validity from when this version was written.
        released: whether the lease was released.
        written: wall clock of the holder at the write (Unix seconds), for display only.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: Literal["svote-helper sender lease 1"] = "svote-helper sender lease 1"
    holder: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    host: Annotated[str, Field(max_length=256)]
    fence: Annotated[int, Field(ge=0, le=2**62)]
    beat: Annotated[int, Field(ge=0, le=2**62)]
    mark: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = Field(default_factory=lambda: token_hex(8))
    seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_SECONDS, allow_inf_nan=False)]
    released: bool = False
    written: Annotated[float, Field(allow_inf_nan=False)]

    def to_bytes(self) -> bytes:
        """Return the content of the object."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord:
        """Parse the content of an object.

        Raises:
            ValueError: it is not a lease.
        """
        if len(content) > _MAX_BYTES:
            raise ValueError(f"has {len(content)} bytes")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None


class LeaseObservation:
    """Measures how long the same version has been observed, by the observer's monotonic clock.

    Clocks of different hosts are never compared. A holder writes a new version long before its lease expires. If a
    version does not change for its entire validity, measured from its first *observation*, its holder has already
    stopped. The clocks must run at the same rate but may show different times.
    """

    def __init__(self) -> None:
        self._tag = ""
        self._since = 0.0

    def record_version(self, tag: str, now: float) -> None:
        """Record that a version was observed.

        Args:
            tag: its ETag.
            now: monotonic time after the response.
        """
        if tag != self._tag:
            self._tag, self._since = tag, now

    def is_expired(self, record: LeaseRecord, own_seconds: float, now: float) -> bool:
        """Return whether the version observed last has expired or was released.

        Args:
            record: its content.
            own_seconds: validity of this host's leases; the longer of the two applies.
            now: monotonic time.
        """
        return record.released or now - self._since >= max(record.seconds, own_seconds)
