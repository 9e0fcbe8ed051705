"""Blocks from main memory, files and another engine: the tokens are the same, and a load that fails costs only work."""

import copy
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from chapter import chapter_cells
from tiny_models import hf_model, randomise, save_tiny_model, tiny_model_path

from minivllm.core.config import EngineArgs, KVTransferConfig
from minivllm.core.kv_connector import ARC, LRU, SharedStorageConnector
from minivllm.engine.core_process import connect_engine
from minivllm.engine.llm import LLM
from minivllm.runtime import kv_connectors
from minivllm.runtime.kv_connectors import ConnectorWorker, PeerMemoryWorker, SharedStorageWorker, register_kv_connector
from minivllm.sampling.params import SamplingParams

__all__ = ["tiny_model_path"]
SIZES = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "attention_backend": "sdpa", "max_num_seqs": 3}
SMALL = {**SIZES, "num_gpu_blocks": 16, "max_num_batched_tokens": 48}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [f"Number {i}: a text that is long enough to fill several blocks, {i * i}" for i in range(4)]


def transfer(connector: str, role: str = "kv_both", **extra) -> dict:
    return {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}


def tokens(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def check_at_rest(llm: LLM) -> None:
    """No block is held, and no request is known."""
    scheduler = llm.llm_engine.core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    connector = scheduler.connector
    assert pool.num_free == pool.num_blocks and not scheduler.requests and not connector._admitted
    assert not any((scheduler.remote, scheduler._receiving, scheduler._kept, connector._loading))


def total(trace, kind: str) -> int:
    return sum(len(getattr(event, "blocks", "x")) for event in trace if event.kind == kind)


@pytest.fixture(scope="module")
def want(tiny_model_path):
    """Tokens without a connector."""
    return {name: tokens(LLM(str(tiny_model_path(name)), **SIZES)) for name in ("llama", "deepseek-v3")}


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("slots", [5, 60])
def test_main_memory_gives_back_what_the_cache_has_evicted(tiny_model_path, want, policy, slots):
    extra = {"num_cpu_blocks": slots, "eviction_policy": policy}
    llm = LLM(str(tiny_model_path("llama")), **SMALL, kv_transfer_config=transfer("OffloadingConnector", **extra))
    with llm.llm_engine.record() as trace:
        for _ in range(3):
            assert tokens(llm) == want["llama"]
    trace.check()
    metrics, connector = llm.llm_engine.get_metrics(), llm.llm_engine.core.scheduler.connector
    assert metrics["external_prefix_cache_hits"] == 16 * total(trace, "kv_load") and total(trace, "evict") > 0
    assert metrics["external_prefix_cache_hits"] > 0 if slots == 60 else len(connector.slots) <= 5
    assert total(trace, "kv_save") >= len(connector.slots) == min(slots, len(connector.slots))
    assert metrics["external_prefix_cache_queries"] >= metrics["external_prefix_cache_hits"]
    check_at_rest(llm)
    assert llm.llm_engine.reset_prefix_cache() and not connector.slots
    assert tokens(llm) == want["llama"]


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_one_engine_computes_prompts_and_another_decodes(tiny_model_path, want, tmp_path, name):
    path = str(tiny_model_path(name))
    first = LLM(
        path,
        **SIZES,
        kv_transfer_config=transfer("SharedStorageConnector", "kv_producer", shared_storage_path=str(tmp_path)),
    )
    second = LLM(
        path,
        **SIZES,
        kv_transfer_config=transfer("SharedStorageConnector", "kv_consumer", shared_storage_path=str(tmp_path)),
    )
    one = SamplingParams(temperature=0, max_tokens=1)
    with first.llm_engine.record() as saved:
        first.generate(PROMPTS, one, use_tqdm=False)
    with second.llm_engine.record() as trace:
        assert tokens(second) == want[name]
    prompt_blocks = sum((event.num_prompt - 1) // 16 for event in trace if event.kind == "add")
    assert total(trace, "kv_load") == prompt_blocks == total(saved, "kv_save") and not total(saved, "kv_load")
    assert second.llm_engine.get_metrics()["external_prefix_cache_hits"] == 16 * prompt_blocks
    assert not total(trace, "kv_save") and len(list(tmp_path.glob("*/*.0"))) == prompt_blocks
    check_at_rest(second)


def shared(path: str, folder, role: str = "kv_both", **more) -> LLM:
    return LLM(
        path,
        **{**SIZES, **more},
        kv_transfer_config=transfer("SharedStorageConnector", role, shared_storage_path=str(folder)),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_whose_blocks_cannot_be_fetched_compute_them(tiny_model_path, tmp_path, monkeypatch, overlap):
    """Files torn, damaged, and gone between look-up and load; requests that share a prefix with one whose block is bad."""
    path = str(tiny_model_path("llama"))
    prompts = [*PROMPTS, PROMPTS[0] + " and more", PROMPTS[1][:40]]
    first = shared(path, tmp_path)
    want = tokens(first, prompts)
    files = sorted(tmp_path.glob("*/*.0"))
    files[0].write_bytes(files[0].read_bytes()[:-5])
    data = bytearray(files[1].read_bytes())
    data[200] ^= 1
    files[1].write_bytes(data)
    read, calls = SharedStorageWorker._read, 0

    def lossy(self, path):
        nonlocal calls
        calls += 1
        if calls in (3, 9):
            os.unlink(path)
        return read(self, path)

    monkeypatch.setattr(SharedStorageWorker, "_read", lossy)
    second = shared(path, tmp_path, "kv_consumer", async_scheduling=overlap)
    with second.llm_engine.record() as trace:
        assert tokens(second, prompts) == want
    trace.check()
    metrics = second.llm_engine.get_metrics()
    preempted = [event for event in trace if event.kind == "preempt"]
    assert metrics["num_kv_load_failures"] >= 2 and metrics["external_prefix_cache_hits"] == 16 * total(
        trace, "kv_load"
    )
    assert len(preempted) >= 2 and {event.chosen_by for event in preempted} == {"kv_load_failure"}
    check_at_rest(second)
    assert tokens(second, prompts) == want


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from test_kv_connectors import GREEDY, PROMPTS, shared
replace, calls = os.replace, 0
def killed(*args):
    global calls
    calls += 1
    if calls == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args)
os.replace = killed
shared(sys.argv[1], sys.argv[2], "kv_producer").generate(PROMPTS, GREEDY, use_tqdm=False)
"""


@pytest.mark.slow
def test_a_producer_killed_in_the_middle_of_a_block_leaves_whole_blocks(tiny_model_path, want, tmp_path):
    path, tests = str(tiny_model_path("llama")), [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(tests))
    command = [sys.executable, "-c", KILLED, path, str(tmp_path), tests[0]]
    assert subprocess.run(command, check=False, env=env, timeout=300).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/*.tmp-*"))) == 1
    llm = shared(path, tmp_path, "kv_consumer")
    assert not list(tmp_path.glob("*/*.tmp-*")) and len(list(tmp_path.glob("*/*.0"))) == 5
    assert tokens(llm) == want["llama"]
    assert 0 < llm.llm_engine.get_metrics()["external_prefix_cache_hits"] <= 5 * 16
    check_at_rest(llm)


def test_files_that_were_used_longest_ago_give_way(tiny_model_path, want, tmp_path):
    path = str(tiny_model_path("llama"))
    size = 40_000
    config = transfer("SharedStorageConnector", shared_storage_path=str(tmp_path), max_bytes=size)
    llm = LLM(path, **SMALL, kv_transfer_config=config)
    for _ in range(2):
        assert tokens(llm) == want["llama"]
    assert 0 < sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= size


def test_what_is_kept():
    """A scan over new blocks empties `lru`; `arc` keeps what was seen twice."""
    kept = {}
    for make in (LRU, ARC):
        policy, held = make(8), set()
        for key in [*range(4), *range(4), *range(100, 140), *range(4)]:
            if key in held:
                policy.touch(key)
                continue
            if len(held) == 8:
                held.remove(policy.evict())
            policy.add(key)
            held.add(key)
        kept[make] = held
    assert kept[ARC] >= set(range(4)) and len(kept[LRU]) == len(kept[ARC]) == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_role": "kv_both"}, "must be a dict with kv_connector"),
        (
            {"kv_connector": "Nixl"},
            "kv_connector must be one of OffloadingConnector, PeerMemoryConnector, SharedStorageConnector",
        ),
        ({"kv_connector": "OffloadingConnector", "kv_role": "both"}, "kv_role must be one of"),
        ({"kv_connector": "OffloadingConnector", "kv_load_failure_policy": "fail"}, "kv_load_failure_policy must be"),
        (transfer("OffloadingConnector"), "must have 'num_cpu_blocks'"),
        (transfer("OffloadingConnector", num_cpu_blocks=2, load_async=1), "load_async must be true or false, got 1"),
        (transfer("OffloadingConnector", num_cpu_blocks=0), "must be at least 1, got 0"),
        (transfer("OffloadingConnector", num_cpu_blocks=2, eviction_policy="fifo"), "must be one of lru, arc"),
        (transfer("OffloadingConnector", num_cpu_blocks=2, block_size=2), "'block_size' is unknown"),
    ],
)
def test_what_is_wrong_is_said(tiny_model_path, config, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_model_path("llama")), **SIZES, num_gpu_blocks=10, kv_transfer_config=config)


def test_what_does_not_go_together_is_said(tiny_model_path):
    config = transfer("OffloadingConnector", num_cpu_blocks=4)
    for changes, message in (
        ({"enable_prefix_caching": False}, "it needs enable_prefix_caching"),
        ({"speculative_config": {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}}, "'draft_model'"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineArgs(kv_transfer_config=config, **changes)
    with pytest.raises(ValueError, match="has layers of 'sliding_window'"):
        LLM(str(tiny_model_path("gemma3")), **SIZES, num_gpu_blocks=40, kv_transfer_config=config)
    with pytest.raises(ValueError, match="exists already"):
        register_kv_connector("OffloadingConnector", None, None)


def peer(path: str, folder, role: str, num_blocks: int = 60, load_async: bool = False, **more) -> LLM:
    extra = {"shared_storage_path": str(folder), "num_blocks": num_blocks, "load_async": load_async}
    return LLM(path, **{**SIZES, **more}, kv_transfer_config=transfer("PeerMemoryConnector", role, **extra))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_an_engine_reads_blocks_in_the_memory_of_another(tiny_model_path, want, tmp_path, name):
    path = str(tiny_model_path(name))
    first, second = peer(path, tmp_path, "kv_producer"), peer(path, tmp_path, "kv_consumer")
    tokens(first)
    with second.llm_engine.record() as trace:
        assert tokens(second) == want[name]
    prompt_blocks = sum((event.num_prompt - 1) // 16 for event in trace if event.kind == "add")
    assert total(trace, "kv_load") == prompt_blocks > 0 and not total(trace, "kv_save")
    assert second.llm_engine.get_metrics()["num_kv_load_failures"] == 0
    assert len(list(tmp_path.glob("store-*"))) == 1 and len(list(tmp_path.glob("*/*.0"))) >= prompt_blocks
    check_at_rest(second)
    (tmp_path / "another's").mkdir()
    first.llm_engine.close()
    assert os.listdir(tmp_path) == ["another's"]


def mapped(pid: int, folder) -> set[str]:
    """Files of a folder that a process has mapped."""
    return set(re.findall(rf"{folder}/.+", Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("load_async", "reaped"), [(False, False), (True, True)])
def test_a_producer_killed_while_its_blocks_are_read(tiny_model_path, want, monkeypatch, load_async, reaped):
    """It leaves a store and files of two folders, of which one has a name that the consumer does not know."""
    path, copy, copies = str(tiny_model_path("llama")), PeerMemoryWorker._copy_here, 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        extra = {"shared_storage_path": folder, "num_blocks": 60}
        config = transfer("PeerMemoryConnector", "kv_producer", **extra)
        first = connect_engine(EngineArgs(model=path, **SIZES, kv_transfer_config=config))
        for new_weights in (False, True):
            if new_weights:
                first.load_weights()
            for i, prompt in enumerate(PROMPTS):
                first.add_request(str(i), prompt, GREEDY)
            while first.has_unfinished_requests():
                first.step()
        process = first.core.process
        left = mapped(process.pid, "/dev/shm")
        assert len(os.listdir(folder)) == 3 and len(mapped(process.pid, folder)) == 1

        def killed(self, slots, pairs):
            nonlocal copies
            copies += 1
            copy(self, slots, pairs[:1])
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
            assert mapped(os.getpid(), folder)
            copy(self, slots, pairs[1:])

        monkeypatch.setattr(PeerMemoryWorker, "_copy_here", killed)
        second = peer(path, folder, "kv_consumer", load_async=load_async)
        with second.llm_engine.record() as trace:
            assert tokens(second) == want["llama"]
        trace.check()
        metrics = second.llm_engine.get_metrics()
        assert copies == 1 and metrics["num_kv_load_failures"] == (len(PROMPTS) if load_async else 1)
        assert metrics["external_prefix_cache_hits"] == 16 * total(trace, "kv_load") > 0
        lost = [event for event in trace if event.kind == "preempt"]
        assert lost and {event.chosen_by for event in lost} == {"kv_load_failure"}
        check_at_rest(second)
        assert not os.listdir(folder) and not mapped(os.getpid(), folder)
        left |= mapped(os.getpid(), "/dev/shm")
        for engine in (first, second.llm_engine):
            engine.close()
        del second, engine
        gc.collect()
        assert not os.listdir(folder) and not any(map(os.path.exists, left))


@pytest.mark.parametrize(
    "fault", ["few slots", "refilled while it is read", "given back while it is read", "producer gone", "nonsense"]
)
def test_blocks_that_are_gone_from_the_other_memory_are_computed(tiny_model_path, want, tmp_path, monkeypatch, fault):
    path = str(tiny_model_path("llama"))
    first = peer(path, tmp_path, "kv_producer", num_blocks=3 if fault == "few slots" else 60)
    tokens(first)
    files = sorted(tmp_path.glob("*/*.0"))
    if fault.endswith("while it is read"):
        copy = PeerMemoryWorker._copy_here

        def refilled(self, slots, pairs):
            copy(self, slots, pairs)
            if fault.startswith("given back"):
                for store in tmp_path.glob("store-*"):
                    store.unlink()
            for file in files if fault.startswith("refilled") else ():
                os.replace(shutil.copy(file, f"{file}.new"), file)

        monkeypatch.setattr(PeerMemoryWorker, "_copy_here", refilled)
    second = peer(path, tmp_path, "kv_consumer")
    if fault in ("producer gone", "nonsense"):
        store = "store-0-60-1 " if fault == "producer gone" else "../store-0-60-1 "
        for file in files:
            file.write_text(store + "5")
    assert tokens(second) == want["llama"]
    metrics = second.llm_engine.get_metrics()
    if fault == "few slots":
        assert len(files) == 3 and metrics["num_kv_load_failures"] == 0
    else:
        assert len(files) > 3 and metrics["num_kv_load_failures"] > 0
    check_at_rest(second)


def test_blocks_of_a_producer_that_was_started_again_are_read(tiny_model_path, want, tmp_path, monkeypatch):
    """Their files have the names of blocks that could not be read before."""
    path, copy = str(tiny_model_path("llama")), PeerMemoryWorker._copy_here
    first, second = peer(path, tmp_path, "kv_producer"), peer(path, tmp_path, "kv_consumer", **SMALL)
    tokens(first)

    def ended(self, slots, pairs):
        copy(self, slots, pairs)
        first.llm_engine.close()

    def hits() -> float:
        metrics = second.llm_engine.get_metrics()
        return metrics["external_prefix_cache_hits"], metrics["num_kv_load_failures"]

    with monkeypatch.context() as patch:
        patch.setattr(PeerMemoryWorker, "_copy_here", ended)
        assert tokens(second) == want["llama"]
    before, failures = hits()
    tokens(third := peer(path, tmp_path, "kv_producer"))
    assert tokens(second) == want["llama"] and failures > 0
    assert hits()[0] > before and hits()[1] == failures
    third.llm_engine.close()
    assert not os.listdir(tmp_path)


EXTRA = {
    "OffloadingConnector": {"num_cpu_blocks": 60},
    "SharedStorageConnector": {"shared_storage_path": "kv"},
    "PeerMemoryConnector": {"shared_storage_path": "kv", "num_blocks": 60},
}


@pytest.mark.parametrize(("name", "overlap"), [*((name, False) for name in EXTRA), ("SharedStorageConnector", True)])
def test_blocks_come_beside_the_steps(tiny_model_path, want, tmp_path, monkeypatch, name, overlap):
    monkeypatch.chdir(tmp_path)
    config = transfer(name, load_async=True, **EXTRA[name])
    llm = LLM(str(tiny_model_path("llama")), **SMALL, async_scheduling=overlap, kv_transfer_config=config)
    with llm.llm_engine.record() as trace:
        for _ in range(3):
            assert tokens(llm) == want["llama"]
    trace.check()
    metrics, waits = llm.llm_engine.get_metrics(), [event for event in trace if event.kind == "kv_wait"]
    assert metrics["external_prefix_cache_hits"] == 16 * total(trace, "kv_load") > 0
    assert sum(event.num_external for event in waits) == metrics["external_prefix_cache_hits"]
    assert len(waits) == total(trace, "kv_arrive") and metrics["num_kv_load_failures"] == 0
    check_at_rest(llm)


def slow_consumer(path: str, folder, monkeypatch) -> tuple[LLM, threading.Event]:
    """An engine that reads files of another beside its steps, but not before it is let."""
    let, fetch = threading.Event(), SharedStorageWorker.fetch
    monkeypatch.setattr(SharedStorageWorker, "fetch", lambda *args: let.wait(60) and fetch(*args))
    tokens(shared(path, folder, "kv_producer"), PROMPTS[:1])
    config = transfer("SharedStorageConnector", "kv_consumer", shared_storage_path=str(folder), load_async=True)
    return LLM(path, **SIZES, kv_transfer_config=config), let


def test_others_run_while_a_request_waits_for_its_blocks(tiny_model_path, want, tmp_path, monkeypatch):
    llm, let = slow_consumer(str(tiny_model_path("llama")), tmp_path, monkeypatch)
    engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
    with engine.record() as trace:
        for i, prompt in enumerate(PROMPTS[:2]):
            engine.add_request(str(i), prompt, GREEDY)
        done = []
        while not done:
            done = [out for out in engine.step() if out.finished]
        assert [out.request_id for out in done] == ["1"] and list(scheduler.remote) == ["0"]
        assert engine.get_metrics()["num_requests_waiting"] == 1
        let.set()
        while engine.has_unfinished_requests():
            done += [out for out in engine.step() if out.finished]
    trace.check()
    assert [list(out.outputs[0].token_ids) for out in reversed(done)] == want["llama"][:2]
    assert any(line.endswith("being fetched from elsewhere (48 tokens)") for line in trace.why("0")), trace.why("0")
    check_at_rest(llm)


def test_an_abort_while_blocks_come_leaks_nothing(tiny_model_path, want, tmp_path, monkeypatch):
    llm, let = slow_consumer(str(tiny_model_path("llama")), tmp_path, monkeypatch)
    engine, pool = llm.llm_engine, llm.llm_engine.core.scheduler.kv_cache_manager.block_pool
    with engine.record() as trace:
        engine.add_request("0", PROMPTS[0], GREEDY)
        engine.step()
        engine.abort_request(["0"])
        for _ in range(3):
            engine.step()
        assert pool.num_free < pool.num_blocks  # they may be written yet
        let.set()
        while engine.core.has_requests():
            engine.step()
    trace.check()
    check_at_rest(llm)
    assert tokens(llm, PROMPTS[:1]) == want["llama"][:1]


def test_an_engine_does_not_sleep_while_blocks_come(tiny_model_path, want, tmp_path, monkeypatch):
    """It refuses before it ends a request; later it sleeps, and computes what had come anew."""
    llm, let = slow_consumer(str(tiny_model_path("llama")), tmp_path, monkeypatch)
    engine = llm.llm_engine
    with engine.record() as trace:
        engine.add_request("0", PROMPTS[0], GREEDY)
        engine.step()
        for mode in ("keep", "abort"):
            with pytest.raises(RuntimeError, match="still being filled"):
                engine.core.sleep(mode=mode)
        assert engine.has_unfinished_requests() and not engine.is_sleeping()
        let.set()
        while engine.core.scheduler.is_receiving:
            engine.step()
        engine.core.sleep(mode="keep")
        engine.core.wake_up()
        done = []
        while engine.has_unfinished_requests():
            done += [out for out in engine.step() if out.finished]
    trace.check()
    assert [list(out.outputs[0].token_ids) for out in done] == want["llama"][:1]
    assert [event.num_computed for event in trace if event.kind == "admit"][-1] == 0
    check_at_rest(llm)


@pytest.mark.parametrize("fault", ["raises", "files gone", "file torn"])
def test_a_transfer_that_breaks_off_costs_only_work(tiny_model_path, want, tmp_path, monkeypatch, fault):
    """What came before the first bad block is used, and the request goes on from there."""
    llm, let = slow_consumer(str(tiny_model_path("llama")), tmp_path, monkeypatch)
    engine = llm.llm_engine
    with engine.record() as trace:
        engine.add_request("0", PROMPTS[0], GREEDY)
        engine.step()
        files = sorted(tmp_path.glob("*/*.0"), key=lambda path: path.stat().st_mtime_ns)
        if fault == "raises":
            monkeypatch.setattr(SharedStorageWorker, "_read", lambda *_: 1 / 0)
        else:
            for file in files[2:]:
                file.unlink() if fault == "files gone" else file.write_bytes(file.read_bytes()[:-5])
        let.set()
        done = []
        while engine.has_unfinished_requests():
            done += [out for out in engine.step() if out.finished]
    trace.check()
    assert [list(out.outputs[0].token_ids) for out in done] == want["llama"][:1]
    assert engine.get_metrics()["num_kv_load_failures"] == 1
    kept = [event.num_computed for event in trace if event.kind == "kv_arrive"]
    assert kept == ([] if fault == "raises" else [32])
    lost = [event.chosen_by for event in trace if event.kind == "preempt"]
    assert lost == (["kv_load_failure"] if fault == "raises" else [])
    check_at_rest(llm)


class Sender(SharedStorageConnector):
    """Wants the blocks of a request that ends to stay."""

    def request_finished(self, request, block_ids):
        self.blocks = [block for table in block_ids for block in table]
        return True


class SendingWorker(SharedStorageWorker):
    """Has copied them three steps later."""

    def get_finished(self, finished_req_ids, idle=False):
        self.sending = {name: left - 1 for name, left in getattr(self, "sending", {}).items()}
        sent = {name for name, left in self.sending.items() if not left}
        self.sending = {name: left for name, left in self.sending.items() if left} | dict.fromkeys(
            self.sends.keys() & set(finished_req_ids), 3
        )
        return sent, super().get_finished(finished_req_ids, idle)[1]


@pytest.fixture
def sending(tiny_model_path, tmp_path, monkeypatch):
    monkeypatch.setitem(kv_connectors.CONNECTORS, "Sender", Sender)
    monkeypatch.setitem(kv_connectors._WORKERS, "Sender", SendingWorker)
    config = transfer("Sender", "kv_producer", shared_storage_path=str(tmp_path))
    return LLM(str(tiny_model_path("llama")), **SMALL, kv_transfer_config=config)


def test_blocks_of_a_request_that_has_ended_stay_until_they_are_sent(sending, want):
    scheduler, core = sending.llm_engine.core.scheduler, sending.llm_engine.core
    pool, kept = scheduler.kv_cache_manager.block_pool, []
    with sending.llm_engine.record() as trace:
        for _ in range(2):
            assert tokens(sending) == want["llama"]
            kept.append(scheduler.state().kept)
            assert kept[-1] and pool.num_free == pool.num_blocks - sum(map(len, kept[-1].values()))
            assert all(pool.blocks[block].ref_cnt for block in scheduler.connector.blocks)
        assert total(trace, "kv_release") == total(trace, "kv_keep") - sum(map(len, kept[-1].values())) > 0
        while core.has_requests():  # as an engine's loop does
            core.step()
    trace.check()
    check_at_rest(sending)


@pytest.mark.parametrize("call", ["sleep", "load_weights", "reset_prefix_cache"])
def test_who_changes_the_cache_waits_for_what_is_sent_but_not_for_ever(sending, monkeypatch, call):
    core = sending.llm_engine.core
    tokens(sending, PROMPTS[:1])
    assert core.scheduler.is_sending
    monkeypatch.setattr("minivllm.engine.core.SEND_STEPS", 2)
    options = {} if call == "reset_prefix_cache" else {"mode": "abort"}
    if call == "reset_prefix_cache":
        assert not core.reset_prefix_cache()
    else:
        sending.llm_engine.add_request("open", PROMPTS[1], GREEDY)
        with pytest.raises(RuntimeError, match="still being copied"):
            getattr(core, call)(**options)
        assert "open" in core.scheduler.requests  # refused before one has ended
    monkeypatch.undo()
    assert getattr(core, call)(**options) is not False
    check_at_rest(sending)


def test_an_idle_engine_does_not_spin_while_blocks_are_sent(monkeypatch):
    class Worker(ConnectorWorker):
        load = save = None

    worker, waits = Worker(None, None, (), None), []
    monkeypatch.setattr(kv_connectors.time, "sleep", waits.append)
    for sends, idle in (({}, True), ({"0": 3}, False), ({"0": 3}, True), ({}, True)):
        assert worker.end_transfers(sends, (), idle) == (set(), set())
    assert waits == [0.01]


def test_the_recipe_over_tcp_forgets_what_its_worker_has_dropped(recipe):
    extra = {"address": "tcp://127.0.0.1:1", "num_blocks": 3}  # it binds no socket
    config = KVTransferConfig(**transfer("TCPConnector", "kv_consumer", **extra))
    connector = recipe.TCPConnector(config, 4, 1, "model")
    worker = recipe.TCPWorker(config, None, [torch.arange(24.0).view(2, 3, 4)], None)
    for name in b"abcadaebcc":
        if (place := connector.place_to_save((0, bytes([name])))) is not None:
            worker.save([(1, place)])
        kept = [connector.place_to_load(key)[0].encode() for key in connector.sent]
        assert kept == list(worker.kept)
    connector.clear()
    assert connector.place_to_save((0, b"c"))[0].encode() not in worker.kept


def recipe_over_tcp():
    return chapter_cells("recipes/kv_over_tcp", "tcp-connector", "tcp-worker")


@pytest.fixture
def recipe():
    with patch.dict(kv_connectors.CONNECTORS), patch.dict(kv_connectors._WORKERS):
        yield recipe_over_tcp()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_recipe_over_tcp_listens_where_it_is_told_and_until_its_end(recipe):
    port = free_port()
    extra = {"address": f"tcp://127.0.0.1:{port}", "num_blocks": 3}
    config = KVTransferConfig(**transfer("TCPConnector", "kv_producer", **extra))
    caches = [torch.arange(24.0).view(2, 3, 4)]

    def addresses():
        return [
            one.laddr.ip
            for one in psutil.Process().net_connections()
            if one.laddr and one.laddr.port == port and one.status == "LISTEN"
        ]

    worker = recipe.TCPWorker(config, None, caches, None)
    worker.save([(1, ("a", (0, b"")))])
    assert addresses() == ["127.0.0.1"]
    assert worker.load(((("b", (0, b"")), 2), (("a", (0, b"")), 0))) == {2}
    assert torch.equal(caches[0][:, 0], caches[0][:, 1]) and not torch.equal(caches[0][:, 0], caches[0][:, 2])
    del worker
    gc.collect()
    assert addresses() == []


HOLDS = """
import sys, time
from test_kv_connectors import GREEDY, LLM, PROMPTS, SIZES, recipe_over_tcp, transfer
def hold(requests, kept):
    requests.recv_multipart()
    print("asked", flush=True)
    time.sleep(60)
recipe_over_tcp().TCPWorker.__init__.__globals__["answer"] = hold
config = transfer("TCPConnector", "kv_producer", address=sys.argv[2])
llm = LLM(sys.argv[1], **SIZES, kv_transfer_config=config)
llm.generate(PROMPTS, GREEDY, use_tqdm=False)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_producer_that_is_killed_before_it_answers_costs_a_timeout(tiny_model_path, want, recipe):
    path, port, tests = str(tiny_model_path("llama")), free_port(), Path(__file__).parent
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(map(str, (tests, tests.parent))))
    command = [sys.executable, "-c", HOLDS, path, f"tcp://127.0.0.1:{port}"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        asked = []
        killer = threading.Thread(target=lambda: asked.append(first.stdout.readline()) or first.kill())
        killer.start()
        extra = {"address": f"tcp://127.0.0.1:{port}", "load_async": True}
        try:
            second = LLM(path, **SIZES, kv_transfer_config=transfer("TCPConnector", "kv_consumer", **extra))
            with second.llm_engine.record() as trace:
                assert tokens(second, PROMPTS[:2]) == want["llama"][:2]
        finally:
            first.kill()
            killer.join()
    assert asked == ["asked\n"] and first.returncode == -signal.SIGKILL
    trace.check()
    assert second.llm_engine.get_metrics()["num_kv_load_failures"] == 2
    lost = [event for event in trace if event.kind == "preempt"]
    assert [event.chosen_by for event in lost] == ["kv_load_failure"] * 2
    check_at_rest(second)
    deadline = time.monotonic() + 10
    while any(at.raddr and at.raddr.port == port for at in psutil.Process().net_connections("tcp")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_requests_that_sleep_ends_are_not_sent(tiny_model_path, want, tmp_path, monkeypatch):
    """Their blocks are void: a connector is not asked whether it wants them."""
    monkeypatch.setitem(kv_connectors.CONNECTORS, "Sender", Sender)
    monkeypatch.setitem(kv_connectors._WORKERS, "Sender", SharedStorageWorker)
    config = transfer("Sender", "kv_producer", shared_storage_path=str(tmp_path))
    llm = LLM(str(tiny_model_path("llama")), **SIZES, kv_transfer_config=config)
    engine = llm.llm_engine
    with engine.record() as trace:
        for call in (engine.sleep, lambda: engine.load_weights(mode="abort")):
            engine.add_request("0", PROMPTS[0], GREEDY)
            engine.step()
            call()
            (output,) = engine.step()
            assert output.outputs[0].finish_reason == "abort"
            engine.wake_up()
    trace.check()
    assert not total(trace, "kv_keep") and not engine.core.scheduler.is_sending
    assert tokens(llm, PROMPTS[:1]) == want["llama"][:1]


def test_a_producer_says_how_many_blocks_it_keeps(tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        peer(str(tiny_model_path("llama")), tmp_path, "kv_producer", num_blocks=0)


def test_an_engine_reads_its_own_memory_without_opening_it(tiny_model_path, want, tmp_path, monkeypatch):
    monkeypatch.setattr(PeerMemoryWorker, "_open", None)  # CUDA cannot open memory in the process that has it
    llm = peer(str(tiny_model_path("llama")), tmp_path, "kv_both", **SMALL)
    with llm.llm_engine.record() as trace:
        for _ in range(2):
            assert tokens(llm) == want["llama"]
    assert total(trace, "kv_load") > 0 and llm.llm_engine.get_metrics()["num_kv_load_failures"] == 0
    check_at_rest(llm)


def test_a_producer_goes_on_when_its_folder_refuses(tiny_model_path, want, tmp_path, monkeypatch, caplog):
    first = peer(str(tiny_model_path("llama")), tmp_path, "kv_producer", num_blocks=3)
    (store,) = tmp_path.glob("store-*")  # it is there from the start
    tokens(first, PROMPTS[:1])
    kept, files = store.read_bytes(), sorted(tmp_path.glob("*/*.0"))
    assert len(files) == 3

    def refuse(*_, **__):
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert tokens(first, PROMPTS[1:2]) == want["llama"][1:2]
    assert caplog.text.count("KV blocks are not kept: read-only") > 0 and store.read_bytes() == kept
    caplog.clear()
    monkeypatch.setattr(kv_connectors, "write_whole", refuse)
    assert tokens(first, PROMPTS[2:3]) == want["llama"][2:3]
    assert caplog.text.count("KV blocks are not kept: read-only") > 0 and store.read_bytes() != kept
    assert not set(tmp_path.glob("*/*.0")) - set(files)
    check_at_rest(first)


def test_blocks_of_changed_weights_do_not_outlive_a_killed_engine(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    config = KVTransferConfig(**transfer("SharedStorageConnector", shared_storage_path=str(tmp_path)))
    engines = [SharedStorageConnector(config, 16, 1, 24 * name) for name in "abc"]
    engines[0].clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: ended.pid)
        engines[1].clear()
    for engine in engines:
        os.mkdir(engine.folder)
        Path(engine.folder, "block-0.0").touch()
    SharedStorageWorker(config, None, [torch.zeros(2, 3, 4)], None)
    assert {str(path) for path in tmp_path.iterdir()} == {engines[0].folder, engines[2].folder}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Two more checkpoints of the tiny model, and the tokens of an engine made of each."""
    found = []
    for seed in (7, 9):
        folder = save_tiny_model("llama", tmp_path_factory.mktemp("weights") / "model")
        model = copy.deepcopy(hf_model("llama"))
        randomise(model, seed=seed)
        model.save_pretrained(folder)
        found.append((str(folder), tokens(LLM(str(folder), **SIZES))))
    assert found[0][1] != found[1][1]
    return found


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("name", ["SharedStorageConnector", "PeerMemoryConnector"])
def test_engines_with_other_weights_share_no_block(tiny_model_path, tmp_path, reloaded, name, load_async):
    """Two that began with the same weights in one store, in one process, and one that comes after the first has ended."""
    more = {} if name == "SharedStorageConnector" else {"num_blocks": 60}
    config = transfer(name, shared_storage_path=str(tmp_path), load_async=load_async, **more)
    (first_folder, want_first), (second_folder, want_second) = reloaded
    first, second = (LLM(str(tiny_model_path("llama")), **SIZES, kv_transfer_config=config) for _ in range(2))
    first.load_weights(first_folder)
    second.load_weights(second_folder)
    assert tokens(first) == want_first and tokens(second) == want_second
    first.load_weights(second_folder)
    assert tokens(first) == want_second
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2  # of now: no folder is left behind
    for llm in (first, second):
        llm.llm_engine.close()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_slot_that_was_not_filled_again_keeps_no_block_of_the_old_weights(tiny_model_path, reloaded, monkeypatch):
    """The first step after new weights fails, so that what it would have kept is not kept."""
    (folder, want), config = reloaded[0], transfer("OffloadingConnector", num_cpu_blocks=60)
    llm = LLM(str(tiny_model_path("llama")), **SIZES, kv_transfer_config=config)
    tokens(llm)
    llm.load_weights(folder)

    def fail(*_, **__):
        raise MemoryError("no memory for this step")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.core.executor.runner.model, "forward", fail)
        with pytest.raises(MemoryError):
            tokens(llm)
    assert tokens(llm) == want
    check_at_rest(llm)
