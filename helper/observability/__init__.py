"""Logging, statistics, metrics and status feed. Contains no data of a single share."""
