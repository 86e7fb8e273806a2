"""`pdserve COMMAND --help` reads well: it renders, and no part of a text is taken for markup."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_commands_are_listed() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert {"up", "router", "prefill", "decode", "chat", "generate"} <= set(COMMANDS)
    assert all(name in shown for name in COMMANDS)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_shown_with_its_whole_text(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    shown = re.sub(r"\s+", " ", result.output)
    for option in COMMANDS[name].params:
        if getattr(option, "hidden", False) or not (text := getattr(option, "help", None)):
            continue
        assert text in shown, option.name


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"pdserve {version('pdserve')}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [("pdserve do", "doctor"), ("pdserve up --max-m", "--max-model-len"), ("pdserve keys ", "new")],
)
def test_a_shell_completes_commands_and_options(words: str, completed: str) -> None:
    environ = {"_PDSERVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="pdserve", env=environ)
    assert result.output.split() == [completed]


UP: Any = COMMANDS["up"]
FLAGS = [option for option in UP.params if getattr(option, "is_flag", False) and option.name != "help"]


@pytest.mark.diagonal
@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["{}"], True), (["{}", "true"], True), (["{}=true"], True), (["{}", "TRUE"], True),
        (["{}", "false"], False), (["{}=false"], False), (["{}", "false", "{}"], True), (["{}", "{}", "false"], False),
    ],
)  # fmt: skip
def test_a_flag_takes_what_its_help_shows(option: Any, words: list[str], value: bool) -> None:
    given = [word.format(option.opts[0]) for word in words]
    for args in ([*given, "demo"], ["demo", *given], [*given, "--port", "0", "demo"]):
        context = UP.make_context("up", list(args))
        assert (context.params[option.name], context.params["model_argument"]) == (value, "demo"), args


def test_words_that_are_no_values_of_a_flag_stay() -> None:
    asked = UP.make_context("up", ["--ask", "true", "--", "false"]).params
    assert (asked["ask"], asked["model_argument"], asked["once"]) == ("true", "false", False)
    result = CliRunner().invoke(app, ["up", "--once=maybe"])
    assert result.exit_code == 2
