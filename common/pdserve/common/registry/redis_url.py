"""`RedisUrl`: address and credentials of Redis, with a text for logs without the password."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pdserve.common.errors import ConfigError

_DEFAULT_PORT = 6379
_MAX_DB = 65_535
_SCHEMES = {"redis": False, "rediss": True}
_WANTED = "redis://[user:password@]host[:port][/db] is needed, or rediss:// for TLS"


@dataclass(frozen=True, slots=True, repr=False)
class RedisUrl:
    """A parsed `redis://` or `rediss://` URL."""

    host: str
    port: int
    db: int
    tls: bool
    username: str | None
    password: str | None

    def __str__(self) -> str:
        """The URL without the password, for logs."""
        who = f"{self.username or ''}{':***' if self.password else ''}@" if self.username or self.password else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{who}{host}:{self.port}/{self.db}"

    __repr__ = __str__


def parse_redis_url(url: str) -> RedisUrl:
    """Parse the setting `redis`. Raises: ConfigError, without any part of the URL, which may contain an unescaped password."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        raise ConfigError(f"redis has no valid host and port: {_WANTED}") from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"redis has another scheme than redis and rediss: {_WANTED}")
    if not parts.hostname:
        raise ConfigError(f"redis names no host: {_WANTED}")
    if parts.query or parts.fragment:
        raise ConfigError(f"redis has a query or fragment, which is not supported: {_WANTED}")
    db = parts.path.removeprefix("/") or "0"
    if not (db.isascii() and db.isdigit() and len(db) <= len(str(_MAX_DB)) and int(db) <= _MAX_DB):
        raise ConfigError(f"redis names a database that is no number up to {_MAX_DB}: {_WANTED}")
    return RedisUrl(
        host=parts.hostname,
        port=port,
        db=int(db),
        tls=_SCHEMES[parts.scheme],
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )
