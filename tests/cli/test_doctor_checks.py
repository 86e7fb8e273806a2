"""Each of the doctor's checks that needs no other service: what it says when all is well, and when not."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.doctor.address_check import check_addresses
from pdserve.cli.doctor.credentials_check import check_clients, check_key, check_tls
from pdserve.cli.doctor.finding import Finding, Verdict
from pdserve.cli.doctor.gpu_check import check_gpu
from pdserve.cli.doctor.memory_check import check_memory
from pdserve.cli.doctor.model_check import check_model
from pdserve.cli.doctor.nixl_check import check_nixl
from pdserve.cli.doctor.port_check import check_ports
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.kernels.cpu.free_memory import free_memory
from pdserve.models.model_folder import model_folder
from tests.support.processes.tls_authority import Authority

Folders = Callable[..., Path]
SECRET = "0123456789abcdef"
BEYOND: dict[str, Any] = {"host": "0.0.0.0", "insecure": True}


def verdicts(findings: list[Finding]) -> list[str]:
    assert all(bool(finding.advice) is (finding.verdict is not Verdict.OK) for finding in findings), "advice if not ok"
    return [finding.verdict.value for finding in findings]


def text(findings: list[Finding]) -> str:
    return "\n".join(finding.what for finding in findings)


# ---- model


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def edited(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def model(folder: Path, **settings: Any) -> list[Finding]:
    return list(check_model(PrefillSettings(model=str(folder), **settings)))


def test_the_bundled_model_is_whole() -> None:
    findings = list(check_model(PrefillSettings()))
    assert verdicts(findings) == ["ok", "ok", "ok"]
    assert "Qwen3ForCausalLM" in text(findings)
    assert "bfloat16, 8.0 MiB of weights" in text(findings)
    assert verdicts(list(check_model(RouterSettings()))) == ["ok", "ok"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: edited(folder, "config.json", architectures=["GptForCausalLM"]), "GptForCausalLM"),
        (lambda folder: edited(folder, "config.json", hidden_size=64), "embed_tokens"),
        (lambda folder: edited(folder, "config.json", num_hidden_layers=5), "have no place"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 4096), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}"), "refused"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_a_broken_model_folder_fails_and_names_what_is_broken(
    tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    folder = copy_of(model_folder("demo"), tmp_path / "model")
    spoil(folder)
    findings = model(folder)
    assert "failed" in verdicts(findings)
    assert named in text([finding for finding in findings if finding.verdict is Verdict.FAILED])


def test_settings_that_the_model_does_not_take_fail(tiny_checkpoints: Folders) -> None:
    folder = tiny_checkpoints("llama")
    assert "tensor_parallel_size is 7" in text(model(folder, tensor_parallel_size=7))


def test_what_a_model_lacks_is_a_warning(tmp_path: Path) -> None:
    folder = copy_of(model_folder("demo"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    findings = model(folder)
    assert verdicts(findings) == ["ok", "ok", "warning"]
    assert "no chat template" in text(findings)
    assert verdicts(model(tmp_path / "nowhere")) == ["failed"]


@pytest.mark.slow
def test_every_architecture_is_held_against_its_headers(tiny_checkpoints: Folders) -> None:
    for architecture in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"):
        findings = model(tiny_checkpoints(architecture))
        assert findings[0].verdict is Verdict.OK, findings
        assert "MiB of weights" in findings[0].what


# ---- memory


def test_a_pool_that_fits_and_one_that_does_not() -> None:
    assert verdicts(list(check_memory(PrefillSettings()))) == ["ok"]
    findings = list(check_memory(PrefillSettings(kv_cache_mib=1 << 30)))
    assert verdicts(findings) == ["failed"]
    assert "KV pool 1,073,741,8" in text(findings)
    findings = list(check_memory(PrefillSettings(max_model_len=1 << 20)))
    assert verdicts(findings) == ["failed"]
    assert "max_model_len" in text(findings)


@pytest.mark.slow
def test_ranks_have_a_tier_each_and_one_draft_model() -> None:
    drafts = SpeculativeConfig(model="demo", num_speculative_tokens=2)
    settings = DecodeSettings(tensor_parallel_size=2, kv_host_mib=7, speculative_config=drafts)
    [finding] = check_memory(settings)
    needs = memory_needs(model_folder("demo", download=False), settings)
    assert "the host-memory tier of 2 ranks 14 MiB" in finding.what
    assert f"the draft model {needs.draft_model / (1 << 20):,.0f} MiB" in finding.what
    each = needs.weights + needs.pool + needs.step + needs.process + needs.host_tier
    assert needs.host == 2 * each + needs.draft_model


@pytest.mark.slow
def test_each_rank_adds_memory_to_a_shared_store() -> None:
    url = "mooncake://127.0.0.1:1?segment_mib=100"
    shared = DecodeSettings(tensor_parallel_size=2, kv_host_mib=7, kv_store=url)
    alone = DecodeSettings(tensor_parallel_size=2, kv_host_mib=7)
    folder = model_folder("demo", download=False)
    assert memory_needs(folder, shared).host - memory_needs(folder, alone).host == 2 * (100 + 128) << 20
    [finding] = check_memory(shared)
    assert "the shared store of 2 ranks 456 MiB" in finding.what
    [finding] = check_memory(DecodeSettings(kv_host_mib=7, kv_store=url.replace("100", str(1 << 30))))
    assert finding.verdict is Verdict.FAILED
    assert "segment_mib of kv_store" in str(finding)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\n"}
GIB = 1 << 30


def test_the_least_of_machine_and_control_groups_counts(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write(tmp_path, MEMINFO)
    free = free_memory(tmp_path)
    assert free is not None
    assert (free.num_bytes, free.limited_by) == (4 * GIB, "this machine")
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "sys/fs/cgroup/pods/one/memory.max": "max\n",
            "sys/fs/cgroup/pods/one/memory.current": "5\n",
            "sys/fs/cgroup/pods/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/pods/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/pods/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
        },
    )
    free = free_memory(tmp_path)
    assert free is not None
    assert (free.num_bytes, free.limited_by) == (3 * GIB // 2, "the control group /pods")


def test_the_first_version_of_control_groups_as_a_container_sees_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 << 20}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{40 << 20}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {10 << 20}\n",
        },
    )
    findings = list(check_memory(PrefillSettings(), tmp_path))
    assert verdicts(findings) == ["failed"]
    assert "free 70 MiB by the control group /" in text(findings)
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert "by this machine" in text(list(check_memory(PrefillSettings(), tmp_path)))


def test_a_system_that_does_not_tell_is_a_warning_and_one_that_is_nearly_full_too(tmp_path: Path) -> None:
    assert verdicts(list(check_memory(PrefillSettings(), tmp_path))) == ["warning"]
    write(tmp_path, {"proc/meminfo": f"MemAvailable: {700 << 10} kB\n"})
    assert verdicts(list(check_memory(PrefillSettings(), tmp_path))) == ["warning"]


# ---- GPU

TORCH = """
import types
__version__ = "9.9"
version = types.SimpleNamespace(cuda={cuda!r})
cuda = types.SimpleNamespace(
    is_available=lambda: {count} > 0,
    device_count=lambda: {count},
    mem_get_info=lambda index: ({free}, 1 << 40),
    get_device_name=lambda index: f"Made {{index}}",
)
print("a library's greeting")
"""


@pytest.fixture
def make_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Children then import this torch."""

    def make(cuda: str | None = "13.0", count: int = 2, free: int = 1 << 38) -> None:
        (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda, count=count, free=free))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


def test_gpus_are_named_and_the_device_is_one_of_them(make_torch: Callable[..., None]) -> None:
    make_torch()
    findings = list(check_gpu(PrefillSettings(device="cuda:1")))
    assert verdicts(findings) == ["ok"]
    assert "cuda:1 Made 1" in text(findings)
    assert "not used" in text(list(check_gpu(PrefillSettings())))
    assert verdicts(list(check_gpu(PrefillSettings(device="cuda:2")))) == ["failed"]
    beyond = list(check_gpu(PrefillSettings(device="cuda:1", tensor_parallel_size=2)))
    assert verdicts(beyond) == ["failed"]
    assert "device is 'cuda:2', but torch 9.9 sees 2 CUDA devices here" in text(beyond)


def test_no_gpu_and_a_torch_that_breaks(make_torch: Callable[..., None], tmp_path: Path) -> None:
    make_torch(None, 0)
    findings = list(check_gpu(PrefillSettings(device="cuda")))
    assert verdicts(findings) == ["failed"]
    assert "without CUDA" in text(findings)
    assert verdicts(list(check_gpu(PrefillSettings()))) == ["ok"]
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    findings = list(check_gpu(PrefillSettings(device="cuda")))
    assert verdicts(findings) == ["failed"]
    assert "SIGABRT" in text(findings)


@pytest.mark.slow
def test_with_a_gpu_pool_and_weights_must_fit_there_and_what_is_in_transfer_on_both_sides(
    make_torch: Callable[..., None],
) -> None:
    make_torch()
    findings = list(check_memory(PrefillSettings(device="cuda")))
    assert verdicts(findings) == ["ok", "ok"]
    assert "KV blocks in transfer 320 MiB" in findings[0].what
    make_torch(free=1 << 20)
    findings = list(check_memory(PrefillSettings(device="cuda")))
    assert verdicts(findings) == ["ok", "failed"]
    assert "by Made 0" in findings[1].what
    make_torch(count=0)
    assert verdicts(list(check_memory(PrefillSettings(device="cuda")))) == ["ok", "failed"]


# ---- key


def test_the_public_key_a_given_one_and_none_where_one_is_needed(tmp_path: Path) -> None:
    assert verdicts(list(check_key(PrefillSettings()))) == ["warning"]
    findings = list(check_key(PrefillSettings(deployment_key=SECRET)))
    assert verdicts(findings) == ["ok"]
    assert DeploymentKey(SECRET.encode()).fingerprint in text(findings)
    assert SECRET not in text(findings)
    assert verdicts(list(check_key(PrefillSettings(redis="redis://127.0.0.1")))) == ["failed"]
    file = tmp_path / "deployment.key"
    file.write_text(SECRET)
    file.chmod(0o600)
    assert verdicts(list(check_key(RouterSettings(deployment_key_file=str(file))))) == ["ok"]
    file.chmod(0o644)
    assert verdicts(list(check_key(RouterSettings(deployment_key_file=str(file))))) == ["ok", "warning"]


# ---- tls


def test_tls_says_until_when_and_what_is_in_the_clear(tmp_path: Path) -> None:
    assert verdicts(list(check_tls(PrefillSettings()))) == ["ok"]
    findings = list(check_tls(RouterSettings(**BEYOND)))
    assert verdicts(findings) == ["warning"]
    assert "0.0.0.0 is in the clear" in text(findings)
    authority = Authority(tmp_path / "ca")
    files = authority.issue(not_after=datetime(2900, 5, 6, tzinfo=UTC))
    files.key.chmod(0o600)
    worker = PrefillSettings(**files.settings())
    findings = list(check_tls(worker))
    assert verdicts(findings) == ["ok"]
    assert "valid until 2900-05-06" in text(findings)
    assert verdicts(list(check_nixl(worker))) == ["ok"], "nothing is tried"
    soon = authority.issue(not_after=datetime.now(UTC) + timedelta(days=3))
    soon.key.chmod(0o644)
    front: dict[str, Any] = {"front_tls_cert_file": str(soon.cert), "front_tls_key_file": str(soon.key)}
    findings = list(check_tls(RouterSettings(**files.settings(), **front)))
    assert verdicts(findings) == ["ok", "warning", "warning"]
    assert "which clients are shown" in findings[1].what
    assert str(soon.key) in findings[2].what


# ---- ports


def test_ports_that_are_free_drawn_in_use_equal_or_not_ours() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        findings = list(check_ports(PrefillSettings(data_port=port)))
        assert verdicts(findings) == ["ok", "failed", "ok"]
        assert f"127.0.0.1:{port}" in findings[1].what
        assert "data_port" in findings[1].what
    assert verdicts(list(check_ports(PrefillSettings(data_port=port)))) == ["ok", "ok", "ok"], "and nothing holds it"
    findings = list(check_ports(DecodeSettings(port=port, data_port=port)))
    assert verdicts(findings) == ["ok", "ok", "ok", "failed"]
    assert "port and data_port" in findings[3].what
    findings = list(check_ports(RouterSettings(host="192.0.2.1", insecure=True, port=0, grpc_port=0)))
    assert verdicts(findings) == ["failed", "failed", "failed"]
    assert "address of this machine" in findings[0].advice
    assert verdicts(list(check_ports(PrefillSettings(**BEYOND)))) == ["warning", "warning", "ok"]
    assert verdicts(list(check_ports(PrefillSettings(port=70_000)))) == ["failed", "ok", "ok"]


def test_equal_ports_are_a_conflict_only_where_addresses_overlap() -> None:
    port = 7001

    def conflicts(**settings: Any) -> list[str]:
        findings = list(check_ports(DecodeSettings(insecure=True, port=port, metrics_port=port, **settings)))
        return [finding.what for finding in findings[3:]]

    assert conflicts(host="127.0.0.1", metrics_host="127.0.0.2") == []
    both = [f"port and metrics_port are both {port}"]
    for host, metrics_host in (
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("0.0.0.0", "127.0.0.2"),
        ("127.0.0.2", "0.0.0.0"),
        ("127.0.0.2", "::"),
    ):
        assert conflicts(host=host, metrics_host=metrics_host) == both, (host, metrics_host)
    apart = conflicts(host="127.0.0.1", data_port=port, metrics_host="127.0.0.2")
    assert apart == [f"port and data_port are both {port}"]


# ---- addresses


def test_what_peers_are_told() -> None:
    def told(**settings: Any) -> list[Finding]:
        return list(check_addresses(PrefillSettings(**settings)))

    assert verdicts(told()) == ["ok"]
    assert verdicts(told(redis="redis://127.0.0.1")) == ["warning"]
    findings = told(**BEYOND, advertise_host="192.0.2.1")
    assert verdicts(findings) == ["warning"]
    assert "not an address of this machine" in text(findings)
    findings = told(**BEYOND, advertise_host="no-such-host.invalid")
    assert verdicts(findings) == ["failed"]
    assert "does not resolve" in text(findings)


def test_a_worker_that_listens_elsewhere_than_it_says(own_address: str) -> None:
    settings = PrefillSettings(host="127.0.0.1", advertise_host=own_address)
    findings = list(check_addresses(settings))
    assert verdicts(findings) == ["failed"]
    assert "listens on 127.0.0.1 alone" in text(findings)
    assert verdicts(list(check_addresses(PrefillSettings(**BEYOND, advertise_host=own_address)))) == ["ok"]


@pytest.fixture
def own_address() -> str:
    """One beyond loopback that an interface of this machine has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by this
        except OSError:
            pytest.skip("this machine has only loopback")
        return str(probe.getsockname()[0])


def test_the_workers_that_a_router_is_told_of() -> None:
    with socket.socket() as worker:
        worker.bind(("127.0.0.1", 0))
        worker.listen()
        here = f"127.0.0.1:{worker.getsockname()[1]}"
        findings = list(
            check_addresses(RouterSettings(prefill=(here,), decode=("127.0.0.1:1", "no-such-host.invalid:7002")))
        )
    assert verdicts(findings) == ["ok", "warning", "failed"]
    assert verdicts(list(check_addresses(RouterSettings()))) == ["failed"]
    assert verdicts(list(check_addresses(RouterSettings(prefill=(here,))))) == ["failed"]
    assert verdicts(list(check_addresses(RouterSettings(redis="redis://127.0.0.1")))) == ["ok"]


# ---- clients


def clients(**settings: Any) -> list[Finding]:
    return list(check_clients(RouterSettings(**settings)))


def keys_file(tmp_path: Path, *expiries: datetime | None) -> Path:
    path = tmp_path / "keys.toml"
    entries = (
        f'[[keys]]\nname = "k{number}"\nsha256 = "{number:064x}"\n'
        + ("" if expires is None else f"expires = {expires.isoformat()}\n")
        for number, expires in enumerate(expiries)
    )
    path.write_text("".join(entries))
    path.chmod(0o640)
    return path


def test_whether_clients_need_a_key() -> None:
    assert verdicts(clients()) == ["ok"]
    assert verdicts(clients(api_keys=(SECRET,), **BEYOND)) == ["ok"]
    assert verdicts(clients(front_tls_client_ca_file="ca.pem", **BEYOND)) == ["ok"]
    findings = clients(no_auth=True, **BEYOND)
    assert verdicts(findings) == ["warning"]
    assert "every client that reaches 0.0.0.0 is served" in text(findings)


def test_keys_that_expire_and_a_file_that_others_can_write(tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    path = keys_file(tmp_path, None, now + timedelta(days=30), now + timedelta(days=3), now - timedelta(days=1))
    findings = clients(api_keys_file=str(path))
    assert verdicts(findings) == ["ok", "warning", "warning"]
    assert "4 API key(s) of 4 tenant(s)" in text(findings)
    assert "k2 expires at" in text(findings)
    assert "k3 expired at" in text(findings)
    path.chmod(0o666)
    assert "can be written by other users" in text(clients(api_keys_file=str(path)))
    path.write_text("")
    assert verdicts(clients(api_keys_file=str(path))) == ["failed"]
