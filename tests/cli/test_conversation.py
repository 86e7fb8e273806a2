"""Requests and output of `pdserve chat`, over a client that answers from memory."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from pdserve.cli import main as command_line
from pdserve.cli.clients import conversation
from pdserve.cli.clients.conversation import WIDE, summary, timeline_table
from pdserve.cli.clients.grpc_client import ClientMessage, Delta
from pdserve.common.timeline import ARRIVED, FINISHED, FIRST_TOKEN, PHASES, Timeline
from tests.support.processes.reserved_port import reserved_port

MS = 1_000_000


def times(**at_ms: int) -> Timeline:
    made = Timeline()
    made.merge({moment: ms * MS for moment, ms in at_ms.items()})
    return made


TIMES = times(**{ARRIVED: 0, FIRST_TOKEN: 10, FINISHED: 40})
LAST = Delta("b", None, num_prompt_tokens=5, num_output_tokens=4, num_cached_tokens=3, timeline=TIMES)


class Client:
    """Answers each question with its number."""

    def __init__(self) -> None:
        self.asked: list[list[ClientMessage]] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def chat(self, turns: Sequence[ClientMessage], **sampling: Any) -> AsyncIterator[Delta]:
        self.asked.append(list(turns))
        yield Delta("answer ", None)
        yield Delta(str(len(self.asked)), None)


async def test_each_turn_carries_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", " ", "two"])

    def typed(console: Console, prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(Console, "input", typed)
    client: Any = Client()
    await conversation.converse(lambda: client, None, "be brief", {}, show_timeline=False)
    system = ClientMessage("system", "be brief")
    first = [system, ClientMessage("user", "one")]
    assert client.asked == [first, [*first, ClientMessage("assistant", "answer 1"), ClientMessage("user", "two")]]


async def test_one_message_is_one_question() -> None:
    client: Any = Client()
    await conversation.converse(lambda: client, "one", None, {}, show_timeline=False)
    assert client.asked == [[ClientMessage("user", "one")]]


async def test_the_timeline_follows_the_answer() -> None:
    async def deltas() -> AsyncIterator[Delta]:
        yield Delta("a[b]", None)
        yield LAST

    said = io.StringIO()
    assert await conversation.show_answer(Console(file=said, width=WIDE), deltas(), True) == "a[b]b"
    answer, _, head, *_, last = said.getvalue().splitlines()
    assert answer == "a[b]b"
    assert head.split() == ["phase", "ms", "when"]
    assert last == "5 prompt tokens (3 cached), 4 new, first token after 10.0 ms, then 10.00 ms a token"


def test_a_timeline_has_a_row_per_phase_and_meanings_where_there_is_room() -> None:
    moments = dict.fromkeys([moment for phase in PHASES for moment in (phase.start, phase.end)])
    last = Delta("", None, timeline=times(**{moment: number for number, moment in enumerate(moments)}))
    for width in (WIDE - 1, WIDE):
        table = timeline_table(last, width)
        assert len(table.rows) == len(PHASES)
        assert len(table.columns) == (4 if width == WIDE else 3)


def test_a_summary_without_times_counts_tokens_alone() -> None:
    assert summary(Delta("", None, 2, 1, 0)) == "2 prompt tokens (0 cached), 1 new"


def test_a_router_that_is_away_is_one_line_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with reserved_port() as port:
        monkeypatch.setattr("sys.argv", ["pdserve", "chat", "--url", f"127.0.0.1:{port}", "hello"])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"pdserve: no router answers at 127.0.0.1:{port}: Connection refused\n"
