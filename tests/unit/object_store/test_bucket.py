"""Bucket URLs, and the file with the credentials."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from helper.config.value_types import BucketLocation
from helper.errors import ConfigError
from helper.object_store import KEY_CACHE_SECONDS, read_credential
from tests.support.clock import FakeClock


@pytest.mark.parametrize(
    ("text", "bucket", "path"),
    [
        ("s3://votes", "votes", ""),
        ("s3://votes/", "votes", ""),
        ("s3://my.votes-1/a/b.c/", "my.votes-1", "a/b.c"),
    ],
)
def test_parse_location_returns_bucket_and_path(text: str, bucket: str, path: str) -> None:
    location = BucketLocation.parse(text)
    assert (location.bucket, location.path) == (bucket, path)
    assert str(location) == text.removesuffix("/")
    assert BucketLocation.parse(str(location)) == location


@pytest.mark.parametrize(
    "text",
    [
        "votes",
        "https://votes",
        "s3:/votes",
        "s3://",
        "s3://V",
        "s3://ab",
        "s3://votes//a",
        "s3://votes/a//b",
        "s3://votes/../b",
        "s3://votes/a b",
        "s3://key:secret@votes/a",
        "s3://votes?x=1",
        f"s3://{'v' * 64}",
        "s3://votes/ä",
    ],
)
def test_parse_location_invalid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must have the form s3://|invalid bucket name|invalid path"):
        BucketLocation.parse(text)


def test_credentials_are_read_from_aws_file(tmp_path: Path) -> None:
    file, clock = tmp_path / "credentials", FakeClock()
    file.write_text(
        "[default]\naws_access_key_id = AKID\naws_secret_access_key = abc%def=\n"
        "[other]\naws_access_key_id = B\naws_secret_access_key = C\naws_session_token = D\n"
    )
    until = datetime.fromtimestamp(clock.now() + KEY_CACHE_SECONDS, UTC)
    keys = {"access_key_id": "AKID", "secret_access_key": "abc%def=", "token": None, "expires_at": until}
    assert read_credential(file, "default", clock) == keys
    other = {"access_key_id": "B", "secret_access_key": "C", "token": "D", "expires_at": until}
    assert read_credential(file, "other", clock) == other


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "has no section"),
        ("[default]\naws_access_key_id = SECRET\n", "needs aws_access_key_id and"),
        ("SECRET = 1\n", "is not a credentials file"),
        (b"\xff\xfe", "is not a credentials file"),
        (None, "cannot be read"),
    ],
)
def test_credentials_file_without_keys_is_refused_without_quoting(
    tmp_path: Path, content: str | bytes | None, error: str
) -> None:
    file = tmp_path / "credentials"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=error) as caught:
        read_credential(file, "default", FakeClock())
    assert "SECRET" not in str(caught.value)
