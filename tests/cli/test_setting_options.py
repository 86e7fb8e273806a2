"""Settings as options: each service takes its own, errors name them, secrets are told and not repeated."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.common.errors import ConfigError
from pdserve.common.settings.catalogue import SERVICES, settings_of

STARTS_NOT = ["--model=/nowhere"]
"""Refused when all settings have been verified: what the test sets is named unless it got lost."""


def refused(*arguments: str) -> str:
    """The message with which a command ends."""
    error = CliRunner().invoke(app, list(arguments)).exception
    assert isinstance(error, ConfigError)
    return error.message


@pytest.mark.parametrize("kind", SERVICES, ids=lambda kind: kind.section)
def test_each_setting_and_limit_of_a_service_is_an_option_with_its_meaning(kind):
    group: Any = typer.main.get_command(app)
    command = group.commands[kind.section]
    options = {option: one.help for one in command.get_params(typer.Context(command)) for option in one.opts}
    for setting in settings_of(kind).values():
        assert setting.meaning in options[setting.option].replace("\\[", "[")


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("host", "0.0.0.0"), ("port", "x"), ("redis", "x"), ("max-logprobs", "5000"), ("log-format", "xml")],
)
def test_a_wrong_value_is_refused(command, name, wrong):
    for words in ([f"--{name}={wrong}"], [f"--{name}", wrong], [f"--{name.replace('-', '_')}", wrong]):
        assert name.replace("-", "_") in refused(command, *words, *STARTS_NOT)


@pytest.mark.parametrize(
    ("command", "option", "told"),
    [
        (
            "router",
            "--max-conections=3",
            "--max-conections: `pdserve router` has no such option, did you mean '--max-connections'",
        ),
        (
            "router",
            "--max-num-seqs=3",
            "--max-num-seqs: `pdserve router` has no such option, but of prefill and decode",
        ),
        ("decode", "--policy=x", "--policy: `pdserve decode` has no such option, but of router"),
        ("up", "--worker-id=x", "it chooses worker_id for each service"),
        ("up", "--onec", "--onec: `pdserve up` has no such option, did you mean '--once'"),
        (
            "generate",
            "--max-token=3",
            "--max-token: `pdserve generate` has no such option, did you mean '--max-tokens'",
        ),
    ],
)
def test_an_unknown_option_names_the_nearest_ones_or_the_service_that_has_it(command, option, told):
    assert told in refused(command, option)


def test_flags_take_values_and_lists_repeat(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text('no_auth = true\n[router]\ncors_origins = ["https://a.example"]\n')
    key = "a-key-of-many-characters"
    both = refused("router", "--config", str(file), "--api-keys", key, "--api-keys", f"b{key}", *STARTS_NOT)
    assert "no_auth is true, and API keys are given" in both
    own = refused(
        "router", "--config", str(file), "--no-auth", "false", "--api-keys", key, "--api-keys", f"b{key}", *STARTS_NOT
    )
    assert "no such folder" in own
    assert "kv_host_mib is 3 and enable_prefix_caching is false" in refused(
        "prefill", "--no-enable-prefix-caching", "--kv-host-mib", "3", *STARTS_NOT
    )


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--deployment-key=s3cr3t of many characters"], "deployment_key"),
        (["--redis", "redis://:s3cr3t@host"], "redis"),
    ],
)
def test_a_secret_in_the_command_line_is_told_and_not_repeated(command, flags, name):
    result = CliRunner().invoke(app, [command, *flags, *STARTS_NOT])
    assert f"pdserve: {name} is in the command line" in result.output
    assert f"PDSERVE_{name.upper()}" in result.output
    assert "s3cr3t" not in result.output + str(result.exception)


def test_nothing_is_said_of_other_settings():
    result = CliRunner().invoke(app, ["router", "--redis", "redis://host", *STARTS_NOT])
    assert "is in the command line" not in result.output


@pytest.mark.parametrize("name", ["local-prefill", "policy"])
def test_a_wrong_choice_is_refused_with_the_choices(name):
    assert f"{name.replace('-', '_')} is 'x', one of " in refused("router", f"--{name}=x", *STARTS_NOT)


def test_pdserve_settings_prints_what_a_word_finds():
    shown = CliRunner().invoke(app, ["settings", "max_num_seqs"]).output
    first, second, third = shown.splitlines()[:3]
    assert first == "max_num_seqs  integer; default: 64  (prefill, decode)"
    assert second.split() == ["--max-num-seqs", "PDSERVE_MAX_NUM_SEQS"]
    assert third.strip() == "Sequences in one step, at most."
    assert "max_waiting  integer; default: none  ([limits] of prefill, decode)" in shown, (
        "its meaning names max_num_seqs"
    )
    everything = CliRunner().invoke(app, ["settings"]).output
    assert all(setting.variable in everything for setting in settings_of(*SERVICES).values())
    assert "no setting has 'block_sise' in its name or meaning, did you mean 'block_size'" in refused(
        "settings", "block_sise"
    )
