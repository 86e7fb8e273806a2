"""Metrics and spans of calls, and the HTTP server that shows them."""
