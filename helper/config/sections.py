"""What can be set: one class a section, one field a key. Descriptions are the example file's comments."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from helper.config.discovery import ADMIN_DATABASE, DEFAULT_DATABASE, DEFAULT_HOST, DEFAULT_PORT
from helper.config.value_types import (
    BlankUrl,
    BucketPlace,
    Database,
    FilePath,
    Host,
    HostName,
    IntegerField,
    LeasePlace,
    NetworkText,
    Number,
    OptionalUrl,
    Port,
    Schema,
    StoreUrl,
    Switch,
    Text,
    Token,
    Url,
)
from helper.object_store.bucket import BucketLocation, S3Settings


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
    refused_burst: IntegerField = Field(
        800,
        ge=1,
        le=10**9,
        description="Requests that one client may have refused (400, 401, 404 and the like) at once; then it is told "
        "429 for a while. Good requests cost nothing; a posted share above 16 KiB costs one for each further 16 KiB.",
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
    max_concurrent_proofs: IntegerField = Field(
        0, ge=0, le=1024, description="How many proofs are made at once; 0 is one a processor core."
    )
    sentry_dsn: OptionalUrl = Field("", description="Report unexpected errors to this Sentry project.")
    max_attempts: IntegerField = Field(
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
        "the same on every host: new shares use the first. A new one is put second on all of them before it is put "
        "first. Only its owner may read it.",
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
    def place(self) -> BucketLocation | None:
        """The object in a bucket that says who sends, None where none does."""
        return BucketLocation.parse(self.lease) if self.lease.startswith("s3:") else None


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
    poll_seconds: Number = Field(1.0, ge=0.05, le=60, description="The longest time between two looks for a new block.")
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
    nice: IntegerField = Field(
        10, ge=0, le=19, description="How far the provers step back for other work of the machine."
    )


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
        "",
        description="The chain's REST address that everybody is shown, for browser wallets; empty is the first of "
        "[chain] endpoints that is a public https address without path, query and credentials.",
    )
    chain_rpc: OptionalUrl = Field(
        "",
        description="The chain's RPC address that everybody is shown, for browser wallets; empty is the first such "
        "of [chain] rpc.",
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

    def to_settings(self) -> S3Settings:
        """The section as the object store client takes it."""
        return S3Settings(**self.model_dump())


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
