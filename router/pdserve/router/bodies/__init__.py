"""Sizes of clients' messages: limits, counts before parsing, and the thread for large ones."""
