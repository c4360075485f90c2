"""Trace parsing, on which `writes` and other campaigns rely."""

from __future__ import annotations

from tests.campaign.syscalls import kill_points, parse_trace

TRACE = r"""11    pwrite64(4<\x2f\x71\x2d\x77\x61\x6c>, "\x41\x42", 2, 0) = 2
11    fdatasync(4<\x2f\x71\x2d\x77\x61\x6c> <unfinished ...>
7     writev(9<\x73\x6f\x63\x6b\x65\x74\x3a\x5b\x31\x5d>, [{iov_base="\x6f"}, {iov_base="\x6b"}], 2) = 2
11    <... fdatasync resumed>)          = 0
12    pwrite64(4<\x2f\x71\x2d\x77\x61\x6c>, "\x43", 1, 0 <unfinished ...>
7     --- SIGTERM {si_signo=SIGTERM} ---
7     +++ exited with 0 +++
"""


def test_parse_trace_orders_calls_by_start_with_their_end() -> None:
    calls = [(call.name, call.pid, call.file, call.data, call.began_at, call.ended_at) for call in parse_trace(TRACE)]
    assert calls == [
        ("pwrite64", 11, "/q-wal", b"AB", 0, 0),
        ("fdatasync", 11, "/q-wal", b"", 1, 3),
        ("writev", 7, "socket:[1]", b"ok", 2, 2),
    ]


def test_kill_points_counts_writer_calls_per_name() -> None:
    assert kill_points(parse_trace(TRACE), "/q") == [("pwrite64", 1), ("fdatasync", 1)]
