"""Loading holds each weight once: the pages of its file are given back as soon as it is copied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.models.weights.checkpoint import open_checkpoint
from pdserve.models.weights.mapped_pages import drop_mapped_pages
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader

ROWS, COLUMNS = 512, 1024


def resident_kib(file: Path) -> int:
    """Memory of this process that maps the file."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps)
    assert found, "the file is not mapped"
    return sum(map(int, found))


@pytest.fixture
def folder(tmp_path):
    weights = {f"w{number}.weight": torch.full((ROWS, COLUMNS), float(number)) for number in range(4)}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("part", [None, Part(0, 128, 384), Part(1, 256, 512)], ids=["whole", "rows", "columns"])
def test_what_was_copied_is_mapped_no_more(folder, part):
    one_kib = ROWS * COLUMNS * 4 // 1024
    with open_checkpoint(folder) as checkpoint:
        loader = WeightLoader(checkpoint, torch.float32, "cpu")
        kept = [loader.matrix(f"w{number}", ROWS, COLUMNS, part) for number in range(4)]
        # the header and what the kernel reads ahead
        assert resident_kib(folder / "model.safetensors") < one_kib / 2
    for number, tensor in enumerate(kept):
        assert isinstance(tensor, torch.Tensor)
        assert bool(torch.all(tensor == number))


def test_a_released_tensor_of_a_file_is_read_again(folder):
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.read("w3.weight", (ROWS, COLUMNS))
        checkpoint.release(tensor)
        assert bool((tensor == 3).all())


def test_other_memory_keeps_its_content():
    tensor = torch.full((ROWS, COLUMNS), 7.0)
    for view in (tensor, tensor[3:9], tensor.T, torch.empty(0)):
        drop_mapped_pages(view)
    assert bool((tensor == 7).all())
