"""Names of environment variables that several packages read."""

from typing import Final

CREDENTIALS_DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
"""Directory of the credentials that a service manager passes (systemd.exec(5), LoadCredential)."""
