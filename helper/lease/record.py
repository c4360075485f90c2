"""What lies in an object store while somebody holds a lease there. Pure."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LONGEST: Final = 300.0
"""Seconds of the longest lease that is believed: an object must not keep everybody away for ever."""
_LARGEST: Final = 4096


class LeaseRecord(BaseModel):
    """One version of the object.

    Attributes:
        format: what it is, for who finds it.
        holder: a number that the holding process drew at its start (hex).
        host: its host's name, for people.
        fence: the number of this holding; of a version that is nobody's, one that is less than all to come.
        beat: counts the versions that a process wrote.
        mark: drawn for each version (hex), so that no two are alike, not even those of a machine and its copy.
        seconds: for how long it holds from when this version was written, by whatever clock.
        released: whether it was let go.
        written: the holder's wall clock when it wrote this (unix seconds), for people; nothing is concluded from it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: Literal["svote-helper sender lease 1"] = "svote-helper sender lease 1"
    holder: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    host: Annotated[str, Field(max_length=256)]
    fence: Annotated[int, Field(ge=0, le=2**62)]
    beat: Annotated[int, Field(ge=0, le=2**62)]
    mark: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = Field(default_factory=lambda: token_hex(8))
    seconds: Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)]
    released: bool = False
    written: Annotated[float, Field(allow_inf_nan=False)]

    def to_bytes(self) -> bytes:
        """The object's content."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord:
        """What an object says.

        Raises:
            ValueError: it is no lease.
        """
        if len(content) > _LARGEST:
            raise ValueError(f"has {len(content)} bytes")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None


class LeaseObservation:
    """For how long the same version has been seen, by the one clock of who looks.

    No two hosts' clocks are ever compared: who holds the lease writes a new version long before its time is over. So a
    version that stayed for that whole time, from when it was first *seen*, is of a holder that has stopped before.
    Clocks must go about equally fast; none needs to tell the right time.
    """

    def __init__(self) -> None:
        self._tag = ""
        self._since = 0.0

    def looked(self, tag: str, now: float) -> None:
        """A version was seen.

        Args:
            tag: its tag.
            now: a monotonic time after the answer came.
        """
        if tag != self._tag:
            self._tag, self._since = tag, now

    def lapsed(self, record: LeaseRecord, own_seconds: float, now: float) -> bool:
        """Whether the version that was seen last is nobody's any more.

        Args:
            record: what that version says.
            own_seconds: for how long a lease of ours would hold; the longer of both is waited for.
            now: a monotonic time.
        """
        return record.released or now - self._since >= max(record.seconds, own_seconds)
