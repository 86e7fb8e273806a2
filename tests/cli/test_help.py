"""`pdserve COMMAND --help` reads well: it renders, and no part of a text is taken for markup."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.main import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_the_commands_are_listed() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert {"up", "router", "prefill", "decode", "chat", "generate"} <= set(COMMANDS)
    assert all(name in shown for name in COMMANDS)


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
