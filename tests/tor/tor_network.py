"""A private Tor network on loopback: directory authorities, relays and a client (`TestingTorNetwork`).

The options are those of Tor's own test networks (chutney): short voting intervals, every flag for every relay, and no
reachability tests. Such a network has its first consensus after about 15 s.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.process import find_free_port

TOR, TOR_GENCERT = "tor", "tor-gencert"
AUTHORITY_COUNT = 3
RELAY_COUNT = 4
"""Relays that are not authorities. A circuit to an onion service has up to four relays in addition to the guard."""
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05

TESTING_OPTIONS = """\
TestingTorNetwork 1
AssumeReachable 1
PathsNeededToBuildCircuits 0.25
V3AuthNIntervalsValid 2
Address 127.0.0.1
AddressDisableIPv6 1
ShutdownWaitLength 0
SafeLogging 0
DisableDebuggerAttachment 0
"""
AUTHORITY_OPTIONS = """\
AuthoritativeDirectory 1
V3AuthoritativeDirectory 1
ContactInfo test
TestingV3AuthInitialVotingInterval 5
TestingV3AuthInitialVoteDelay 2
TestingV3AuthInitialDistDelay 2
V3AuthVotingInterval 10
V3AuthVoteDelay 2
V3AuthDistDelay 2
TestingDirAuthVoteExit *
TestingDirAuthVoteGuard *
TestingDirAuthVoteHSDir *
TestingMinExitFlagThreshold 0
"""
RELAY_OPTIONS = "ExitPolicy reject *:*\nSocksPort 0\n"


class TorProcess:
    """One tor process.

    Args:
        defaults: file with options of lower priority, as with `--defaults-torrc`.
    """

    def __init__(self, directory: Path, name: str, options: str, defaults: Path) -> None:
        self.directory = directory / name
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.log = self.directory / "tor.log"
        self._torrc = self.directory / "torrc"
        self._torrc.write_text(options)
        self._defaults = defaults
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [
            *(TOR, "--defaults-torrc", str(self._defaults), "-f", str(self._torrc)),
            *("--DataDirectory", str(self.directory / "data"), "--Nickname", self.directory.name),
            *("--Log", "notice stdout", "--__OwningControllerProcess", str(os.getpid())),
        ]

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    async def stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return
            await asyncio.sleep(POLL_SECONDS)

    async def wait_until_bootstrapped(self) -> None:
        """Wait until the process can build circuits, according to its log. The caller limits the time."""
        while "Bootstrapped 100%" not in self.log.read_text(errors="replace"):
            assert self._process is not None
            assert self._process.poll() is None, f"{self.directory.name} ended:\n{self.log_tail()}"
            await asyncio.sleep(POLL_SECONDS)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class TorNetwork:
    """Authorities, relays and a client.

    Args:
        directory: directory of all processes; created. Paths in it must be short enough for unix sockets.

    Attributes:
        testing_defaults: options of every tor in this network, for `TorProcess(defaults=…)`.
        client_socks: SOCKS port of the client, as for `open_socks_stream`.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._directory = directory
        self.testing_defaults = directory / "defaults"
        self.client_socks = f"unix:{directory}/client/socks"
        self._processes: list[TorProcess] = []

    async def start(self, seconds: float) -> None:
        """Start all processes, and wait until the client can build circuits."""
        names = [f"authority{number}" for number in range(AUTHORITY_COUNT)]
        authorities = [_Authority(self._directory, name) for name in names]
        await asyncio.gather(*(asyncio.to_thread(authority.create_keys) for authority in authorities))
        directory_lines = "".join(authority.directory_line() for authority in authorities)
        self.testing_defaults.write_text(TESTING_OPTIONS + directory_lines)
        for authority in authorities:
            options = f"ORPort 127.0.0.1:{authority.or_port}\nDirPort 127.0.0.1:{authority.dir_port}\n"
            self._add(authority.name, options + AUTHORITY_OPTIONS + RELAY_OPTIONS)
        for number in range(RELAY_COUNT):
            self._add(f"relay{number}", f"ORPort 127.0.0.1:{find_free_port()}\n" + RELAY_OPTIONS)
        relays = self._processes.copy()
        client = self._add("client", f"SocksPort {self.client_socks} WorldWritable ExtendedErrors\n")
        async with asyncio.timeout(seconds):
            for process in relays:
                process.start()
            await self._wait_for_consensus(relays)
            # Started later: a client without a consensus requests one with increasing delays.
            client.start()
            await client.wait_until_bootstrapped()

    async def _wait_for_consensus(self, relays: Sequence[TorProcess]) -> None:
        """Wait until each authority has a consensus with all relays. The caller limits the time."""
        for authority in relays[:AUTHORITY_COUNT]:
            consensus = authority.directory / "data" / "cached-microdesc-consensus"
            while not consensus.exists() or consensus.read_text().count("\nr ") < len(relays):
                await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    def describe(self) -> str:
        return "\n".join(f"{process.directory.name}:\n{process.log_tail()}" for process in self._processes)

    def _add(self, name: str, options: str) -> TorProcess:
        process = TorProcess(self._directory, name, options, self.testing_defaults)
        self._processes.append(process)
        return process


class _Authority:
    """Keys and ports of a directory authority."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.or_port, self.dir_port = find_free_port(), find_free_port()
        self._data = directory / name / "data"
        self._identity = self._fingerprint = ""

    def create_keys(self) -> None:
        keys = self._data / "keys"
        keys.mkdir(mode=0o700, parents=True)
        self._data.chmod(0o700)
        files = ("-i", "authority_identity_key", "-s", "authority_signing_key", "-c", "authority_certificate")
        _run([TOR_GENCERT, "--create-identity-key", *files, "-m", "12", "--passphrase-fd", "0"], keys, b"test\n")
        certificate = (keys / "authority_certificate").read_text()
        (self._identity,) = re.findall(r"^fingerprint ([0-9A-F]{40})$", certificate, re.MULTILINE)
        empty = keys / "empty"
        empty.touch()
        fingerprint = _run(
            [
                *(TOR, "--defaults-torrc", str(empty), "-f", str(empty), "--DataDirectory", str(self._data)),
                *("--Nickname", self.name, "--ORPort", "1", "--list-fingerprint", "--quiet"),
                *("--DirAuthority", f"placeholder 127.0.0.1:1 {'f' * 40}"),
            ],
            self._data,
        )
        self._fingerprint = "".join(fingerprint.split()[1:])
        assert re.fullmatch("[0-9A-F]{40}", self._fingerprint), fingerprint

    def directory_line(self) -> str:
        """Return the option that makes a tor trust the authority."""
        return (
            f"DirAuthority {self.name} orport={self.or_port} no-v2 v3ident={self._identity}"
            f" 127.0.0.1:{self.dir_port} {self._fingerprint}\n"
        )


def _run(command: Sequence[str], directory: Path, given: bytes = b"") -> str:
    completed = subprocess.run(command, cwd=directory, input=given, capture_output=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout.decode()
