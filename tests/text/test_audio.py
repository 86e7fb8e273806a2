"""Sound: sampling rates and files, hostile ones too."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from pdserve.common.audio_processor_config import AudioProcessorConfig
from pdserve.common.errors import InvalidRequest
from pdserve.text.audio.audio_processor import AudioProcessor, resampled
from tests.support.models.wav_files import wav_file
from tests.support.run.process_memory import TracedMemory

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
"""Their divisors with 16,000 are small, so that a table with every phase of a filter would be large."""


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 22050, 44100, 48000, 192_000, *ODD_RATES])
@pytest.mark.parametrize("num_samples", [1, 2, 999, 12_345])
def test_the_number_of_samples_at_another_rate(rate: int, num_samples: int) -> None:
    found = resampled(np.ones(num_samples, np.float32), rate, 16000)
    assert found.shape == (-(-num_samples * 16000 // rate),)
    assert found.dtype == np.float32


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
        feature = PROCESSOR.process_file(file, "file")
        peak_bytes = memory.peak_bytes
    assert feature.grid_thw == (1, 1, -(-num_frames * 16000 // rate))
    assert peak_bytes < 4 * num_frames + (64 << 20)


RATES_THAT_ARE_REFUSED = [0, 1, 3999, 192_001, 10**9, 2**32 - 1]


@pytest.mark.parametrize("rate", RATES_THAT_ARE_REFUSED)
def test_rates_that_are_refused(rate: int) -> None:
    file = wav_file(np.zeros(9, np.float32), 16000, header={"rate": rate})
    # libsndfile itself refuses what is no number of samples
    with pytest.raises(
        InvalidRequest, match=f"file has {rate} samples per second, 4000 to 192000 are|file cannot be read"
    ):
        PROCESSOR.process_file(file, "file")


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
    feature = PROCESSOR.process_file(wav_file(samples, 16000, kind=kind, bits=bits, channels=channels), "file")
    found = np.frombuffer(feature.data, "<f4")
    assert feature.grid_thw == (1, 1, 800)
    assert np.abs(found - samples).max() <= error


def test_an_extensible_header_and_chunks_before_the_samples() -> None:
    samples = tone(16000, 440, 0.05)
    plain = PROCESSOR.process_file(wav_file(samples, 16000), "file")
    given = wav_file(samples, 16000, extensible=True, chunks=[(b"LIST", b"abc"), (b"bext", b"x" * 600)])
    assert PROCESSOR.process_file(given, "file") == plain
    assert PROCESSOR.process_file(wav_file(samples, 16000) + b"trailing bytes", "file") == plain


def test_equal_sounds_alone_have_equal_identifiers() -> None:
    samples = tone(16000, 440, 0.05)
    same, other = samples.copy(), samples.copy()
    other[7] += 1e-3
    first, second, third = (PROCESSOR.process(each, "audio").identifier for each in (samples, same, other))
    assert first == second != third


def compressed(samples: NDArray[np.float32], rate: int, kind: str, encoding: str) -> bytes:
    """A file by libsndfile's names of its format and encoding."""
    file = io.BytesIO()
    num_channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(file, "w", rate, num_channels, encoding, format=kind) as writer:
        # libvorbis has all that is written at once on its stack
        for first in range(0, len(samples), rate):
            writer.write(samples[first : first + rate])
    return file.getvalue()


COMPRESSED = [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]


@pytest.mark.parametrize(("kind", "encoding"), COMPRESSED)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_compressed_files(kind: str, encoding: str, channels: int) -> None:
    samples = 0.9 * tone(16000, 440, 1.0)
    frames = np.repeat(samples[:, None], channels, axis=1)
    feature = PROCESSOR.process_file(compressed(frames, 16000, kind, encoding), "file")
    found = np.frombuffer(feature.data, "<f4")
    assert feature.grid_thw == (1, 1, 16000)
    middle = slice(2000, -2000)
    error = np.sqrt(np.mean((found[middle] - samples[middle]) ** 2))
    assert error < (1e-4 if kind == "FLAC" else 0.03)


@pytest.mark.parametrize(("kind", "encoding"), COMPRESSED)
def test_a_small_file_of_much_silence_is_refused_before_it_is_decoded(kind: str, encoding: str) -> None:
    silence = np.zeros(16000 * 60, np.float32)
    file = compressed(silence, 16000, kind, encoding)
    assert len(file) < 4 * len(silence) / 10
    with TracedMemory() as memory:
        with pytest.raises(InvalidRequest, match=r"file has 60\.\d\d seconds, at most 30 are read at once"):
            PROCESSOR.process_file(file, "file")
        peak_bytes = memory.peak_bytes
    assert peak_bytes < len(file) + (1 << 20)


@pytest.mark.parametrize(("kind", "encoding"), COMPRESSED)
def test_every_tenth_cut_of_a_compressed_file_is_refused_or_read(kind: str, encoding: str) -> None:
    file = compressed(tone(16000, 440, 0.1), 16000, kind, encoding)
    for length in range(0, len(file), 10):
        with contextlib.suppress(InvalidRequest):
            assert PROCESSOR.process_file(file[:length], "file").grid_thw[2] <= 1600


def hostile() -> dict[str, tuple[bytes, str]]:
    good = wav_file(tone(16000, 440, 0.05), 16000)
    flac = compressed(tone(16000, 440, 0.5), 16000, "FLAC", "PCM_16")
    # an MPEG frame says nothing about the others: the header of its first one does
    mp3 = compressed(tone(16000, 440, 0.5), 16000, "MP3", "MPEG_LAYER_III")

    def header(**fields: int) -> bytes:
        return wav_file(tone(16000, 440, 0.05), 16000, header=fields)

    at = good.index(b"data") + 4
    return {
        "empty": (b"", "file is no file of sound that is read: WAV of PCM or floats, FLAC, OGG and MP3 are read"),
        "noise": (bytes(99), "file is no file of sound that is read"),
        "a tag alone": (b"ID3\x04" + bytes(99), "file cannot be read: "),
        "riff of another kind": (b"RIFF\x10\0\0\0AVI " + bytes(40), "file is no file of sound that is read"),
        "another format": (
            compressed(tone(16000, 440), 16000, "AIFF", "PCM_16"),
            "file is no file of sound that is read",
        ),
        "another encoding": (
            compressed(tone(16000, 440), 16000, "WAV", "IMA_ADPCM"),
            "file is WAV with IMA_ADPCM: WAV of PCM",
        ),
        "cut": (good[:-100], f"file is cut: its header says {len(good)} bytes, {len(good) - 100} are there"),
        "cut in its header": (good[:30], "file is cut: its header says"),
        "flac cut": (flac[:-100], "file cannot be read: |file is cut: its header says 8000 samples, "),
        "mp3 cut": (mp3[:-600], "file is cut: its header says 8000 samples, "),
        "1,000 channels": (header(channels=1000, block=2000), "file has 1000 channels, 1 to 8 are read"),
        "60,000 channels": (header(channels=60_000), "file cannot be read: "),
        "no channels": (header(channels=0, block=0), "file cannot be read: "),
        "one sample per second": (header(rate=1), "file has 1 samples per second, 4000 to 192000 are read"),
        "a billion per second": (header(rate=10**9), "file has 1000000000 samples per second"),
        "no bits": (header(bits=0, block=0), "file "),
        "compressed": (header(kind=0x55), "file "),
        "no samples": (wav_file(np.zeros(0, np.float32), 16000), "file has no samples"),
        "samples first": (good[:4] + b"\xff" * 4 + good[8:12] + good[at - 4 :], "file cannot be read: "),
        "many chunks": (
            good[:4] + b"\xff" * 4 + good[8:12] + b"JUNK\0\0\0\0" * 500_000 + good[12:],
            "file cannot be read: ",
        ),
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
        PROCESSOR.process_file(file, "file")
    assert caught.value.field == "file"
    assert " at 0x" not in caught.value.message


@pytest.mark.parametrize("size", [0, 2**32 - 1])
def test_a_wav_file_whose_writer_did_not_know_its_size_is_read(size: int) -> None:
    good = wav_file(tone(16000, 440, 0.05), 16000)
    at = good.index(b"data") + 4
    streamed = good[:4] + struct.pack("<I", size) + good[8:at] + struct.pack("<I", 2**32 - 1) + good[at + 4 :]
    assert PROCESSOR.process_file(streamed, "file") == PROCESSOR.process_file(good, "file")


def test_every_cut_of_a_file_is_refused_or_read() -> None:
    good = wav_file(tone(16000, 440, 0.01), 16000)
    for length in range(len(good)):
        with pytest.raises(InvalidRequest):
            PROCESSOR.process_file(good[:length], "file")
