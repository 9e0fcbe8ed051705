"""What a process loads between its start and its first token. Seconds of start are modules that are not needed."""

import subprocess
import sys

from tiny_models import tiny_model_path  # noqa: F401

HEAVY = {
    "IPython",
    "fastapi",
    "gguf",
    "llguidance",
    "matplotlib",
    "minivllm.serving",
    "minivllm.viz",
    "numba",
    "pandas",
    "pyarrow",
    "ray",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torchvision",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models",
    "triton",
}
FIRST_TOKEN = """
import sys
from minivllm import LLM, SamplingParams

llm = LLM(sys.argv[1], max_model_len=64, num_gpu_blocks=8)
[output] = llm.generate("a", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 1
print(*sys.modules)
"""


def loaded_until_first_token(model: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN, model], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_first_token_needs_no_heavy_module(tiny_model_path):  # noqa: F811
    model = str(tiny_model_path("llama"))
    loaded = loaded_until_first_token(model)
    if "numba" in loaded:  # kernels were compiled, once for this machine
        loaded = loaded_until_first_token(model)
    assert "minivllm.engine.llm" in loaded
    assert loaded & HEAVY == set()
