"""A model folder with sound, of which a router reads tokenizer and configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.router.fake_worker import EOS, save_tokenizer

RATE = 16_000
SECONDS = 2
"""Longest sound."""
POSITIONS = SECONDS * 50
"""Positions of the encoder."""
PREVIOUS, START, EN, TRANSCRIBE, NO_TIMESTAMPS = 5, EOS + 1, 6, 7, 8
"""Token ids."""
PROMPT_IDS = [START, EN, TRANSCRIBE, NO_TIMESTAMPS]
"""Begin a transcript."""


def save_audio_folder(folder: Path) -> Path:
    """A model of one language, English, which a client must name. Returns the folder."""
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"chunk_length": SECONDS}))
    generation = {
        "decoder_start_token_id": START,
        "lang_to_id": {"<|en|>": EN},
        "task_to_id": {"transcribe": TRANSCRIBE},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
