"""`AudioProcessorConfig`: how sound becomes the input of an encoder, as a model's `preprocessor_config.json` says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import read_json_object

FILE = "preprocessor_config.json"
SAMPLE_BYTES = 4
"""A sample is a float32, little endian."""
MAX_SAMPLE = 1e6
"""Largest absolute value of a sample; 1 is the loudest of usual files."""
_TYPE = "WhisperFeatureExtractor"
_STRIDE = 2
"""Frames of a position of Whisper's encoder."""
_DIGEST_BYTES = 16
_LIMITS = {
    "feature_size": (1, 1024),
    "sampling_rate": (1000, 48_000),
    "hop_length": (1, 1 << 16),
    "chunk_length": (1, 60),
    "n_fft": (2, 1 << 16),
}
"""Field -> smallest and largest value."""


@dataclass(frozen=True, slots=True)
class AudioProcessorConfig:
    """Defaults are those of transformers' `WhisperFeatureExtractor`."""

    feature_size: int = 80
    """Mel bins of a frame."""
    sampling_rate: int = 16_000
    """Samples per second."""
    hop_length: int = 160
    """Samples from one frame to the next."""
    chunk_length: int = 30
    """Seconds that the encoder reads; shorter sound is padded with silence."""
    n_fft: int = 400
    """Samples of a frame."""

    @classmethod
    def read(cls, folder: Path) -> AudioProcessorConfig:
        """Raises: ConfigError naming file, field and value; UnsupportedModel for another processor."""
        path = folder / FILE
        values = read_json_object(path)
        kind = values.get("feature_extractor_type", _TYPE)
        if kind != _TYPE:
            raise UnsupportedModel(f"{path}: feature_extractor_type is {kind!r:.80}; supported: {_TYPE}")
        for name in ("padding_value", "dither"):
            if values.get(name) not in (None, 0, 0.0):
                raise UnsupportedModel(f"{path}: {name} is {values[name]!r:.80}; audio is served where it is 0")
        default = cls()
        return cls(**{name: _integer(path, name, values.get(name), getattr(default, name)) for name in _LIMITS})

    @property
    def max_samples(self) -> int:
        """Samples that the encoder reads."""
        return self.chunk_length * self.sampling_rate

    @property
    def num_frames(self) -> int:
        """Frames of mel bins that the encoder reads."""
        return self.max_samples // self.hop_length

    @property
    def num_positions(self) -> int:
        """Hidden states of the encoder's output, to which the decoder attends."""
        return self.num_frames // _STRIDE

    def identifier(self, data: bytes) -> str:
        """See `MultiModalFeatureSpec.identifier`. data: float32 samples."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"audio")
        digest.update(json.dumps(asdict(self), sort_keys=True).encode())
        digest.update(data)
        return digest.hexdigest()


def _integer(path: Path, name: str, value: Any, default: int) -> int:
    lowest, highest = _LIMITS[name]
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{path}: {name} must be an integer from {lowest} to {highest}, not {value!r:.80}")
    return value
