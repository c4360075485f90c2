"""Ingest of posted shares: payload schema, validation and admission."""
