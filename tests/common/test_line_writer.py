"""`LineWriter` and the file that processes share; `tests/router` has the logs that use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.common.telemetry.line_writer import LineFile, LineWriter
from tests.support.run.full_disk import full_disk
from tests.support.run.waiting import wait_until


def encode(text: str) -> bytes:
    if text == "bad":
        raise ValueError("no line can be made of it")
    return text.encode()


def test_what_cannot_be_encoded_costs_its_line_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    writer = LineWriter("a_log", LineFile(path), encode, max_waiting=100)
    for text in ("a", "bad", "bad", "b"):
        writer.put(text)
    writer.close()
    assert writer.has_stopped
    assert path.read_text() == "a\nb\n"
    assert writer.counts == {"written": 2, "dropped": 2}
    [warning] = [record.message for record in caplog.records]
    assert warning == "a_log: a line could not be written: ValueError('no line can be made of it')"


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have appended to the file since, so that nothing of it is taken away."""
    path = tmp_path / "log"
    writer = LineWriter("a_log", LineFile(path), encode, max_waiting=100)
    room = full_disk(monkeypatch, 5)
    for text in ("one", "two", "three"):
        writer.put(text)
    wait_until(lambda: sum(writer.counts.values()) == 3, "the writer's thread")
    room[0] = 100
    writer.put("four")
    writer.close()
    assert path.read_text() == "one\nt\nfour\n"
    assert writer.counts == {"written": 2, "dropped": 2}


def test_processes_share_a_file_that_is_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = LineFile(path), LineFile(path)
    first.write(b"a\n")
    second.write(b"b\n")
    path.rename(tmp_path / "moved")
    first.write(b"c\n")
    second.write(b"d\n")
    first.close()
    second.close()
    assert ((tmp_path / "moved").read_text(), path.read_text()) == ("a\nb\n", "c\nd\n")
