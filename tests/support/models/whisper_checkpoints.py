"""Tiny random checkpoints of Whisper, made with its classes in `transformers`, and transcripts by its `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.support.models.checkpoints import VOCAB_SIZE, save_tokenizer

RATE = 16_000
EOS, PAD = 2, 0
SPECIAL = ("startoftranscript", "en", "de", "transcribe", "translate", "startofprev", "nospeech", "notimestamps")
IDS = {name: VOCAB_SIZE + place for place, name in enumerate(SPECIAL)}
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
PROMPT_IDS = [IDS[name] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
POSITIONS, MAX_LEN = 50, 64
"""The encoder's positions, and tokens of the decoder."""
SUPPRESSED, BEGIN_SUPPRESSED = (5, 6, *range(VOCAB_SIZE, VOCAB_SIZE + len(SPECIAL))), (EOS, 7)


def make_whisper(folder: Path, *, seed: int = 0, **overrides: Any) -> Transcripts:
    """Write model, tokenizer and processor into `folder`: sound of one second, in 16 mel bins. overrides: fields of the
    configuration."""
    given: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE + len(SPECIAL), "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
        "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56,
        "max_source_positions": POSITIONS, "max_target_positions": MAX_LEN, "init_std": 0.1, "pad_token_id": PAD,
        "bos_token_id": EOS, "eos_token_id": EOS, "decoder_start_token_id": IDS["startoftranscript"], "dtype": "float32",
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(WhisperConfig(**given | overrides)).eval()
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.uniform_(-1.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
            elif "embed_positions" in name:
                weight.normal_()
            elif "encoder_attn" in name or "conv" in name:
                weight.normal_(std=0.4)  # else transcripts hardly depend on the sound
    model.generation_config = GenerationConfig(
        decoder_start_token_id=IDS["startoftranscript"], suppress_tokens=list(SUPPRESSED),
        begin_suppress_tokens=list(BEGIN_SUPPRESSED), is_multilingual=True, no_timestamps_token_id=IDS["notimestamps"],
        lang_to_id={f"<|{name}|>": IDS[name] for name in ("en", "de")}, prev_sot_token_id=IDS["startofprev"],
        task_to_id={name: IDS[name] for name in ("transcribe", "translate")},
        pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS, max_length=MAX_LEN,
    )  # fmt: skip
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=given["num_mel_bins"], chunk_length=1)
    extractor.save_pretrained(folder)
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in SPECIAL])
    tokenizer.save(str(path))
    return Transcripts(model, extractor)


def sound(seed: int = 0, seconds: float = 0.8, rate: int = RATE) -> NDArray[np.float32]:
    """`[n]`: three tones with noise."""
    draw = random.Random(seed)
    time = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * draw.uniform(80, 3000) * time + draw.random()) for _ in range(3))
    noise = np.random.default_rng(seed).normal(size=len(time))
    samples: NDArray[np.float32] = (0.2 * tones + 0.05 * noise).astype(np.float32)
    return samples


class Transcripts:
    """Greedy transcripts of `transformers`, one sound at a time."""

    def __init__(self, model: WhisperForConditionalGeneration, extractor: WhisperFeatureExtractor) -> None:
        self._model = model
        self._extractor = extractor

    def features(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """`[1, M, F]`"""
        found: torch.Tensor = self._extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return found

    @torch.inference_mode()
    def answer(
        self, samples: NDArray[np.float32], max_tokens: int, *, language: str = "en", task: str = "transcribe"
    ) -> list[int]:
        """Output tokens, without EOS."""
        ids: list[int] = self._model.generate(
            self.features(samples),
            language=language,
            task=task,
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
        )[0].tolist()
        start = next((place for place, token in enumerate(ids) if token == IDS["notimestamps"]), -1)
        return ids[start + 1 :]

    @torch.inference_mode()
    def logits(self, samples: NDArray[np.float32], decoder_ids: list[int]) -> torch.Tensor:
        """`[len(decoder_ids), V]`"""
        output = self._model(self.features(samples), decoder_input_ids=torch.tensor([decoder_ids]))
        logits: torch.Tensor = output.logits[0]
        return logits
