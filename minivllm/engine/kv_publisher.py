"""Publishes KV cache events over ZeroMQ in vLLM's wire format."""

# Generated from nbs/engine/kv_publisher.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from minivllm.core.kv_events import KVEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_STOP = object()


class KVEventPublisher:
    """Publishes KV events over ZeroMQ, wire-compatible with vLLM's `ZmqEventPublisher`.

    Args:
        endpoint: where to bind the PUB socket, such as `tcp://127.0.0.1:5557`; port `*` picks a free one.
        replay_endpoint: where to bind the ROUTER socket for replays, or None for none.
        topic: the first frame of every message.
        buffer_steps: how many messages can be replayed.

    Attributes:
        endpoint, replay_endpoint: what the sockets are bound to, with the port that was picked.

    Raises:
        ImportError: pyzmq or msgpack is missing; says how to install them.
        zmq.ZMQError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", buffer_steps: int = 10_000
    ) -> None:
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise ImportError(
                f"publishing KV events needs {error.name}; install it with: pip install 'minivllm[server]'"
            ) from error
        self._pack = msgpack.packb
        self._topic, self._buffer = topic.encode(), deque[tuple[int, bytes]](maxlen=buffer_steps)
        self._context = zmq.Context()
        self._replay: Any = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.bind(endpoint)
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="minivllm-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send one batch. Returns at once; an empty batch is not sent."""
        if events:
            self._queue.put((time.time(), [event.to_wire() for event in events]))

    def close(self) -> None:
        """Send what is queued, then close the sockets."""
        self._queue.put(_STOP)
        self._thread.join()
        self._context.destroy(linger=1000)

    def _run(self) -> None:
        sequence = 0
        while True:
            self._answer_replays()
            try:
                item = self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
            if item is _STOP:
                return
            moment, events = item
            payload = self._pack([moment, events, 0])  # one data parallel rank
            self._buffer.append((sequence, payload))
            self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
            sequence += 1

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a replay request; vLLM passes over those too
            client, empty, first = frames[0], frames[1], int.from_bytes(frames[2], "big")
            for sequence, payload in self._buffer:
                if sequence >= first:
                    self._replay.send_multipart([client, empty, self._topic, sequence.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, empty, b"", END_OF_REPLAY, b""])
