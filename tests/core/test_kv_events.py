"""KV events: a mirror kept from them alone equals the index, and the wire format is vLLM's."""

import os
import random
import struct
import time
from pathlib import Path

import pytest
from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventTap, event_from_wire
from minivllm.core.policy import FCFS
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


@pytest.mark.parametrize("kind", ["full", "gemma"])
def test_a_mirror_kept_from_events_equals_the_index(kind):
    """A set per group: what is stored is new to it, and what is removed is in it, also where several blocks are equal."""
    kv = kv_config(kind, 4, 2, window=8)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=32),
        CacheConfig(4, 16 * len(kv.groups)),
        kv,
        policy=FlakyVictim(),
    )
    tap, mirror, rng = KVEventTap(scheduler), {}, random.Random(1)
    trace = scheduler.record()
    for i in range(40):
        for j in range(3):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(4, 20))]
            lora, salt = rng.choice([None, "a"]), rng.choice([None, None, "s"])
            scheduler.add_request(Request(f"{i}-{j}", prompt, max_tokens=6, lora_name=lora, cache_salt=salt))
        while scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, fake_model(output, scheduler))
            if i % 20 == 19:
                scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.1)
            for event in tap.take():
                if isinstance(event, BlockStored):
                    assert event.parent_block_hash is None or event.parent_block_hash not in event.block_hashes
                    assert len(event.token_ids) == 4 * len(event.block_hashes) == 4 * len(event.extra_keys)
                    assert event.kv_cache_spec_kind == (
                        "full_attention" if kv.groups[event.group_idx].spec.kind == "full" else "sliding_window"
                    )
                    new = {(event.group_idx, name) for name in event.block_hashes}
                    assert not new & set(mirror)
                    mirror |= dict.fromkeys(new)
                elif isinstance(event, BlockRemoved):
                    for name in event.block_hashes:
                        del mirror[event.group_idx, name]
                else:
                    mirror.clear()
            blocks = scheduler.kv_cache_manager.block_pool.blocks
            assert set(mirror) == {(block.group, block.block_hash) for block in blocks if block.block_hash}
    assert scheduler.num_preemptions
    trace.check()
    tap.close()
    scheduler.stop_recording()
    assert scheduler.trace is None


class FlakyVictim(FCFS):
    def victim(self, running, view):
        return running[0]


def test_wire_format_is_vllms():
    """Events as vLLM 0.32 sent them, and as older versions did: read by our types, and sent back as 0.32 does."""
    salted = {
        "type": "BlockStored", "block_hashes": [2**64 - 1, 7], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["tenant-1"], None], "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [b"h" * 32], "medium": "GPU", "group_idx": 1}
    for wire in (salted, removed, {"type": "AllBlocksCleared"}):
        again = event_from_wire(wire).to_wire()
        assert again == wire and list(again) == list(wire)
    old = event_from_wire(["BlockStored", [b"h"], b"p", [1, 2], 2, None, "GPU", "a"])
    assert old == BlockStored([b"h"], b"p", [1, 2], 2, lora_name="a")
    assert event_from_wire(["BlockRemoved", [b"h"], "GPU"]) == BlockRemoved([b"h"])
    assert event_from_wire(["AllBlocksCleared"]) == AllBlocksCleared()
    assert event_from_wire({"type": "AllBlocksCleared", "of_a_newer_version": 1}) == AllBlocksCleared()


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ({"type": "BlockLost"}, "one of BlockStored, BlockRemoved, AllBlocksCleared; got 'BlockLost'"),
        ({"type": "BlockStored", "block_hashes": []}, "BlockStored: .*missing.*token_ids"),
        ([], "a map or an array"),
        (7, "a map or an array, got 7"),
    ],
)
def test_what_is_no_event_is_refused(wire, words):
    with pytest.raises(ValueError, match=words):
        event_from_wire(wire)


@pytest.mark.parametrize("name", ["frames.bin", "frames_bytes_hashes.bin"])
def test_a_recorded_stream_of_vllm(name):
    """All of it is read by our types and written again in the same bytes; what is removed was there, and never twice."""
    msgpack = pytest.importorskip("msgpack")
    path = Path(os.environ.get("MINIVLLM_VLLM_EVENTS", Path(__file__).parents[3] / "shared/data/vllm_events")) / name
    if not path.exists():
        pytest.skip(f"no recorded stream at {path}; MINIVLLM_VLLM_EVENTS names its folder")
    data, at, live, count = path.read_bytes(), 0, set(), 0
    while at < len(data):
        parts = []
        at += 4  # number of frames: three
        for _ in range(3):
            (size,) = struct.unpack_from(">I", data, at)
            parts.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        moment, events, rank = msgpack.unpackb(parts[2], strict_map_key=False)
        read = [event_from_wire(event) for event in events]
        assert msgpack.packb([moment, [event.to_wire() for event in read], rank]) == parts[2]
        for event in read:
            if isinstance(event, BlockStored):
                assert not live & set(event.block_hashes)
                live |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert live >= set(event.block_hashes)
                live -= set(event.block_hashes)
            else:
                live.clear()
        count += len(read)
    assert count == {"frames.bin": 2251, "frames_bytes_hashes.bin": 107}[name]


def test_publish_subscribe_replay():
    zmq = pytest.importorskip("zmq")
    msgpack = pytest.importorskip("msgpack")
    from minivllm.engine.kv_publisher import END_OF_REPLAY, KVEventPublisher

    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", buffer_steps=3)
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe("kv")
        deadline = time.monotonic() + 10
        sent = 0
        while not subscriber.poll(50):  # until the subscription has arrived
            publisher.publish([AllBlocksCleared()])
            sent += 1
            assert time.monotonic() < deadline
        topic, number, _ = subscriber.recv_multipart()
        first = struct.unpack(">Q", number)[0]
        assert topic == b"kv"
        for _ in range(4):
            publisher.publish([BlockRemoved([b"x" * 32])])
        publisher.publish([])
        numbers = []
        while len(numbers) < sent - 1 - first + 4:
            assert subscriber.poll(5000)
            _, number, payload = subscriber.recv_multipart()
            numbers.append(struct.unpack(">Q", number)[0])
        assert numbers == list(range(first + 1, first + 1 + len(numbers)))
        moment, events, rank = msgpack.unpackb(payload)
        assert events == [{"type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": "GPU"}]
        assert rank == 0
        assert abs(moment - time.time()) < 60
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        replayed = []
        while True:
            assert dealer.poll(5000)
            empty, topic, number, _ = dealer.recv_multipart()
            if number == END_OF_REPLAY:
                break
            assert (empty, topic) == (b"", b"kv")
            replayed.append(struct.unpack(">Q", number)[0])
        assert replayed == numbers[-3:], "the buffer holds three"
        with pytest.raises(zmq.ZMQError):
            KVEventPublisher(publisher.endpoint)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_an_engine_publishes(tmp_path):
    zmq = pytest.importorskip("zmq")
    msgpack = pytest.importorskip("msgpack")
    from tiny_models import save_tiny_model

    from minivllm import LLM, SamplingParams

    context = zmq.Context()
    path = save_tiny_model("llama", tmp_path / "tiny")
    try:
        with LLM(
            path,
            dtype="float32",
            block_size=8,
            num_gpu_blocks=16,
            kv_events_endpoint="tcp://127.0.0.1:*",
            kv_events_replay_endpoint="tcp://127.0.0.1:*",
        ) as llm:
            llm.generate(
                [{"prompt_token_ids": list(range(20))}], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False
            )
            with llm.record() as trace:
                llm.generate(
                    [{"prompt_token_ids": list(range(20))}], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False
                )
            assert trace.num_steps
            dealer = context.socket(zmq.DEALER)
            dealer.connect(llm.llm_engine.core._publisher.replay_endpoint)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            assert dealer.poll(5000)
            _, _, _, payload = dealer.recv_multipart()
            (event,) = msgpack.unpackb(payload)[1]
            assert (event["type"], event["group_idx"], event["token_ids"]) == ("BlockStored", 0, list(range(16)))
    finally:
        context.destroy(linger=0)
