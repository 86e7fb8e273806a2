"""Sound: sampling rates and WAV files, hostile ones too."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.errors import InvalidRequest
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.audio.resampling import resampled
from tests.support.process_memory import TracedMemory
from tests.support.wav_files import wav_file

PROCESSOR = AudioProcessor(AudioProcessorConfig())


def tone(rate: int, hertz: float, seconds: float = 0.5) -> NDArray[np.float32]:
    samples: NDArray[np.float32] = np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32)
    return samples


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 16001])
def test_a_tone_stays_itself_at_another_rate(rate: int) -> None:
    hertz = 0.2 * min(rate, 16000)
    found = resampled(tone(rate, hertz), rate, 16000)
    expected = tone(16000, hertz)
    assert len(found) == -(-int(0.5 * rate) * 16000 // rate)
    middle = slice(1000, 7000)
    assert np.abs(found[middle] - expected[middle]).max() < 2e-3


def test_what_the_lower_rate_cannot_hold_is_removed() -> None:
    assert np.abs(resampled(tone(48000, 9500), 48000, 16000)[500:-500]).max() < 2e-2
    assert np.abs(resampled(np.ones(48000, np.float32), 48000, 16000)[500:-500] - 1).max() < 1e-6


ODD_RATES = [4001, 7919, 15_991, 16_001, 44_101, 65_537, 104_729, 191_993, 191_999]
"""Their divisors with 16,000 are small, so that a table with every phase would be large."""


def reference(samples: NDArray[np.float32], rate: int, places: Sequence[int]) -> NDArray[np.float64]:
    """Output samples by their definition, in float64: without a table."""
    cutoff = min(1.0, 16000 / rate) * 0.95
    half = math.ceil(16 / cutoff)
    found = []
    for place in places:
        number, phase = divmod(place * rate, 16000)
        taps = np.arange(number - half, number + half + 1)
        distances = taps - number - phase / 16000
        weights = np.sinc(distances * cutoff) * np.cos(np.clip(distances / (half + 1), -1, 1) * (np.pi / 2)) ** 2
        inside = (taps >= 0) & (taps < len(samples))
        found.append(np.sum(samples[taps[inside]] * weights[inside]) / np.sum(weights))
    return np.array(found)


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000, 192_000, *ODD_RATES])
def test_each_sample_is_that_of_the_filter(rate: int) -> None:
    samples = np.random.default_rng(rate).uniform(-1, 1, rate // 4).astype(np.float32)
    found = resampled(samples, rate, 16000)
    places = [*range(50), *range(50, len(found), 37), len(found) - 1]
    assert np.abs(found[places] - reference(samples, rate, places)).max() < 3e-6


@pytest.mark.few(8)
@pytest.mark.diagonal
@pytest.mark.parametrize("rate", [4000, 16_000, 44_100, 192_000, *ODD_RATES])
@pytest.mark.parametrize("num_bytes", [12, 16 << 20])
@pytest.mark.parametrize(("kind", "bits", "channels"), [(1, 8, 1), (1, 8, 8), (1, 16, 1), (1, 24, 2), (3, 64, 1)])
def test_a_file_takes_memory_for_its_samples(rate: int, num_bytes: int, kind: int, bits: int, channels: int) -> None:
    frame_bytes = bits // 8 * channels
    num_frames = min(max(1, num_bytes // frame_bytes), 30 * rate)
    one = wav_file(np.zeros(1, np.float32), rate, kind=kind, bits=bits, channels=channels)
    file = one[: -frame_bytes - frame_bytes % 2 - 4] + struct.pack("<I", num_frames * frame_bytes)
    file += bytes(num_frames * frame_bytes)
    with TracedMemory() as memory:
        feature = PROCESSOR.process_wav(file, "file")
        peak_bytes = memory.peak_bytes
    assert feature.grid_thw == (1, 1, -(-num_frames * 16000 // rate))
    assert peak_bytes < 4 * num_frames + (64 << 20)


RATES_THAT_ARE_REFUSED = [0, 1, 3999, 192_001, 10**9, 2**32 - 1]


@pytest.mark.parametrize("rate", RATES_THAT_ARE_REFUSED)
def test_rates_that_are_refused(rate: int) -> None:
    file = wav_file(np.zeros(9, np.float32), 16000, header={"rate": rate})
    with pytest.raises(InvalidRequest, match=f"file has {rate} samples per second, 4000 to 192000 are read"):
        PROCESSOR.process_wav(file, "file")


@pytest.mark.parametrize("rate", [*RATES_THAT_ARE_REFUSED, -1, 10**400, 1e300, np.inf, np.nan, np.float32(1)])
def test_rates_of_callers_that_are_refused(rate: object) -> None:
    with pytest.raises(InvalidRequest, match="samples per second, 4000 to 192000 are read"):
        PROCESSOR.process((np.zeros(9, np.float32), rate), "audio")


@pytest.mark.parametrize("rate", [8000.5, "8000", True, None])
def test_rates_that_are_no_whole_numbers(rate: object) -> None:
    with pytest.raises(InvalidRequest, match="audio has a rate of"):
        PROCESSOR.process((np.zeros(9, np.float32), rate), "audio")


@pytest.mark.parametrize(
    ("kind", "bits", "error"), [(1, 8, 1.6e-2), (1, 16, 1e-4), (1, 24, 1e-6), (1, 32, 1e-6), (3, 32, 0), (3, 64, 0)]
)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_files(kind: int, bits: int, error: float, channels: int) -> None:
    samples = 0.9 * tone(16000, 440, 0.05)
    feature = PROCESSOR.process_wav(wav_file(samples, 16000, kind=kind, bits=bits, channels=channels), "file")
    found = np.frombuffer(feature.data, "<f4")
    assert feature.grid_thw == (1, 1, 800)
    assert np.abs(found - samples).max() <= error


def test_an_extensible_header_and_chunks_before_the_samples() -> None:
    samples = tone(16000, 440, 0.05)
    plain = PROCESSOR.process_wav(wav_file(samples, 16000), "file")
    given = wav_file(samples, 16000, extensible=True, chunks=[(b"LIST", b"abc"), (b"bext", b"x" * 600)])
    assert PROCESSOR.process_wav(given, "file") == plain
    assert PROCESSOR.process_wav(wav_file(samples, 16000) + b"trailing bytes", "file") == plain


def test_equal_sounds_alone_have_equal_identifiers() -> None:
    samples = tone(16000, 440, 0.05)
    same, other = samples.copy(), samples.copy()
    other[7] += 1e-3
    first, second, third = (PROCESSOR.process(each, "audio").identifier for each in (samples, same, other))
    assert first == second != third


def hostile() -> dict[str, tuple[bytes, str]]:
    good = wav_file(tone(16000, 440, 0.05), 16000)

    def header(**fields: int) -> bytes:
        return wav_file(tone(16000, 440, 0.05), 16000, header=fields)

    at = good.index(b"data") + 4
    return {
        "empty": (b"", "file is no WAV file: PCM of 8, 16, 24 or 32 bits"),
        "mp3": (b"ID3\x04" + bytes(99), "file is no WAV file"),
        "riff of another kind": (b"RIFF\x10\0\0\0AVI " + bytes(40), "file is no WAV file"),
        "cut": (good[:-100], "file is cut: its header says 1600 bytes of data, 1500 are there"),
        "cut in its header": (good[:30], "file is cut: its header says 16 bytes of fmt"),
        "4 GiB": (good[:at] + struct.pack("<I", 2**32 - 1) + good[at + 4 :], "says 4294967295 bytes of data, 1600 are"),
        "1,000 channels": (header(channels=1000, block=2000), "file has 1000 channels, 1 to 8 are read"),
        "no channels": (header(channels=0, block=0), "file has 0 channels"),
        "one sample per second": (header(rate=1), "file has 1 samples per second, 4000 to 192000 are read"),
        "a billion per second": (header(rate=10**9), "file has 1000000000 samples per second"),
        "no bits": (header(bits=0, block=0), "file has format 1 with 0 bits"),
        "compressed": (header(kind=0x55), "file has format 85 with 16 bits"),
        "wrong block": (header(block=3), "file says 3 bytes for 1 samples of 16 bits, which have 2"),
        "no samples": (wav_file(np.zeros(0, np.float32), 16000), "file has no samples"),
        "samples first": (good[:12] + good[at - 4 :], "file has its samples before their format"),
        "many chunks": (good[:12] + b"JUNK\0\0\0\0" * 5000 + good[12:], "no samples among its first 1024 chunks"),
        "too long": (
            wav_file(np.zeros(4001 * 30, np.float32), 4000, kind=1, bits=8),
            "file has 30.01 seconds, at most 30 are read at once",
        ),
        "infinite": (wav_file(np.array([0, np.inf], np.float32), 16000, kind=3, bits=32), "file: sample 1 is inf"),
        "beyond float32": (
            wav_file(np.array([0, 1e300]), 16000, kind=3, bits=64),
            "file: sample 1 is inf, numbers from -1e.06 to 1e.06 are read",
        ),
    }


HOSTILE = hostile()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    file, message = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=message) as caught:
        PROCESSOR.process_wav(file, "file")
    assert caught.value.field == "file"


def test_every_cut_of_a_file_is_refused_or_read() -> None:
    good = wav_file(tone(16000, 440, 0.01), 16000)
    for length in range(len(good)):
        with pytest.raises(InvalidRequest):
            PROCESSOR.process_wav(good[:length], "file")
