"""Sound of a prompt as a `MultiModalFeatureSpec`: what an encoder reads in place of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.audio_processor_config import MAX_SAMPLE, SAMPLE_BYTES, AudioProcessorConfig
from pdserve.common.errors import InvalidRequest
from pdserve.common.request.multimodal import IDENTIFIER, MultiModalFeatureSpec, PlaceholderRange

MODALITY = "audio"
_NOWHERE = PlaceholderRange(0, 0)
"""Until a worker lays out the tokens: the place of the encoder's tokens depends on its `block_size`."""


def audio_feature(data: bytes, config: AudioProcessorConfig) -> MultiModalFeatureSpec:
    """data: float32 samples, little endian, at `sampling_rate`."""
    return MultiModalFeatureSpec(
        identifier=config.identifier(data),
        mm_position=_NOWHERE,
        grid_thw=(1, 1, len(data) // SAMPLE_BYTES),
        data=data,
        modality=MODALITY,
    )


def placed(features: Sequence[MultiModalFeatureSpec], num_slots: int) -> list[MultiModalFeatureSpec]:
    """The sound in the place of the encoder's tokens, with the padding."""
    place = PlaceholderRange(0, num_slots)
    return [msgspec.structs.replace(feature, mm_position=place) for feature in features]


def verify_audio(
    features: Sequence[MultiModalFeatureSpec], config: AudioProcessorConfig, *, needs_samples: bool = False
) -> None:
    """Check the sound of a prompt. needs_samples: False where the KV of the encoder's output may be received.

    Raises: InvalidRequest naming `mm_features`.
    """
    if len(features) != 1:
        raise _refusal(f"{len(features)} sounds are given; a prompt for this model has exactly one")
    [feature] = features
    if feature.modality != MODALITY:
        raise _refusal(f"mm_features[0].modality is {feature.modality[:40]!r}; {MODALITY} is supported")
    if not IDENTIFIER.fullmatch(feature.identifier):
        raise _refusal(f"mm_features[0].identifier is {feature.identifier[:40]!r}, 32 hex digits are needed")
    *ones, num_samples = feature.grid_thw
    if ones != [1, 1] or not 0 < num_samples <= config.max_samples:
        raise _refusal(
            f"mm_features[0].grid_thw is {feature.grid_thw}, 1, 1 and 1 to {config.max_samples} samples are needed"
        )
    if len(feature.data) != SAMPLE_BYTES * num_samples and (feature.data or needs_samples):
        raise _refusal(
            f"mm_features[0].data has {len(feature.data)} bytes, {SAMPLE_BYTES * num_samples} of {num_samples} samples are needed"
        )
    verify_samples(feature.data, "mm_features[0].data", "mm_features")


def verify_samples(data: bytes | memoryview, where: str, field: str) -> None:
    """Check float32 samples. where: the caller's name of them, in `field`. Raises: InvalidRequest for NaN and huge values."""
    # imported here: few requests have sound, and a client's process need not have numpy
    import numpy as np

    samples = np.frombuffer(data, dtype="<f4")
    # written so that NaN is beyond the limit
    if not len(samples) or (samples.min() >= -MAX_SAMPLE and samples.max() <= MAX_SAMPLE):
        return
    place = int((~(np.abs(samples) <= MAX_SAMPLE)).argmax())
    raise InvalidRequest(
        f"{where}: sample {place} is {float(samples[place])!r}, numbers from -{MAX_SAMPLE:g} to {MAX_SAMPLE:g} are read",
        field,
    )


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, "mm_features")
