"""What can be set: one class a section, one field a key. Descriptions are the example file's comments."""

from __future__ import annotations

import os
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from helper.config.files import ADMIN_DATABASE, DEFAULT_DATABASE, DEFAULT_HOST, DEFAULT_PORT, SOCKET_NAME
from helper.objects.base import Place

DEV_CHAIN_REST: Final = "http://127.0.0.1:11317"
DEV_CHAIN_RPC: Final = "http://127.0.0.1:36657"
"""Where the dev chain listens: the endpoints of a helper that is told of none."""
LEASE_SECONDS: Final = (5, 300)
"""The shortest and the longest lease in an object store: writes must fit into it, and it must not last for ever."""


def _url(value: str) -> str:
    """An http(s) address of a server, without a query; a slash at the end is dropped."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"is not an address: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError("must be an address like http://127.0.0.1:1317")
    if parts.query or parts.fragment:
        raise ValueError("must be an address without a query")
    return value.rstrip("/")


def _url_or_blank(value: str) -> str:
    return value if value == "" else _url(value)


def _url_or_nothing(value: str) -> str:
    return value if value == "" else _url_with_query(value)


def _url_with_query(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be empty or an http address")
    return value


def _network(value: str) -> str:
    try:
        ip_network(value)
    except ValueError as error:
        raise ValueError(f"must be an address or a network like 10.0.0.0/8: {error}") from None
    return value


def _header_token(value: str) -> str:
    """A token must be able to stand in a header."""
    if value != value.strip() or not value.isprintable():
        raise ValueError("must not begin or end with a space or hold control characters")
    return value


def _nonblank(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise ValueError("must not be empty")
    return value


def _database(value: str) -> str:
    """Where a PostgreSQL database is; the store reads it further."""
    if value and not value.startswith(("postgresql://", "postgres://")):
        raise ValueError("must be empty or an address like postgresql://user@host/database")
    return value


def _schema(value: str) -> str:
    """A name of a PostgreSQL schema that needs no quotes."""
    if not (value.isidentifier() and value.isascii() and value == value.lower() and len(value) < 64):
        raise ValueError("must be up to 63 lower-case letters, digits and _, and begin with no digit")
    return value


def _host_name(value: str) -> str:
    """How a host is called among others; the database shows it as the name of its connections."""
    if not value.isprintable() or len(value.encode()) > 63:
        raise ValueError("must be up to 63 characters that can be printed")
    return value


def _store_url(value: str) -> str:
    """A store's address: over TLS, or on this machine. A session's token goes with every request."""
    if value == "":
        return value
    parts = urlsplit(_url(value))
    if parts.scheme != "https" and not _is_here(parts.hostname or ""):
        raise ValueError("must be https, or on this machine (127.0.0.1, ::1, localhost)")
    return value.rstrip("/")


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _place_or_nothing(value: str) -> str:
    return value if value == "" else str(Place.parse(value))


def _lease(value: str) -> str:
    """Where hosts agree on who sends."""
    if value in {"auto", "postgres"}:
        return value
    if not value.startswith("s3:"):
        raise ValueError("must be auto, postgres, or an object like s3://bucket/sender.json")
    place = Place.parse(value)
    if not place.path:
        raise ValueError(f"must name an object, like {place}/sender.json")
    return str(place)


Url = Annotated[str, Field(strict=True), AfterValidator(_url)]
Schema = Annotated[str, Field(strict=True), AfterValidator(_schema)]
HostName = Annotated[str, Field(strict=True), AfterValidator(_host_name)]
Database = Annotated[str, Field(strict=True), AfterValidator(_database)]
BlankUrl = Annotated[str, Field(strict=True), AfterValidator(_url_or_blank)]
OptionalUrl = Annotated[str, Field(strict=True), AfterValidator(_url_or_nothing)]
StoreUrl = Annotated[str, Field(strict=True), AfterValidator(_store_url)]
BucketPlace = Annotated[str, Field(strict=True), AfterValidator(_place_or_nothing)]
LeasePlace = Annotated[str, Field(strict=True), AfterValidator(_lease)]
NetworkText = Annotated[str, Field(strict=True), AfterValidator(_network)]
Token = Annotated[str, Field(strict=True), AfterValidator(_header_token)]
Text = Annotated[str, Field(strict=True)]
FilePath = Annotated[str, Field(strict=True), AfterValidator(_nonblank)]
Host = Annotated[str, Field(strict=True), AfterValidator(_nonblank)]
Switch = Annotated[bool, Field(strict=True)]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Section(BaseModel):
    """One table of the file; frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HelperSection(Section):
    """The service that wallets post their shares to."""

    disable: Switch = Field(False, description="Do not take or reveal shares (the other parts still run).")
    role: Literal["all", "api", "prover", "sender"] = Field(
        "all",
        description="What this host does for the queue: api takes shares, prover makes proofs, sender sends them and "
        "looks after closed rounds. All but all need a [store] url.",
    )
    host: Host = Field(DEFAULT_HOST, description="Address that the wallet API listens on.")
    port: Port = Field(DEFAULT_PORT, description="Port of the wallet API; 0 takes a free one.")
    api_token: Token = Field(
        "",
        description="Wallets must send this in X-Helper-Token. Public wallets send none: "
        "leave it empty unless your set-up is closed.",
    )
    api_token_file: Text = Field(
        "",
        description="A file whose first line is that token, instead of api_token; one of your service manager's "
        "credentials that is called api-token is found without being named.",
    )
    expose_queue_status: Switch = Field(
        False, description="Serve the counts of every round at /shielded-vote/v1/queue-status."
    )
    refused_burst: Whole = Field(
        800,
        ge=1,
        le=10**9,
        description="Requests that one client may have refused (400, 401, 404 and the like) at once; then it is told "
        "429 for a while. Good requests cost nothing.",
    )
    refused_per_second: Number = Field(50, ge=0.01, le=10**9, description="How many of them come back each second.")
    trusted_proxies: tuple[NetworkText, ...] = Field(
        (),
        description="Addresses or networks of your own reverse proxies. From them, and from nobody else, the client's "
        "address is taken from X-Forwarded-For or Forwarded. It is kept in memory, for the limit alone.",
    )
    db_path: FilePath = Field(
        DEFAULT_DATABASE,
        description="The database with the waiting shares; relative to the working directory.",
    )
    chain_api_port: Port = Field(
        0,
        description="REST port of a node on this machine, 0 for none; it comes before [chain] endpoints.",
    )
    max_concurrent_proofs: Whole = Field(
        0, ge=0, le=1024, description="How many proofs are made at once; 0 is one a processor core."
    )
    sentry_dsn: OptionalUrl = Field("", description="Report unexpected errors to this Sentry project.")
    max_attempts: Whole = Field(
        5, ge=1, le=50, description="After how many failed attempts a share is given up. Outages spend none."
    )
    purge_after_hours: Number = Field(
        24,
        ge=0,
        le=24 * 365,
        description="Hours after the chain closed a round until all that is kept of it is erased.",
    )


class StoreSection(Section):
    """A PostgreSQL database that several hosts share, instead of a file. See docs/cluster.md."""

    url: Database = Field(
        "",
        description="Its address, like postgresql://user@host/database; empty keeps the queue in [helper] db_path. "
        "Over a network TLS with verified certificates is required, and taken where nothing is said. The directory of "
        "db_path then holds the control socket and the registrations only.",
    )
    url_file: Text = Field(
        "",
        description="A file whose first line is that address, instead of url, as it may hold a password; one of your "
        "service manager's credentials that is called store-url is found without being named.",
    )
    key_file: Text = Field(
        "",
        description="A file with the keys that witnesses are sealed with before they go there, 64 hex digits a line, "
        "the same on every host: new shares use the first. Only its owner may read it.",
    )
    host: HostName = Field("", description="This host's name among the others; empty is the machine's.")
    schema_name: Schema = Field("svote_helper", description="The schema of the tables.")
    lease_seconds: Number = Field(
        10,
        ge=1,
        le=600,
        description="A host that is not heard of for so long loses what it has in hand, and the right to send.",
    )


class SenderSection(Section):
    """Which of several hosts sends reveals to the chain: one does."""

    lease: LeasePlace = Field(
        "auto",
        description="Where the hosts agree on it: postgres is the queue's own database; auto is that where [store] url "
        "is set, and nothing where the queue is a file. An object like s3://bucket/sender.json, reached as [s3] says, "
        "does for both: with a file it keeps a copy of the queue on another host from sending beside this one.",
    )
    standby: Switch = Field(
        False,
        description="Wait while another host sends, and take over when it is gone. Without it a second sender refuses "
        "to run.",
    )

    @property
    def place(self) -> Place | None:
        """The object in a bucket that says who sends, None where none does."""
        return Place.parse(self.lease) if self.lease.startswith("s3:") else None


class ChainSection(Section):
    """The vote chain's nodes."""

    endpoints: tuple[Url, ...] = Field(
        (),
        description="REST addresses of nodes, best first. With two or more, one may fail or lie.",
    )
    rpc: tuple[BlankUrl, ...] = Field(
        (),
        description='CometBFT RPC addresses of the same nodes in the same order, "" for a node without; '
        "optional, spares requests.",
    )
    own: Switch = Field(
        False,
        description="All these nodes are your own: they may be asked about shares that are not public yet.",
    )
    chain_id: Text = Field("", description="Which chain this is; empty learns it from the first answer.")
    poll_seconds: Number = Field(1.0, ge=0.05, le=60, description="How often rounds and trees are brought up to date.")
    stale_seconds: Number = Field(
        90, gt=0, le=3600, description="A node whose newest block is older than this is not used."
    )
    clock_skew_seconds: Number = Field(
        120, gt=0, le=120, description="Dispatch pauses when our clock is further than this from the chain's."
    )
    timeout_seconds: Number = Field(10, gt=0, le=60, description="Longest time that a whole call to a node may take.")

    @field_validator("rpc")
    @classmethod
    def _rpc_belongs_to_endpoints(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # absent when it is wrong itself, which is told on its own
        endpoints = info.data.get("endpoints")
        if endpoints is not None and len(value) > len(endpoints):
            raise ValueError(f"has {len(value)} entries, more than endpoints ({len(endpoints)})")
        return value


class ProverSection(Section):
    """The processes that make the proofs."""

    circuit: Literal["auto", "k10", "k11"] = Field(
        "auto",
        description="Circuit generation of the chain: auto finds it out; k11 before v1.3.0, k10 since.",
    )
    timeout_seconds: Number = Field(
        0,
        ge=0,
        le=86400,
        description="A proof that takes longer is given up; 0 is max(60, 50 times the self-test).",
    )
    nice: Whole = Field(10, ge=0, le=19, description="How far the provers step back for other work of the machine.")


class AdminSection(Section):
    """The API through which validators join."""

    disable: Switch = Field(False, description="Do not serve /api.")
    config_url: OptionalUrl = Field("", description="Where the published voting configuration is fetched from.")
    db_path: Text = Field(
        "", description=f"The database with the registrations; empty is {ADMIN_DATABASE} beside the queue's database."
    )
    mode: Literal["production", "development"] = Field(
        "production",
        description="In production a validator's URL must be a public https address; in development it may be any.",
    )


class UiSection(Section):
    """The web page."""

    enable: Switch = Field(False, description="Serve the page.")
    dist_path: Text = Field("", description="Directory of the built page; empty takes the one that came along.")
    dev_pir_controls: Switch = Field(False, description="Let the page show the controls of a PIR test service.")
    precomputed_base_url: OptionalUrl = Field("", description="Where the page finds precomputed data.")
    chain_rest: OptionalUrl = Field(
        "", description="The chain's REST address for browser wallets; empty is the first of [chain] endpoints."
    )
    chain_rpc: OptionalUrl = Field(
        "", description="The chain's RPC address for browser wallets; empty is the first of [chain] rpc."
    )
    chain_denom: Text = Field("usvote", description="The chain's staking denomination, for browser wallets.")


class OperatorSection(Section):
    """What operators may see and do."""

    token: Token = Field(
        "", description="Opens the operators' part over HTTP, as a Bearer header; empty keeps it shut."
    )
    token_file: Text = Field(
        "",
        description="A file whose first line is that token, instead of token; one of your service manager's "
        "credentials that is called operator-token is found without being named.",
    )
    socket: Text = Field("", description="Control socket; empty is helper.sock beside the database.")


class MetricsSection(Section):
    """Figures for Prometheus."""

    enable: Switch = Field(False, description="Serve /metrics.")
    host: Host = Field("127.0.0.1", description="Address that it listens on.")
    port: Port = Field(9464, description="Its port; 0 takes a free one.")


class GatewaySection(Section):
    """One base URL for wallets: the chain's API and the helper's under one address."""

    enable: Switch = Field(False, description="Pass the wallets' requests for the chain on to its nodes.")


class S3Section(Section):
    """How object stores (S3 and what speaks like it) are reached; which are used stands where they are."""

    endpoint: StoreUrl = Field(
        "", description="Address of the store, https unless it is on this machine; empty is Amazon's for the region."
    )
    region: Host = Field("us-east-1", description="Region that requests are signed for.")
    virtual_host: Switch = Field(
        False, description="The bucket's name is in the host name of the endpoint, and not the first part of the path."
    )
    credentials_file: Text = Field(
        "",
        description="A credentials file of the usual form ([default], aws_access_key_id, aws_secret_access_key); one "
        "of your service manager's credentials that is called s3-credentials is found without being named. Without one "
        "the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or the machine's role is asked.",
    )
    timeout_seconds: Number = Field(10, gt=0, le=60, description="Longest time that a call to the store may take.")


class ArchiveSection(Section):
    """The proof bundles of all the chain's counted reveals, kept in an object store."""

    place: BucketPlace = Field(
        "",
        description="Where they go and are found, like s3://bucket/path; empty keeps no archive.",
    )
    check_seconds: Number = Field(60, ge=1, le=3600, description="How often to look for more blocks.")


class LogSection(Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least that is written.")
    format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="json is one object a line; auto is pretty on a terminal and json elsewhere."
    )


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
