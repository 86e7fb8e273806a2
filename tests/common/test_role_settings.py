"""Whether a worker's settings let it take the other role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.development_certificates import TRUST_DOMAIN
from pdserve.common.errors import ConfigError
from pdserve.common.security.tls_roles import RoleName, ServiceRole
from pdserve.common.settings.role_settings import OF_THE_PROCESS, READ_PER_CALL, settings_in_other_role
from pdserve.common.settings.settings import load_settings, values_of
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from tests.support.processes.tls_authority import Authority


def other_of(kind: type[WorkerSettings], tmp_path: Path, text: str = "", **flags: Any) -> WorkerSettings:
    """The settings in the other role, with this file and these options."""
    file = tmp_path / "pdserve.toml"
    file.write_text(text)
    return settings_in_other_role(load_settings(kind, flags=flags, toml=file, environ={}), flags, file, {})


@pytest.mark.parametrize(("kind", "other"), [(PrefillSettings, DecodeSettings), (DecodeSettings, PrefillSettings)])
def test_equal_settings(kind: type[WorkerSettings], other: type[WorkerSettings], tmp_path: Path) -> None:
    made = other_of(kind, tmp_path, num_blocks=100, max_num_seqs=8, drain_s=3.0)
    assert type(made) is other
    assert (made.num_blocks, made.max_num_seqs) == (100, 8)


def test_what_is_read_per_call_follows_the_role(tmp_path: Path) -> None:
    text = "[decode]\nstream_interval = 4\n[decode.limits]\nmax_sessions = 3\nmax_waiting = 7\n[prefill.limits]\nmax_waiting = 9\n"
    made = other_of(PrefillSettings, tmp_path, text)
    assert isinstance(made, DecodeSettings)
    assert (made.stream_interval, made.session_limit, made.waiting_limit) == (4, 3, 7)
    back = other_of(DecodeSettings, tmp_path, text, stream_interval=5)
    assert (back.session_limit, back.waiting_limit) == (0, 9)


def test_what_is_the_process_own_may_differ(tmp_path: Path) -> None:
    text = '[prefill]\nport = 7001\nlog_level = "debug"\n[decode]\nport = 7002\ncpu_core = 3\n'
    assert other_of(PrefillSettings, tmp_path, text).port == 7002


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[decode]\nmax_num_seqs = 128\n", "max_num_seqs is 64 in [prefill] and 128 in [decode]"),
        ("[prefill]\nmax_num_batched_tokens = 4096\n", "max_num_batched_tokens is 4096 in [prefill] and None in [decode]"),
        ('[decode]\ndtype = "float32"\nnum_blocks = 9\n', "dtype is 'auto' in [prefill] and 'float32' in [decode]; num_blocks"),
        ("[decode.limits]\nrun_ahead_share = 0.1\n", "run_ahead_share is 0.5 in [prefill] and 0.1 in [decode]"),
        ("[decode]\nblock_size = 8\nmax_model_len = 9\nnum_blocks = 9\nnum_threads = 2\n", ", and 1 more differ: equal"),
        ("[decode]\nstream_interval = 0\n", "stream_interval is 0, 1 to 1024 tokens are possible"),
        ('[decode]\ntls_cert_file = "nowhere.pem"\n', "tls_cert_file is given, so tls_key_file and tls_ca_file must be, too"),
    ],
)  # fmt: skip
def test_what_cannot_change_is_named(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        other_of(PrefillSettings, tmp_path, text)
    assert told in caught.value.message


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        other_of(PrefillSettings, tmp_path, '[decode]\ndeployment_key = "0123456789abcdef"\n')
    assert "deployment_key differs in [prefill] and [decode]" in caught.value.message
    assert "0123456789abcdef" not in caught.value.message


def test_the_environment_counts_for_both(tmp_path: Path) -> None:
    environ = {"PDSERVE_STREAM_INTERVAL": "6", "PDSERVE_NUM_BLOCKS": "77"}
    settings = load_settings(PrefillSettings, environ=environ)
    made = settings_in_other_role(settings, {}, None, environ)
    assert isinstance(made, DecodeSettings)
    assert (made.stream_interval, made.num_blocks) == (6, 77)


@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "decode")])
def test_a_certificate_needs_both_roles(roles: tuple[str, ...], tmp_path: Path) -> None:
    uris = [str(RoleName(TRUST_DOMAIN, ServiceRole(role))) for role in roles]
    flags = Authority(tmp_path / "ca").issue(uris=uris).settings()
    if len(roles) == 2:
        assert other_of(PrefillSettings, tmp_path, **flags).tls() is not None
        return
    with pytest.raises(ConfigError, match="no role spiffe://<trust domain>/pdserve/decode among its names"):
        other_of(PrefillSettings, tmp_path, **flags)


def test_each_name_is_that_of_a_setting() -> None:
    known = values_of(DecodeSettings()).keys()
    assert known >= (READ_PER_CALL | OF_THE_PROCESS)
    assert not READ_PER_CALL & OF_THE_PROCESS
