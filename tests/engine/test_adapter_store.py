"""`AdapterStore`: which contents of folders are known, and how many of those that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.common.errors import NotFound
from pdserve.engine.lora import adapter_store
from pdserve.engine.lora.adapter_store import AdapterStore
from pdserve.models.loading import load_decoder
from pdserve.models.lora.lora_targets import with_lora_targets
from tests.support.models.lora_adapters import make_adapter


class Folders:
    """A store, and folders whose content is a number."""

    def __init__(self, base: Path, room: Path) -> None:
        self.store = AdapterStore(with_lora_targets(load_decoder(base), max_loras=1, max_rank=1)[1], 1)
        self._base = base
        self._room = room

    def add(self, name: str, content: int) -> str:
        """Write the content, and return its fingerprint."""
        folder = self._room / name
        make_adapter(folder, self._base, rank=1, targets=["q_proj"], alpha=content)
        return self.store.add(folder)

    def remove(self, name: str) -> None:
        self.store.remove(self._room / name)


@pytest.fixture
def folders(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> Folders:
    return Folders(tiny_checkpoints("llama"), tmp_path)


def test_the_last_replaced_contents_of_a_folder_are_known(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "MAX_REPLACED", 3)
    contents = [folders.add("one", content) for content in range(1, 9)]
    assert [folders.store.has(fingerprint) for fingerprint in contents] == [False] * 4 + [True] * 4
    assert len(folders.store._path_of) == 4
    with pytest.raises(NotFound, match=f"no adapter with the fingerprint {contents[0]} is known"):
        folders.store.get(contents[0])
    with pytest.raises(NotFound, match=f"{contents[5]} is gone: its folder has the fingerprint {contents[7]}"):
        folders.store.get(contents[5])
    folders.remove("one")
    assert not folders.store._path_of
    assert not folders.store._replaced


def test_a_content_that_comes_back_is_not_replaced(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "MAX_REPLACED", 1)
    first = folders.add("one", 1)
    folders.add("one", 2)
    assert folders.add("one", 1) == first
    for content in (3, 4):
        folders.add("two", content)
    assert folders.store.has(first)
    assert folders.store.get(first).fingerprint == first


def test_a_content_is_read_from_another_folder_that_has_it(folders: Folders) -> None:
    first = folders.add("one", 1)
    assert folders.add("two", 1) == first
    folders.add("two", 2)
    assert folders.store.get(first).fingerprint == first
    folders.add("one", 3)
    with pytest.raises(NotFound, match="is gone"):
        folders.store.get(first)
