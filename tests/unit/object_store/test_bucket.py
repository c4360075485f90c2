"""Where something is kept, and the file with the keys to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helper.errors import ConfigError
from helper.object_store.bucket import BucketLocation
from helper.object_store.credentials import Keys, credentials_file, read_keys


@pytest.mark.parametrize(
    ("text", "bucket", "path"),
    [
        ("s3://votes", "votes", ""),
        ("s3://votes/", "votes", ""),
        ("s3://my.votes-1/a/b.c/", "my.votes-1", "a/b.c"),
    ],
)
def test_a_place_is_a_bucket_and_a_path(text: str, bucket: str, path: str) -> None:
    place = BucketLocation.parse(text)
    assert (place.bucket, place.path) == (bucket, path)
    assert str(place) == text.removesuffix("/")
    assert BucketLocation.parse(str(place)) == place


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
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be like s3://|invalid bucket name|invalid path"):
        BucketLocation.parse(text)


def test_keys_come_from_a_file_of_the_usual_form(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id = AKID\naws_secret_access_key = abc%def=\n"
        "[other]\naws_access_key_id = B\naws_secret_access_key = C\naws_session_token = D\n"
    )
    assert read_keys(file) == Keys("AKID", "abc%def=")
    assert read_keys(file, "other") == Keys("B", "C", "D")
    assert "abc" not in repr(read_keys(file))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no section"),
        ("[default]\naws_access_key_id = SECRET\n", "needs aws_access_key_id and"),
        ("SECRET = 1\n", "is not a credentials file"),
        (b"\xff\xfe", "is not a credentials file"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_keys_says_so_and_nothing_of_itself(
    tmp_path: Path, content: str | bytes | None, says: str
) -> None:
    file = tmp_path / "credentials"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(file)
    assert "SECRET" not in str(caught.value)


def test_the_settings_file_comes_first_then_the_service_managers_then_the_environments(tmp_path: Path) -> None:
    handed = tmp_path / "s3-credentials"
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path), "AWS_SHARED_CREDENTIALS_FILE": "/shared"}
    assert credentials_file("", env) == Path("/shared")
    handed.write_text("")
    assert credentials_file("", env) == handed
    assert credentials_file("named", env) == Path("named")
    assert credentials_file("", {}) is None
