"""Two texts that are cut to a number of tokens, as `longest_first` of the library cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from pdserve.common.errors import InvalidRequest
from pdserve.text.tokenization.pair_limit import PairLimit
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.models.checkpoints import save_tokenizer

TEXTS = ("the miller sang", "in winter the wheel stood still, and the questions were longer than the evenings", "she")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds special tokens around and between two texts."""
    folder = tmp_path_factory.mktemp("pairs")
    save_tokenizer(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    start, end = "<|im_start|>", "<|im_end|>"
    ids = [(token, backend.token_to_id(token)) for token in (start, end)]
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {end} $B:1 {end}:1", special_tokens=ids
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.diagonal
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("first", TEXTS)
@pytest.mark.parametrize("second", TEXTS)
def test_each_size_is_that_of_the_library(
    folder: Path, first: str, second: str, side: Literal["left", "right"]
) -> None:
    tokenizer, backend = Tokenizer.from_folder(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for size in range(5, 80):
        backend.enable_truncation(size, strategy="longest_first", direction=side)
        assert tokenizer.encode_pair(first, second, limit=PairLimit(size, side)) == backend.encode(first, second).ids


def test_a_limit_that_leaves_no_token_of_a_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    message = (
        "truncate_prompt_tokens must be at least 5, not 4: a pair of texts has 3 special tokens, and at least one of"
    )
    with pytest.raises(InvalidRequest, match=message):
        tokenizer.encode_pair("a b", "c d", limit=PairLimit(4, "right"))
