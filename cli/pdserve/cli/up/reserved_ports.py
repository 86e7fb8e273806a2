"""`reserved_ports`: keeps the ports of services that are still to be started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pdserve.cli.doctor.port_check import Port, advice_for, conflicts
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import bound_socket


@contextlib.contextmanager
def reserved_ports(ports: Sequence[Port]) -> Iterator[list[int]]:
    """The numbers of the ports, each kept from other processes while the block runs; 0 draws a free one.

    A service can listen on its port meanwhile, and again after a restart.
    Raises: ConfigError naming setting and address of a port that is in use, or that two of them share.
    """
    for conflict in conflicts(ports):
        raise ConfigError(f"{conflict}: give each a number of its own")
    with contextlib.ExitStack() as held:
        yield [_reserve(port, held) for port in ports]


def _reserve(port: Port, held: contextlib.ExitStack) -> int:
    try:
        bound = held.enter_context(bound_socket(port.host, port.number))
    except ConfigError as error:
        raise ConfigError(f"{port.setting} ({port.purpose}): {error.message}: {advice_for(error, port)}") from error
    number: int = bound.getsockname()[1]
    return number
