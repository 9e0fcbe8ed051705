"""Clips from WAV bytes and arrays: checked, one channel, at the model's rate."""

# Generated from nbs/multimodal/audio.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.multimodal.images import MediaError

Samples = npt.NDArray[np.float32]
LOUDEST = 1000  # files of floats may go beyond full scale, but not without end
RATES = range(1_000, 384_001)  # samples a second that are taken
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def decode_wav(data: bytes) -> tuple[Samples, int]:
    """The samples of a WAV file, float32 [n] in -1..1, the mean of its channels, and how many there are a second.

    Raises:
        MediaError: it is none, is cut off, or holds samples of an unknown form.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise MediaError("the data are no WAV file; other formats of sound are not supported")
    form, at = None, 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        body = data[at + 8 : at + 8 + size]
        if len(body) < size and (name, size) != (b"data", 0xFFFFFFFF):  # else streamed: of unknown size
            raise MediaError("the WAV file is cut off")
        if name == b"fmt ":
            form = _read_form(body)
        if name == b"data":
            if form is None:
                raise MediaError("the WAV file has no format (fmt chunk) before its samples")
            (kind, bits, channels), rate = form
            return _to_floats(body, kind, bits, channels), rate
        at += 8 + size + size % 2
    raise MediaError("the WAV file has no samples")


def _read_form(body: bytes) -> tuple[tuple[int, int, int], int]:
    if len(body) < 16:
        raise MediaError("the WAV file is damaged")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
    if kind == _EXTENSIBLE and len(body) >= 26:
        kind = int.from_bytes(body[24:26], "little")
    if (kind, bits) not in ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)):
        raise MediaError(f"samples of {bits} bits in form {kind} are not supported; 8 to 32 bits PCM and floats are")
    if not channels:
        raise MediaError("the WAV file has no channels")
    return (kind, bits, channels), rate


def _to_floats(body: bytes, kind: int, bits: int, channels: int) -> Samples:
    body = body[: len(body) - len(body) % (bits // 8 * channels)]
    if kind == _FLOAT:
        values = np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    elif bits == 8:
        values = (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / np.float32(128)
    elif bits == 24:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    else:
        values = np.frombuffer(body, f"<i{bits // 8}").astype(np.float32) / np.float32(2 ** (bits - 1))
    return values.reshape(-1, channels).mean(1)


def resample(samples: Samples, rate: int, to: int) -> Samples:
    """A clip at another rate, by its spectrum: frequencies that the new rate cannot hold are left out."""
    if rate == to or not len(samples):
        return samples
    count = max(1, round(len(samples) * to / rate))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    if 2 * (len(spectrum) - 1) == count < len(samples):
        spectrum[-1] = 2 * spectrum[-1].real  # the highest frequency stands for itself and its mirror image
    elif 2 * (len(spectrum) - 1) == len(samples) < count:
        spectrum[-1] /= 2
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)


def as_audio(value: Any, rate: int, most: int) -> Samples:
    """A clip that a caller gave, as float32 [n] at `rate`.

    Args:
        value: an array of floats in -1..1 or of int16, [n]; (array, samples a second); or the path of a WAV file.
        rate: the model's samples a second, also assumed for an array that comes without a rate.
        most: samples at that rate that it can hear.

    Raises:
        TypeError: it is something else. MediaError: empty, too long, not finite, or see `decode_wav`. OSError: a file that cannot be read.
    """
    if isinstance(value, str | Path):
        value = decode_wav(Path(value).read_bytes())
    samples, given = value if isinstance(value, tuple) and len(value) == 2 else (value, rate)
    if (
        not isinstance(samples, np.ndarray)
        or samples.ndim != 1
        or samples.dtype.kind + str(samples.itemsize) not in ("f4", "f8", "i2")
    ):
        what = f"{samples.dtype} {list(samples.shape)}" if isinstance(samples, np.ndarray) else type(samples).__name__
        raise TypeError(
            f"a clip must be an array of floats or int16 [samples], alone or with its rate, or a path, got {what}"
        )
    if isinstance(given, bool) or int(given) != given or int(given) not in RATES:
        raise MediaError(f"a clip has {RATES[0]:,} to {RATES[-1]:,} samples a second, got {given!r}")
    if not len(samples):
        raise MediaError("the clip has no samples")
    if len(samples) * rate > most * int(given):
        seconds = len(samples) / int(given)
        raise MediaError(
            f"the clip lasts {seconds:.1f} seconds; this model hears at most {most / rate:g}: cut it into several"
        )
    floats = samples.astype(np.float32) / np.float32(2**15 if samples.dtype.kind == "i" else 1)
    if not (np.abs(floats) <= LOUDEST).all():  # nor for NaN
        raise MediaError(f"the clip has samples that are not finite, or beyond {LOUDEST:,}; full scale is 1")
    return resample(floats, int(given), rate)
