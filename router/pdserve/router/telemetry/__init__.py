"""Metrics and spans of requests."""
