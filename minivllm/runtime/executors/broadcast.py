"""Messages from the engine to its workers through shared memory, and replies."""

# Generated from nbs/runtime/executors/broadcast.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
import time
from typing import Any


def unnamed_file(size: int) -> int:
    """The descriptor of a file that is gone when the last process that has it ends. It lies in memory if the system can do that."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("minivllm-ring")
    else:
        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, size)
    return number


class Ring:
    """Memory that one process writes messages into and several read.

    Args:
        file: from `unnamed_file(Ring.size(readers))`; inherited by the readers.
        readers: how many.
    """

    SLOTS, BYTES = 8, 1 << 20
    """Messages that may be unread, and the largest one."""

    def __init__(self, file: int, readers: int) -> None:
        self._memory = mmap.mmap(file, self.size(readers))
        self._counts = memoryview(self._memory)[: 8 * readers].cast("q")
        self._start = 8 * readers
        self.written = 0

    @classmethod
    def size(cls, readers: int) -> int:
        """Bytes of memory for this many readers."""
        return 8 * readers + cls.SLOTS * cls.BYTES

    def has_room(self) -> bool:
        """Whether the next slot has been read by all."""
        return self.written - min(self._counts) < self.SLOTS

    def write(self, data: bytes) -> int:
        """Put a message into the next slot, which must have room; returns its number."""
        start = self._start + self.written % self.SLOTS * self.BYTES
        self._memory[start : start + len(data)] = data
        self.written += 1
        return self.written - 1

    def read(self, number: int, length: int, reader: int) -> bytes:
        """Copy a message out. Every reader reads every message, in order."""
        start = self._start + number % self.SLOTS * self.BYTES
        data = self._memory[start : start + length]
        self._counts[reader] = number + 1
        return data


_HEAD = struct.Struct("<qq")


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes. Raises EOFError if the other end is gone."""
    parts = []
    while count:
        try:
            part = sock.recv(min(count, 1 << 20))
        except OSError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("the other end has closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Frames:
    """Pickled values over a socket between two processes of one engine. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()

    def send(self, value: Any) -> None:
        """Raises OSError if the other end is gone, or what pickle raises for a value that cannot cross (nothing is sent then)."""
        self.send_bytes(-1, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, number: int, data: bytes, length: int | None = None) -> None:
        """Send a head, and with number -1 the message itself. Any other number says where in the ring the message lies."""
        with self._sending:
            self.sock.sendall(_HEAD.pack(number, len(data) if length is None else length) + data)

    def receive(self, ring: Ring | None = None, reader: int = 0) -> Any:
        """The next value, from the ring if that is where it lies; waits for it. Raises EOFError if the other end is gone."""
        number, length = _HEAD.unpack(receive_exactly(self.sock, _HEAD.size))
        if number >= 0 and ring is not None:
            return pickle.loads(ring.read(number, length, reader))
        return pickle.loads(receive_exactly(self.sock, length))


class Broadcast:
    """The engine's side: one message to all workers.

    Args:
        frames: a socket to each worker, in the order of ranks.
        file: the ring's.
    """

    def __init__(self, frames: list[Frames], file: int) -> None:
        self._frames, self._ring = frames, Ring(file, len(frames))
        self.closed = False

    def send(self, value: Any) -> None:
        """Raises OSError if a worker is gone, or what pickle raises for a value that cannot cross (nothing is sent then)."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if len(data) > Ring.BYTES:
            for frames in self._frames:
                frames.send_bytes(-1, data)
            return
        while not self._ring.has_room():  # many steps are in flight, and a worker has not come to the oldest yet
            if self.closed:
                raise BrokenPipeError("a worker has ended")
            time.sleep(0.0002)
        number = self._ring.write(data)
        for frames in self._frames:
            frames.send_bytes(number, b"", len(data))
