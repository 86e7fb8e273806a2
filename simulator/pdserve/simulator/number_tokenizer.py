"""`number_tokenizer`: for a model folder without a tokenizer, one whose tokens are the numbers of their ids."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pdserve.text.tokenization.tokenizer import Tokenizer, TokenizerJson
from pdserve.text.tokenization.tokenizer_folder import TokenizerFolder


@lru_cache(maxsize=1)
def number_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Nobody reads the texts of a simulation: its requests are token ids. There are no special tokens."""
    backend = Backend(WordLevel({str(token_id): token_id for token_id in range(vocab_size)}, unk_token="0"))
    backend.pre_tokenizer = Whitespace()
    return Tokenizer(backend, TokenizerJson(), TokenizerFolder(folder, {}, {}, {}, {}))
