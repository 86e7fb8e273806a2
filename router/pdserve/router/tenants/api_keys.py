"""`ApiKeys`: bearer keys of both front ends, from settings or from a file that is read again when it changes."""

from __future__ import annotations

import asyncio
import datetime
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pdserve.common.errors import ConfigError, InvalidRequest, Unauthenticated
from pdserve.common.settings.api_key_file import KeyEntry, key_hash, read_keys
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.tenants.client import ANYBODY, ASKING, Client
from pdserve.router.tenants.failed_attempts import FailedAttempts

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds between checks for a change of the file."""
_Stamp = tuple[int, int, int]


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ApiKeys:
    """Checks API keys for both front ends. Without any key all clients are served."""

    def __init__(
        self,
        keys: Mapping[str, KeyEntry] | None,
        file: Path | None = None,
        stamp: _Stamp | None = None,
        *,
        failures: FailedAttempts | None = None,
        now: Callable[[], datetime.datetime] = _utc_now,
    ) -> None:
        """keys: SHA-256 in 64 hexadecimal digits -> key; None if no key is required. file: source of the keys.

        stamp: state of the file before it was read; None: read it again at the first check. now: wall clock with a time zone, for
        `expires`.
        """
        self._keys = keys
        self.num_tenants = _num_tenants(keys)
        """Number of tenants with keys; 1 if no key is required."""
        self._file = file
        self._stamp = stamp
        self._now = now
        self._refused_stamp: _Stamp | None = None
        self.failures = failures or FailedAttempts()
        self.on_failure: Callable[[str, str], None] | None = None
        """Called with address and cause of each failed authentication, for the audit log."""
        self.on_change: Callable[[], None] | None = None
        """Called after the file was read again."""

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> ApiKeys:
        """Keys from the settings or their file. Raises: ConfigError for an invalid file."""
        if settings.api_keys_file is not None:
            path = Path(settings.api_keys_file)
            stamp = _stamp_of(path)
            return cls(_by_hash(read_keys(path)), path, stamp)
        if settings.api_keys is None:
            return cls(None)
        # a key in the settings has no name, so its position is used
        entries = (
            KeyEntry(name=f"key-{place}", sha256=key_hash(key), tenant=f"key-{place}")
            for place, key in enumerate(settings.api_keys)
        )
        return cls(_by_hash(entries))

    @property
    def needed(self) -> bool:
        """True if a client must show a key."""
        return self._keys is not None

    @property
    def entries(self) -> list[KeyEntry]:
        """The current keys; empty if none is required."""
        return list((self._keys or {}).values())

    def check(self, authorization: str | None, address: str = "") -> Client:
        """The client of an authorization header. authorization: None if absent. address: the peer's IP address.

        Raises: Unauthenticated, whose `hold_back_s` is the delay of the response in seconds.
        """
        if self._keys is None:
            return ANYBODY if not address else Client(role="operator", address=address)
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise self._failed("an API key is needed: send the header 'Authorization: Bearer <key>'", address)
        # the lookup is by a hash that a caller cannot choose, so its time reveals nothing about keys
        sha256 = key_hash(given.strip())
        entry = self._keys.get(sha256)
        if entry is None or not hmac.compare_digest(sha256, entry.sha256):
            raise self._failed("the API key is not known", address)
        if entry.expires is not None and entry.expires <= self._now():
            raise self._failed(f"the API key {entry.name} expired at {entry.expires.isoformat()}", address)
        return Client(key_name=entry.name, tenant=entry.tenant, role=entry.role, limits=entry.limits, address=address)

    async def authenticate(self, authorizations: Sequence[str], address: str = "") -> Client:
        """As `check`; a failure is raised after the delay for repeated failures of the address.

        authorizations: every such header of the request. Raises: InvalidRequest if there are several, whatever they are: a proxy
        may have checked another one.
        """
        if len(authorizations) > 1:
            raise InvalidRequest(
                f"the request has {len(authorizations)} authorization headers, at most 1 is allowed", "authorization"
            )
        try:
            client = self.check(authorizations[0] if authorizations else None, address)
            ASKING.set(client)
            return client
        except Unauthenticated as error:
            await self.failures.hold_back(error.hold_back_s)
            raise

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            # in a thread, since a large file takes time
            self._take(await asyncio.to_thread(self._changed))

    def look(self) -> None:
        """Read the file again if it has changed. An invalid file is logged once and changes no keys."""
        self._take(self._changed())

    def _changed(self) -> tuple[_Stamp, dict[str, KeyEntry] | ConfigError] | None:
        """The file's keys, or the error; None if the file is unchanged."""
        if self._file is None:
            return None
        stamp = _stamp_of(self._file)
        if stamp in (self._stamp, self._refused_stamp):
            return None
        try:
            return stamp, _by_hash(read_keys(self._file))
        except ConfigError as error:
            return stamp, error

    def _take(self, changed: tuple[_Stamp, dict[str, KeyEntry] | ConfigError] | None) -> None:
        if changed is None:
            return
        stamp, keys = changed
        if isinstance(keys, ConfigError):
            self._refused_stamp = stamp
            log.error("the API keys remain unchanged: %s", keys.message)
            return
        self._keys, self._stamp, self._refused_stamp = keys, stamp, None
        self.num_tenants = _num_tenants(keys)
        log.info("api_keys_file %s was read again: %d key(s) of %d tenant(s)", self._file, len(keys), self.num_tenants)
        if self.on_change is not None:
            self.on_change()

    def _failed(self, message: str, address: str) -> Unauthenticated:
        error = Unauthenticated(message)
        error.hold_back_s = self.failures.add(address, message)
        if self.on_failure is not None:
            self.on_failure(address, message)
        return error


def _by_hash(entries: Iterable[KeyEntry]) -> dict[str, KeyEntry]:
    return {entry.sha256: entry for entry in entries}


def _num_tenants(keys: Mapping[str, KeyEntry] | None) -> int:
    return len({entry.tenant for entry in keys.values()}) if keys else 1


def _stamp_of(file: Path | None) -> _Stamp:
    """A value that differs after each change of the file; (0, 0, 0) if there is no file."""
    if file is None:
        return 0, 0, 0
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size
