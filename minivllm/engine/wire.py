"""MessagePack encoding and a socket channel between engine processes."""

# Generated from nbs/engine/wire.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgpack
import numpy as np

from minivllm.core import config, encoder_cache, output, request
from minivllm.runtime.executors.broadcast import receive_exactly
from minivllm.sampling import logprobs, params, pooling

CLASSES: tuple[type, ...] = (
    config.EngineArgs, config.EngineConfig, config.ModelFacts, config.KVCacheSpec, config.KVCacheGroup, config.KVCacheConfig,
    config.CacheConfig, config.SchedulerConfig, config.Decision, config.PoolingFacts,
    request.Request, request.RequestStatus, request.FinishReason,
    params.SamplingParams, params.StructuredOutputsParams, params.RepetitionDetectionParams, params.RequestOutputKind,
    pooling.PoolingParams,
    output.EngineCoreOutput, logprobs.Logprob,
    encoder_cache.PlaceholderRange, encoder_cache.MultiModalFeatureSpec,
)  # fmt: skip
"""Classes that may cross, besides numbers, text, bytes, None, lists, tuples, frozen sets, dictionaries and arrays."""

_PLACE = {cls: place for place, cls in enumerate(CLASSES)}
_NAMES: dict[type, tuple[str, ...]] = {
    cls: tuple(f.name for f in fields(cls)) if is_dataclass(cls) else tuple(getattr(cls, "__slots__", ()))
    for cls in CLASSES
}
_TUPLE, _FROZENSET, _OBJECT, _ARRAY = 1, 2, 3, 4


def pack(value: Any) -> bytes:
    """A value as MessagePack. Raises TypeError that names what cannot cross, OverflowError for an integer of more than 64 bits."""
    return bytes(msgpack.packb(value, default=_encode, strict_types=True, unicode_errors="surrogatepass"))


def _encode(value: Any) -> msgpack.ExtType:
    cls = type(value)
    place = _PLACE.get(cls)
    if place is not None:
        body = value.value if isinstance(value, Enum) else [getattr(value, name) for name in _NAMES[cls]]
        return msgpack.ExtType(_OBJECT, pack([place, body]))
    if cls is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if cls is frozenset:
        return msgpack.ExtType(_FROZENSET, pack(list(value)))
    if cls is np.ndarray and value.dtype.kind in "fiub":
        return msgpack.ExtType(_ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(f"a value of type {cls.__name__} cannot cross between processes: {repr(value)[:60]}")


def unpack(data: bytes) -> Any:
    """What was packed. Builds nothing but the classes of `CLASSES`. Raises ValueError for anything else."""
    return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")


def _decode(code: int, data: bytes) -> Any:
    if code not in (_TUPLE, _FROZENSET, _OBJECT, _ARRAY):
        raise ValueError(f"a message holds a value of an unknown kind {code}")
    body = unpack(data)
    if code == _TUPLE:
        return tuple(body)
    if code == _FROZENSET:
        return frozenset(body)
    if code == _ARRAY:
        dtype, shape, content = body
        return np.frombuffer(bytearray(content), np.dtype(dtype)).reshape(shape)
    place, values = body
    cls = CLASSES[place]
    if issubclass(cls, Enum):
        return cls(values)
    made = object.__new__(cls)
    for name, value in zip(_NAMES[cls], values, strict=True):
        object.__setattr__(made, name, value)
    return made


def in_columns(outputs: Sequence[output.EngineCoreOutput]) -> list[Any]:
    """The outputs of a step: those with more to say than tokens whole, then ids, tokens, cached tokens and weight versions of the
    rest, a list each."""
    whole: list[output.EngineCoreOutput] = []
    plain: list[output.EngineCoreOutput] = []
    for o in outputs:
        more = (o.finish_reason, o.logprobs, o.prompt_logprobs, o.error, o.pooled, o.num_draft_tokens or None)
        (plain if more == (None,) * 6 else whole).append(o)
    return [
        whole, [o.request_id for o in plain], [o.new_token_ids for o in plain], [o.num_cached_tokens for o in plain],
        [o.weight_version for o in plain],
    ]  # fmt: skip


def from_columns(columns: Sequence[Any]) -> list[output.EngineCoreOutput]:
    """The outputs again, in the order of `in_columns`."""
    whole, *plain = columns
    return whole + [
        output.EngineCoreOutput(name, token_ids, num_cached_tokens=cached, weight_version=version)
        for name, token_ids, cached, version in zip(*plain, strict=True)
    ]


_LENGTH = struct.Struct(">I")


class Channel:
    """Values over a connected stream socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self._poll = select.poll()  # select() itself knows no file numbers above 1023
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, value: Any) -> None:
        """Raises OSError if the other end is gone, TypeError if the value cannot cross (nothing is sent then)."""
        data = pack(value)
        with self._sending:
            self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next value; waits for it. Raises EOFError if the other end is gone."""
        (length,) = _LENGTH.unpack(receive_exactly(self.sock, _LENGTH.size))
        return unpack(receive_exactly(self.sock, length))

    def ready(self) -> bool:
        """Whether something has come, or the other end is gone."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """The other end reads the end of the stream. Twice is no error."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed already, here or there
            pass
        self.sock.close()
