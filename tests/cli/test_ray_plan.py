"""`pdserve up --ray` without Ray: its plan, its errors before it connects, and the addresses that its router gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cli import main as command_line
from pdserve.cli.ray_cluster import connection
from pdserve.cli.ray_cluster.ray_directory import RayDirectory
from pdserve.cli.up.cluster_plan import ClusterPlan, make_plan
from pdserve.common.errors import ConfigError
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.common.worker_identity import WorkerRole
from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import eventually


def plan(
    given: dict[str, object] | None = None, config: Path | None = None, environ: dict[str, str] | None = None
) -> ClusterPlan:
    return make_plan(given or {}, config, {"prefill": 1, "decode": 1}, environ or {}, on_ray=True)


def test_a_node_gets_every_setting_and_nothing_else_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of many characters\n")
    file = tmp_path / "up.toml"
    file.write_text('[decode]\nnum_threads = 3\nkv_digest = "gmac"\nstream_interval = 2\n')
    given = {"deployment_key_file": str(tmp_path / "key"), "logits_processors": "one,two", "insecure": True}
    made = plan(given, file, {"PDSERVE_MAX_MODEL_LEN": "30", "HOME": "/home/me", "OTEL_SERVICE_NAME": "mine"})
    kinds: tuple[type[WorkerSettings], ...] = (PrefillSettings, DecodeSettings)
    for child, kind in zip(made.children, kinds, strict=True):
        assert child.flags == ()
        assert child.environ.pop("OTEL_SERVICE_NAME") == "mine"
        assert all(name.startswith("PDSERVE_") for name in child.environ)
        settings = load_settings(kind, environ=child.environ)
        assert settings == child.settings
        assert (settings.insecure, settings.max_model_len) == (True, 30)
        assert (settings.logits_processors, settings.log_level) == (("one", "two"), "warning")
        assert settings.deployment_key_file is None
        assert settings.key()[0] == made.router.key()[0]
        assert settings.cpu_core is None, "the node's cores are not this machine's"
    decode = made.children[1].settings
    assert isinstance(decode, DecodeSettings)
    assert (decode.num_threads, decode.kv_digest, decode.stream_interval) == (3, "gmac", 2)
    assert len(made.ports()) == 3, "the router's alone"


def test_a_relative_folder_of_the_model_is_absolute_at_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"model": "model", "enable_lora": True, "lora_modules": "sql=adapters/sql", "lora_dir": "watched"}
    made = plan(given).children[0]
    assert made.settings.model == str(tmp_path / "model")
    assert made.settings.lora_modules == {"sql": str(tmp_path / "adapters/sql")}
    assert made.settings.lora_dir == str(tmp_path / "watched")
    assert load_settings(PrefillSettings, environ=made.environ) == made.settings
    assert plan({"model": "ORG/NAME"}).children[0].settings.model == "ORG/NAME"


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2: workers on Ray have one rank each"):
        plan({"tensor_parallel_size": "2"})


def test_a_numbered_gpu_is_refused() -> None:
    assert plan({"device": "cuda"}).children[0].settings.device == "cuda"
    with pytest.raises(ConfigError, match=r"device is 'cuda:1': Ray assigns the GPU"):
        plan({"device": "cuda:1"})


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:{closed}", "--ray 127.0.0.1:{closed}: nothing answers at 127.0.0.1:{closed}: "),
        ("ray://127.0.0.1:{closed}", "--ray ray://127.0.0.1:{closed}: nothing answers at 127.0.0.1:{closed}: "),
        ("127.0.0.1:99999", "--ray 127.0.0.1:99999: nothing answers at 127.0.0.1:99999: "),
        ("local", "--ray is 'local': auto, host:port or ray://host:port is needed"),
        ("nowhere", "--ray is 'nowhere': auto, host:port or ray://host:port is needed"),
    ],
)
def test_an_address_without_ray_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, line: str
) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: name)
    monkeypatch.setattr("pdserve.cli.up.up_command.configure_logging", lambda *given: None)
    with reserved_port() as closed:
        ray = ["--ray", address.format(closed=closed)]
        monkeypatch.setattr("sys.argv", ["pdserve", "up", "--port", "0", "--grpc-port", "0", *ray])
        began = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    assert ended.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"pdserve: {line.format(closed=closed)}")
    assert time.monotonic() - began < 60


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"^--ray needs the package ray: .* deploy/install\.py ray$"),
        connection.ray_workers("auto", 1.0, (), verbose=False),
    ):
        pass


class Known:
    """A fleet of which every worker lives as long as it is known."""

    def __init__(self) -> None:
        self.roles: dict[str, WorkerRole] = {}

    def register(self, address: str, role: WorkerRole) -> None:
        self.roles[address] = role

    def forget(self, missing: Collection[str]) -> None:
        for address in missing:
            del self.roles[address]

    def introduced(self) -> list[str]:
        return list(self.roles)

    def lives(self) -> list[Any]:
        return []


async def test_a_router_gets_the_addresses_where_workers_are_now() -> None:
    workers: list[Any] = [
        SimpleNamespace(plan=SimpleNamespace(role=role), address=address)
        for role, address in (("prefill", "10.0.0.1:1"), ("decode", "10.0.0.2:2"))
    ]
    fleet = Known()
    running = asyncio.create_task(RayDirectory(workers).run(fleet))
    try:
        both = {"10.0.0.1:1": WorkerRole.PREFILL, "10.0.0.2:2": WorkerRole.DECODE}
        await eventually(lambda: fleet.roles == both)
        workers[1].address = ""
        await eventually(lambda: fleet.roles == {"10.0.0.1:1": WorkerRole.PREFILL})
        workers[1].address = "10.0.0.3:3"
        await eventually(lambda: fleet.roles == {"10.0.0.1:1": WorkerRole.PREFILL, "10.0.0.3:3": WorkerRole.DECODE})
    finally:
        running.cancel()
