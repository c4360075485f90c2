"""Settings: one class per section, one field per key.

`helper.toml.example` is generated from the descriptions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from helper.config.discovery import ADMIN_DATABASE, DEFAULT_DATABASE, DEFAULT_HOST, DEFAULT_PORT
from helper.config.value_types import (
    BlankUrl,
    BucketUrl,
    DatabaseUrl,
    FilePath,
    Host,
    HostName,
    IntegerField,
    LeaseStorage,
    NetworkText,
    Number,
    OptionalUrl,
    Port,
    SchemaName,
    StoreUrl,
    Switch,
    Text,
    Token,
    Url,
)
from helper.object_store.bucket import BucketLocation, S3Settings


class Section(BaseModel):
    """A section of the settings file; immutable, rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HelperSection(Section):
    """The share service."""

    disable: Switch = Field(False, description="Do not accept or reveal shares; the admin API and the page still run.")
    role: Literal["all", "api", "prover", "sender"] = Field(
        "all",
        description="Role of this host: api accepts shares, prover makes proofs, sender sends them and handles closed "
        "rounds, all does everything. Roles other than all require [store] url.",
    )
    host: Host = Field(DEFAULT_HOST, description="Listen address of the wallet API.")
    port: Port = Field(DEFAULT_PORT, description="Port of the wallet API; 0 selects a free port.")
    api_token: Token = Field(
        "",
        description="Token that wallets must send in X-Helper-Token. Public wallets send none, so leave this empty "
        "unless your deployment is private.",
    )
    api_token_file: Text = Field(
        "",
        description="File whose first line is the token, instead of api_token. A systemd credential named api-token is "
        "used automatically.",
    )
    expose_queue_status: Switch = Field(
        False, description="Serve the share counts of each round at /shielded-vote/v1/queue-status."
    )
    refused_burst: IntegerField = Field(
        800,
        ge=1,
        le=10**9,
        description="Rate limit: refused requests (400, 401, 404 and similar) that one client may send in a burst "
        "before it gets 429. Valid requests are free; a share larger than 16 KiB costs one for each further 16 KiB.",
    )
    refused_per_second: Number = Field(
        50, ge=0.01, le=10**9, description="Refused requests that each client regains per second."
    )
    trusted_proxies: tuple[NetworkText, ...] = Field(
        (),
        description="Addresses or networks of your reverse proxies. Only for their requests, the client's address is "
        "read from X-Forwarded-For or Forwarded. It is held in memory for rate limits only.",
    )
    db_path: FilePath = Field(
        DEFAULT_DATABASE,
        description="Path of the queue's database, relative to the working directory.",
    )
    chain_api_port: Port = Field(
        0,
        description="REST port of a node on this machine; 0 means none. This node precedes [chain] endpoints.",
    )
    max_concurrent_proofs: IntegerField = Field(
        0, ge=0, le=1024, description="Maximum number of concurrent proofs; 0 means one per processor core."
    )
    sentry_dsn: OptionalUrl = Field("", description="Report unexpected errors to this Sentry project.")
    max_attempts: IntegerField = Field(
        5, ge=1, le=50, description="Failed attempts after which a share fails for good. Outages spend no attempts."
    )
    purge_after_hours: Number = Field(
        24,
        ge=0,
        le=24 * 365,
        description="Hours after the chain has closed a round until all its data is deleted.",
    )


class StoreSection(Section):
    """PostgreSQL database shared by several hosts, instead of a file. See docs/cluster.md."""

    url: DatabaseUrl = Field(
        "",
        description="Address such as postgresql://user@host/database; empty stores the queue in [helper] db_path. Over "
        "a network, TLS with verified certificates is required and is the default. The directory of db_path then "
        "contains only the control socket and the registrations.",
    )
    url_file: Text = Field(
        "",
        description="File whose first line is the address, instead of url, because it may contain a password. A "
        "systemd credential named store-url is used automatically.",
    )
    key_file: Text = Field(
        "",
        description="File with the keys that encrypt witnesses before they are stored: 64 hex digits per line, the "
        "same file on every host, readable only by its owner. New shares use the first key. To rotate, add the new key "
        "as the second line on all hosts, then make it the first.",
    )
    host: HostName = Field("", description="Name of this host in the cluster; empty means the machine's host name.")
    schema_name: SchemaName = Field("svote_helper", description="PostgreSQL schema of the tables.")
    lease_seconds: Number = Field(
        10,
        ge=1,
        le=600,
        description="Seconds without a heartbeat after which a host loses its claimed shares and the sender's lease.",
    )


class SenderSection(Section):
    """The sender's lease: only one of several hosts sends reveals to the chain."""

    lease: LeaseStorage = Field(
        "auto",
        description="Storage of the lease: postgres is the queue's database; auto means postgres if [store] url is "
        "set, and no lease if the queue is a file. An object such as s3://bucket/sender.json (see [s3]) works with "
        "both; with a file, it prevents a copy of the queue on another host from sending too.",
    )
    standby: Switch = Field(
        False,
        description="Wait while another host holds the lease, and take over when it fails. If false, a second sender "
        "refuses to start.",
    )

    @property
    def lease_location(self) -> BucketLocation | None:
        """The object that stores the lease, or None."""
        return BucketLocation.parse(self.lease) if self.lease.startswith("s3:") else None


class ChainSection(Section):
    """The vote chain's nodes."""

    endpoints: tuple[Url, ...] = Field(
        (),
        description="REST addresses of nodes in order of preference. With two or more, one may fail or be malicious.",
    )
    rpc: tuple[BlankUrl, ...] = Field(
        (),
        description='CometBFT RPC addresses of the same nodes in the same order, "" for a node without one. '
        "Optional; reduces the number of requests.",
    )
    chain_id: Text = Field("", description="Expected chain id; empty accepts the id of the first response.")
    poll_seconds: Number = Field(1.0, ge=0.05, le=60, description="Longest interval between checks for a new block.")
    stale_seconds: Number = Field(
        90, gt=0, le=3600, description="Age of the newest block from which a node is stale and not used."
    )
    clock_skew_seconds: Number = Field(
        120,
        gt=0,
        le=120,
        description="Largest difference between this machine's clock and the chain's; dispatch pauses beyond it.",
    )
    timeout_seconds: Number = Field(10, gt=0, le=60, description="Timeout of a request to a node.")

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
        description="Circuit generation of the chain: k10 since v1.3.0, k11 before; auto detects it.",
    )
    timeout_seconds: Number = Field(
        0,
        ge=0,
        le=86400,
        description="Timeout of a proof; 0 means max(60, 50 times the self-test).",
    )
    nice: IntegerField = Field(10, ge=0, le=19, description="Niceness of prover processes (0-19).")


class AdminSection(Section):
    """The admin API for validator onboarding."""

    disable: Switch = Field(False, description="Do not serve /api.")
    config_url: OptionalUrl = Field("", description="URL of the published voting configuration.")
    db_path: Text = Field(
        "",
        description="Path of the registrations' database; empty means "
        f"{ADMIN_DATABASE} in the directory of the queue's database.",
    )
    mode: Literal["production", "development"] = Field(
        "production",
        description="In production, a validator's URL must be a public https address; in development, any URL.",
    )


class UiSection(Section):
    """The web page."""

    enable: Switch = Field(False, description="Serve the page.")
    dist_path: Text = Field("", description="Directory of the built page; empty means the installed one.")
    dev_pir_controls: Switch = Field(False, description="Show the controls of a PIR test service on the page.")
    precomputed_base_url: OptionalUrl = Field("", description="Base URL of precomputed data for the page.")
    chain_rest: OptionalUrl = Field(
        "",
        description="Public REST address of the chain for browser wallets; empty means the first of [chain] endpoints "
        "that is a public https address without path, query and credentials.",
    )
    chain_rpc: OptionalUrl = Field(
        "",
        description="Public RPC address of the chain for browser wallets; empty means the first such address in "
        "[chain] rpc.",
    )
    chain_denom: Text = Field("usvote", description="The chain's staking denomination, for browser wallets.")


class OperatorSection(Section):
    """The operator API."""

    token: Token = Field(
        "", description="Bearer token of the operator API over HTTP; empty disables the operator API over HTTP."
    )
    token_file: Text = Field(
        "",
        description="File whose first line is the token, instead of token. A systemd credential named operator-token "
        "is used automatically.",
    )
    socket: Text = Field(
        "", description="Path of the control socket; empty means helper.sock in the directory of the queue's database."
    )


class MetricsSection(Section):
    """Prometheus metrics."""

    enable: Switch = Field(False, description="Serve /metrics.")
    host: Host = Field("127.0.0.1", description="Listen address of the metrics server.")
    port: Port = Field(9464, description="Port of the metrics server; 0 selects a free port.")


class GatewaySection(Section):
    """Chain gateway: serves the chain's API and the helper's under one base URL."""

    enable: Switch = Field(False, description="Forward the wallets' chain requests to the nodes.")


class S3Section(Section):
    """Access to S3-compatible object stores. The objects are set in [sender], [archive] and commands."""

    endpoint: StoreUrl = Field(
        "",
        description="Address of the object store, https unless it is on this machine; empty means Amazon S3 in the "
        "region.",
    )
    region: Host = Field("us-east-1", description="Region for request signatures.")
    virtual_host: Switch = Field(
        False, description="Put the bucket's name into the host name instead of the path (virtual-hosted style)."
    )
    credentials_file: Text = Field(
        "",
        description="Credentials file in AWS format ([default], aws_access_key_id, aws_secret_access_key). A systemd "
        "credential named s3-credentials is used automatically. Without a file, the environment (AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY) or the machine's role is used.",
    )
    timeout_seconds: Number = Field(10, gt=0, le=60, description="Timeout of a request to the object store.")

    def to_settings(self) -> S3Settings:
        """Return the settings of the object store client."""
        return S3Settings(**self.model_dump())


class ArchiveSection(Section):
    """Archive of the proof bundles of all reveals on the chain, in an object store."""

    place: BucketUrl = Field(
        "",
        description="Location of the archive, such as s3://bucket/path; empty disables it.",
    )
    check_seconds: Number = Field(60, ge=1, le=3600, description="Interval between checks for new blocks.")


class LogSection(Section):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="json writes one object per line; auto means pretty on a terminal and json elsewhere."
    )
