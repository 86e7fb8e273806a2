"""`TlsRenewal`: reads certificates, keys and CAs again when their files change, without a restart.

Files are checked every `POLL_S`. When they have not changed again at one more check, so that half of a new pair is not tried,
they are loaded with every check of the start and are used for new connections; open ones continue. Files that
cannot be used are logged once, and the earlier ones remain in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from pdserve.common import clock
from pdserve.common.errors import ConfigError
from pdserve.common.security.tls import ServerTls, TlsIdentity
from pdserve.common.settings.service_settings import ServiceSettings

log = logging.getLogger(__name__)

POLL_S = 2.0
SOON_S = 14 * 86400.0
"""A certificate that is valid no longer than this is a warning."""

T = TypeVar("T")
PeerKind = Literal["services", "clients"]
_Signature = tuple[tuple[int, int, int] | None, ...]
_SERVICE_FILES = ("tls_cert_file", "tls_key_file", "tls_ca_file")
_FRONT_FILES = ("front_tls_cert_file", "front_tls_key_file", "front_tls_client_ca_file")


@dataclass(slots=True)
class _Source(Generic[T]):
    """Files, and the object that was loaded from them."""

    peers: PeerKind
    paths: tuple[str, ...]
    server: ServerTls
    load: Callable[[], T | None]
    renew: Callable[[T], None]
    """Puts the loaded object into use."""
    used: _Signature = field(init=False)
    """Signature of the files that were loaded, or refused, last."""
    seen: _Signature = field(init=False)
    """Signature of the files at the last check."""

    def __post_init__(self) -> None:
        self.used = self.seen = _signature(self.paths)

    @property
    def valid_until(self) -> float:
        return self.server.current.valid_until

    def look(self) -> None:
        """Load files that have changed and are unchanged since the last check."""
        seen, self.seen = self.seen, _signature(self.paths)
        if self.seen == self.used or self.seen != seen:
            return
        try:
            loaded = self.load()
        except ConfigError as error:
            self.used = self.seen
            log.error("the new certificate for %s cannot be used, the old one stays: %s", self.peers, error.message)
            return
        if loaded is not None and _signature(self.paths) == self.seen:  # else they have changed meanwhile
            self.renew(loaded)
            self.used = self.seen
            self.log_expiry("was read again and is valid")

    def log_expiry(self, what: str) -> None:
        """Log how long the certificate is valid."""
        left_s = self.valid_until - clock.unix_s()
        level = logging.WARNING if left_s < SOON_S else logging.INFO
        until = datetime.fromtimestamp(self.valid_until, UTC)
        log.log(
            level, "the certificate for %s, %s, %s until %s, for %.1f days",
            self.peers, self.paths[0], what, f"{until:%F %T} UTC", left_s / 86400,
        )  # fmt: skip


class TlsRenewal:
    """Renewal for one service. `run` is a background task."""

    def __init__(
        self,
        settings: ServiceSettings,
        identity: TlsIdentity | None,
        front: ServerTls | None = None,
        load_front: Callable[[], ServerTls | None] | None = None,
    ) -> None:
        """identity: what `settings.tls()` has returned. front: what `load_front` has."""
        self._sources: list[_Source[Any]] = []
        if identity is not None:
            paths = _paths(settings, _SERVICE_FILES)
            self._sources.append(_Source("services", paths, identity.server, settings.tls, identity.renew))
        if front is not None and load_front is not None:
            paths = _paths(settings, _FRONT_FILES)
            self._sources.append(_Source("clients", paths, front, load_front, front.renew))

    def expiries(self) -> dict[PeerKind, float]:
        """Peers of a certificate -> its expiry, in Unix time."""
        return {source.peers: source.valid_until for source in self._sources}

    def log_expiry(self) -> None:
        """Log how long each certificate is valid."""
        for source in self._sources:
            source.log_expiry("is valid")

    async def run(self) -> None:
        """Until cancelled."""
        while self._sources:
            await asyncio.sleep(POLL_S)
            for source in self._sources:
                await asyncio.to_thread(source.look)


def _paths(settings: ServiceSettings, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(path for name in names if (path := getattr(settings, name, None)) is not None)


def _signature(paths: Sequence[str]) -> _Signature:
    """Changes when a file is written or replaced; None for a missing file."""
    return tuple(_file_signature(path) for path in paths)


def _file_signature(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - follows the links of mounted secrets
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
