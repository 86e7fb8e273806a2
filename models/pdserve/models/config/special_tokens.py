"""`special_tokens`: the tokens that begin and end a text."""

from __future__ import annotations

from pathlib import Path

from pdserve.models.json_object import JsonObject


def special_tokens(folder: Path, config: JsonObject, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """EOS ids and BOS id; `generation_config.json` takes precedence over `config.json`.

    Ids outside the vocabulary are left out, since they are never sampled.
    """
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, JsonObject.read(folder / "generation_config.json"))
    ends = next((ids for source in sources if (ids := source.token_ids("eos_token_id"))), ())
    begins = next((ids for source in sources if (ids := source.token_ids("bos_token_id"))), ())
    known = tuple(token_id for token_id in ends if token_id < vocab_size)
    return known, begins[0] if begins and begins[0] < vocab_size else None
