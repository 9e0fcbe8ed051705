"""A decode step stays small enough to be read: how many of our functions and files it enters, and how deep."""

import importlib.util
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step_depth.py"
FUNCTIONS, FILES, DEPTH = 60, 20, 12


def load_benchmark():
    spec = importlib.util.spec_from_file_location("step_depth", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plain_decode_step_is_short():
    step_depth = load_benchmark()
    calls, depth = step_depth.decode_step("sdpa")
    files = {file for file, _ in calls}
    assert len(calls) <= FUNCTIONS, f"{len(calls)} functions: {sorted(calls)}"
    assert len(files) <= FILES, f"{len(files)} files: {sorted(files)}"
    assert depth <= DEPTH
    assert {"minivllm/engine/llm_engine.py", "minivllm/models/decoder.py", "minivllm/attention/sdpa.py"} <= files


def test_the_trace_counts_functions_and_their_depth():
    step_depth = load_benchmark()
    calls, depth = step_depth.traced(lambda: step_depth.minivllm.SamplingParams(temperature=0).clone())
    names = {name for _, name in calls}
    assert {"CheckedParams.__post_init__", "SamplingParams.clone"} <= names and depth >= 3
    assert all(file.startswith(("minivllm/", "kernels/")) for file, _ in calls)
