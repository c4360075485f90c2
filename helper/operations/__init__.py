"""Operator actions, queue export and import, proof bundles and their archive."""
