"""A credentials file of the form that the tools around S3 share: an INI file with a section for each profile."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from helper.core.environment import CREDENTIALS_DIRECTORY
from helper.errors import ConfigError

CREDENTIAL: Final = "s3-credentials"
"""The name under which a service manager may hand the file over (systemd.exec(5), LoadCredential)."""
SHARED: Final = "AWS_SHARED_CREDENTIALS_FILE"
PROFILE: Final = "AWS_PROFILE"


@dataclass(frozen=True, slots=True)
class Keys:
    """What requests are signed with. Never printed."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def credentials_file(named: str, env: Mapping[str, str]) -> Path | None:
    """The file to read: the one that the settings name, the service manager's, or the environment's.

    None for none: the client looks for keys itself (AWS_ACCESS_KEY_ID and its like, a web identity, a container's or
    machine's role).
    """
    if named:
        return Path(named)
    if folder := env.get(CREDENTIALS_DIRECTORY):
        handed = Path(folder, CREDENTIAL)
        if handed.exists():
            return handed
    return Path(env[SHARED]) if env.get(SHARED) else None


def read_keys(path: Path, profile: str = "default") -> Keys:
    """The keys in such a file.

    Raises:
        ConfigError: it can not be read or has none; names no content of it.
    """
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, configparser.Error):
        raise ConfigError(f"{path} is not a credentials file: [{profile}], then aws_access_key_id = …") from None
    if not parser.has_section(profile):
        raise ConfigError(f"{path} has no section [{profile}]")
    section = parser[profile]
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        raise ConfigError(f"{path}: [{profile}] needs aws_access_key_id and aws_secret_access_key")
    return Keys(access, secret, section.get("aws_session_token") or None)
