"""Two processes that were started as torchrun starts them, each with an engine of its own: the tokens of one rank, in both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapters import VARIANTS, peft_adapter
from ranks import PROMPTS, SIZES
from tiny_models import tiny_model_path

from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.llm import LLM
from minivllm.lora.adapter import LoRARequest
from minivllm.runtime.executors import external
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams
from minivllm.spec_decode.drafter import DraftLength

__all__ = ["tiny_model_path"]
SMALL = {**SIZES, "num_gpu_blocks": 12, "max_model_len": 100, "enable_lora": True}
LAUNCHED = {"distributed_executor_backend": "external_launcher"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


def answers(llm: LLM, adapter: str) -> list[list[int]]:
    """Greedy, drawn, structured; with an adapter and without. Twice, so that the second time there are prefix hits."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    choice = SamplingParams(
        temperature=0, max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    params = [greedy, choice, greedy, SamplingParams(temperature=1, max_tokens=9, ignore_eos=True), choice, greedy]
    loras = [LoRARequest("one", 1, adapter), None, None] * 2
    found = []
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=loras)
        found += [list(o.outputs[0].token_ids) for o in outputs]
    metrics = llm.llm_engine.get_metrics()
    assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hits"] > 0
    return found


def main(path: str, adapter: str) -> None:
    """What each of the two processes runs: two shares, then two stages in the process group that is there."""
    most = 1 + int(os.environ["RANK"])
    DraftLength.asks = lambda self, batch_size: True
    DraftLength.choose = lambda self, chances, lengths, *about: [min(most, n) for n in lengths]  # as by other times
    shares = LLM(path, **SMALL, **LAUNCHED, speculative_config=DRAFTS, tensor_parallel_size=2)
    found = [answers(shares, adapter)]
    stages = LLM(path, **SMALL, **LAUNCHED, speculative_config=DRAFTS, pipeline_parallel_size=2)
    found.append(answers(stages, adapter))
    try:
        LLM(path, **SMALL, **LAUNCHED, tensor_parallel_size=2, seed=int(os.environ["RANK"]))
    except ValueError as error:
        found.append(str(error))
    for llm in (stages, shares):
        assert llm.llm_engine.get_metrics()["spec_decode_num_draft_tokens"] > 0
        llm.close()
    print(json.dumps(found))


@pytest.mark.slow
def test_two_processes_decide_the_same(tiny_model_path, tmp_path):
    peft_adapter("llama", VARIANTS["all-linear"], tmp_path / "one", 1)
    path, adapter = str(tiny_model_path("llama")), str(tmp_path / "one")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    here = Path(__file__)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (here.parent, here.parents[1])))}
    command = [sys.executable, "-c", "import sys, test_external_launcher as t; t.main(*sys.argv[1:])", path, adapter]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | env | {"RANK": r, "LOCAL_RANK": r}
        )
        for r in "01"
    ]
    llm = LLM(path, **SMALL)
    want = answers(llm, adapter)
    llm.close()
    for process in processes:
        shares, stages, refused = json.loads(process.communicate(timeout=500)[0].splitlines()[-1])
        assert process.returncode == 0 and shares == want and stages == want
        assert "engine arguments must be the same in all processes" in refused


def test_other_arguments_are_found_before_the_weights_are_read_and_the_ranks_are_left(monkeypatch):
    left: list[str] = []

    class Rank:
        runner = None

        def __init__(self, launch):
            pass

        def load_model(self, config, machine):
            left.append("weights were read")

    def differ(what, value):
        raise ValueError(f"{what} must be the same")

    monkeypatch.setattr(external, "Worker", Rank)
    monkeypatch.setattr(external, "launch_from_environment", lambda size, device: None)
    monkeypatch.setattr(external, "same_everywhere", differ)
    monkeypatch.setattr(external.ExternalExecutor, "shutdown", lambda self: left.append("shut down"))
    config = SimpleNamespace(args=SimpleNamespace(world_size=2), device="cpu")
    with pytest.raises(ValueError, match="engine arguments must be the same"):
        external.ExternalExecutor(SimpleNamespace(config=config, machine=None))
    assert left == ["shut down"]


def test_what_cannot_be_in_step_is_refused(monkeypatch, tiny_model_path):
    path = str(tiny_model_path("llama"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="needs RANK in the environment: start the program with torchrun"):
        LLM(path, **SIZES, **LAUNCHED, tensor_parallel_size=2)
    launched = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="3 processes were launched, but tensor_parallel_size x pipeline_parallel_size is 2"
    ):
        LLM(path, **SIZES, **LAUNCHED, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="is for LLM.generate in a program under torchrun"):
        AsyncLLM.from_engine_args(EngineArgs(model=path, **SIZES, **LAUNCHED))
    files = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "x"}}
    with pytest.raises(ValueError, match="'SharedStorageConnector' does not promise that"):
        EngineArgs(model=path, **LAUNCHED, kv_transfer_config=files)
