"""Clients of an engine in this process or in one of its own."""
