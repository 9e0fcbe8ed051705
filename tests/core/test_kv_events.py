"""KV events: a mirror kept from them alone equals the index, and the wire format is vLLM's."""

import random
import struct
import time

import pytest
from scheduling import fake_model

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventTap
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


def test_a_mirror_kept_from_events_equals_the_index():
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=40), CacheConfig(4, 16)
    )
    tap, mirror, rng = KVEventTap(scheduler), {}, random.Random(1)
    trace = scheduler.record()
    for i in range(60):
        scheduler.add_request(
            Request(
                str(i),
                [rng.randrange(2) for _ in range(rng.randrange(4, 20))],
                max_tokens=6,
                lora_name=rng.choice([None, "a"]),
            )
        )
        while scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, fake_model(output, scheduler))
            if i % 20 == 19:
                scheduler.reset_prefix_cache()
            for event in tap.take():
                if isinstance(event, BlockStored):
                    assert event.parent_block_hash is None or event.parent_block_hash not in event.block_hashes
                    assert len(event.token_ids) == 4 * len(event.block_hashes)
                    mirror.update(
                        zip(
                            event.block_hashes,
                            [tuple(event.token_ids[j : j + 4]) for j in range(0, len(event.token_ids), 4)],
                            strict=True,
                        )
                    )
                elif isinstance(event, BlockRemoved):
                    for name in event.block_hashes:
                        del mirror[name]
                else:
                    mirror.clear()
            assert set(mirror) == {
                block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks if block.block_hash
            }
    trace.check()
    tap.close()
    scheduler.stop_recording()
    assert scheduler.trace is None


def test_wire_format_is_vllms():
    """Decoded with msgspec structs declared as vLLM declares them, where msgspec is installed; else checked by hand."""
    stored = BlockStored([b"h"], b"p", [1, 2], 2, lora_name="a").to_wire()
    assert stored == ["BlockStored", [b"h"], b"p", [1, 2], 2, None, "GPU", "a"]
    assert BlockRemoved([b"h"]).to_wire() == ["BlockRemoved", [b"h"], "GPU"]
    assert AllBlocksCleared().to_wire() == ["AllBlocksCleared"]


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
        assert events == [["BlockRemoved", [b"x" * 32], "GPU"]]
        assert rank is None
        assert abs(moment - time.time()) < 60
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        replayed = []
        while True:
            assert dealer.poll(5000)
            _, number, _ = dealer.recv_multipart()
            if number == END_OF_REPLAY:
                break
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
            _, _, payload = dealer.recv_multipart()
            (event,) = msgpack.unpackb(payload)[1]
            assert event[0] == "BlockStored"
            assert event[3] == list(range(16))
    finally:
        context.destroy(linger=0)
