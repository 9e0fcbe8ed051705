"""KV connectors on two ranks: the tokens of one rank without a connector, and as many hits as blocks that the trace has as loaded."""

import importlib
import json
import socket
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from ranks import LOOPBACK, SIZES, listening, sharded, tokens
from tiny_models import TINY_MODELS, tiny_model_path

from minivllm.core import plugins
from minivllm.engine.llm import LLM
from minivllm.runtime import kv_connectors
from minivllm.runtime.executors.mp import start_workers
from minivllm.sampling.params import SamplingParams

__all__ = ["tiny_model_path"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="sockets are inherited"),
]

TINY_MODELS.setdefault("llama-9-heads", ("llama", {**TINY_MODELS["llama-tied-biased"][1], "num_attention_heads": 9, "num_key_value_heads": 3}))  # fmt: skip
SMALL = {**SIZES, "num_gpu_blocks": 12, "max_model_len": 100, "max_num_batched_tokens": 48, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
WAYS = {
    "two shares of padded heads": {"tensor_parallel_size": 2},
    "two stages": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}
CONNECTORS = ("OffloadingConnector", "SharedStorageConnector", "PeerMemoryConnector", "TCPConnector")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks, which know the recipe's connector by a plugin, as this process does meanwhile."""
    folder, notebook = tmp_path_factory.mktemp("plugin"), Path(__file__).parents[2] / "nbs/recipes/kv_over_tcp.ipynb"
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]}
    (folder / "kv_over_tcp.py").write_text(f"{cells['tcp-connector']}\n{cells['tcp-worker']}\ndef register(): pass\n")
    (info := folder / "kv_over_tcp-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-over-tcp\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nkv_over_tcp = kv_over_tcp:register\n")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        patch.dict(kv_connectors.CONNECTORS),
        patch.dict(kv_connectors._WORKERS),
    ):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
        monkeypatch.syspath_prepend(str(folder))
        importlib.import_module("kv_over_tcp")
        workers = start_workers(2, "cpu")
        yield workers
        workers.close()
        del sys.modules["kv_over_tcp"]


@pytest.fixture(scope="module")
def want(tiny_model_path):
    """Tokens of one rank without a connector, by the type of the cache."""
    path = str(tiny_model_path("llama-9-heads"))
    return path, {kv: tokens(LLM(path, **SMALL, kv_cache_dtype=kv), GREEDY) for kv in ("auto", "int8_per_token_head")}


def extra_of(connector: str, folder: Path) -> dict:
    if connector == "OffloadingConnector":
        return {"num_cpu_blocks": 60}
    if connector == "TCPConnector":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return {"address": f"tcp://127.0.0.1:{port}", "load_async": True}
    count = {"num_blocks": 60} if connector == "PeerMemoryConnector" else {}
    return {"shared_storage_path": str(folder), **count}


@pytest.mark.parametrize("kv", ["auto", "int8_per_token_head"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_blocks_come_back_on_two_ranks(pair, want, tmp_path, connector, way, kv):
    path, tokens_of = want
    config = {"kv_connector": connector, "kv_connector_extra_config": extra_of(connector, tmp_path)}
    llm = sharded(pair, path, **SMALL, **WAYS[way], kv_cache_dtype=kv, kv_transfer_config=config)
    with llm.record() as trace:
        for _ in range(2):
            assert tokens(llm, GREEDY) == tokens_of[kv]
    trace.check()
    metrics, events = llm.llm_engine.get_metrics(), list(trace)
    loaded = sum(len(event.blocks) for event in events if event.kind == "kv_load")
    assert metrics["external_prefix_cache_hits"] == 16 * loaded > 0
    assert any(event.kind == "kv_save" for event in events)
    if connector != "TCPConnector":  # it claims to hold every block, so some loads fail
        assert metrics["num_kv_load_failures"] == 0
    else:
        assert any(event.kind == "kv_arrive" for event in events)
        assert listening([process.pid for process in pair.processes]) <= LOOPBACK
    scheduler = llm.llm_engine.core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.num_free == pool.num_blocks and not (scheduler.requests or scheduler.remote or scheduler._kept)
    llm.llm_engine.close()
    if connector == "PeerMemoryConnector":
        assert not list(tmp_path.iterdir())
    if connector == "TCPConnector":
        port = int(config["kv_connector_extra_config"]["address"].rpartition(":")[2])
        for rank in range(2):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port + rank))


def test_what_a_rank_that_is_killed_has_left_is_removed_with_its_engine(want, tmp_path):
    workers = start_workers(2, "cpu")
    config = {"kv_connector": "PeerMemoryConnector"}
    config["kv_connector_extra_config"] = extra_of("PeerMemoryConnector", tmp_path)
    llm = sharded(workers, want[0], **SMALL, kv_transfer_config=config)
    tokens(llm, GREEDY)
    assert len(list(tmp_path.glob("store-*"))) == 2 and list(tmp_path.glob("*/*.1"))
    workers.processes[1].kill()
    llm.llm_engine.close()
    assert not list(tmp_path.iterdir())
