"""How the fuzz tests of a run divide the time that they were given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.inputs.fuzz_cases import DEFAULT_S, MOST_S, seconds_of


class Item:
    """As far as `seconds_of` looks at a test."""

    def __init__(self, mark: pytest.MarkDecorator | None = None) -> None:
        self._mark = mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "fuzz"
        return None if self._mark is None else self._mark.mark


def seconds(*items: Any) -> list[float]:
    return [seconds_of(item, items) for item in items if item.get_closest_marker("fuzz") is not None]


def test_together_they_take_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_S", "1800")
    whole, half = pytest.mark.fuzz, pytest.mark.fuzz(share=0.5)
    assert seconds(Item(whole), Item(), Item(half), Item(half), Item(whole)) == [600.0, 300.0, 300.0, 600.0]
    assert seconds(Item(half)) == [1800.0]


def test_without_being_asked_they_take_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUZZ_S", raising=False)
    many = [Item(pytest.mark.fuzz) for _ in range(20)]
    assert sum(seconds(*many)) == pytest.approx(DEFAULT_S)
    assert seconds(many[0]) == [MOST_S]
