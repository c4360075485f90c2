"""Composition root: service wiring, listeners, start-up, health and readiness."""
