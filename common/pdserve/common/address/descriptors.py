"""Descriptors of a process: how many it may open, and how many of them connections of strangers may take."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

ENOUGH_DESCRIPTORS = 65_536
"""More are not asked for: some programs that a service starts look at every number below the limit."""
KEPT_BACK = 128
"""For connections to workers, Redis and collectors, for listening sockets and files."""
MAX_CONNECTIONS = 8192
MIN_CONNECTIONS = 16


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, at most `ENOUGH_DESCRIPTORS`; returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            log.warning("the limit of %d open files cannot be raised to %d: %s", soft, wanted, error)
    return descriptor_limit()


def descriptor_limit() -> int:
    """Descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def default_max_connections(num_servers: int) -> int:
    """Connections that each of `num_servers` public servers of this process may have at a time."""
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (descriptor_limit() - KEPT_BACK) // num_servers))
