"""How much code does one decode step enter? Prints the functions, files and depth of a step on the path in plain torch.

    python benchmarks/step_depth.py [--backend sdpa] [--list]

The shape of SmolLM2 with 4 layers and random weights, 3 requests past their prompts, one `LLMEngine.step()` under `sys.setprofile`. Only Python
functions of this package count; comprehensions and lambdas are part of the function that holds them.
"""

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import minivllm
from minivllm import LLM, SamplingParams

PACKAGES = (Path(minivllm.__file__).parent, Path(minivllm.__file__).parents[1] / "kernels" / "minivllm_kernels")


def ours(frame: FrameType) -> bool:
    """Whether a frame is a function of this package."""
    return frame.f_code.co_filename.startswith(tuple(map(str, PACKAGES))) and frame.f_code.co_name[0] != "<"


def traced(call: Any) -> tuple[dict[tuple[str, str], int], int]:
    """{(file, function): calls} of our functions that a call enters, and the most of them that are inside each other."""
    calls: dict[tuple[str, str], int] = {}
    depth = deepest = 0

    def see(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal depth, deepest
        if event not in ("call", "return") or not ours(frame):
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        if event == "call":
            file = Path(frame.f_code.co_filename).relative_to(PACKAGES[0].parent)
            key = str(file), frame.f_code.co_qualname
            calls[key] = calls.get(key, 0) + 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls, deepest


def decode_step(backend: str = "sdpa", model: str = "smollm2") -> tuple[dict[tuple[str, str], int], int]:
    """What one decode step of three requests enters, see `traced`."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 60, "max_model_len": 64}
    shape = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 4}}
    with LLM(model, attention_backend=backend, async_scheduling=False, **shape, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for i in range(3):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": [1 + i, 2, 3]}, params)
        for _ in range(5):
            llm.llm_engine.step()
        return traced(llm.llm_engine.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="sdpa", help="an attention backend")
    parser.add_argument("--list", action="store_true", help="name the functions, too")
    args = parser.parse_args()
    calls, depth = decode_step(args.backend)
    print(f"{len(calls)} functions in {len({file for file, _ in calls})} files, {depth} deep")
    if args.list:
        for (file, name), count in sorted(calls.items()):
            print(f"{count:5}  {file}: {name}")


if __name__ == "__main__":
    main()
