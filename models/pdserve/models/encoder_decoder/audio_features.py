"""`AudioFeatures`: samples of sound to a log-mel spectrogram, by the feature extractor of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.common.audio_processor_config import AudioProcessorConfig


class AudioFeatures:
    """The extractor is imported and made at the first use: a model without weights needs none."""

    def __init__(self, config: AudioProcessorConfig) -> None:
        self._config = config
        self._extractor: Any = None

    def __call__(self, data: bytes) -> Tensor:
        """data: at most `max_samples` float32 samples -> `[M, F]` float32 on the CPU: mel bins, frames."""
        config = self._config
        if self._extractor is None:
            from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

            self._extractor = WhisperFeatureExtractor(
                feature_size=config.feature_size,
                sampling_rate=config.sampling_rate,
                hop_length=config.hop_length,
                chunk_length=config.chunk_length,
                n_fft=config.n_fft,
            )
        samples = np.frombuffer(data, dtype="<f4")
        features = self._extractor(samples, sampling_rate=config.sampling_rate, return_tensors="np").input_features
        return torch.from_numpy(features[0])
