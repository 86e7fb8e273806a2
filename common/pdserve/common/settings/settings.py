"""`load_settings`: the settings of a service, from wherever they are given.

Order, later wins: defaults, TOML file, `PDSERVE_<NAME>` in the environment, flags. Unknown names are refused everywhere.
In the TOML file top-level keys hold for every service and the tables [router], [prefill] and [decode] for one; limits stand in
[limits], or in [router.limits] and so on. Everywhere else settings and limits are one list of names.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.settings.catalogue import ENV_PREFIX, LIMITS, SECRETS, SERVICES, hint, settings_of
from pdserve.common.settings.collector import read_collector
from pdserve.common.settings.near_match import near_match
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.speculative_config import FIELD, SpeculativeConfig

CLIENT_VARIABLES = ("api_key",)
"""Read by the client commands, so services ignore them in their environment."""
_NO_BLANKS = ("api_keys",)
"""Lists in which a blank entry is an error, and not left out: a key that is missing must not read as one key fewer."""
S = TypeVar("S", bound=ServiceSettings)


def load_settings(
    kind: type[S],
    *,
    flags: Mapping[str, Any] | None = None,
    toml: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """Settings of one service. flags: those given, limits among them; None values count as not given.

    Raises: ConfigError naming the key, its source and what is wrong.
    """
    environ = os.environ if environ is None else environ
    merged: dict[str, Any] = {}
    for source, values in (
        (f"{toml}", from_toml(kind, toml)),
        ("environment", _from_environ(kind, environ)),
        ("flags", {name: _parsed(name, value) for name, value in (flags or {}).items() if value is not None}),
    ):
        for name in values:
            if name not in settings_of(kind):
                raise ConfigError(
                    f"settings from {source}: {name!r} is no setting of {kind.section or 'a service'}{hint(name, kind)}"
                )
        try:
            msgspec.convert(with_limits(kind, values), kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"settings from {source}: {_reason(error, values, kind)}") from error
        merged |= values
    settings = msgspec.convert(with_limits(kind, merged), kind, strict=False)
    settings.verify()
    if (collector := read_collector(environ)) is not None:
        collector.verify(insecure=settings.insecure)
    return settings


def with_limits(kind: type[ServiceSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the struct has them: limits in a table of their own."""
    limits = {
        name: value for name, value in values.items() if name in settings_of(kind) and settings_of(kind)[name].is_limit
    }
    return {name: value for name, value in values.items() if name not in limits} | ({LIMITS: limits} if limits else {})


def values_of(settings: ServiceSettings) -> dict[str, Any]:
    """Name -> value of all settings and limits."""
    values = msgspec.structs.asdict(settings)
    return values | msgspec.structs.asdict(values.pop(LIMITS))


def _reason(error: msgspec.ValidationError, values: Mapping[str, Any], kind: type[ServiceSettings]) -> str:
    """The setting with its value, unless that may be a secret, and what was expected."""
    found = re.fullmatch(rf"(.*) - at `\$\.(?:{LIMITS}\.)?(\w+).*`", str(error))
    if found is None:
        return str(error)
    what, name = found.groups()
    if name == FIELD and (unknown := re.search(r"unknown field `(.*)`", what)) is not None:
        what += near_match(unknown[1], SpeculativeConfig.__struct_fields__)
    if choices := settings_of(kind)[name].choices:
        return f"{name} is {str(values[name])[:100]!r}, one of {', '.join(choices)} is needed"
    return f"{name}: {what}" if name in (*SECRETS, "redis") else f"{name} is {str(values[name])[:100]!r}: {what}"


def names_given(kind: type[ServiceSettings], toml: Path | None, environ: Mapping[str, str] | None = None) -> set[str]:
    """Names of the settings that the file or the environment gives. Raises: ConfigError."""
    return from_toml(kind, toml).keys() | _from_environ(kind, os.environ if environ is None else environ).keys()


def describe(settings: ServiceSettings) -> str:
    """The resolved settings that are not the defaults, for the log: one line, secrets left out."""
    defaults = values_of(type(settings)())
    shown = {name: value for name, value in values_of(settings).items() if value != defaults[name]}
    if settings.redis is not None:
        shown["redis"] = parse_redis_url(settings.redis)
    given = [f"{name}={'***' if name in SECRETS and value else value}" for name, value in shown.items()]
    return " ".join([*given, "(all others have their defaults)"])


def from_toml(kind: type[ServiceSettings], path: Path | None) -> dict[str, Any]:
    """The settings and limits of one service that a TOML file gives; none without a file. Raises: ConfigError naming the key."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    tables = {
        service.section: content.pop(service.section) for service in SERVICES if _is_table(content, service.section)
    }
    values = _of_table(content, None, path)
    for service in SERVICES:
        own = _of_table(tables.get(service.section, {}), service, path)
        if service is kind:
            values |= own
    return {name: value for name, value in values.items() if name in settings_of(kind)}


def _is_table(content: Mapping[str, Any], section: str) -> bool:
    """False for the router's lists of workers, which have the names of their tables."""
    return isinstance(content.get(section), dict)


def _of_table(table: Mapping[str, Any], service: type[ServiceSettings] | None, path: Path) -> dict[str, Any]:
    """Settings of a table of the file, and of its own table of limits. service: None for the top level.

    Raises: ConfigError for a name that the service, or no service, has as a setting or limit.
    """
    section = service.section if service is not None else ""
    known = settings_of(*(SERVICES if service is None else (service,)))
    limits = table.get(LIMITS, {})
    if not isinstance(limits, dict):
        raise ConfigError(f"{path}: {LIMITS} is {str(limits)[:100]!r}, a table is needed")
    for names, title, is_limit in ((table, section, False), (limits, ".".join(filter(None, (section, LIMITS))), True)):
        where = f" in [{title}]" if title else ""
        for name in names:
            if name == LIMITS and not is_limit:
                continue
            if name not in known:
                near = hint(name, service) or near_match(name, [one.section for one in SERVICES] if not title else ())
                raise ConfigError(f"{path}: unknown key {name!r}{where}{near}")
            if known[name].is_limit is not is_limit:
                place = "is a limit: write it below" if known[name].is_limit else "is no limit: write it above"
                raise ConfigError(f"{path}: {name}{where} {place} [{'.'.join(filter(None, (section, LIMITS)))}]")
    return {name: value for name, value in table.items() if name != LIMITS} | limits


def _from_environ(kind: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    known = settings_of(*SERVICES)
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in CLIENT_VARIABLES:
            continue
        if name not in known:
            near = near_match(variable, [setting.variable for setting in known.values()])
            raise ConfigError(f"environment: unknown setting {variable}{near}")
        if name in settings_of(kind):
            values[name] = _parsed(name, text)
    return values


def _parsed(name: str, value: Any) -> Any:
    """A list that is given as text has commas between its entries, named values too, a table is JSON. Raises: ConfigError."""
    setting = settings_of(*SERVICES).get(name)
    if setting is None:
        return value
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    if setting.is_map and not isinstance(value, Mapping) and not is_json:
        return _named_values(name, value.split(",") if isinstance(value, str) else value)
    if (setting.is_struct or setting.is_map) and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name} is {value[:100]!r}, which is no JSON: {error}") from error
    if setting.is_list and isinstance(value, str):
        return [part for part in map(str.strip, value.split(",")) if part or name in _NO_BLANKS]
    return value


def _named_values(name: str, entries: Sequence[str]) -> dict[str, str]:
    """`name=value` of each entry that is not blank. Raises: ConfigError."""
    values: dict[str, str] = {}
    for entry in filter(None, map(str.strip, entries)):
        key, equals, value = map(str.strip, entry.partition("="))
        if not equals:
            raise ConfigError(f"{name} has {entry[:200]!r}, name=folder is needed")
        if key in values:
            raise ConfigError(f"{name} has the name {key[:200]!r} more than once")
        values[key] = value
    return values
