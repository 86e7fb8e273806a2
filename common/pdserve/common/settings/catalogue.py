"""`Setting`: what options, documents and schemas are generated from, read from the structs of settings and their docstrings."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from pdserve.common.settings.limits import ServiceLimits
from pdserve.common.settings.near_match import near_match
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

ENV_PREFIX = "PDSERVE_"
LIMITS = "limits"
"""The field, and the table of a file, that has the limits."""
SERVICES: tuple[type[ServiceSettings], ...] = (RouterSettings, PrefillSettings, DecodeSettings)
SECRETS = ("deployment_key", "api_keys")
"""Never logged, never in a child's command line. A URL with a password in it (`redis`) is shown without it."""
_WORDS: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting or limit of one or more services."""

    name: str
    kind: Any
    """Its type, without None."""
    default: object
    meaning: str
    """Its docstring, in one line."""
    owner: type[ServiceSettings] | type[ServiceLimits]
    """The struct that defines it."""
    services: tuple[str, ...]
    """Services that have it, as `router`."""

    @property
    def is_limit(self) -> bool:
        return issubclass(self.owner, ServiceLimits)

    @property
    def option(self) -> str:
        """As `--max-num-seqs`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """As `PDSERVE_MAX_NUM_SEQS`."""
        return f"{ENV_PREFIX}{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """All values of a setting that has a list of them; empty for others."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def is_map(self) -> bool:
        return get_origin(self.kind) is dict

    @property
    def is_struct(self) -> bool:
        return isinstance(self.kind, type) and issubclass(self.kind, msgspec.Struct)

    @property
    def type_text(self) -> str:
        """For documents and help: its choices, or a word for its type."""
        if self.choices:
            return ", ".join(self.choices)
        if self.is_list:
            return "list"
        return _WORDS.get(self.kind, "name=value, ..." if self.is_map else "JSON")

    @property
    def default_text(self) -> str:
        """For documents and help; `none` for None and the empty list."""
        if self.default in (None, ()):
            return "none"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def limits_of(kind: type[ServiceSettings]) -> type[ServiceLimits]:
    """The struct of a service's limits."""
    limits: type[ServiceLimits] = type(kind().limits)
    return limits


@cache
def settings_of(*kinds: type[ServiceSettings]) -> dict[str, Setting]:
    """Name -> setting or limit of these services, in the order of the structs; of equal names the first service's."""
    found: dict[str, Setting] = {}
    for setting in _in_order(kinds):
        found.setdefault(setting.name, setting)
    return found


@cache
def catalogue() -> tuple[Setting, ...]:
    """Every setting, then every limit; a name that two services define by themselves (`port`) comes twice."""
    return tuple(sorted(_in_order(SERVICES), key=lambda setting: setting.is_limit))


def matching(word: str) -> list[Setting]:
    """Settings with the word in name or meaning, those with it in the name first; an option or variable counts as its name."""
    name = word.removeprefix(ENV_PREFIX).lower().strip("-").replace("-", "_")
    return [setting for setting in catalogue() if name in setting.name] + [
        setting for setting in catalogue() if name not in setting.name and word.lower() in setting.meaning.lower()
    ]


def hint(name: str, kind: type[ServiceSettings] | None = None) -> str:
    """What a name may stand for that `kind`, or no service, has as a setting: `, but of router`, or the nearest names."""
    if kind is not None and (setting := settings_of(*SERVICES).get(name)) is not None:
        return f", but of {' and '.join(setting.services)}"
    return near_match(name, settings_of(*((kind,) if kind is not None else SERVICES)))


def _in_order(kinds: Sequence[type[ServiceSettings]]) -> Iterator[Setting]:
    """Settings of the services by the struct that defines them, then their limits likewise."""
    structs = [(kind, kind) for kind in kinds] + [(kind, limits_of(kind)) for kind in kinds]
    owned: dict[tuple[type, str], tuple[msgspec.structs.FieldInfo, list[str]]] = {}
    for kind, struct in structs:
        for field in msgspec.structs.fields(struct):
            if field.name != LIMITS:
                _, services = owned.setdefault((_owner(struct, field.name), field.name), (field, []))
                services.append(kind.section)
    for (owner, name), (field, services) in owned.items():
        meaning = " ".join(_docstrings(owner).get(name, "").split())
        yield Setting(name, _without_none(field.type), field.default, meaning, owner, tuple(services))


def _owner(struct: type, name: str) -> type:
    return next(one for one in struct.__mro__ if name in inspect.get_annotations(one))


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(hint) if one is not type(None))
        return kind
    return hint


@cache
def _docstrings(struct: type) -> dict[str, str]:
    """Field -> the text below it in the source."""
    [body] = (
        node.body
        for node in ast.parse(inspect.getsource(inspect.getmodule(struct) or struct)).body
        if isinstance(node, ast.ClassDef) and node.name == struct.__name__
    )
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
