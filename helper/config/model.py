"""All settings together, what follows from them, and what contradicts itself among them."""

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
    StoreSection,
    UiSection,
)

DEV_CHAIN_REST: Final = "http://127.0.0.1:11317"
DEV_CHAIN_RPC: Final = "http://127.0.0.1:36657"
"""Where the dev chain listens: the endpoints of a helper that is told of none."""
LEASE_SECONDS: Final = (5, 300)
"""The shortest and the longest lease in an object store: writes must fit into it, and it must not last for ever."""


class Config(Section):
    """All settings, checked. Get one from `helper.config.load`."""

    helper: HelperSection = HelperSection()
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
        """How many proofs are made at once: the setting, or one a core that this process may use."""
        return self.helper.max_concurrent_proofs or len(os.sched_getaffinity(0))

    @property
    def chain_nodes(self) -> tuple[tuple[str, str], ...]:
        """REST and RPC address ("" for none) of each node, best first, each node once.

        `chain_api_port` comes first and has no RPC of its own; the n-th `rpc` belongs to the n-th of
        `endpoints`; the dev chain where none is set.
        """
        nodes: dict[str, str] = {}
        if self.helper.chain_api_port:
            nodes[f"http://127.0.0.1:{self.helper.chain_api_port}"] = ""
        for rest, rpc in zip_longest(self.chain.endpoints, self.chain.rpc, fillvalue=""):
            nodes[rest] = nodes.get(rest) or rpc
        return tuple(nodes.items()) or ((DEV_CHAIN_REST, DEV_CHAIN_RPC),)

    @property
    def chain_endpoints(self) -> tuple[str, ...]:
        """The nodes' REST addresses."""
        return tuple(rest for rest, _ in self.chain_nodes)

    @property
    def chain_rpc(self) -> tuple[str, ...]:
        """The nodes' RPC addresses in the same order, "" for none."""
        return tuple(rpc for _, rpc in self.chain_nodes)

    @property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of the operator's own proxies."""
        return tuple(map(ip_network, self.helper.trusted_proxies))

    @property
    def db_path(self) -> Path:
        """The database; a relative one is relative to the working directory."""
        return Path(self.helper.db_path)

    @property
    def admin_db_path(self) -> Path:
        """The registrations' database: as set, or beside the queue's."""
        return Path(self.admin.db_path) if self.admin.db_path else self.db_path.parent / ADMIN_DATABASE

    @property
    def socket_path(self) -> Path:
        """The control socket: as set, or beside the database."""
        return Path(self.operator.socket) if self.operator.socket else self.db_path.parent / SOCKET_NAME


def contradictions(config: Config) -> list[tuple[str, str, str]]:
    """What is right in each setting and wrong in all together.

    Returns:
        Section and key of a setting that was given, and what is wrong with it.
    """
    found = []
    if config.store.url and not config.store.key_file:
        found.append(("store", "url", "needs [store] key_file: nothing secret goes to a shared database unsealed"))
    if not config.store.url and config.helper.role != "all":
        found.append(("helper", "role", "needs a [store] url: a file is one host's, and that does all"))
    if not config.store.url and config.sender.lease == "postgres":
        found.append(("sender", "lease", "needs a [store] url"))
    if config.sender.standby and not config.store.url and config.sender.place is None:
        found.append(("sender", "standby", "needs a [store] url or a lease: there is no other host to wait for"))
    shortest, longest = LEASE_SECONDS
    if config.sender.place is not None and not shortest <= config.store.lease_seconds <= longest:
        found.append(("store", "lease_seconds", f"must be {shortest} to {longest} with a lease in an object store"))
    return found
