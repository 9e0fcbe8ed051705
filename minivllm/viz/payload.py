"""Compact binary payload for views: varints, deflate, base64."""

# Generated from nbs/viz/payload.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


def as_rows(rows: Sequence[Sequence[int]], width: int) -> Ints:
    """Rows of whole numbers as an array [len(rows), width], also if there are none."""
    return np.array(rows, np.int32).reshape(len(rows), width)


def varints(numbers: Iterable[int] | np.ndarray) -> bytes:
    """Whole numbers of 32 bits, small ones in one byte: zigzag-coded (0, -1, 1, -2, ... become 0, 1, 2, 3, ...), 7 bits a byte, low bits first.

    Raises:
        ValueError: a number does not fit in 32 bits with sign.
    """
    wide = np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers), dtype=np.int64).ravel()
    if wide.size and (wide.min() < -(2**31) or wide.max() >= 2**31):
        raise ValueError(f"numbers must fit in 32 bits with sign, got {wide.min()} to {wide.max()}")
    coded = ((wide << 1) ^ (wide >> 63)).astype(np.uint64)
    left = coded[:, None] >> np.arange(0, 35, 7, dtype=np.uint64)
    more = left >= 128
    used = np.concatenate([np.ones((wide.size, 1), bool), more[:, :4]], axis=1)
    return ((left & np.uint64(127)) | more.astype(np.uint64) << np.uint64(7))[used].astype(np.uint8).tobytes()


class Payload:
    """A header of plain values, and binary parts, each deflated alone so that the page inflates only what it shows.

    Attributes:
        header: goes to the page as JSON.
        parts: the deflated parts.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.parts: list[bytes] = []
        self._counts: list[int] = []

    def __repr__(self) -> str:
        return f"Payload({len(self.json())} bytes of header, {len(self.parts)} parts, {len(self.bytes())} bytes)"

    def _append(self, raw: bytes, count: int) -> int:
        self.parts.append(zlib.compress(raw, 9))
        self._counts.append(count)
        return len(self.parts) - 1

    def add_numbers(self, numbers: Iterable[int] | np.ndarray) -> int:
        """Add whole numbers (an Int32Array on the page); returns the part's number for the header."""
        numbers = np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers), dtype=np.int64).ravel()
        return self._append(varints(numbers), numbers.size)

    def add_bytes(self, data: bytes) -> int:
        """Add bytes (a Uint8Array on the page); returns the part's number."""
        return self._append(data, -1)

    def add_json(self, value: Any) -> int:
        """Add a value as JSON; returns the part's number."""
        return self.add_bytes(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())

    def drop_last(self) -> None:
        """Take the last part away again."""
        del self.parts[-1], self._counts[-1]

    def extend(self, other: Payload) -> None:
        """Append the parts of another payload, in order."""
        self.parts += other.parts
        self._counts += other._counts

    def bytes(self) -> bytes:
        """All parts, one after the other."""
        return b"".join(self.parts)

    def full_header(self, offset: int = 0) -> dict[str, Any]:
        """The header with where each part lies: `blobs` is a list of [offset, length, count of numbers or -1]."""
        blobs = []
        for part, count in zip(self.parts, self._counts, strict=True):
            blobs.append([offset, len(part), count])
            offset += len(part)
        return {**self.header, "blobs": blobs}

    def json(self) -> str:
        """The full header as JSON that may stand inside a script element."""
        text = json.dumps(self.full_header(), separators=(",", ":"), ensure_ascii=False)
        return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")
