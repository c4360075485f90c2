"""Process-level services: supervisor, systemd, hardening, privileges, HTTP clients."""
