"""Which of its settings `pdserve up` gives to which service, and from where they come."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.cli.up.cluster_plan import ClusterPlan, make_plan, settings_by_role
from pdserve.cli.up.reserved_ports import reserved_ports
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import listening_socket
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from tests.support.processes.reserved_port import reserved_port

KEY = "a key of many characters"


def plan(
    given: Mapping[str, object] | None = None,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    decode: int = 1,
) -> ClusterPlan:
    return make_plan(given or {}, config, {"prefill": 1, "decode": decode}, environ or {})


def test_each_service_is_given_the_settings_that_it_has() -> None:
    given = {"stream_interval": "4", "max_attempts": "2", "log_level": "debug", "num_blocks": "100"}
    assert settings_by_role(given) == {
        "router": {"max_attempts": "2", "log_level": "debug"},
        "prefill": {"log_level": "debug", "num_blocks": "100"},
        "decode": {"stream_interval": "4", "log_level": "debug", "num_blocks": "100"},
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stream_intervall", "no service has such a setting, did you mean 'stream_interval'"),
        ("waiting", "no service has such a setting, did you mean 'max_waiting'"),
    ],
)
def test_a_setting_that_up_cannot_give_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{why}"):
        plan({name: "4"})


@pytest.mark.parametrize("name", ["port", "stream_interval", "block_size"])
def test_a_wrong_value_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'x': Expected `int`"):
        plan({name: "x"})


def test_what_was_asked_for_comes_after_what_up_chooses_itself() -> None:
    prefill, decode = plan({"stream_interval": "4", "num_threads": "9"}).children
    # a prefill worker has it when it takes the decode role
    assert prefill.environ["PDSERVE_STREAM_INTERVAL"] == "4"
    assert not hasattr(prefill.settings, "stream_interval")
    assert decode.environ["PDSERVE_STREAM_INTERVAL"] == "4"
    assert (prefill.settings.num_threads, prefill.settings.log_level) == (9, "warning")


@pytest.mark.parametrize(("cores", "first"), [({4, 5, 6}, [4, 5, 6]), ({4, 5}, [None, None, None])])
def test_workers_get_cores_of_their_own_from_those_that_the_cluster_may_use(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], first: list[int | None]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)
    assert [child.settings.cpu_core for child in plan(decode=2).children] == first


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text(
        'port = 1\ngrpc_port = 2\nlog_level = "error"\nmax_model_len = 30\n[router.limits]\nmax_attempts = 7\n'
    )
    environ = {"PDSERVE_PORT": "11", "PDSERVE_GRPC_PORT": "12", "PDSERVE_LOG_LEVEL": "info"}
    made = plan({"port": 21}, file.rename(tmp_path / "shared.toml"), environ)
    router = made.router
    assert (router.port, router.grpc_port, router.limits.max_attempts, router.log_level) == (21, 12, 7, "info")
    for child in made.children:
        assert (child.settings.port, child.settings.max_model_len, child.settings.log_level) == (0, 30, "info")
    assert plan().router.log_level == "warning"


def test_no_setting_stands_in_a_childs_command_line() -> None:
    secrets = {
        "deployment_key": "s3cr3t of many characters",
        "redis": "redis://:s3cr3t@127.0.0.1",
    }
    kinds: tuple[type[WorkerSettings], ...] = (PrefillSettings, DecodeSettings)
    for child, kind in zip(plan(secrets).children, kinds, strict=True):
        assert child.flags == ()
        settings = load_settings(kind, environ={k: v for k, v in child.environ.items() if k.startswith("PDSERVE_")})
        assert settings == child.settings
        assert {name: getattr(settings, name) for name in secrets} == secrets


def test_the_file_counts_more_than_what_up_chooses_itself(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text('[prefill]\nnum_threads = 7\nlog_level = "info"\n')
    prefill, decode = plan(config=file).children
    assert prefill.flags == ("--config", str(file))
    assert "PDSERVE_NUM_THREADS" not in prefill.environ
    settings = load_settings(PrefillSettings, toml=file, environ=prefill.environ)
    assert (settings.num_threads, settings.log_level) == (7, "info")
    assert decode.environ["PDSERVE_LOG_LEVEL"] == "warning"


@pytest.mark.parametrize("source", ["flags", "environment", "file", "key file", "nowhere"])
def test_one_deployment_key_reaches_all_services(tmp_path: Path, source: str) -> None:
    config, key_file = tmp_path / "up.toml", tmp_path / "key"
    config.write_text(f'[router]\ndeployment_key = "{KEY}"\n' if source == "file" else "")
    key_file.write_text(KEY)
    made = plan(
        {"flags": {"deployment_key": KEY}, "key file": {"deployment_key_file": str(key_file)}}.get(source),
        config,
        {"PDSERVE_DEPLOYMENT_KEY": KEY} if source == "environment" else {},
    )
    keys = {service.key()[0].secret for service in (made.router, *(child.settings for child in made.children))}
    assert len(keys) == 1
    assert (keys == {KEY.encode()}) is (source != "nowhere")


def test_another_key_for_one_service_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("another key of many characters")
    (tmp_path / "up.toml").write_text(f'deployment_key = "{KEY}"\n[decode]\ndeployment_key_file = "{tmp_path}/key"\n')
    with pytest.raises(ConfigError, match=r"deployment_key_file in \[decode\]"):
        plan(config=tmp_path / "up.toml")


def test_workers_stay_on_loopback_and_their_ports_are_their_own(tmp_path: Path) -> None:
    (tmp_path / "up.toml").write_text('[decode]\nhost = "10.0.0.1"\nadvertise_host = "10.0.0.1"\ndata_port = 7\n')
    given = {"host": "0.0.0.0", "insecure": True, "no_auth": True, "metrics_port": "9200"}
    made = plan(given, tmp_path / "up.toml", {"PDSERVE_PORT": "8300"}, decode=2)
    assert (made.router.host, made.router.port, made.router.metrics_port) == ("0.0.0.0", 8300, 9200)
    for place, child in enumerate(made.children):
        settings = child.settings
        assert (settings.host, settings.peers_host, settings.data_port) == ("127.0.0.1", "127.0.0.1", 0)
        assert (settings.metrics_port, settings.metrics_at) == (9201 + place, "127.0.0.1")
    assert [child.settings.worker_id for child in made.children] == ["prefill-0", "decode-0", "decode-1"]


@pytest.mark.parametrize("name", ["port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_named(name: str) -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        made = plan({"port": 0, "grpc_port": 0, name: port})
        with pytest.raises(ConfigError, match=rf"{name} .*127\.0\.0\.1:{port}: .*in use"), reserved_ports(made.ports()):
            pass


def test_equal_ports_are_refused() -> None:
    with reserved_port() as port:
        ports = plan({"port": port, "grpc_port": port}).ports()
        with pytest.raises(ConfigError, match=f"port and grpc_port are both {port}"), reserved_ports(ports):
            pass


def test_a_reserved_port_is_free_for_its_service_alone() -> None:
    with reserved_ports(plan({"port": 0, "grpc_port": 0}).ports()) as numbers:
        assert len(set(numbers)) == 5
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", numbers[0]))
        for _ in "a service", "the same after a restart":
            listening_socket("127.0.0.1", numbers[0]).close()


def test_each_rank_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    workers = plan({"tensor_parallel_size": "2"}, decode=1).children
    assert [(child.settings.cpu_core, child.settings.num_threads) for child in workers] == [(0, 4), (8, 4)]
    own = plan(environ={"PDSERVE_TENSOR_PARALLEL_SIZE": "2"}, decode=2).children
    assert [(child.settings.cpu_core, child.settings.num_threads) for child in own] == [(0, 2), (4, 2), (8, 2)]


def test_adapters_reach_both_workers() -> None:
    given = {"enable_lora": True, "lora_modules": ["sql=/a/sql", "fr=b"], "lora_dir": "/watched"}
    made = plan(given)
    kinds: tuple[type[WorkerSettings], ...] = (PrefillSettings, DecodeSettings)
    for child, kind in zip(made.children, kinds, strict=True):
        assert child.settings.lora_modules == {"sql": "/a/sql", "fr": "b"}
        found = load_settings(kind, environ=child.environ)
        assert found.lora_modules == child.settings.lora_modules
        assert (found.lora_dir, found.enable_lora) == ("/watched", True)
