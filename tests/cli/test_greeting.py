"""`pdserve up` prints the command to type next."""

from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.cli.clients.grpc_client import Delta
from pdserve.cli.up.cluster import Addresses
from pdserve.cli.up.greeting import Greeting

URL = "127.0.0.1:50051"


async def printed(grpc: str = URL) -> list[str]:
    """Lines."""
    said = io.StringIO()
    greeting = Greeting(Console(file=said, width=200), "", False, URL)
    assert await greeting(Addresses("127.0.0.1:8000", grpc, [], ["127.0.0.1:1"], {"router": "127.0.0.1:9"}))
    return said.getvalue().splitlines()


async def hint(grpc: str = URL) -> str:
    """The last line that is printed."""
    return (await printed(grpc))[-1]


async def test_a_question_that_cannot_be_asked_is_left_out_with_the_reason() -> None:
    said = io.StringIO()
    greeting = Greeting(Console(file=said, width=200), "What?", True, URL)
    addresses = Addresses("127.0.0.1:1", "127.0.0.1:1", [], [], {}, None, True, "clients need something")
    assert not await greeting(addresses)
    assert not greeting.answered
    assert "OpenAI https://127.0.0.1:1/v1" in said.getvalue()
    assert said.getvalue().splitlines()[-1] == "no question is asked: clients need something"


async def test_addresses_of_metrics_are_printed() -> None:
    assert (await printed())[1] == "metrics  router http://127.0.0.1:9/metrics"


async def test_the_hint_can_be_pasted_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/pdserve", "up"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (await hint()).startswith("Ask more:  .venv/bin/pdserve chat --timeline ")
    assert " .venv/bin/pdserve chat --url 127.0.0.1:7 --timeline " in await hint("127.0.0.1:7")
    assert " pdserve chat --timeline " in (await hint("0.0.0.0:50051")).replace(".venv/bin/", " ")
    monkeypatch.setattr("sys.argv", ["/site-packages/pdserve/__main__.py", "up"])
    assert (await hint()).startswith(f"Ask more:  {sys.executable} -m pdserve chat --timeline ")
    (tmp_path / "pdserve").touch(0o755)
    assert (await hint()).startswith("Ask more:  pdserve chat --timeline ")


async def test_a_model_without_a_chat_template_is_asked_for_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def generate(self: object, prompt: str, **sampling: float) -> AsyncIterator[Delta]:
        asked.append((prompt, sampling))
        yield Delta(" Paris.", None, 5, 2)

    monkeypatch.setattr("pdserve.cli.up.greeting.GrpcClient.generate", generate)
    said = io.StringIO()
    greeting = Greeting(Console(file=said, width=200), "The capital of France is", False, URL)
    assert await greeting(Addresses("127.0.0.1:8000", URL, [], ["127.0.0.1:1"], {}, has_chat=False))
    assert greeting.answered
    assert asked == [("The capital of France is", {"temperature": 0.0, "max_tokens": 64})]
    assert " Paris." in said.getvalue()
    assert ' generate --timeline "Seven plus five is"' in said.getvalue().splitlines()[-1]
