"""The doctor's check of Redis, against real servers: reachable, primary, rights, and who is there; it writes nothing."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.doctor.finding import Finding, Verdict
from pdserve.cli.doctor.redis_check import check_redis, harmless_commands, right_of, transaction_commands
from pdserve.common.protocol import PROTOCOL_VERSION
from pdserve.common.registry.registry import Keys, RecordSigner, WorkerRecord
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import PrefillSettings
from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.processes.reserved_port import reserved_port

SECRET = "0123456789abcdef"
KEYS = Keys("test")
COMMANDS = sorted({right_of(command).lower() for command in harmless_commands(KEYS) + transaction_commands(KEYS)})
PROTOCOL = Path(__file__).resolve().parents[2] / "docs/protocol.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def empty(server: RedisServer) -> None:
    server.do("FLUSHALL")


def look(url: str, **settings: Any) -> list[Finding]:
    given = {"redis": url, "redis_namespace": "test", "deployment_key": SECRET} | settings
    return list(check_redis(PrefillSettings(**given)))


def verdicts(findings: list[Finding]) -> list[str]:
    assert all(bool(finding.advice) is (finding.verdict is not Verdict.OK) for finding in findings), "advice if not ok"
    return [finding.verdict.value for finding in findings]


def changes(server: RedisServer) -> int:
    """Writes since the server's start."""
    info = server.do("INFO", "persistence")
    assert isinstance(info, bytes | dict)
    found = info["rdb_changes_since_last_save"] if isinstance(info, dict) else re.findall(rb"save:(\d+)", info)[0]
    return int(found)


def test_one_that_can_be_used(server: RedisServer) -> None:
    before = changes(server)
    findings = look(server.url)
    assert verdicts(findings) == ["ok", "ok", "ok"]
    assert re.search(r"Redis \d+\.\d+\.\d+, \d+\.\d\d ms per round trip", findings[0].what)
    assert "0 live workers" in findings[2].what
    assert server.do("DBSIZE") == 0
    assert changes(server) == before, "the doctor wrote something"
    assert verdicts(list(check_redis(RouterSettings()))) == ["ok"]


def test_the_rights_asked_for_are_those_of_the_document() -> None:
    section = PROTOCOL.read_text().split("**Rights.**")[1].split("```")[1]
    assert sorted(re.findall(r"\+([\w|]+)", section)) == COMMANDS


def test_a_user_with_the_rights_it_needs_and_without_each_of_them(server: RedisServer) -> None:
    url = f"redis://pd:{SECRET}@127.0.0.1:{server.port}/0"

    def allow(names: list[str], keys: str = "~{test}:*") -> None:
        server.do("ACL", "SETUSER", "pd", "reset", "on", f">{SECRET}", keys, *(f"+{name}" for name in names))

    allow(COMMANDS)
    assert verdicts(look(url)) == ["ok", "ok", "ok"]
    before = changes(server)
    for left_out in COMMANDS:
        allow([name for name in COMMANDS if name != left_out])
        failed = [finding for finding in look(url) if finding.verdict is Verdict.FAILED]
        assert len(failed) == 1, left_out
        assert SECRET not in failed[0].what
        if left_out not in ("ping", "multi"):
            assert failed[0].what.startswith(f"Redis refuses {left_out.upper()}:"), left_out
            assert failed[0].advice.endswith(f"~{{test}}:* +{left_out}")
    allow(COMMANDS, "~{other}:*")
    assert any("Redis refuses" in finding.what for finding in look(url))
    assert changes(server) == before, "the doctor wrote something"
    findings = look(f"redis://pd:wrong@127.0.0.1:{server.port}/0")
    assert verdicts(findings) == ["failed"]
    assert "(denied)" in findings[0].what


def test_one_that_is_not_there_one_that_is_silent_and_one_without_an_address() -> None:
    with reserved_port() as port:
        findings = look(f"redis://127.0.0.1:{port}")
    assert verdicts(findings) == ["failed"]
    assert "(unreachable)" in findings[0].what
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        findings = look(f"redis://127.0.0.1:{silent.getsockname()[1]}")
    assert verdicts(findings) == ["failed"]
    assert "(timeout)" in findings[0].what
    findings = look("redis://no-such-host.invalid")
    assert verdicts(findings) == ["failed"]
    assert "does not resolve" in findings[0].what


def test_a_replica_takes_no_writes(tmp_path: Path) -> None:
    with redis_server(tmp_path) as replica, reserved_port() as nobody:
        replica.do("REPLICAOF", "127.0.0.1", nobody)
        findings = look(replica.url)
    assert findings[0].verdict is Verdict.FAILED
    assert "replica" in findings[0].what


def test_one_too_old_to_say_its_version(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--rename-command", "HELLO", "") as old:
        findings = look(old.url)
    assert findings[0].verdict is Verdict.FAILED
    assert "does not report its version" in findings[0].what
    assert "6.2 or newer" in findings[0].advice


def register(server: RedisServer, worker_id: str, secret: str = SECRET, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "worker_id": worker_id, "epoch": 7, "registered_us": 1, "role": "decode", "address": "127.0.0.1:7002",
        "protocol_version": PROTOCOL_VERSION, "model_fingerprint": "ab", "layout_fingerprint": "ab",
        "tokenizer_fingerprint": "ab",
    }  # fmt: skip
    signer = RecordSigner(DeploymentKey(secret.encode()), "test")
    with server.admin() as admin:
        admin.zadd(KEYS.workers, {worker_id: 1})
        admin.hset(KEYS.worker(worker_id), mapping=signer.signed(WorkerRecord(**(fields | changes))).fields())


def test_who_is_there_and_who_does_not_fit(server: RedisServer) -> None:
    register(server, "decode-1")
    with server.admin() as admin:
        admin.zadd(KEYS.workers, {"gone": 2})
    findings = look(server.url)
    assert verdicts(findings) == ["ok", "ok", "ok"]
    assert "1 live workers: decode-1 (decode, 127.0.0.1:7002)" in findings[2].what
    register(server, "decode-2", secret="fedcba9876543210")
    register(server, "decode-3", protocol_version=PROTOCOL_VERSION + 2)
    findings = look(server.url, worker_id="decode-1")
    assert verdicts(findings) == ["ok", "ok", "ok", "failed", "warning", "warning"]
    assert "decode-2: a different deployment key" in findings[3].what
    assert f"decode-3: it speaks protocol version {PROTOCOL_VERSION + 2}" in findings[4].what
    assert "decode-1" in findings[5].what
    with server.admin() as admin:
        admin.zadd(KEYS.workers, {"no id at all": 3})
    findings = look(server.url)
    assert verdicts(findings) == ["ok", "ok", "failed"]
    assert "something else" in findings[2].what
