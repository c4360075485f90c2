"""Searches the memory of a process for a network address in the forms that programs use."""

from __future__ import annotations

import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

CHUNK_BYTES = 16 << 20
OVERLAP_BYTES = 256
"""Bytes that two chunks share, so that no value is divided between them."""
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_KERNEL_REGIONS = {"[vvar]", "[vvar_vclock]", "[vsyscall]"}


def read_memory(pid: int) -> Iterator[bytes]:
    """Yield all readable memory of a process in overlapping chunks: code, heap, stacks and environment.

    Only root may read the memory of a hardened process. Regions that were unmapped in the meantime are omitted.
    """
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in _readable_regions(Path(f"/proc/{pid}/maps").read_text()):
            at = start
            while at < end:
                memory.seek(at)
                try:
                    chunk = memory.read(min(CHUNK_BYTES, end - at))
                except OSError:
                    break
                if not chunk:
                    break
                yield chunk
                at += len(chunk) - (OVERLAP_BYTES if len(chunk) == CHUNK_BYTES else 0)


def _readable_regions(maps: str) -> Iterator[tuple[int, int]]:
    for start, end, permissions, name in _REGION.findall(maps):
        if "r" in permissions and name not in _KERNEL_REGIONS:
            yield int(start, 16), int(end, 16)


class AddressSearch:
    """Counts the occurrences of an IPv4 address by form.

    The forms are `text`, `sockaddr` (struct sockaddr_in), `bytes` (a Python bytes object), `int` (a Python int, as in
    `IPv4Address`) and `other`: only the four bytes. Random data has these by chance, about once in 4 GB.
    """

    def __init__(self, address: str) -> None:
        self._text = address.encode()
        self._packed = IPv4Address(address).packed
        number = int(IPv4Address(address))
        self._digits = struct.pack("<II", number & (1 << 30) - 1, number >> 30)

    def count(self, data: bytes) -> Counter[str]:
        found = Counter({"text": data.count(self._text), "int": data.count(self._digits)})
        at = data.find(self._packed)
        while at >= 0:
            found[self._classify(data, at)] += 1
            at = data.find(self._packed, at + 1)
        return +found

    def _classify(self, data: bytes, at: int) -> str:
        if at >= 4 and data[at - 4 : at - 2] == struct.pack("=H", socket.AF_INET):
            return "sockaddr"
        # size (8 bytes), hash (8 bytes), the bytes, a null byte
        if at >= 16 and data[at - 16 : at - 8] == struct.pack("=q", 4) and data[at + 4 : at + 5] == b"\0":
            return "bytes"
        return "other"

    def count_in_process(self, pid: int) -> Counter[str]:
        return sum((self.count(chunk) for chunk in read_memory(pid)), Counter[str]())


def is_in_process(pid: int, value: bytes) -> bool:
    return any(value in chunk for chunk in read_memory(pid))
