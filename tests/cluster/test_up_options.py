"""`pdserve up` with options, as users give them: every promise is looked at from outside."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pdserve.models.model_folder import model_folder
from tests.support.processes.up_cluster import ENVIRON, running_up
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

KEY = "a-key-of-many-characters"
ANSWER = "The capital of France is Paris."
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def is_open(host: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(HANG_S)
        return client.connect_ex((host, port)) == 0


def test_a_router_outside_and_workers_on_loopback_in_one_command(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    options = [
        "demo", "--host", "0.0.0.0", "--insecure", "--api-keys", KEY, "--max-model-len", "128",
        "--served-model-name", "first", "--served-model-name", "second",
        "--cors-origins=https://chat.example", "--unknown-fields=ignore", f"--audit-log={audit}",
    ]  # fmt: skip
    with running_up(tmp_path, *options) as up:
        port = int(up.base_url.removesuffix("/v1").rpartition(":")[2])
        ready = up.log.read_text()
        workers = re.search(r"prefill 127\.0\.0\.1:(\d+)   decode 127\.0\.0\.1:(\d+)", ready)
        assert workers, ready
        # 127.0.0.2 is an address that the router's wildcard has and the workers' 127.0.0.1 has not
        assert [is_open("127.0.0.2", int(number)) for number in (port, *workers.groups())] == [True, False, False]
        with httpx.Client(base_url=f"http://127.0.0.2:{port}", trust_env=False, timeout=HANG_S) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 401
            asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
            allowed = client.options("/v1/chat/completions", headers=asks).headers
            assert allowed["access-control-allow-origin"] == "https://chat.example"
            assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
            assert "<h1>pdserve</h1>" in client.get("/docs").text
            client.headers["authorization"] = f"Bearer {KEY}"
            assert client.get("/version").json()["version"]
            models = client.get("/v1/models").json()["data"]
            assert [(one["id"], one["max_model_len"]) for one in models] == [("first", 128), ("second", 128)]
            for name in ("first", "second"):
                said = client.post("/v1/chat/completions", json=CHAT | {"model": name, "no_such_field": 1}).json()
                assert (said["model"], said["choices"][0]["message"]["content"]) == ("first", ANSWER)
            assert client.post("/v1/chat/completions", json=CHAT | {"model": "demo"}).status_code == 404
            assert "128" in client.post("/v1/completions", json={"prompt": "a b " * 200}).json()["error"]["message"]
        up.check_pools()
    assert audit.read_text().count("\n") >= 4
    assert "Paris" not in audit.read_text()


def test_a_name_of_the_hub_is_served_from_its_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--tiny-1B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    shutil.copytree(model_folder("demo"), folder / "snapshots" / COMMIT)
    environ = ENVIRON | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PDSERVE_PORT": "0"}
    command = [sys.executable, "-m", "pdserve", "up", "org/tiny-1B", "--grpc-port", "0", "--once"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ANSWER in done.stdout.splitlines()
    command[4] = "org/another"
    absent = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert absent.returncode == 2
    assert re.fullmatch(r"pdserve: model 'org/another': .*offline.*`hf download org/another`.*\n", absent.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["models--org--tiny-1B"]
