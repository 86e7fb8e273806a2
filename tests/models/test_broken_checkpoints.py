"""Broken checkpoints of every native family: each is refused in one sentence that names the file, and the weight or the field."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.models.registry import FAMILIES
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.models.broken_checkpoints import (
    BREAKAGES,
    NEEDED,
    NEEDED_BY_ALL,
    change_weight,
    edit_text_config,
    split_in_two,
    stored_names,
    tail_of,
)
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.image_checkpoints import make_image_checkpoint

FAST = ("phi3", "gpt_oss", "qwen3_vl")
"""Fused projections, stacked experts, a vision tower. The others are of `make test-all`."""
OPTIONAL = {"axk1": "e_score_correction_bias"}
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(family.model_type for family in FAMILIES.values())
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)`: its plain case in two shards, made once."""
    with_images = {family.model_type for family in FAMILIES.values() if family.has_images}

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        if family in with_images:
            make_image_checkpoint(folder, family)
            (folder / "tokenizer.json").unlink()
        else:
            make_family(folder, family, cases(family)[0])
        split_in_two(folder)
        return folder

    return make


@pytest.fixture
def broken(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint."""
    return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / "model", dirs_exist_ok=True))


def refused(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as error:
        load_decoder(folder)
    message = error.value.message
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.diagonal
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_wrong_is_named(family: str, breakage: str, broken: Callable[[str], Path]) -> None:
    folder = broken(family)
    refused(folder, BREAKAGES[breakage](folder))


@pytest.mark.parametrize("family", NAMES)
def test_each_needed_field_is_named(family: str, broken: Callable[[str], Path]) -> None:
    folder = broken(family)
    config = (folder / "config.json").read_text()
    [owner] = [owner for owner in FAMILIES.values() if owner.model_type == family]
    own = {"num_hidden_layers": owner.layers_field, "intermediate_size": owner.intermediate_size_field}
    needed = NEEDED if owner.has_attention else NEEDED_BY_ALL
    for field in (own.get(field) or owner.field_names.get(field, field) for field in needed):
        edit_text_config(folder, **{field: ...})
        refused(folder, f"{field} is missing")
        (folder / "config.json").write_text(config)


@pytest.mark.parametrize("family", NAMES)
def test_a_folder_without_a_tokenizer(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    with pytest.raises(ConfigError, match=re.escape(f"{folder / 'tokenizer.json'} is missing")) as error:
        Tokenizer.from_folder(folder)
    assert "\n" not in error.value.message


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(family.model_type for family in FAMILIES.values()))
def test_each_weight_of_a_layer_and_outside_the_layers_is_needed(family: str, broken: Callable[[str], Path]) -> None:
    folder = broken(family)
    config = read_config(folder)
    # transformers also stores matrices that no model has, and biases that others lack
    names = [name for name in stored_names(folder) if not config.family.ignores(name, config.num_layers)]
    names = [name for name in names if not name.endswith(OPTIONAL.get(family, ()))]
    names = [name for name in names if not re.search(r"(layers|blocks)\.(?!1\.)\d", name)]
    assert len(names) > 8
    for name in names:
        change_weight(folder, name, None)
        refused(folder, re.escape(tail_of(name)))
        broken(family)
