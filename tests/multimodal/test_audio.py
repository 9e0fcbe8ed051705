"""Clips: WAV files as the standard library writes them, resampling as scipy does it, bad ones refused by name."""

import io
import struct
import wave

import numpy as np
import pytest
from scipy import signal

from minivllm.multimodal.audio import as_audio, decode_wav, resample
from minivllm.multimodal.images import MediaError

TONE = np.sin(np.arange(600) / 7).astype(np.float32) * 0.9


def pcm(samples, width=2, channels=1, rate=8000):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, width, rate, 0, "NONE", ""))
        if width == 1:
            out.writeframes((samples * 127 + 128).astype(np.uint8).tobytes())
        else:
            whole = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i4")
            out.writeframes(whole.view(np.uint8).reshape(-1, 4)[:, :width].tobytes())
    return file.getvalue()


def riff(kind, bits, body, channels=1, more=b"", size=None):
    head = struct.pack("<HHIIHH", kind, channels, 8000, 0, 0, bits) + more
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    return b"RIFF\0\0\0\0WAVE" + chunks + b"data" + struct.pack("<I", len(body) if size is None else size) + body


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width):
    samples, rate = decode_wav(pcm(TONE, width))
    assert rate == 8000 and samples.dtype == np.float32
    assert np.abs(samples - TONE).max() < 2.0 ** (3 - 8 * min(width, 3))


def test_channels_are_mixed_and_floats_and_extensible_files_are_read():
    both = np.stack([TONE, np.zeros_like(TONE)], 1).reshape(-1)
    assert np.abs(decode_wav(pcm(both, channels=2))[0] - TONE / 2).max() < 1e-4
    assert (decode_wav(riff(3, 32, TONE.tobytes()))[0] == TONE).all()
    extra = struct.pack("<HHIH", 22, 32, 0, 3) + bytes(14)  # an extensible head, whose form is float
    assert (decode_wav(riff(0xFFFE, 32, TONE.tobytes(), more=extra))[0] == TONE).all()
    assert (decode_wav(riff(3, 32, TONE.tobytes(), size=0xFFFFFFFF))[0] == TONE).all()


@pytest.mark.parametrize("length", [1, 2, 599, 600])
@pytest.mark.parametrize(("rate", "to"), [(8000, 16000), (44100, 16000), (16000, 16001), (48000, 16000), (3, 2)])
def test_resampling_equals_scipy(length, rate, to):
    got = resample(TONE[:length], rate, to)
    assert got.dtype == np.float32 and len(got) == max(1, round(length * to / rate))
    assert np.abs(got - signal.resample(TONE[:length].astype(np.float64), len(got))).max() < 1e-5


def test_the_forms_of_a_clip(tmp_path):
    (tmp_path / "a.wav").write_bytes(pcm(TONE, rate=16000))
    for value in (
        TONE,
        TONE.astype(np.float64),
        (TONE, 16000),
        (TONE * 32767).astype(np.int16),
        str(tmp_path / "a.wav"),
    ):
        assert np.abs(as_audio(value, 16000, 600) - TONE).max() < 1e-4
    assert len(as_audio((TONE, 8000), 16000, 1200)) == 1200


@pytest.mark.parametrize(
    "value, error",
    [
        (b"ID3", "no WAV file"),
        (pcm(TONE)[:300], "cut off"),
        (pcm(TONE)[:36], "no samples"),
        (riff(1, 12, b"abc"), "12 bits in form 1"),
        (riff(6, 8, b"abc"), "8 bits in form 6"),
        (riff(1, 16, b"ab", channels=0), "no channels"),
        (b"RIFF____WAVEfmt \2\0\0\0ab", "damaged"),
        (b"RIFF____WAVEdata\2\0\0\0ab", "no format"),
        (np.zeros(0, np.float32), "no samples"),
        (np.zeros(601, np.float32), "0.0 seconds; this model hears at most 0.0375"),
        ((TONE, 7999), "0.1 seconds; this model hears at most"),
        (np.array([np.nan], np.float32), "not finite"),
        (np.array([3e38], np.float32), "beyond 1,000; full scale is 1"),
        ((TONE, 100), "1,000 to 384,000"),
        ((TONE, 16000.5), "1,000 to 384,000"),
        (TONE[None], "must be an array"),
        (TONE.astype(np.int32), "must be an array .* got int32"),
        ("/nowhere", "No such file"),
        (7, "got int"),
    ],
)  # fmt: skip
def test_what_is_no_clip_is_refused_by_name(value, error):
    with pytest.raises((MediaError, TypeError, OSError), match=error):
        decode_wav(value) if isinstance(value, bytes) else as_audio(value, 16000, 600)
