"""The doctor's check of NIXL and UCX: as they are here, and as they may be elsewhere: missing, broken, aborting, silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.cli.doctor.child_process import ChildBroke
from pdserve.cli.doctor.finding import Finding, Verdict
from pdserve.cli.doctor.nixl_check import check_nixl, choice, transports_text
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.kv_transfer.nixl import nixl_probe
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_probe import NixlView, ReadView, UcxTransport
from tests.support.engine.pretend_device import pretended_device
from tests.support.engine.pretend_pool import PretendedPool, digest_on_device, reachable_by_nixl


def verdicts(findings: list[Finding]) -> list[str]:
    assert all(bool(finding.advice) is (finding.verdict is not Verdict.OK) for finding in findings), "advice if not ok"
    return [finding.verdict.value for finding in findings]


def look(environ: dict[str, str] | None = None, **settings: Any) -> list[Finding]:
    return list(check_nixl(PrefillSettings(**settings), environ or {}))


@pytest.mark.slow
def test_two_processes_read_each_other_here() -> None:
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    findings = look({"UCX_TLS": "^tcp"})
    assert verdicts(findings) == ["ok", "ok", "ok", "ok", "ok"]
    assert "UCX_TLS is '^tcp', as the environment says" in findings[0].what
    assert "shared memory: " in findings[1].what
    assert "(not used)" in findings[1].what.split("TCP: ")[1]
    assert re.search(r"read each other over NIXL \(\d+ ms with the connection, then \d+.\d GB/s", findings[2].what)
    assert findings[3].what.startswith("device is cpu: ")
    assert "peers on this machine over shared memory, on others over the tcp connector" in findings[4].what


def _device(device: str, environ: dict[str, str] | None = None, **settings: Any) -> tuple[str, str]:
    """Verdict and text of the finding about a device's memory."""
    [finding] = [
        finding for finding in look(environ, device=device, **settings) if f"memory of {device}" in finding.what
    ]
    return finding.verdict.value, finding.what


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_memory_of_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    verdict, what = _device("cuda", {"UCX_TLS": "^tcp"})
    assert verdict == "warning"
    assert "memory of cuda cannot be read over NIXL: torch " in what
    assert "sees no GPU here; connector is auto, so blocks move over TCP" in what


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_memory_of_a_gpu_is_read_and_timed() -> None:
    verdict, what = _device("cuda")
    assert verdict == "ok"
    assert re.search(r"each other's memory of cuda over NIXL .*then \d+.\d GB/s", what)


GOOD = (NixlView(why_not=None, nixl="1.5.1"), ReadView(None, 0.2, 5e9))


@pytest.mark.parametrize(
    ("answer", "verdict", "told"),
    [
        ((GOOD[0], ReadView(None, 0.5, 123.4e9)), "ok", "(500 ms with the connection, then 123.4 GB/s with digests)"),
        ((GOOD[0], ReadView("nothing for 3 s")), "failed", "cannot be read over NIXL: nothing for 3 s"),
        (ChildBroke("it was ended by SIGABRT"), "failed", "registers it with NIXL: it was ended by SIGABRT"),
        (TimeoutError(), "failed", "was not read over NIXL within 40 s"),
    ],
)
def test_what_reading_memory_of_a_gpu_may_come_to(
    monkeypatch: pytest.MonkeyPatch, answer: Any, verdict: str, told: str
) -> None:
    def probe(device: str, *_: object) -> Any:
        if device == "cuda:1" and isinstance(answer, Exception):
            raise answer
        return answer if device == "cuda:1" else GOOD

    monkeypatch.setattr("pdserve.cli.doctor.nixl_check.probe", probe)
    found = _device("cuda:1", connector="nixl")
    assert found[0] == verdict
    assert told in found[1]


@pytest.mark.slow
def test_a_source_and_a_reader_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's path for memory of a device, in one process, on the pretended device."""
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    monkeypatch.setattr("pdserve.kv_transfer.memory.device_digests.device_digests", lambda *_: digest_on_device)
    monkeypatch.setattr("pdserve.kv_transfer.memory.device_pool.DevicePool", PretendedPool)
    with reachable_by_nixl(), pretended_device():
        pools = [nixl_probe.make_pool("meta") for _ in range(2)]
        nixl_probe.fill(pools[0])
        source, reader = (NixlConnector() for _ in pools)
        for connector, pool in zip((source, reader), pools, strict=True):
            connector.serve(pool)
        read = nixl_probe.timed_reads(reader, source.metadata)
        assert (read.why_not, read.seconds > 0, read.bytes_per_s > 0) == (None, True, True)
        assert torch.equal(*(pool._blocks.held for pool in pools))  # type: ignore[attr-defined]
        pools[0]._blocks.held[5, 7] += 1  # type: ignore[attr-defined]
        assert "block 5 " in (nixl_probe.timed_reads(reader, source.metadata).why_not or "")
        for connector in (reader, source):
            connector.close()


@pytest.mark.slow
def test_transports_that_ucx_does_not_know() -> None:
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    findings = look({"UCX_TLS": "no_such_transport"}, connector="nixl")
    assert verdicts(findings) == ["failed"]
    assert "NIXL cannot start UCX" in findings[0].what


BROKEN = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'nixl'\")", "cannot be imported: ModuleNotFoundError"),
    "talkative": ("import sys; sys.stderr.write('x' * (1 << 20)); raise ImportError('no')", "ImportError: no"),
    "aborting": ("import os; os.abort()", "SIGABRT"),
    "leaving": ("import sys; sys.stderr.write('no driver'); sys.exit(3)", "status 3: no driver"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", BROKEN)
def test_a_package_that_cannot_be_used(tmp_path: Path, how: str) -> None:
    source, told = BROKEN[how]
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text(source)
    environ = {"PYTHONPATH": str(tmp_path)}
    findings = look(environ)
    assert verdicts(findings) == ["warning"]
    assert told in findings[0].what
    assert "connector is auto, so blocks move over TCP" in findings[0].what
    assert verdicts(look(environ, connector="nixl")) == ["failed"]


def test_a_package_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("import time; time.sleep(86400)")
    findings = list(check_nixl(PrefillSettings(), {"PYTHONPATH": str(tmp_path)}, answer_s=1.0))
    assert verdicts(findings) == ["warning"]
    assert "within 1 s" in findings[0].what
    assert "busy" in findings[0].advice
    assert "install" not in findings[0].advice


@pytest.mark.parametrize(
    ("installed", "advice"),
    [("", "in pdserve's repository: .venv/bin/python deploy/install.py nixl"), ("1.5.0", "look at UCX_TLS")],
)
def test_the_advice_is_to_install_it_only_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, installed: str, advice: str
) -> None:
    view = NixlView(why_not="it cannot be imported", nixl=installed)
    monkeypatch.setattr("pdserve.cli.doctor.nixl_check.probe", lambda *given: (view, ReadView(None)))
    [finding] = look()
    assert finding.advice.startswith(advice)
    assert "connector=tcp" in finding.advice


def test_a_worker_that_uses_tcp_is_not_asked_for_nixl() -> None:
    assert verdicts(look({"PYTHONPATH": "/no/such"}, connector="tcp")) == ["ok"]


RDMA = [UcxTransport("rc_mlx5", "mlx5_0:1"), UcxTransport("ud_verbs", "mlx5_0:1")]
NEAR = [UcxTransport("cma", "memory"), UcxTransport("posix", "memory")]
OTHERS = [UcxTransport("tcp", "eth0"), UcxTransport("cuda_ipc", "cuda"), UcxTransport("self", "memory")]
BEYOND = {"host": "10.0.0.1", "insecure": True}


def test_transports_by_kind() -> None:
    view = NixlView(why_not=None, nixl="1", found=[*NEAR, *RDMA, *OTHERS], used=[*NEAR, *RDMA])
    assert transports_text(view) == (
        "UCX finds shared memory: cma, posix; RDMA: rc_mlx5 on mlx5_0:1, ud_verbs on mlx5_0:1; "
        "CUDA IPC: cuda_ipc on cuda (not used); TCP: tcp on eth0 (not used)"
    )
    assert "does not tell" in transports_text(NixlView(why_not=None, nixl="1"))
    kinds = {name: UcxTransport(name, "x").kind for name in ("cuda_copy", "gdr_copy", "dc_mlx5", "srd", "self", "new")}
    assert list(kinds.values()) == ["CUDA copy", "CUDA copy", "RDMA", "RDMA", "self", "other"]


@pytest.mark.parametrize(
    ("used", "settings", "verdict", "told"),
    [
        (NEAR, {}, "ok", "this machine over shared memory, on others over the tcp connector"),
        (NEAR, BEYOND, "warning", "without RDMA"),
        ([*NEAR, *RDMA], BEYOND, "ok", "on others over UCX RDMA"),
        (OTHERS, BEYOND, "ok", "on others over UCX TCP"),
        ([], BEYOND, "ok", "NIXL is tried first"),
    ],
)
def test_what_would_be_chosen_and_why(used: list[Any], settings: dict[str, Any], verdict: str, told: str) -> None:
    finding = choice(PrefillSettings(**settings), used)
    assert finding.verdict.value == verdict
    assert told in finding.what
