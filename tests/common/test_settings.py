"""Settings: one order of sources, unknown keys refused everywhere, secrets nowhere to be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey, is_loopback
from pdserve.common.settings.catalogue import SECRETS, SERVICES, catalogue, settings_of
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import describe, load_settings
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

SECRET = "a secret of many characters"
API_KEY = "a-key-of-many-characters"


def write(folder: Path, text: str, name: str = "settings.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_toml_over_defaults(tmp_path: Path) -> None:
    toml = write(tmp_path, 'model = "toml"\nnum_blocks = 11\nkv_cache_mib = 12\n[prefill]\nnum_blocks = 13\n')
    environ = {"PDSERVE_MODEL": "environment", "PDSERVE_PORT": "14", "HOME": "/nowhere"}
    flags = {"port": 15, "max_num_seqs": None, "data_port": "16"}
    settings = load_settings(PrefillSettings, flags=flags, toml=toml, environ=environ)
    assert (settings.model, settings.num_blocks, settings.kv_cache_mib) == ("environment", 13, 12)
    assert (settings.port, settings.max_num_seqs, settings.data_port) == (15, 64, 16)
    assert load_settings(DecodeSettings, toml=toml, environ={}).num_blocks == 11
    assert load_settings(RouterSettings, toml=toml, environ={}).model == "toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bogus = 1", "unknown key 'bogus'"),
        ("[bogus]\nport = 1", "unknown key 'bogus'"),
        ("[prefill]\nbogus = 1", "unknown key 'bogus' in .prefill."),
        ("[decode]\nbogus = 1", "unknown key 'bogus' in .decode."),
        ("[router]\nnum_blocks = 1", "unknown key 'num_blocks' in .router."),
        ("num_blocks = 'many'", r"Expected `int \| null`"),
        ("[host]\na = 1", "Expected `str`"),
        ("log_level = 'loud'", "log_level is 'loud', one of debug, info, warning, error is needed"),
        ("scheduling_policy = 'lifo'", "scheduling_policy is 'lifo', one of fcfs, priority is needed"),
        ("= 3", "Invalid"),
    ],
)
def test_a_wrong_toml_file_is_refused_and_named(tmp_path: Path, text: str, message: str) -> None:
    toml = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(PrefillSettings, toml=toml, environ={})
    assert str(toml) in caught.value.message


def test_a_missing_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        load_settings(PrefillSettings, toml=tmp_path / "absent.toml", environ={})


def test_limits_have_a_table_of_their_own_and_names_like_all_others(tmp_path: Path) -> None:
    toml = write(tmp_path, "[limits]\nmax_logprobs = 7\nmax_waiting = 8\n[decode.limits]\nmax_waiting = 9\n")
    router, prefill, decode = (
        load_settings(kind, toml=toml, environ={"PDSERVE_MAX_N_SEQUENCES": "5"}, flags={}) for kind in SERVICES
    )
    assert (router.limits.max_logprobs, router.limits.max_n_sequences) == (7, 5)
    assert isinstance(prefill, PrefillSettings)
    assert isinstance(decode, DecodeSettings)
    assert (prefill.limits.max_waiting, prefill.waiting_limit, decode.limits.max_waiting) == (8, 8, 9)
    flags = {"max_logprobs": "3", "max_attempts": 2}
    given = load_settings(RouterSettings, toml=toml, environ={}, flags=flags)
    assert (given.limits.max_logprobs, given.limits.max_attempts) == (3, 2)
    assert "max_attempts=2" in describe(given)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_waiting = 1", r"max_waiting is a limit: write it below \[limits\]"),
        ("[decode]\nmax_waiting = 1", r"max_waiting in \[decode\] is a limit: write it below \[decode.limits\]"),
        ("[limits]\nblock_size = 1", r"block_size in \[limits\] is no limit: write it above \[limits\]"),
        ("[limits]\nmax_waitin = 1", r"unknown key 'max_waitin' in \[limits\], did you mean 'max_waiting'"),
        ("[router.limits]\nmax_waiting = 1", r"'max_waiting' in \[router.limits\], but of prefill and decode"),
        ("limits = 3", "limits is '3', a table is needed"),
        ("[limits]\nmax_waiting = 'x'", "max_waiting is 'x': Expected `int | null`"),
    ],
)
def test_a_limit_in_the_wrong_place_is_told_the_right_one(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(PrefillSettings, toml=write(tmp_path, text), environ={})


def test_every_setting_says_what_it_means_and_has_one_name() -> None:
    for setting in catalogue():
        assert setting.meaning.endswith("."), setting.name
        assert setting.type_text, setting.name
    names = [setting.name for setting in catalogue()]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == ["port"]
    settings = {setting.name for setting in catalogue() if not setting.is_limit}
    assert len(settings) <= 95
    assert settings_of(RouterSettings)["port"].default == 8000
    ports = [setting.services for setting in catalogue() if setting.name == "port"]
    assert ports == [("router",), ("prefill", "decode")]


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"kv_cache_mb": 1}, "'kv_cache_mib'?"),
        ({"MAX-NUM-SEQ": 1}, "'max_num_seqs'?"),
        ({"speculative": 1}, "'speculative_config'?"),
        ({"bogus": 1}, None),
        ({"x": 1}, None),
    ],
)
def test_a_misspelt_setting_names_the_nearest_one(tmp_path: Path, given: dict[str, Any], near: str | None) -> None:
    [(name, value)] = given.items()
    sources: list[dict[str, Any]] = [
        {"flags": given, "environ": {}},
        {"toml": write(tmp_path, f'"{name}" = {value}'), "environ": {}},
        {"toml": write(tmp_path, f'[prefill]\n"{name}" = {value}', "own.toml"), "environ": {}},
    ]
    for source in sources:
        with pytest.raises(ConfigError) as refused:
            load_settings(PrefillSettings, **source)
        assert near is None or f", did you mean {near.rstrip('?')}" in refused.value.message
        assert near is not None or "did you mean" not in refused.value.message
    with pytest.raises(ConfigError) as refused:
        load_settings(PrefillSettings, environ={f"PDSERVE_{name.upper()}": "1"})
    assert near is None or f", did you mean 'PDSERVE_{near[1:-2].upper()}'" in refused.value.message


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("max_num_seqs", 65536),
        ("max_num_batched_tokens", 4194304),
        ("max_waiting", 16777216),
        ("num_threads", 4096),
        ("kv_ring_mib", 16777216),
        ("grammar_memory_mib", 16777216),
        ("tensor_parallel_size", 1024),
        ("block_size", 65536),
        ("max_cpu_loras", 65536),
    ],
)
def test_what_no_machine_has_is_refused_with_the_limit(name: str, most: int) -> None:
    load_settings(DecodeSettings, flags={name: most}, environ={})
    for value in (most + 1, 10**18):
        with pytest.raises(ConfigError) as refused:
            load_settings(DecodeSettings, flags={name: value}, environ={})
        assert refused.value.message == f"{name} is {value}, at most {most} is possible"


def test_a_setting_of_another_service_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match="'num_blocks' is no setting of router, but of prefill and decode"):
        load_settings(RouterSettings, flags={"num_blocks": 1}, environ={})
    with pytest.raises(ConfigError, match=r"unknown field `num_spec_tokens`, did you mean 'num_speculative_tokens'\?"):
        load_settings(PrefillSettings, flags={"speculative_config": '{"num_spec_tokens": 1}'}, environ={})


def test_unknown_variables_and_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="PDSERVE_BOGUS"):
        load_settings(PrefillSettings, environ={"PDSERVE_BOGUS": "1"})
    with pytest.raises(ConfigError, match=r"flags.*bogus"):
        load_settings(PrefillSettings, flags={"bogus": 1}, environ={})
    with pytest.raises(ConfigError, match=r"environment.*num_blocks"):
        load_settings(PrefillSettings, environ={"PDSERVE_NUM_BLOCKS": "several"})


def test_variables_of_other_services_and_of_clients_are_left_alone() -> None:
    environ = {"PDSERVE_GRPC_PORT": "1", "PDSERVE_API_KEY": "x", "PDSERVE_PREFILL": "h:1"}
    assert load_settings(DecodeSettings, environ=environ).port == 0


def test_lists_are_written_with_commas() -> None:
    environ = {
        "PDSERVE_PREFILL": "127.0.0.1:1, [::1]:2,",
        "PDSERVE_API_KEYS": f"{API_KEY},b{API_KEY}",
        "PDSERVE_INSECURE": "true",
    }
    settings = load_settings(RouterSettings, environ=environ)
    assert settings.prefill == ("127.0.0.1:1", "[::1]:2")
    assert (settings.api_keys, settings.insecure) == ((API_KEY, f"b{API_KEY}"), True)
    settings = load_settings(
        RouterSettings, flags={"decode": "127.0.0.1:3,[::1]:4", "api_keys": f"c{API_KEY}"}, environ=environ
    )
    assert (settings.prefill, settings.decode) == (("127.0.0.1:1", "[::1]:2"), ("127.0.0.1:3", "[::1]:4"))
    assert settings.api_keys == (f"c{API_KEY}",)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *(
            (PrefillSettings, {name: 0})
            for name in ("block_size", "kv_cache_mib", "max_num_seqs", "max_waiting", "num_threads")
        ),
        (PrefillSettings, {"max_num_batched_tokens": -1}),
        (PrefillSettings, {"num_blocks": 1}),
        (PrefillSettings, {"kv_host_mib": -1}),
        *((PrefillSettings, {"run_ahead_share": value}) for value in (0.0, 1.1, -1.0, NAN)),
        *((DecodeSettings, {"lease_grace_s": value}) for value in (-1.0, NAN, INF)),
        (DecodeSettings, {"attach_timeout_s": NAN}),
        (PrefillSettings, {"long_prefill_token_threshold": -1}),
        (DecodeSettings, {"max_sessions": -1}),
        (DecodeSettings, {"data_parallel_rank": -1}),
        (DecodeSettings, {"data_parallel_rank": 65536}),
        *((DecodeSettings, {"worker_id": value}) for value in ("", "a b", "x" * 129, "a:b", "ä")),
        *((DecodeSettings, {"logits_processors": value}) for value in ("a,a", ["a", " "])),
        *((DecodeSettings, {"stream_interval": value}) for value in (0, -1, 1025)),
        *((DecodeSettings, {"session_idle_timeout_s": value}) for value in (0.0, -1.0, NAN, INF)),
        *(
            (DecodeSettings, {"speculative_config": value})
            for value in (
                "{",
                "[]",
                "{}",
                '{"num_speculative_tokens": 0}',
                '{"num_speculative_tokens": 33}',
                '{"num_speculative_tokens": 2, "method": "eagle"}',
                '{"num_speculative_tokens": 2, "colour": 1}',
                '{"num_speculative_tokens": 2, "prompt_lookup_max": 65}',
                '{"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
                {"num_speculative_tokens": 2, "disable_by_batch_size": 0},
            )
        ),
        (RouterSettings, {"request_timeout_s": NAN}),
        *((RouterSettings, {name: 0}) for name in ("max_attempts", "max_queued_requests", "max_unread_bytes")),
        *((RouterSettings, {"prefill": (value,)}) for value in ("host", "host:", ":1", "host:0", "host:65536", "h:²")),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused_by_name(kind: type, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        load_settings(kind, flags=flags, environ={})


def test_speculation_is_a_table_or_json(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "[decode.speculative_config]\nmethod = 'ngram'\nnum_speculative_tokens = 3\nprompt_lookup_max = 4\n"
    )
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    for given in (
        load_settings(DecodeSettings, toml=file, environ={}),
        load_settings(DecodeSettings, environ={"PDSERVE_SPECULATIVE_CONFIG": text}),
        load_settings(DecodeSettings, flags={"speculative_config": text}, environ={}),
    ):
        assert given.speculative_config == expected
    assert (expected.shortest_lookup, expected.longest_lookup) == (4, 4)
    assert load_settings(DecodeSettings, environ={}).speculative_config is None


def test_listening_beyond_loopback_needs_to_be_said() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        load_settings(PrefillSettings, flags={"host": "0.0.0.0"}, environ={})
    load_settings(PrefillSettings, flags={"host": "0.0.0.0", "insecure": True}, environ={})


def test_every_text_setting_that_sounds_like_a_secret_is_treated_as_one() -> None:
    for kind in (RouterSettings, PrefillSettings, DecodeSettings):
        fields = [field for field in msgspec.structs.fields(kind) if "str" in str(field.type)]
        sounding = {field.name for field in fields if re.search(r"key|secret|password|token|header", field.name)}
        assert {name for name in sounding if not name.endswith("_file")} <= set(SECRETS)
        assert "deployment_key" in sounding


def test_secrets_are_not_in_the_log_line() -> None:
    flags = {"deployment_key": SECRET, "api_keys": (API_KEY,)}
    line = describe(load_settings(RouterSettings, flags=flags, environ={}))
    assert SECRET not in line
    assert API_KEY not in line
    assert "deployment_key=***" in line
    assert "api_keys=***" in line


@pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings, DecodeSettings])
def test_the_log_line_has_only_what_is_not_a_default(kind: type[RouterSettings]) -> None:
    assert describe(load_settings(kind, environ={})) == "(all others have their defaults)"
    given = load_settings(kind, flags={"port": 7, "model": "m"}, environ={"PDSERVE_LOG_LEVEL": "warning"})
    line = describe(given)
    assert sorted(line.removesuffix(" (all others have their defaults)").split()) == [
        "log_level=warning",
        "model=m",
        "port=7",
    ]


def test_a_key_is_needed_as_soon_as_an_address_is_not_loopback(tmp_path: Path) -> None:
    assert load_settings(PrefillSettings, environ={}).key() == (DEVELOPMENT_KEY, True)
    far = load_settings(RouterSettings, flags={"decode": ("10.0.0.1:1",), "insecure": True}, environ={})
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1"):
        far.key()
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    for flags in ({"deployment_key": SECRET}, {"deployment_key_file": str(path)}):
        assert load_settings(RouterSettings, flags=flags, environ={}).key() == (DeploymentKey(SECRET.encode()), False)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\xff", b"too short"])
def test_a_key_file_without_a_usable_key_never_falls_back_to_the_public_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(PrefillSettings, flags={"deployment_key_file": str(path)}, environ={}).key()
    assert "too short" not in caught.value.message
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(PrefillSettings, flags={"deployment_key_file": str(tmp_path / "absent")}, environ={}).key()


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "blank"),
        (" " * 16, "blank"),
        ("\t\n" * 20, "blank"),
        ("x" * 64, "1 different"),
        ("abcab" * 9, "3 different"),
    ],
)
@pytest.mark.parametrize("given", ["environment", "file"])
def test_a_blank_or_uniform_key_is_refused_and_never_repeated(tmp_path: Path, key: str, why: str, given: str) -> None:
    path = tmp_path / "key"
    path.write_text(key)
    environ = {"PDSERVE_DEPLOYMENT_KEY": key}
    flags = {"deployment_key_file": str(path)} if given == "file" else {}
    with pytest.raises(ConfigError, match=why) as caught:
        load_settings(PrefillSettings, flags=flags, environ=environ if given == "environment" else {}).key()
    assert not key.strip() or key.strip() not in caught.value.message


def test_a_blank_name_of_a_key_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="deployment_key_file"):
        load_settings(PrefillSettings, environ={"PDSERVE_DEPLOYMENT_KEY_FILE": ""}).key()


def test_loopback_is_recognised_with_and_without_port() -> None:
    near = ("127.0.0.1", "127.1.2.3:80", "localhost", "localhost:1", "::1", "[::1]:80", "[::1]")
    far = ("0.0.0.0", "10.0.0.1:80", "::", "[fe80::1]:80", "example.org", "localhost.example.org", "")
    assert all(is_loopback(address) for address in near)
    assert not any(is_loopback(address) for address in far)


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        ("max_logprobs", -1, "0 to 1024"), ("max_logprobs", 1025, "0 to 1024"), ("max_n_sequences", 0, "1 to 256"),
        ("max_n_sequences", 257, "1 to 256"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [PrefillSettings, RouterSettings])
def test_limits_of_requests_have_limits(kind: type[PrefillSettings], name: str, value: int, possible: str) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}, {possible} are possible"):
        load_settings(kind, flags=given, environ={})
