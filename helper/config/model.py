"""The complete settings, values derived from them, and checks across sections."""

from __future__ import annotations

import os
from ipaddress import IPv4Network, IPv6Network, ip_network
from itertools import zip_longest
from pathlib import Path
from typing import Final

from helper.config.discovery import ADMIN_DATABASE, SOCKET_NAME
from helper.config.sections import (
    AdminSection,
    ArchiveSection,
    ChainSection,
    GatewaySection,
    HelperSection,
    LogSection,
    MetricsSection,
    OperatorSection,
    ProverSection,
    S3Section,
    Section,
    SenderSection,
    ServerSection,
    StoreSection,
    UiSection,
)
from helper.errors import ConfigError

LEASE_SECONDS_RANGE: Final = (5, 300)
"""Shortest and longest lease in seconds: long enough for the writes, short enough for a takeover."""


class Config(Section):
    """All settings, validated. Created by `helper.config.load`."""

    helper: HelperSection = HelperSection()
    server: ServerSection = ServerSection()
    store: StoreSection = StoreSection()
    sender: SenderSection = SenderSection()
    chain: ChainSection = ChainSection()
    prover: ProverSection = ProverSection()
    admin: AdminSection = AdminSection()
    ui: UiSection = UiSection()
    operator: OperatorSection = OperatorSection()
    metrics: MetricsSection = MetricsSection()
    gateway: GatewaySection = GatewaySection()
    s3: S3Section = S3Section()
    archive: ArchiveSection = ArchiveSection()
    log: LogSection = LogSection()

    @property
    def proof_slots(self) -> int:
        """Number of concurrent proofs: as set, or one per core that this process may use."""
        return self.helper.max_concurrent_proofs or len(os.sched_getaffinity(0))

    @property
    def chain_nodes(self) -> tuple[tuple[str, str], ...]:
        """REST and RPC URL ("" if none) of each node, in order of preference and without duplicates.

        The node of `chain_api_port` is first and has no RPC URL. The n-th entry of `rpc` belongs to the n-th entry
        of `endpoints`.
        """
        nodes: dict[str, str] = {}
        if self.helper.chain_api_port:
            nodes[f"http://127.0.0.1:{self.helper.chain_api_port}"] = ""
        for rest, rpc in zip_longest(self.chain.endpoints, self.chain.rpc, fillvalue=""):
            nodes[rest] = nodes.get(rest) or rpc
        return tuple(nodes.items())

    def require_nodes(self) -> None:
        """Refuse settings without a node: whoever answers on a default address would decide about the votes.

        Raises:
            ConfigError: no node is configured.
        """
        if not self.chain_nodes:
            raise ConfigError(
                "no node is configured: [chain] endpoints is empty",
                advice="Set it to the REST URLs of at least two nodes of the vote chain, for example "
                '`endpoints = ["http://127.0.0.1:1317", "https://node.example.org"]`.',
            )

    @property
    def chain_endpoints(self) -> tuple[str, ...]:
        """The nodes' REST URLs."""
        return tuple(rest for rest, _ in self.chain_nodes)

    @property
    def chain_rpc(self) -> tuple[str, ...]:
        """The nodes' RPC URLs in the same order, "" if none."""
        return tuple(rpc for _, rpc in self.chain_nodes)

    @property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Networks of the operator's reverse proxies."""
        return tuple(map(ip_network, self.helper.trusted_proxies))

    @property
    def db_path(self) -> Path:
        """Path of the queue database. A relative path is relative to the working directory."""
        return Path(self.helper.db_path)

    @property
    def admin_db_path(self) -> Path:
        """Path of the registration database: as set, or in the directory of the queue database."""
        return Path(self.admin.db_path) if self.admin.db_path else self.db_path.parent / ADMIN_DATABASE

    @property
    def socket_path(self) -> Path:
        """Path of the control socket: as set, or in the directory of the queue database."""
        return Path(self.operator.socket) if self.operator.socket else self.db_path.parent / SOCKET_NAME


def find_contradictions(config: Config) -> list[tuple[str, str, str]]:
    """Find settings that are individually valid but contradict each other.

    Returns:
        Section and key of a setting, and the problem.
    """
    problems = []
    if config.store.url and not config.store.key_file:
        problems.append(("store", "url", "requires [store] key_file: secrets in a shared database must be encrypted"))
    if not config.store.url and config.helper.role != "all":
        problems.append(("helper", "role", "requires [store] url: with a database file, the only role is all"))
    if not config.store.url and config.sender.lease == "postgres":
        problems.append(("sender", "lease", "requires [store] url"))
    for key in ("release_manifest", "allowed_signers"):
        if config.prover.require_verified and not getattr(config.prover, key):
            problems.append(("prover", "require_verified", f"requires [prover] {key}"))
    if config.sender.standby and not config.store.url and config.sender.lease_location is None:
        problems.append(("sender", "standby", "requires [store] url or a lease: there is no other host to wait for"))
    if config.server.unix_socket and Path(config.server.unix_socket) == config.socket_path.absolute():
        problems.append(("server", "unix_socket", "must differ from the control socket, which is only for operators"))
    shortest, longest = LEASE_SECONDS_RANGE
    if config.sender.lease_location is not None and not shortest <= config.store.lease_seconds <= longest:
        problems.append(("store", "lease_seconds", f"must be {shortest} to {longest} with a lease in an object store"))
    return problems
