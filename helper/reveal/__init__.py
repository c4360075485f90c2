"""Reveals due shares: dispatch, proof, broadcast, retries and retention."""
