"""`pdserve keys new`: a key that the router takes, and a file that holds its hash alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.common.errors import ConfigError
from pdserve.common.settings.api_key_file import MIN_KEY_CHARS, read_keys
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.tenants.api_keys import ApiKeys


def test_a_fresh_key_is_shown_once_and_its_entry_lets_it_in(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = []
    for arguments in (["alice"], ["alice-next", "--tenant", "alice"], ["ops", "--role", "operator"]):
        result = CliRunner().invoke(app, ["keys", "new", *arguments])
        assert result.exit_code == 0, result.output
        [key] = re.findall(r"^  (pdserve-\S+)$", result.stderr, re.MULTILINE)
        assert key not in result.stdout
        assert len(key) > MIN_KEY_CHARS
        keys.append(key)
        # as the shell's >> does
        with file.open("a") as entries:
            entries.write(result.stdout)
    assert len(set(keys)) == 3
    assert [(entry.name, entry.tenant, entry.role) for entry in read_keys(file)] == [
        ("alice", "alice", "user"),
        ("alice-next", "alice", "user"),
        ("ops", "ops", "operator"),
    ]
    known = ApiKeys.from_settings(RouterSettings(api_keys_file=str(file)))
    assert [known.check(f"Bearer {key}").tenant for key in keys] == ["alice", "alice", "ops"]
    assert all(key not in file.read_text() for key in keys)


@pytest.mark.parametrize("arguments", [["a b"], [""], ["a", "--tenant", "x+y"], ['a"\nrole = "operator'], ["a" * 65]])
def test_names_that_a_file_cannot_have_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["keys", "new", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert not result.stdout
