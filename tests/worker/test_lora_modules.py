"""Adapters of a worker by name: settings, a watched folder, broken ones, and what `Worker.start` refuses."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.known_adapters import MAX_ADAPTERS, KnownAdapters, read_known_adapters
from pdserve.worker.lora_modules import LoraModules


class Engine:
    """An engine that takes any folder whose configuration is not `broken`."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.removed: list[str] = []

    async def utility_async(self, name: str, folder: str) -> str | None:
        if name == "remove_lora":
            self.removed.append(Path(folder).name)
            return None
        assert name == "add_lora"
        self.num_reads += 1
        path = Path(folder) / "adapter_config.json"
        if not path.is_file() or path.read_text() == "broken":
            raise ConfigError(f"{path} is broken")
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def write(folder: Path, config: str) -> Path:
    """An adapter's two files; every call changes their state."""
    folder.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / f"{name}.new").write_text(config)
        (folder / f"{name}.new").replace(folder / name)
    return folder


class World:
    """Modules over a folder, and what they offered."""

    def __init__(self, folder: Path, **given: Path) -> None:
        self.folder, self.engine = folder, Engine()
        self.offers: list[KnownAdapters] = []
        modules = {name: str(path) for name, path in given.items()}
        self.modules = LoraModules(self.engine, modules, str(folder), self.offers.append)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        return sorted(self.offers[-1]) if self.offers else []


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    (folder := tmp_path / "watched").mkdir()
    return folder


async def test_a_folder_is_read_once_when_it_has_been_still_for_a_look(watched: Path) -> None:
    world = World(watched)
    await world.modules.start()
    write(watched / "sql", "one")
    await world.modules.follow()
    assert not world.names
    assert not world.engine.num_reads, "a copy may be under way"
    write(watched / "sql", "two")
    await world.modules.follow()
    assert not world.engine.num_reads, "it has changed since the last look"
    for _ in range(3):
        await world.modules.follow()
    assert world.names == ["sql"]
    assert (world.engine.num_reads, len(world.offers)) == (1, 1)


async def test_new_content_is_offered_and_a_removed_folder_is_not(watched: Path) -> None:
    write(watched / "sql", "one")
    world = World(watched)
    await world.modules.start()
    first = world.offers[-1]["sql"]
    write(watched / "sql", "two")
    for _ in range(2):
        await world.modules.follow()
    assert world.offers[-1]["sql"] != first
    shutil.rmtree(watched / "sql")
    await world.modules.follow()
    assert world.names == []
    assert world.engine.removed == ["sql"]


async def test_a_broken_folder_is_logged_once_and_offered_when_it_is_whole(
    watched: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(watched / "sql", "broken")
    world = World(watched)
    await world.modules.start()
    for _ in range(3):
        await world.modules.follow()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"adapter sql is not offered: {watched}/sql/adapter_config.json is broken"]
    assert not world.offers
    write(watched / "sql", "whole")
    for _ in range(2):
        await world.modules.follow()
    assert world.names == ["sql"]
    write(watched / "sql", "broken")
    for _ in range(2):
        await world.modules.follow()
    assert world.names == [], "its content is not the one that was offered"


async def test_other_entries_are_passed_over_with_one_line_each(
    watched: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(watched / "_draft", "one")
    write(watched / "same", "one")
    write(watched / ".hidden", "one")
    (watched / "notes.txt").write_text("a file")
    world = World(watched, same=write(watched.parent / "given", "two"))
    await world.modules.start()
    for _ in range(2):
        await world.modules.follow()
    assert world.names == ["same"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "'_draft'" in said[0]
    assert "lora_modules has that name, too" in said[1]


async def test_the_folder_itself_may_go_and_come_back(watched: Path) -> None:
    write(watched / "sql", "one")
    world = World(watched)
    await world.modules.start()
    shutil.move(watched, moved := watched.parent / "moved")
    with pytest.raises(OSError, match="watched"):
        await world.modules.follow()
    assert world.names == ["sql"], "one unreadable look removes nothing"
    shutil.move(moved, watched)
    await world.modules.follow()
    assert world.names == ["sql"]


async def test_start_refuses_a_given_adapter_that_is_broken_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_dir is .*/nowhere', which is no folder"):
        await World(tmp_path / "nowhere").modules.start()
    broken = write(tmp_path / "broken", "broken")
    with pytest.raises(ConfigError, match=r"lora_modules has 'sql', which cannot be used: .*broken"):
        await World(tmp_path, sql=broken).modules.start()


@pytest.mark.parametrize(
    ("pairs", "num_pairs", "said"),
    [
        ([("a", "0" * 32)], MAX_ADAPTERS + 1, "1025 entries, at most 1024"),
        ([("/etc", "0" * 32)], 1, "'/etc' has a wrong name"),
        ([("a", "0" * 31)], 1, "32 hex digits"),
        ([("a", "0" * 32), ("a", "1" * 32)], 2, "'a' twice"),
    ],
)
def test_a_peers_list_is_checked(pairs: list[tuple[str, str]], num_pairs: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_known_adapters(pairs, num_pairs)
