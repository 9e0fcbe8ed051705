"""MKL picks the kernel of a function at its first call: that call is made by one thread, before the first step."""

import subprocess
import sys
import textwrap

from tiny_models import tiny_model_path  # noqa: F401 - a fixture

SCRIPT = """
    import sys
    import torch

    first = {}

    def watched(name):
        function = getattr(torch.Tensor, name)
        def call(self, *args):
            first.setdefault((name, self.dtype), self.numel())
            return function(self, *args)
        return call

    watched_names = ("cos", "sin", "exp", "log", "tanh", "sqrt")
    for name in watched_names:
        setattr(torch.Tensor, name, watched(name))
        setattr(torch, name, getattr(torch.Tensor, name))

    from minivllm import LLM, SamplingParams
    with LLM(sys.argv[1], dtype="float32", max_model_len=64, num_gpu_blocks=20) as llm:
        llm.generate(["a b c"] * 3, SamplingParams(max_tokens=3, top_p=0.9, min_p=0.1, prompt_logprobs=1), use_tqdm=False)
    assert {name for name, _ in first} == set(watched_names), first
    assert set(first.values()) == {1}, first
"""


def test_the_first_call_of_each_function_is_made_by_one_thread(tiny_model_path):  # noqa: F811
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tiny_model_path("llama"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
