"""`FlagsWithValues`, and `settings_command`: commands whose options are the settings of the services that they start."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.markup import escape
from typer.core import TyperCommand

from pdserve.common.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.common.settings.catalogue import Setting

_VALUES = {"true": True, "false": False}


class FlagsWithValues(TyperCommand):
    """`--flag`, `--flag true` and `--flag=true` are the same; `--flag false` overrides a file and the environment.

    Options may be written with underscores, `--max_num_seqs`; an unknown one is refused with the nearest names.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse flags and their values here, and pass the other words to typer. Raises: ConfigError."""
        options = {word: option for option in self.get_params(ctx) for word in (*option.opts, *option.secondary_opts)}
        words: list[str] = []
        values: dict[str, bool] = {}
        last = None
        """Name of the flag that the previous word was, without a value."""
        is_value = False
        """True if the next word is the value of the option before it."""
        for place, word in enumerate(args):
            if word == "--":
                words += args[place:]
                break
            if last is not None and word.lower() in _VALUES:
                values[last], last = _VALUES[word.lower()], None
                continue
            last = None
            if is_value or not word.startswith("--"):
                is_value = False
                words.append(word)
                continue
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            if (option := options.get(flag)) is None:
                raise ConfigError(
                    f"{flag[:100]}: `pdserve {self.name}` has no such option{self.hint(flag, list(options))}"
                )
            is_flag = getattr(option, "is_flag", False)
            if is_flag and not option.is_eager and flag in option.opts and (not equals or value.lower() in _VALUES):
                values[str(option.name)] = _VALUES[value.lower()] if equals else True
                last = None if equals else str(option.name)
            else:
                words.append(flag + equals + value)
                is_value = not equals and not is_flag
        left: list[str] = super().parse_args(ctx, words)
        ctx.params.update(values)
        return left

    def hint(self, flag: str, known: list[str]) -> str:
        """The end of the error for an unknown option: known options that it resembles."""
        from pdserve.common.settings.near_match import near_match

        return near_match(flag, known)


class SettingsCommand(FlagsWithValues):
    """Has an option for each setting and limit of its services. `given_settings(context)` returns those that are given."""

    services: ClassVar[tuple[str, ...]] = ()
    without: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """Name -> setting of one of the services."""
        # imported only for a command that has settings, so that client commands start faster
        from pdserve.common.settings.catalogue import SERVICES, settings_of

        known = settings_of(*(kind for kind in SERVICES if kind.section in self.services))
        return {name: setting for name, setting in known.items() if name not in self.without}

    @cached_property
    def _options(self) -> list[Any]:
        """typer's options of the settings."""
        command = typer.Typer(add_completion=False)

        def takes_settings(**_: object) -> None: ...

        takes_settings.__signature__ = inspect.Signature(list(map(_parameter, self.settings.values())))  # type: ignore[attr-defined]
        command.command()(takes_settings)
        return list(typer.main.get_command(command).params)

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        return [*own[:-1], *self._options, own[-1]]

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = dict(_given({name: ctx.params.pop(name) for name in self.settings}))
        return super().invoke(ctx)

    def hint(self, flag: str, known: list[str]) -> str:
        from pdserve.common.settings.catalogue import SERVICES, hint, settings_of

        name = flag.lstrip("-").replace("-", "_")
        if name in self.without:
            return f": it chooses {name} for each service; `pdserve router`, `prefill` and `decode` take it"
        if name in settings_of(*SERVICES):
            return hint(name, SERVICES[0])
        return super().hint(flag, known)


def settings_command(*services: str, without: tuple[str, ...] = ()) -> type[SettingsCommand]:
    """A command with options for all settings of these services but `without`."""
    return type("SettingsCommand", (SettingsCommand,), {"services": services, "without": without})


def given_settings(context: typer.Context) -> dict[str, Any]:
    """Name -> value of the settings on the command line; a list is one text with commas between its entries."""
    given: dict[str, Any] = context.obj
    return given


def _given(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list | tuple):
            if value:
                yield name, ",".join(value)
        elif value is not None:
            yield name, value


def _parameter(setting: Setting) -> inspect.Parameter:
    """The option of a setting. Its values stay text, which `load_settings` reads as it reads environment variables."""
    kind: Any = bool if setting.is_flag else list[str] if setting.is_list or setting.is_map else str
    default = setting.default_text
    negative = f"/--no-{setting.option.removeprefix('--')}" if setting.default is True else ""
    option = typer.Option(
        setting.option + negative,
        help=escape(setting.meaning if default == "none" else f"{setting.meaning} (default: {default})"),
        metavar=None if setting.is_flag else escape(setting.type_text.replace(", ", "|")),
        show_default=False,
        rich_help_panel=setting.owner.group,
    )
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
