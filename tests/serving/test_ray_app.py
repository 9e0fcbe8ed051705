"""The server as replicas of Ray Serve, on a cluster that keeps to this machine."""

import contextlib
import os
import signal
import socket
import sys
import time

import openai
import psutil
import pytest
from ranks import LOOPBACK, listening

from minivllm.core.ray_cluster import cluster_folder
from minivllm.engine.llm import LLM
from minivllm.sampling.params import SamplingParams
from minivllm.serving import ray_app
from minivllm.serving.ray_app import serving, split_arguments


def test_arguments(monkeypatch):
    monkeypatch.delenv("MINIVLLM_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    config = '{"num_replicas": 3, "ray_actor_options": {"num_cpus": 2}}'
    given = {
        "model": "smollm2",
        "device": "cpu",
        "max_num_seqs": "16",
        "deployment_config": config,
        "num_replicas": "2",
    }
    engine, options, deployment = split_arguments(given)
    assert (engine.model, engine.max_num_seqs, options.api_key) == ("smollm2", 16, ["secret"])
    assert deployment["num_replicas"] == 2 and deployment["ray_actor_options"] == {"num_cpus": 2}
    for wrong, message in (
        ({"data_parallel_size": 2}, "replicas are num_replicas"),
        ({"distributed_executor_backend": "ray"}, "'uni' or 'mp', not 'ray'"),
        ({"trace": "run.jsonl"}, "all replicas would write the same file"),
    ):
        with pytest.raises(ValueError, match=message):
            split_arguments({"model": "smollm2", "device": "cpu"} | wrong)
    texts = {"api_key": "12345", "served_model_name": '["1", "2"]', "num_replicas": "auto", "enable_lora": "true"}
    texts |= {"quantization": "null", "request_timeout": "3", "max_queue": "null", "download_dir": "2024"}
    engine, options, deployment = split_arguments({"model": "7", "device": "cpu"} | texts)
    assert (engine.model, engine.enable_lora, engine.quantization, engine.download_dir) == ("7", True, None, "2024")
    assert (options.api_key, options.served_model_name, options.max_queue) == (["12345"], ["1", "2"], None)
    assert options.request_timeout == 3 and deployment["num_replicas"] == "auto"
    for wrong in ({"max_num_seqs": "many"}, {"enable_lora": "1"}, {"dashboard": "yes"}, {"deployment_config": "[]"}):
        with pytest.raises(ValueError, match="must be of type"):
            split_arguments({"model": "smollm2", "device": "cpu"} | wrong)
    with pytest.raises(TypeError, match="modle"):
        split_arguments({"modle": "smollm2"})


class Serve:
    """Ray Serve, as far as it is called here. It notes the ends."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def start(self, http_options):
        pass

    def run(self, app, name, route_prefix):
        if app == "broken":
            raise RuntimeError("no room")

    def delete(self, name):
        self.ended.append(name)

    def shutdown(self):
        self.ended.append("all")


@pytest.mark.parametrize(("folder", "ended"), [(None, "minivllm"), ("ours", "all")])
@pytest.mark.parametrize("app", ["whole", "broken"])
def test_applications_of_others_stay_on_a_cluster_that_was_there(folder, ended, app, monkeypatch):
    serve, left = Serve(), []
    for name, value in {
        "_import_serve": lambda: serve,
        "join_cluster": lambda: None,
        "leave_cluster": lambda: left.append(1),
        "cluster_folder": lambda: folder,
        "build": lambda args: app,
    }.items():
        monkeypatch.setattr(ray_app, name, value, raising=False)
    with contextlib.suppress(RuntimeError), serving({}, port=1) as url:
        assert url == "http://127.0.0.1:1"
    assert serve.ended == [ended] and left == [1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_replicas_answer_as_one_engine_and_one_that_dies_is_replaced(tiny_model_path, monkeypatch):
    """The routes of the server, streams among them. Nothing listens beyond this machine, and nothing is left at the end."""
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'minivllm[scale]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sizes = {"dtype": "float32", "device": "cpu", "num_gpu_blocks": 64, "max_num_seqs": 8}
    with LLM(str(tiny_model_path("llama")), **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        want = [o.outputs[0].text for o in llm.generate(["Hello", "abcd"], params, use_tqdm=False)]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    given = {"model": str(tiny_model_path("llama")), **sizes, "served_model_name": ["tiny"], "num_replicas": 2}
    given["deployment_config"] = {"ray_actor_options": {"num_cpus": 0.1}, "health_check_period_s": 1}
    with serving(given, port=port) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        ask = {"model": "tiny", "max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for _ in range(4):
            assert [client.completions.create(prompt=p, **ask).choices[0].text for p in ("Hello", "abcd")] == want
        chunks = client.completions.create(prompt="Hello", stream=True, **ask)
        assert "".join(chunk.choices[0].text for chunk in chunks) == want[0]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(prompt="x", **ask | {"model": "other"})
        engines = engine_processes()
        pids = [process.pid for process in psutil.Process().children(recursive=True)]
        assert len(engines) == 2 and listening(pids) <= LOOPBACK
        os.kill(engines[0], signal.SIGKILL)
        deadline = time.monotonic() + 90
        while len(now := engine_processes()) < 2 or engines[0] in now:
            assert time.monotonic() < deadline, "the replica was not replaced"
            time.sleep(0.5)
        while True:
            assert time.monotonic() < deadline
            try:
                assert client.completions.create(prompt="abcd", **ask).choices[0].text == want[1]
                break
            except openai.InternalServerError:
                time.sleep(0.5)
        folder = cluster_folder()
    assert folder and not os.path.exists(folder) and not engine_processes()


def engine_processes() -> list[int]:
    """Of the replicas, which are below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "minivllm.engine.core_process" in process.cmdline():  # empty for one that has ended
                found.append(process.pid)
    return found
