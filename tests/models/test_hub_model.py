"""`--model ORG/NAME`: from the hub, from its cache, and why not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from pdserve.common.errors import ConfigError
from pdserve.common.hub_name import is_hub_name
from pdserve.models.model_folder import model_folder

NAME = "org/tiny-1.5B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"text", "original/consolidated.pth": b"x"}


class Hub(BaseHTTPRequestHandler):
    """The few calls of a hub's API that a download makes."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        asked.append(path)
        if path == f"/api/models/{NAME}/revision/main":
            self._answer(json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = [{"type": "file", "path": p, "size": len(c), "oid": _etag(c)} for p, c in FILES.items()]
            self._answer(json.dumps(entries).encode())
        elif (file := path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")) in FILES:
            self._answer(FILES[file], {"ETag": f'"{_etag(FILES[file])}"', "X-Repo-Commit": COMMIT})
        else:
            gated = "gated" in path
            self._answer(b"", {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"}, 403 if gated else 404)

    def _answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


asked: list[str] = []


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
        asked.clear()
        yield server
        server.shutdown()


def test_a_model_is_downloaded_and_then_found_in_the_cache(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(NAME)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    asked.clear()
    assert model_folder(NAME) == model_folder(NAME, download=False) == folder
    assert not asked


@pytest.mark.parametrize(
    ("name", "told"),
    [("org/none", "no such folder, and http://.* has no such model"), ("org/gated", "accept the terms at .*org/gated")],
)
def test_a_model_that_the_hub_does_not_give(hub: ThreadingHTTPServer, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^model '{name}': .*{told}.*HF_TOKEN$"):
        model_folder(name)


@pytest.mark.parametrize(("download", "told"), [(True, "http://127.0.0.1:1 cannot be reached"), (False, "nothing is")])
def test_without_the_hub_the_line_says_what_to_do(cache: Path, download: bool, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{cache}, and {told}.*`hf download {NAME}`") as caught:
        model_folder(NAME, download=download)
    assert "\n" not in caught.value.message


def test_folders_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name")
    (tmp_path / "org/name").mkdir(parents=True)
    assert not any(
        map(is_hub_name, ("org/name", "demo", "/org/name", "./name", "~/name", "a/b/c", "../b", "a/", "ä/b"))
    )
    with pytest.raises(ConfigError, match=r"org/name has no config\.json"):
        model_folder("org/name")
    with pytest.raises(ConfigError, match=r"no such folder \(a Hugging Face checkpoint, a GGUF file, ORG/NAME"):
        model_folder("nowhere")
