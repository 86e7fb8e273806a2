"""`load_settings`: the settings of a service, from wherever they are given.

Order, later wins: defaults, TOML file, `PDSERVE_<NAME>` in the environment, flags. Unknown keys are refused everywhere.
In the TOML file top-level keys hold for every service and the tables [router], [prefill] and [decode] for one.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pdserve.common.address.host_address import masked_url
from pdserve.common.errors import ConfigError
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.settings.near_match import near_match
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.speculative_config import FIELD, SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

ENV_PREFIX = "PDSERVE_"
OTEL_VARIABLES = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "otlp_protocol",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "otlp_protocol",
    "OTEL_EXPORTER_OTLP_HEADERS": "otlp_headers",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "otlp_headers",
    "OTEL_SERVICE_NAME": "otel_service_name",
    "OTEL_RESOURCE_ATTRIBUTES": "otel_resource_attributes",
    "OTEL_TRACES_SAMPLER": "otel_traces_sampler",
    "OTEL_TRACES_SAMPLER_ARG": "otel_traces_sampler_arg",
    "OTEL_BSP_SCHEDULE_DELAY": "otel_bsp_schedule_delay_ms",
    "OTEL_SDK_DISABLED": "otel_sdk_disabled",
}
"""OpenTelemetry's variables and the settings that they set, those of traces alone before the general ones; our own variable takes
precedence."""
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
CLIENT_VARIABLES = ("api_key",)
"""Read by the client commands, so services ignore them in their environment."""
_LISTS = (
    "prefill",
    "decode",
    "api_keys",
    "cors_origins",
    "shared_prefix_cache",
    "allowed_media_domains",
    "logits_processors",
    "served_model_name",
)
_TABLES = ("speculative_config",)
"""Given as text, they are JSON."""
_NAMED = ("lora_modules",)
"""Given as text, they are `name=value`, with commas between several, or a JSON object."""
_NO_BLANKS = ("api_keys",)
"""Lists in which a blank entry is an error, and not left out: a key that is missing must not read as one key fewer."""
SECRETS = ("deployment_key", "api_keys", "otlp_headers")
"""Never logged, never in a child's command line. URLs with a password in them (`redis`, `otlp`) are shown without it."""
SERVICES: tuple[type[ServiceSettings], ...] = (RouterSettings, PrefillSettings, DecodeSettings)
S = TypeVar("S", bound=ServiceSettings)


def load_settings(
    kind: type[S],
    *,
    flags: Mapping[str, Any] | None = None,
    toml: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> S:
    """Settings of one service. flags: those given; None values count as not given.

    Raises: ConfigError naming the key, its source and what is wrong.
    """
    merged: dict[str, Any] = {}
    for source, values in (
        (f"{toml}", from_toml(kind, toml)),
        ("environment", _from_environ(kind, os.environ if environ is None else environ)),
        ("flags", {name: _parsed(name, value) for name, value in (flags or {}).items() if value is not None}),
    ):
        for name in values:
            if name not in kind.__struct_fields__:
                raise ConfigError(
                    f"settings from {source}: {name!r} is no setting of {kind.section or 'a service'}{_hint(name, kind)}"
                )
        try:
            msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"settings from {source}: {_reason(error, values, kind)}") from error
        if "otlp" in values:
            merged.pop("otlp_is_traces_url", None)  # it described the URL that is replaced
        merged |= values
    settings = msgspec.convert(merged, kind, strict=False)
    settings.verify()
    return settings


def _hint(name: str, kind: type[ServiceSettings]) -> str:
    """The services that have a setting which `kind` has not, or the setting of `kind` that the name resembles."""
    if others := [service.section for service in SERVICES if name in service.__struct_fields__]:
        return f", but of {' and '.join(others)}"
    return near_match(name, kind.__struct_fields__)


def _reason(error: msgspec.ValidationError, values: Mapping[str, Any], kind: type[ServiceSettings]) -> str:
    """The setting with its value, unless that may be a secret, and what was expected."""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", str(error))
    if found is None:
        return str(error)
    what, name = found.groups()
    if name == FIELD and (unknown := re.search(r"unknown field `(.*)`", what)) is not None:
        what += near_match(unknown[1], SpeculativeConfig.__struct_fields__)
    if choices := _choices(kind, name):
        return f"{name} is {str(values[name])[:100]!r}, one of {', '.join(choices)} is needed"
    return (
        f"{name}: {what}" if name in (*SECRETS, "redis", "otlp") else f"{name} is {str(values[name])[:100]!r}: {what}"
    )


def _choices(kind: type[ServiceSettings], name: str) -> list[str]:
    """All values of a setting that has a list of them; empty for others."""
    hint = get_type_hints(kind)[name]
    return [str(value) for each in (hint, *get_args(hint)) if get_origin(each) is Literal for value in get_args(each)]


def names_given(kind: type[ServiceSettings], toml: Path | None, environ: Mapping[str, str] | None = None) -> set[str]:
    """Names of the settings that the file or the environment gives. Raises: ConfigError."""
    return from_toml(kind, toml).keys() | _from_environ(kind, os.environ if environ is None else environ).keys()


def describe(settings: ServiceSettings) -> str:
    """The resolved settings that are not the defaults, for the log: one line, secrets left out."""
    defaults = type(settings)()
    shown = {
        name: value for name, value in msgspec.structs.asdict(settings).items() if value != getattr(defaults, name)
    }
    if settings.redis is not None:
        shown["redis"] = parse_redis_url(settings.redis)
    if settings.otlp is not None:
        shown["otlp"] = masked_url(settings.otlp)
    given = [f"{name}={'***' if name in SECRETS and value else value}" for name, value in shown.items()]
    return " ".join([*given, "(all others have their defaults)"])


def from_toml(kind: type[ServiceSettings], path: Path | None) -> dict[str, Any]:
    """The settings of one service that a TOML file gives; none without a file. Raises: ConfigError naming the key."""
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    sections = {service.section: service for service in SERVICES}
    known = {name for service in SERVICES for name in service.__struct_fields__}
    for key, value in content.items():
        if key not in known and not (key in sections and isinstance(value, dict)):
            raise ConfigError(f"{path}: unknown key {key!r}{near_match(key, known | sections.keys())}")
        if key in sections and isinstance(value, dict):
            for name in value:
                if name not in sections[key].__struct_fields__:
                    raise ConfigError(f"{path}: unknown key {name!r} in [{key}]{_hint(name, sections[key])}")
    common = {
        key: value
        for key, value in content.items()
        if key in kind.__struct_fields__ and not (key in sections and isinstance(value, dict))
    }
    own = content.get(kind.section, {})
    return common | (own if isinstance(own, dict) else {})


def _from_environ(kind: type[ServiceSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    known = {name for service in SERVICES for name in service.__struct_fields__}
    values: dict[str, Any] = {}
    for variable, name in OTEL_VARIABLES.items():
        # set but empty means unset, and any word but "true" means false: OpenTelemetry's rules
        if text := environ.get(variable, "").strip():
            values[name] = text.lower() == "true" if name == "otel_sdk_disabled" else text
            if variable == _TRACES_ENDPOINT:
                values["otlp_is_traces_url"] = True
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in CLIENT_VARIABLES:
            continue
        if name not in known:
            near = near_match(variable, {f"{ENV_PREFIX}{one.upper()}" for one in known})
            raise ConfigError(f"environment: unknown setting {variable}{near}")
        if name in kind.__struct_fields__:
            values[name] = _parsed(name, text)
        if name == "otlp" and f"{ENV_PREFIX}OTLP_IS_TRACES_URL" not in environ:
            values.pop("otlp_is_traces_url", None)
    return values


def _parsed(name: str, value: Any) -> Any:
    """A list that is given as text has commas between its entries, named values too, a table is JSON. Raises: ConfigError."""
    is_json = isinstance(value, str) and value.lstrip().startswith("{")
    if name in _NAMED and not isinstance(value, Mapping) and not is_json:
        return _named_values(name, value.split(",") if isinstance(value, str) else value)
    if name in (*_TABLES, *_NAMED) and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name} is {value[:100]!r}, which is no JSON: {error}") from error
    if name in _LISTS and isinstance(value, str):
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
