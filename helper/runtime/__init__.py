"""Process-level services: supervisor, systemd, hardening, maintenance."""
