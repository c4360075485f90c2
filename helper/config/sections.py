"""Settings: one class per section, one field per key; the complete settings, and checks across sections.

`helper.toml.example` is generated from the descriptions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from itertools import zip_longest
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from helper.config.settings_file import ADMIN_DATABASE, DEFAULT_DATABASE, DEFAULT_HOST, DEFAULT_PORT, SOCKET_NAME
from helper.config.value_types import (
    BlankUrl,
    BucketLocation,
    BucketUrl,
    DatabaseUrl,
    FilePath,
    Host,
    HostName,
    LeaseStorage,
    NetworkText,
    OnionAddress,
    OptionalUrl,
    PinnedUrlText,
    Port,
    SchemaName,
    SocketPath,
    SocksAddress,
    StoreUrl,
    Token,
    Url,
)
from helper.core.text_forms import Network
from helper.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Role:
    """The tasks of a host.

    Every role follows the chain: its rounds, trees and confirmed reveals.

    Attributes:
        can_accept: admits shares from wallets.
        can_prove: proves due shares and stores the prepared messages.
        can_send: sends prepared messages and handles closed rounds; only one host does this at a time.
    """

    can_accept: bool
    can_prove: bool
    can_send: bool

    @property
    def can_process(self) -> bool:
        """Whether the host processes admitted shares."""
        return self.can_prove or self.can_send


ROLES: Final = {
    "all": Role(can_accept=True, can_prove=True, can_send=True),
    "api": Role(can_accept=True, can_prove=False, can_send=False),
    "prover": Role(can_accept=False, can_prove=True, can_send=False),
    "sender": Role(can_accept=False, can_prove=False, can_send=True),
}
"""Roles by their name in `[helper] role` and `serve --role`."""


class Section(BaseModel):
    """A section of the settings file; immutable, rejects unknown keys and other types. TOML has lists, not tuples."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class HelperSection(Section):
    """The share service."""

    disable: bool = Field(
        False, description="Disable the share service; the gateway, the admin API and the web page keep running."
    )
    role: Literal["all", "api", "prover", "sender"] = Field(
        "all",
        description="Role of this host: api accepts shares, prover creates proofs, sender broadcasts reveals and "
        "handles closed rounds, all combines the three. Roles other than all require [store] url.",
    )
    host: Host = Field(DEFAULT_HOST, description="Listen address of the wallet API.")
    port: Port = Field(DEFAULT_PORT, description="Port of the wallet API; 0 selects a free port.")
    api_token: Token = Field(
        "",
        description="Token that wallets must send in X-Helper-Token. Public wallets send none, so leave this empty "
        "unless your deployment is private.",
    )
    api_token_file: str = Field(
        "",
        description="File whose first line is the token; an alternative to api_token. A systemd credential named "
        "api-token is used automatically.",
    )
    expose_queue_status: bool = Field(
        False,
        description="Serve the share counts of each round at /shielded-vote/v1/queue-status. They are exact: without "
        "api_token, anyone can read when shares arrive and when they are due.",
    )
    expose_queue_summary: bool = Field(
        True,
        description="Serve the share counts of a round at /shielded-vote/v1/queue-summary/{round}, without a token, "
        "for the page that monitors queues: hourly, in hundreds, and without due times of waiting shares.",
    )
    trusted_proxies: tuple[NetworkText, ...] = Field(
        (),
        strict=False,
        description="Addresses or networks of your reverse proxies. Their idle connections are closed last when the "
        "connection limit is reached, and their clients may read slowly. Registrations of validators through them are "
        "limited by the network of the address that the proxy adds to X-Forwarded-For. No other request uses it, and "
        "no address is stored.",
    )
    db_path: FilePath = Field(
        DEFAULT_DATABASE,
        description="Path of the queue database. A relative path is relative to the working directory.",
    )
    chain_api_port: Port = Field(
        0,
        description="REST port of a node on this machine; 0 means none. It is tried before [chain] endpoints.",
    )
    max_concurrent_proofs: int = Field(
        0, ge=0, le=1024, description="Maximum number of concurrent proofs; 0 means one per processor core."
    )
    backlog_after_seconds: float = Field(
        2,
        ge=0,
        le=3600,
        description="Seconds from which due shares are overdue. With a backlog of overdue shares, the helper proves "
        "them in an order of its own, not oldest first, so that several helpers do not prove the same shares; rounds "
        "take turns.",
    )
    backlog_min_shares: int = Field(
        0,
        ge=0,
        le=10_000,
        description="A backlog has more due shares than this; 0 means 8 for each concurrent proof.",
    )
    sentry_dsn: OptionalUrl = Field("", description="Report unexpected errors to this Sentry project.")
    max_attempts: int = Field(
        5,
        ge=1,
        le=50,
        description="Number of quick retries after a failure (after 2, 4, 8 s and so on, at most 64 s). Later "
        "retries follow after 1 minute, 10 minutes, 1 hour and 6 hours, until the round ends. Outages do not spend "
        "attempts.",
    )
    purge_after_hours: float = Field(
        24,
        ge=0,
        le=24 * 365,
        description="Hours after the chain has closed a round until all its data is deleted.",
    )


class ServerSection(Section):
    """The server of the wallet API, and the onion service in front of it. See docs/operations.md."""

    unix_socket: SocketPath = Field(
        "",
        description="Path of a unix socket on which the wallet API listens instead of [helper] host and port, for a "
        "Tor onion service: no TCP port is open. Its user and group can connect (mode 0660). A reverse proxy must use "
        "TCP, because trusted_proxies does not apply to this socket: tor, unlike a proxy, sets no time limits for its "
        "clients.",
    )
    onion_address: OnionAddress = Field(
        "",
        description="Address of the onion service (the hostname file in tor's HiddenServiceDir). "
        "`svote-helper doctor` checks through Tor that it is published and reaches this helper.",
    )
    tor_socks: SocksAddress = Field(
        "unix:/run/tor/socks",
        description="SOCKS port of tor for this check: unix:PATH or HOST:PORT.",
    )
    pending_status: Literal[200, 202] = Field(
        202,
        description="HTTP status of share-status for a share that is not confirmed yet: 202, or 200 as the original "
        "helper responds. zkool takes every 200 for confirmed.",
    )
    trace_requests: bool = Field(
        False,
        description="Answer requests that have an X-Vote-Request-ID with this id and the times of the request, for the "
        "developers of wallets on a test network. Nothing is stored or logged.",
    )


class StoreSection(Section):
    """The encryption of the queue, and a PostgreSQL database shared by several hosts, instead of a file."""

    url: DatabaseUrl = Field(
        "",
        description="Database URL such as postgresql://user@host/database. If empty, the queue is stored in [helper] "
        "db_path; otherwise the directory of db_path contains only the control socket and the registrations. Over a "
        "network, TLS with verified certificates is required and is the default. List a primary and its standbys as "
        "hosts separated by commas.",
    )
    url_file: str = Field(
        "",
        description="File whose first line is the database URL. Use it instead of url if the URL contains a password. "
        "A systemd credential named store-url is used automatically.",
    )
    key_file: str = Field(
        "",
        description="File with the keys that encrypt witnesses and messages before they are stored: 64 hex digits per "
        "line, readable only by its owner. Required with url, where it is the same on every host; optional with a "
        "database file, where a new file is then encrypted, and an existing one by `svote-helper db encrypt`. New "
        "shares use the first key. To rotate, add the new key as the second line on all hosts, then make it the first. "
        "If you lose the keys, you lose the unconfirmed shares. A systemd credential named store-key is used "
        "automatically.",
    )
    host: HostName = Field("", description="Name of this host in the cluster; empty means the machine's host name.")
    schema_name: SchemaName = Field("svote_helper", description="PostgreSQL schema of the tables.")
    lease_seconds: float = Field(
        10,
        ge=1,
        le=600,
        description="Seconds without a heartbeat after which a host loses its claimed shares and the sender lease.",
    )


class SenderSection(Section):
    """The sender lease, which ensures that only one host broadcasts reveals."""

    lease: LeaseStorage = Field(
        "auto",
        description="Where the lease is stored: postgres is the queue database; auto means postgres if [store] url is "
        "set, otherwise no lease. An object such as s3://bucket/sender.json (see [s3]) works with both PostgreSQL and "
        "a database file. With a file, it prevents a copy of the queue on another host from sending at the same time.",
    )
    standby: bool = Field(
        False,
        description="Wait while another host holds the lease, and take over when it fails. If false, a second sender "
        "exits at startup.",
    )

    @property
    def lease_location(self) -> BucketLocation | None:
        """The object that stores the lease, or None."""
        return BucketLocation.parse(self.lease) if self.lease.startswith("s3:") else None


class ChainSection(Section):
    """The vote chain's nodes."""

    endpoints: tuple[Url, ...] = Field(
        (),
        strict=False,
        description="REST URLs of nodes, in order of preference. Required. With two, one that reports "
        "wrong data cannot make the helper confirm, delete or finally refuse a share, and one that is down only delays "
        "confirmations; with three, it delays nothing.",
    )
    rpc: tuple[BlankUrl, ...] = Field(
        (),
        strict=False,
        description='CometBFT RPC URLs of the same nodes in the same order; "" for a node without RPC. Reduces the '
        "number of requests, and is required for a node without transaction index: otherwise it confirms no reveals.",
    )
    agree: int = Field(
        2,
        ge=1,
        le=2,
        description="Number of nodes that must report a fact alike before the helper confirms, deletes or finally "
        "refuses a share. With 1, one node's report is enough, also a wrong one: use it only while all other nodes are "
        "down for long.",
    )
    chain_id: str = Field("", description="Expected chain id. If empty, the id that enough nodes report is used.")
    poll_seconds: float = Field(1.0, ge=0.05, le=60, description="Seconds between checks for a new block.")
    stale_seconds: float = Field(
        90,
        gt=0,
        le=3600,
        description="Age of a node's latest block, in seconds, from which the node is considered stale and not used.",
    )
    clock_skew_seconds: float = Field(
        120,
        gt=0,
        le=120,
        description="Maximum time in seconds by which this machine's clock may be behind the chain's; dispatch pauses "
        "above it. The limit in the other direction is stale_seconds.",
    )
    timeout_seconds: float = Field(
        10, gt=0, le=60, description="Timeout of a request to a node, in seconds. A reveal gets at least 75."
    )

    @field_validator("rpc")
    @classmethod
    def _rpc_belongs_to_endpoints(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # Missing if invalid, which is reported separately.
        endpoints = info.data.get("endpoints")
        if endpoints is not None and len(value) > len(endpoints):
            raise ValueError(f"has {len(value)} entries, more than endpoints ({len(endpoints)})")
        return value


class ProverSection(Section):
    """The prover processes."""

    circuit: Literal["auto", "k10", "k11"] = Field(
        "auto",
        description="Circuit generation of the chain: k10 for chain version 1.3.0 and later, k11 for earlier versions; "
        "auto detects it.",
    )
    timeout_seconds: float = Field(
        0,
        ge=0,
        le=86400,
        description="Timeout of a proof in seconds; 0 means 50 times the duration of the self-test, at least 60.",
    )
    nice: int = Field(10, ge=0, le=19, description="Niceness of prover processes (0-19).")
    require_verified: bool = Field(
        False,
        description="Start provers only if their native module matches a signed release. Requires "
        "release_manifest and allowed_signers.",
    )
    release_manifest: str = Field(
        "",
        description="Path of the release.json of the installed release, next to its SHA256SUMS and SHA256SUMS.sig.",
    )
    allowed_signers: str = Field(
        "",
        description="Path of a file with the keys that may sign a release (ssh-keygen(1), ALLOWED SIGNERS). Obtain "
        "it independently of the release.",
    )


class AdminSection(Section):
    """The admin API for validator onboarding."""

    disable: bool = Field(False, description="Do not serve /api.")
    config_url: PinnedUrlText = Field(
        "",
        description="URL of the published voting configuration: of its static document, which names the signing keys "
        "and the mirrors, or of the dynamic one. With ?checksum=sha256:HEX, as in wallets, only a document with this "
        "SHA-256 is used.",
    )
    public_url: BlankUrl = Field(
        "",
        description="Base URL at which wallets reach this helper. `svote-helper doctor` checks that it serves what "
        "wallets and the operators' tools request, and that the voting configuration lists it.",
    )
    db_path: str = Field(
        "",
        description="Path of the registration database; empty means "
        f"{ADMIN_DATABASE} in the directory of the queue database.",
    )
    mode: Literal["production", "development"] = Field(
        "production",
        description="production accepts only public https URLs for validators; development accepts any URL.",
    )


class UiSection(Section):
    """The web page."""

    enable: bool = Field(False, description="Serve the page.")
    dist_path: str = Field("", description="Directory of the built page, read at start; empty means the bundled page.")
    dev_pir_controls: bool = Field(False, description="Show the controls of a PIR test service on the page.")
    precomputed_base_url: OptionalUrl = Field("", description="Base URL of the page's precomputed data.")
    chain_rest: OptionalUrl = Field(
        "",
        description="Public REST URL of the chain for browser wallets. If empty, the first of [chain] endpoints that "
        "is a public https URL without path, query or credentials is used.",
    )
    chain_rpc: OptionalUrl = Field(
        "",
        description="Public RPC URL of the chain for browser wallets. If empty, the first such URL in [chain] rpc is "
        "used.",
    )
    chain_denom: str = Field("usvote", description="The chain's staking denomination, for browser wallets.")


class OperatorSection(Section):
    """The operator API."""

    token: Token = Field(
        "",
        description="Bearer token of the event stream /shielded-vote/v1/events, which the queue page reads; empty "
        "disables it. The rest of the operator API is only on the control socket.",
    )
    token_file: str = Field(
        "",
        description="File whose first line is the token; an alternative to token. A systemd credential named "
        "operator-token is used automatically.",
    )
    socket: str = Field(
        "", description="Path of the control socket; empty means helper.sock in the directory of the queue database."
    )


class MetricsSection(Section):
    """Prometheus metrics."""

    enable: bool = Field(False, description="Serve /metrics.")
    host: Host = Field("127.0.0.1", description="Listen address of the metrics server.")
    port: Port = Field(9464, description="Port of the metrics server; 0 selects a free port.")


class GatewaySection(Section):
    """Chain gateway: serves the chain's API and the helper's under one base URL."""

    enable: bool = Field(
        True,
        description="Forward chain requests that arrive here to the nodes. If your proxy sends them to a node itself, "
        "none arrives, and this has no effect. With false, wallets at a base URL without such a proxy cannot vote.",
    )


class S3Section(Section):
    """Access to S3-compatible object stores. [sender] lease and [archive] place name the objects."""

    endpoint: StoreUrl = Field(
        "",
        description="URL of the object store; must be https unless the store is on this machine. Empty means Amazon S3 "
        "in the region.",
    )
    region: Host = Field("us-east-1", description="Region for request signatures.")
    virtual_host: bool = Field(
        False,
        description="Use virtual-hosted-style requests (bucket name in the host name instead of the path).",
    )
    credentials_file: str = Field(
        "",
        description="Credentials file in AWS format ([default], aws_access_key_id, aws_secret_access_key). A systemd "
        "credential named s3-credentials is used automatically. Without a file, the environment (AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY) or the instance role is used.",
    )
    timeout_seconds: float = Field(10, gt=0, le=60, description="Timeout of a request to the object store, in seconds.")


class ArchiveSection(Section):
    """Archive of all reveals of the chain, and of the data for audits, in an object store."""

    place: BucketUrl = Field(
        "",
        description="Location of the archive, such as s3://bucket/path; empty disables it.",
    )
    check_seconds: float = Field(60, ge=1, le=3600, description="Seconds between checks for new blocks.")
    audit: bool = Field(
        True, description="Audit each finished round from the archive, at low priority; the page shows the result."
    )


class LogSection(Section):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum log level.")
    format: Literal["auto", "json", "pretty"] = Field(
        "auto",
        description="Log format: json (one object per line), pretty, or auto (pretty on a terminal, otherwise json).",
    )


LEASE_SECONDS_RANGE: Final = (5, 300)
"""Shortest and longest lease in seconds: long enough for the writes, short enough for a takeover."""


class Config(Section):
    """All settings, validated. Created by `helper.config.loader.load`."""

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
        """Raise ConfigError without a node. A default address would trust any process that listens there."""
        if not self.chain_nodes:
            raise ConfigError(
                "no node is configured: [chain] endpoints is empty",
                advice="Set it to the REST URLs of at least two nodes of the vote chain. A new file with them: "
                "`svote-helper config init --endpoint http://127.0.0.1:1317 --endpoint https://node.example.org`.",
            )

    @property
    def chain_endpoints(self) -> tuple[str, ...]:
        """The nodes' REST URLs."""
        return tuple(rest for rest, _ in self.chain_nodes)

    @property
    def trusted_networks(self) -> tuple[Network, ...]:
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


SECTIONS: Final[Mapping[str, Mapping[str, FieldInfo]]] = {
    name: type(section).model_fields for name, section in Config()
}
"""Model fields of all settings by section and key."""
SETTINGS: Final[Mapping[str, FieldInfo]] = {
    f"{section}.{key}": field for section, fields in SECTIONS.items() for key, field in fields.items()
}
"""Model fields of all settings by `section.key`."""


def find_contradictions(config: Config) -> list[tuple[str, str]]:
    """Find settings that are individually valid but contradict each other.

    Returns:
        `section.key` of a setting, and the problem.
    """
    problems = []
    if config.store.url and not config.store.key_file:
        problems.append(("store.url", "requires [store] key_file: secrets in a shared database must be encrypted"))
    if not config.store.url and config.helper.role != "all":
        problems.append(("helper.role", "requires [store] url: with a database file, the only role is all"))
    if not config.store.url and config.sender.lease == "postgres":
        problems.append(("sender.lease", "requires [store] url"))
    for key in ("release_manifest", "allowed_signers"):
        if config.prover.require_verified and not getattr(config.prover, key):
            problems.append(("prover.require_verified", f"requires [prover] {key}"))
    if config.sender.standby and not config.store.url and config.sender.lease_location is None:
        problems.append(("sender.standby", "requires [store] url or a lease: there is no other host to wait for"))
    if config.server.unix_socket and Path(config.server.unix_socket) == config.socket_path.absolute():
        problems.append(("server.unix_socket", "must differ from the control socket, which is only for operators"))
    shortest, longest = LEASE_SECONDS_RANGE
    if config.sender.lease_location is not None and not shortest <= config.store.lease_seconds <= longest:
        problems.append(("store.lease_seconds", f"must be {shortest} to {longest} with a lease in an object store"))
    return problems
