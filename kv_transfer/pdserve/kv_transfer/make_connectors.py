"""`make_connectors`: the connectors that a worker's settings and machine allow."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdserve.common.errors import ConfigError
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings

log = logging.getLogger(__name__)


def make_connectors(
    settings: WorkerSettings, why_not: Callable[[], str | None] = why_no_nixl, *, tls: TlsIdentity | None = None
) -> ConnectorSet:
    """TCP always, and NIXL before it if it is allowed and starts. why_not: function that returns the reason why NIXL cannot be used
    here, or None.

    tls: for TCP. NIXL has no encryption, so with TLS it is used only with `nixl_plaintext`.
    Raises: ConfigError if `connector` is `nixl` and NIXL cannot start.
    """
    tcp = TcpConnector(
        TcpSettings(host=settings.host, port=settings.data_port, advertise_host=settings.peers_host, tls=tls)
    )
    if settings.connector == "tcp":
        log.info("connectors: tcp; not nixl: connector is 'tcp'")
        return ConnectorSet([tcp])
    if tls is not None and not settings.nixl_plaintext:
        log.info("connectors: tcp; not nixl: it encrypts nothing, and TLS is configured (nixl_plaintext allows it)")
        return ConnectorSet([tcp])
    reason = why_not()
    if reason is None:
        log.info("connectors: nixl, tcp")
        return ConnectorSet([NixlConnector(), tcp], optional=("nixl",) if settings.connector == "auto" else ())
    if settings.connector == "nixl":
        raise ConfigError(f"connector is 'nixl', which cannot be used here: {reason}")
    log.info("connectors: tcp; not nixl: %s", reason)
    return ConnectorSet([tcp])
