"""Pictures of the command line: files become data URLs, and messages of the gRPC client carry them."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from pdserve.cli.clients.grpc_client import ClientMessage, GrpcClient
from pdserve.cli.clients.picture_file import data_url
from pdserve.cli.main import main
from pdserve.common.errors import ConfigError
from pdserve.v1 import inference_pb2

ENCODED = base64.b64encode(b"\x89PNG").decode()


@pytest.mark.parametrize(("name", "kind"), [("a.png", "png"), ("b.JPG", "jpeg"), ("c.txt", "png"), ("d", "png")])
def test_a_file_is_sent_as_a_data_url(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"\x89PNG")
    assert data_url(tmp_path / name) == f"data:image/{kind};base64,{ENCODED}"


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"missing.png' cannot be read: No such file or directory"):
        data_url(tmp_path / "missing.png")
    for command in (["chat", "What?"], ["up", "--once"]):
        monkeypatch.setattr("sys.argv", ["pdserve", *command, "--image", str(tmp_path / "missing.png")])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "missing.png' cannot be read" in capsys.readouterr().err


async def test_a_turn_with_a_picture_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[inference_pb2.GenerateRequest] = []
    async with GrpcClient("127.0.0.1:9") as client:
        monkeypatch.setattr(client, "_generate", lambda request, sampling: sent.append(request))
        client.chat(
            [ClientMessage("system", "Be brief."), ClientMessage("user", "What?", "data:image/png;base64,AAAA")]
        )
    system, user = sent[0].chat.messages
    assert (system.content, list(system.parts)) == ("Be brief.", [])
    assert [part.WhichOneof("part") for part in user.parts] == ["image_url", "text"]
    assert [user.parts[0].image_url, user.parts[1].text] == ["data:image/png;base64,AAAA", "What?"]
