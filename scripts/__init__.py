"""Maintenance commands for contributors."""
