"""Reveals due shares: dispatch, proof, broadcast, retries, and closing of rounds."""
