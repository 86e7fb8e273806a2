"""`AudioProcessor`: a caller's sound as the samples that a model's encoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.errors import InvalidRequest
from pdserve.common.json_file import read_model_config
from pdserve.common.request.audio import audio_feature, verify_samples
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.text.audio.sound_file import MAX_RATE, MIN_RATE, SoundFile
from pdserve.text.audio.transcript_prompt import TranscriptPrompt

FIELD = "multi_modal_data"
_ARCHITECTURE = "WhisperForConditionalGeneration"


class AudioProcessor:
    """Safe from any thread."""

    def __init__(self, config: AudioProcessorConfig, transcript: TranscriptPrompt | None = None) -> None:
        """transcript: None if prompts are given in tokens."""
        self.config = config
        self.transcript = transcript

    @classmethod
    def from_folder(cls, folder: Path) -> AudioProcessor | None:
        """None for a model without sound. Raises: ConfigError, UnsupportedModel."""
        architectures = read_model_config(folder).get("architectures")
        if architectures != [_ARCHITECTURE]:
            return None
        return cls(AudioProcessorConfig.read(folder), TranscriptPrompt.from_folder(folder))

    def features(self, sounds: Sequence[object]) -> tuple[MultiModalFeatureSpec, ...]:
        """The sound of a prompt, of which there must be one. sounds: as of `process`. Raises: InvalidRequest."""
        if len(sounds) != 1:
            raise InvalidRequest(
                f"{FIELD} has {len(sounds)} sounds under 'audio'; a prompt for this model has exactly one", FIELD
            )
        return (self.process(sounds[0], f"{FIELD}.audio"),)

    def process(self, sound: object, where: str, field: str = FIELD) -> MultiModalFeatureSpec:
        """sound: samples `[n]`, with `(samples, rate)` at another sampling rate than the model's. where: the caller's name of it.

        Raises: InvalidRequest for another value, and for sound that is empty, too long, or no number.
        """
        rate: object = self.config.sampling_rate
        if isinstance(sound, tuple):
            if len(sound) != 2:
                raise InvalidRequest(f"{where} has {len(sound)} parts; samples and their rate are needed", field)
            sound, rate = sound
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
            raise InvalidRequest(f"{where} has a rate of {rate!r:.40}, samples per second are needed", field)
        if not MIN_RATE <= rate <= MAX_RATE and rate != self.config.sampling_rate:
            raise InvalidRequest(
                f"{where} has {rate!s:.40} samples per second, {MIN_RATE} to {MAX_RATE} are read", field
            )
        if rate != int(rate):
            raise InvalidRequest(f"{where} has a rate of {rate!r:.40}, whole samples per second are needed", field)
        try:
            samples = np.asarray(sound, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{where} is of type {type(sound).__name__}; samples are needed", field) from error
        if samples.ndim != 1:
            raise InvalidRequest(
                f"{where} is an array {list(samples.shape)}, [samples] of one channel is needed", field
            )
        self.verify_length(len(samples), int(rate), where, field)
        return self._feature(samples, int(rate), where, field)

    def process_file(self, file: bytes, field: str) -> MultiModalFeatureSpec:
        """file: as `SoundFile` reads it; channels are mixed. field: the client's name of it. Raises: as `process`."""
        sound = self.sound_file(file, field)
        return self._feature(sound.mono(field), sound.rate, field, field)

    def sound_file(self, file: bytes, field: str) -> SoundFile:
        """The file, only its header read. Arguments and errors: as of `process_file`."""
        sound = SoundFile.read(file, field)
        self.verify_length(sound.num_frames, sound.rate, field, field)
        return sound

    def verify_length(self, num_samples: int, rate: int, where: str, field: str) -> None:
        """rate: samples per second. where, field: as of `process`. Raises: InvalidRequest for sound that is empty or too long."""
        if not num_samples:
            raise InvalidRequest(f"{where} has no samples", field)
        if num_samples > self.config.chunk_length * rate:
            raise InvalidRequest(
                f"{where} has {num_samples / rate:.2f} seconds, at most {self.config.chunk_length} are read at once",
                field,
            )

    def _feature(self, samples: NDArray[np.float32], rate: int, where: str, field: str) -> MultiModalFeatureSpec:
        verify_samples(np.ascontiguousarray(samples, "<f4").data, where, field)
        samples = resampled(samples, rate, self.config.sampling_rate)[: self.config.max_samples]
        return audio_feature(np.ascontiguousarray(samples, "<f4").tobytes(), self.config)


def resampled(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """`[n]` -> `[ceil(n * new_rate / rate)]`; rates are samples per second."""
    if rate == new_rate:
        return samples
    # imported here: a router of a model without sound does not need it
    import soxr

    num_new = -(-len(samples) * new_rate // rate)
    # libsoxr rounds the length, down too: a single sample may become none
    found = soxr.resample(samples, rate, new_rate)[:num_new]
    padded: NDArray[np.float32] = np.pad(found, (0, num_new - len(found)))
    return padded
