"""Checks a round's published result from public data."""
