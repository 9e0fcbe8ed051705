"""How much code a decode step enters between the runner and torch: few enough functions to be read in one sitting."""

import sys
from pathlib import Path

from paged import PagedDecoder, make_decoder
from tiny_models import hf_model

import minivllm

HOME = str(Path(minivllm.__file__).parent)


def test_a_step_of_the_decoder_in_plain_torch_is_few_functions_in_few_files():
    """4 layers, 3 requests. `benchmarks/step_depth.py` names the functions, and counts those of the engine too."""
    decoder = make_decoder(hf_model("qwen3"), "sdpa")
    paged = PagedDecoder(decoder)
    for name in "abc":
        paged.add(name, list(range(9)))
    paged.step({"a": 5, "b": 6, "c": 7})
    functions, depth, deepest = set(), 0, 0

    def see(frame, event, arg):
        nonlocal depth, deepest
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(HOME) and code.co_name[0] != "<":
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            functions.add((code.co_filename, code.co_qualname))

    sys.setprofile(see)
    try:
        paged.step({"a": 1, "b": 1, "c": 1})
    finally:
        sys.setprofile(None)
    files = {file for file, _ in functions}
    assert len(functions) <= 40 and len(files) <= 11 and deepest <= 8, (len(functions), len(files), deepest)
