"""Statuses with which the command ends."""

EXIT_FAILED = 1
"""A service or a request failed."""
EXIT_CONFIG = 2
"""Settings, a model, a port or an address that cannot be used."""
EXIT_INTERRUPTED = 130
"""Ctrl-C in a client, or before a service has started."""
