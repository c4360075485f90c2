"""HTTP routes, one module for each group of endpoints."""
