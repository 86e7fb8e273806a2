"""`pdserve up` from the command line to its end: what it refuses, and how it is stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from pdserve.cli import main as command_line
from pdserve.cli.app import app
from pdserve.cli.development_certificates import write_certificates
from pdserve.cli.up.cluster import Addresses, addresses_of, route
from pdserve.cli.up.cluster_plan import make_plan
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import listening_socket
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.api_key_file import key_hash, new_key
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.models.model_folder import model_folder
from tests.support.run.waiting import HANG_S, wait_until


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--port", "{port}"], "port (OpenAI HTTP): cannot listen on 127.0.0.1:{port}: Address already in use: "),
        # ports are tried before a model is looked for
        (["up", "--grpc-port", "{port}", "/no/such"], "grpc_port (gRPC): cannot listen on 127.0.0.1:{port}: "),
        (["up", "--host", "0.0.0.0"], "host is '0.0.0.0', which is not loopback: "),
        (["up", "a", "--model", "b"], "MODEL is 'a' and --model is 'b': give one of them"),
        (["up", "--port", "0", "--grpc-port", "0", "/no/such"], "model '/no/such': no such folder"),
        (
            ["up", "--served-model-name", "a\tb"],
            "served_model_name has 'a\\tb', 1 to 256 printable characters are needed",
        ),
    ],
)
def test_errors_are_one_line_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    monkeypatch.setattr("pdserve.cli.up.up_command.configure_logging", lambda *given: None)
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("sys.argv", ["pdserve", *(argument.format(port=port) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    assert ended.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"pdserve: {line.format(port=port)}")


def test_an_api_key_in_the_command_line_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["up", "--api-keys", "s3cr3t-of-many-characters", "--port", "-1"])
    assert "pdserve: api_keys is in the command line" in result.output
    assert "PDSERVE_API_KEYS" in result.output
    assert "port is -1" in str(result.exception)
    assert "s3cr3t" not in result.output + str(result.exception)
    assert make_plan({"api_keys": ["a-key-of-many-characters"]}, None, {}, {}).router.api_keys


async def test_an_error_of_the_router_is_no_group(tmp_path: Path) -> None:
    settings = RouterSettings(port=0, grpc_port=0, audit_log=str(tmp_path / "no/such"))

    async def when_ready(addresses: Addresses) -> bool:
        raise AssertionError("it is not ready")

    with pytest.raises(ConfigError, match="audit_log"):
        await route(settings, model_folder("demo"), Addresses("", ""), when_ready, Shutdown())


async def test_an_error_of_the_greeting_stops_the_router() -> None:
    settings = RouterSettings(port=0, grpc_port=0)

    async def when_ready(addresses: Addresses) -> bool:
        raise ConfigError("no greeting")

    with pytest.raises(ConfigError, match="no greeting"):
        await route(settings, model_folder("demo"), Addresses("127.0.0.1:1", ""), when_ready, Shutdown())


async def test_front_ends_with_tls_are_not_asked(tmp_path: Path) -> None:
    write_certificates(tmp_path / "tls", ["127.0.0.1"], 1)
    given = {
        "port": 0, "grpc_port": 0, "host": "0.0.0.0", "api_keys": ["a-key-of-many-characters"],
        "front_tls_cert_file": str(tmp_path / "tls/front.pem"), "front_tls_key_file": str(tmp_path / "tls/front.key"),
    }  # fmt: skip
    plan = make_plan(given, None, {"decode": 1}, {})
    assert (plan.router.host, plan.children[0].settings.host) == ("0.0.0.0", "127.0.0.1")
    found = addresses_of(plan.router, [])
    assert (found.tls, found.why_silent != "") == (True, True)
    shutdown = Shutdown()

    async def when_ready(addresses: Addresses) -> bool:
        return False

    async with asyncio.timeout(HANG_S):
        await route(plan.router, model_folder("demo"), found, when_ready, shutdown)
    assert shutdown.stop.is_set()


def test_a_file_of_hashes_leaves_no_key_for_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.toml").write_text(f'[[keys]]\nname = "mine"\nsha256 = "{key_hash(new_key())}"\n')
    settings = make_plan({"api_keys_file": str(tmp_path / "keys.toml")}, None, {}, {}).router
    monkeypatch.delenv("PDSERVE_API_KEY", raising=False)
    assert "PDSERVE_API_KEY" in addresses_of(settings, []).why_silent
    monkeypatch.setenv("PDSERVE_API_KEY", "a-key-of-many-characters")
    assert addresses_of(settings, []).why_silent == ""


@pytest.mark.process
@pytest.mark.timeout(3 * HANG_S)
def test_ctrl_c_says_what_it_waits_for_and_the_second_one_ends_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", "demo", "--port", "0", "--grpc-port", "0", "--ask", ""],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ,
        )  # fmt: skip
    try:

        def ready() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"OpenAI (http://\S+)/v1(?s:.*)metrics  router (\S+)   prefill-0 (\S+)", log.read_text())

        found = wait_until(ready, log.read_text)
        workers = psutil.Process(process.pid).children()
        assert all(httpx.get(url, trust_env=False, timeout=HANG_S).status_code == 200 for url in found.groups()[1:])
        body = {"prompt": "The", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{found[1]}/v1/completions", json=body, trust_env=False, timeout=HANG_S) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: "draining 1 request, at most 30 s; Ctrl-C again stops now" in log.read_text())
            assert process.poll() is None
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 0
            assert time.monotonic() - asked < 20, "it waited for the drain"
            assert '"code":"draining"' in "".join(lines)
    finally:
        process.kill()
        process.wait()
    assert not any(worker.is_running() for worker in workers)
    assert "Traceback" not in log.read_text()
