"""The kinds of values that settings have, and what is said of one that is not of its kind."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from helper.core.addresses import is_loopback
from helper.object_store.bucket import BucketLocation


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
    return host == "localhost" or is_loopback(host)


def _place_or_nothing(value: str) -> str:
    return value if value == "" else str(BucketLocation.parse(value))


def _lease(value: str) -> str:
    """Where hosts agree on who sends."""
    if value in {"auto", "postgres"}:
        return value
    if not value.startswith("s3:"):
        raise ValueError("must be auto, postgres, or an object like s3://bucket/sender.json")
    place = BucketLocation.parse(value)
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
IntegerField = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
