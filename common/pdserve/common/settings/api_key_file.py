"""The file of API keys: one TOML table per key, which holds the key's SHA-256 and never the key.

[[keys]]
name = "search-2026"
sha256 = "…64 hexadecimal digits…"
tenant = "search"                   # default: the name
role = "user"                       # or "operator"
expires = 2027-01-01T00:00:00Z
max_sequences = 32
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdserve.common.bounded_file import read_bounded
from pdserve.common.errors import ConfigError
from pdserve.common.request.generation_request import MAX_PRIORITY

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 4096
"""Keys in one file. Names of keys become metric labels, so their number is bounded."""
MAX_FILE_BYTES = 4 << 20
MAX_MODELS = 1024
"""Names of models in one key's list."""
KEY_PREFIX = "pdserve-"
"""Begins a key that `new_key` makes, so that scanners for leaked secrets can find it."""

Role = Literal["user", "operator"]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what a tenant may do with one of its keys; None: no bound. All keys of a tenant have one account."""

    max_sequences: int | None = None
    """Sequences in the router at once, running and waiting; a request counts once per sequence (`n`, `best_of`)."""
    max_queued_requests: int | None = None
    """Sequences that wait for a place at once."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute, as a token bucket that holds one minute's tokens."""
    max_sessions: int | None = None
    """Streaming sessions open at once; a session counts between its turns, too."""
    min_priority: int = 0
    """Lowest `priority` value that a request may have; lower values run first."""
    max_priority: int = MAX_PRIORITY
    models: tuple[str, ...] | None = None
    """Names that requests may give as `model`, of the base model and of LoRA adapters; None: all."""


UNLIMITED = KeyLimits(min_priority=-MAX_PRIORITY - 1)


class KeyEntry(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file."""

    name: str
    """Names the key in metrics, spans and the audit log; 1 to 64 letters, digits, `_`, `.` and `-`."""
    sha256: str
    """SHA-256 of the key, 64 hexadecimal digits."""
    tenant: str = ""
    """The tenant that owns the key; default: `name`. Keys of one tenant share its limits and its prefix cache."""
    role: Role = "user"
    """`operator` may see all tenants' requests in `/debug/routing`, and all keys' counters in `/metrics`."""
    expires: datetime.datetime | None = None
    """From then on the key is refused; with an offset from UTC. None: never."""

    @property
    def limits(self) -> KeyLimits:
        """The entry's limits alone."""
        return KeyLimits(**{name: getattr(self, name) for name in KeyLimits.__struct_fields__})


def new_key() -> str:
    """256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """The form of a key in the file: its SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def is_name(text: str) -> bool:
    """True if a key or a tenant may have this name."""
    return _NAME.fullmatch(text) is not None


def verify_plain_keys(setting: str, keys: Sequence[str]) -> None:
    """Check keys that are given in clear text. Raises: ConfigError that names the setting, and never a key."""
    if not keys:
        raise ConfigError(f"{setting} is given but empty: give at least one key, or leave the setting out")
    for place, key in enumerate(keys):
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"{setting}[{place}] has {len(key)} characters, at least {MIN_KEY_CHARS} are needed; "
                "`pdserve keys new` makes a key"
            )
        if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(
                f"{setting}[{place}] cannot be sent as a bearer token: at most {MAX_KEY_CHARS} printable ASCII "
                "characters without spaces are possible"
            )
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{setting} has {len(keys)} entries, of which {len(set(keys))} differ: give each key once")


def read_keys(path: Path, setting: str = "api_keys_file") -> tuple[KeyEntry, ...]:
    """The entries of a file, at least one; `tenant` is filled in. Raises: ConfigError that names the setting and the
    entry."""
    raw = read_bounded(path, MAX_FILE_BYTES, setting)
    try:
        content = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{setting} {path}: {error}") from error
    unknown = sorted(content.keys() - {"keys"})
    if unknown:
        raise ConfigError(f"{setting} {path}: unknown table {unknown[0]!r}; keys are tables [[keys]]")
    entries: Any = content.get("keys")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{setting} {path} has no [[keys]]: no client could be served")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{setting} {path} has {len(entries)} keys, at most {MAX_KEYS} are possible")
    keys = tuple(_entry(f"{setting} {path}: keys[{place}]", raw_entry) for place, raw_entry in enumerate(entries))
    for field in ("name", "sha256"):
        [(value, count)] = Counter(getattr(key, field) for key in keys).most_common(1)
        if count > 1:
            raise ConfigError(f"{setting} {path}: {field} {value!r} is there {count} times")
    return keys


def _entry(where: str, raw: Any) -> KeyEntry:
    try:
        key = msgspec.convert(raw, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not is_name(key.name):
        raise ConfigError(f"{where}.name is {key.name[:64]!r}, 1 to 64 letters, digits, `_`, `.` or `-` are needed")
    where = f"{where} ({key.name})"
    if not _SHA256.fullmatch(key.sha256):
        raise ConfigError(f"{where}.sha256 is not 64 lower-case hexadecimal digits")
    if key.tenant and not is_name(key.tenant):
        raise ConfigError(f"{where}.tenant is {key.tenant[:64]!r}, 1 to 64 letters, digits, `_`, `.` or `-` are needed")
    if key.expires is not None and key.expires.tzinfo is None:
        raise ConfigError(f"{where}.expires is {key.expires.isoformat()}, an offset from UTC is needed, such as Z")
    for name in ("max_sequences", "max_queued_requests", "tokens_per_minute", "max_sessions"):
        value, least = getattr(key, name), 0 if name in ("max_sessions", "max_queued_requests") else 1
        if value is not None and not least <= value <= 1 << 53:
            raise ConfigError(f"{where}.{name} is {value}, {least} to {1 << 53} is needed")
    if key.models is not None and not (0 < len(key.models) <= MAX_MODELS and all(key.models)):
        raise ConfigError(
            f"{where}.models has {len(key.models)} names, 1 to {MAX_MODELS} that are not empty are needed"
        )
    if not -MAX_PRIORITY - 1 <= key.min_priority <= key.max_priority <= MAX_PRIORITY:
        raise ConfigError(
            f"{where}: min_priority is {key.min_priority} and max_priority {key.max_priority}, "
            f"{-MAX_PRIORITY - 1} <= min_priority <= max_priority <= {MAX_PRIORITY} is needed"
        )
    return msgspec.structs.replace(key, tenant=key.tenant or key.name)
