"""The example package of the guide, installed by pip: everything that it adds is reachable by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

PACKAGE = Path(__file__).parents[1] / "example_plugin"
pytestmark = pytest.mark.slow

EVERYTHING = """
import sys
from pathlib import Path
from minivllm import LLM, EngineArgs, SamplingParams, viz
from minivllm.engine.core_process import connect_engine
from minivllm.lab import Constant, read_workload, simulate
from minivllm.models.linear.layer import make_linear_method

if __name__ == "__main__":
    model, workload = sys.argv[1:]
    sizes = {"dtype": "float32", "num_gpu_blocks": 64, "max_num_seqs": 1}
    names = {"attention_backend": "example", "scheduling_policy": "example"}
    draft = {"method": "example", "num_speculative_tokens": 2, "dynamic_length": False}
    ask = SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"example_only": 9})
    llm = LLM(model, speculative_config=draft, distributed_executor_backend="example", **sizes, **names)
    with llm, llm.record() as trace:
        outputs = llm.generate([[3, 4], [5, 6]], ask, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [[9] * 4] * 2, outputs
        core = llm.llm_engine.core
        assert type(core.executor).__name__ == "ExampleExecutor"
        assert type(core.executor.runner.model.layers[0].mixer.qkv.method).__name__ == "ExampleLinear"
        assert core.scheduler.spec_stats.num_draft_tokens > 0
    admitted = [event.request for event in trace if event.kind == "admit"]
    assert admitted == ["1", "0"], admitted  # last in, first out
    assert isinstance(viz.ExampleView(trace), viz.Timeline)
    again = simulate(trace, cost_model=Constant(per_step=0.01))  # under the policy of the trace
    assert again.policy == "LastInFirstOut"
    workload = read_workload(workload)
    assert [(r.arrival_time, len(r.prompt[0]), len(r.output)) for r in workload] == [(0.0, 5, 2), (1.5, 7, 3)]

    other = connect_engine(EngineArgs(model=model, quantization="example_rounded", **sizes, **names))  # its process has loaded the plugin, too
    try:
        other.add_request("x", [3, 4], ask)
        while not (done := other.step()) or not done[0].finished:
            pass
        assert done[0].outputs[0].token_ids == [9] * 4
    finally:
        other.core.shutdown()

    from minivllm.serving.generation import ServerOptions

    options = ServerOptions(
        tool_call_parser="example", enable_auto_tool_choice=True, reasoning_parser="example", lora_resolvers=["example=x"]
    )
    parsers = options.parsers()
    print("all by name:", type(make_linear_method("example")).__name__, parsers.form_parser.__name__)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the example package into."""
    folder = tmp_path_factory.mktemp("target")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(PACKAGE)], check=True, capture_output=True)
    return folder


def run(target: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "MINIVLLM_PLUGINS"}
    environ |= {"PYTHONPATH": str(target), **env}
    return subprocess.run([sys.executable, *command], check=False, env=environ, capture_output=True, text=True)


def test_everything_by_name(target, tmp_path):
    model = save_tiny_model("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["ExampleForCausalLM"], "model_type": "example"}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "work.txt").write_text("# example\n0 5 2\n1.5 7 3\n")
    (tmp_path / "script.py").write_text(EVERYTHING)
    done = run(target, str(tmp_path / "script.py"), str(model), str(tmp_path / "work.txt"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "all by name: ExampleLinear ExampleToolParser\n"


def test_the_command(target):
    done = run(target, "-m", "minivllm.cli", "plugins", MINIVLLM_PLUGINS="other")
    assert (
        "example  minivllm-example-plugin 1.2.3  minivllm_example_plugin:register  not in MINIVLLM_PLUGINS"
        in done.stdout
    )
    assert "MINIVLLM_PLUGINS names 'other'" in done.stderr
