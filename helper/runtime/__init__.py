"""Process-level services: supervisor, systemd, hardening, maintenance, HTTP clients."""
