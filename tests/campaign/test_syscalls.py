"""What is read from a trace: the campaigns `writes` and others believe it."""

from __future__ import annotations

from tests.campaign.syscalls import parse, points

TRACE = r"""11    pwrite64(4<\x2f\x71\x2d\x77\x61\x6c>, "\x41\x42", 2, 0) = 2
11    fdatasync(4<\x2f\x71\x2d\x77\x61\x6c> <unfinished ...>
7     writev(9<\x73\x6f\x63\x6b\x65\x74\x3a\x5b\x31\x5d>, [{iov_base="\x6f"}, {iov_base="\x6b"}], 2) = 2
11    <... fdatasync resumed>)          = 0
12    pwrite64(4<\x2f\x71\x2d\x77\x61\x6c>, "\x43", 1, 0 <unfinished ...>
7     --- SIGTERM {si_signo=SIGTERM} ---
7     +++ exited with 0 +++
"""


def test_calls_come_by_their_beginning_and_know_their_end() -> None:
    told = [(call.name, call.pid, call.file, call.data, call.began, call.ended) for call in parse(TRACE)]
    assert told == [
        ("pwrite64", 11, "/q-wal", b"AB", 0, 0),
        ("fdatasync", 11, "/q-wal", b"", 1, 3),
        ("writev", 7, "socket:[1]", b"ok", 2, 2),
    ]


def test_moments_are_the_writers_calls_each_name_counted_for_itself() -> None:
    assert points(parse(TRACE), "/q") == [("pwrite64", 1), ("fdatasync", 1)]
