"""How near is a layer of experts to the time that reading its weights takes? And what do loading, and a latent cache, cost?

    python benchmarks/experts.py [layer] [load] [cache] [--rounds 5] [--threads N] [--output FILE]

Layer: 64 experts of which a token visits 8, hidden size 1024, 512 numbers inside, 256 tokens, bfloat16, on as many threads as there are cores. The
floor is the time in which the same threads read all weights once. transformers' loop over experts (`eager`) and its grouped matmul take turns with
ours. There are five such layers, one after the other, and a layer is a fifth of the time: so the weights come from memory, as they do in a
model. All keep the memory of their activations, as the engine does.
The goal is 1.5 times the floor. `arithmetic` is the time of as many multiplications by dense weights of a few layers' size: a CPU for which that takes
longer than the floor cannot come nearer than that.
Load: a fresh process for each loads SmolLM2 in float32 and computes one token: wall time from after the imports, and the peak of resident memory
less what it was then. transformers' `from_pretrained` against ours, from the same folder. (transformers maps the file, and reads it with that token.)
Cache: bytes a token of DeepSeek-V3's latent cache, as the paper has it (512 + 64 numbers a layer), and of the keys and values of all heads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_kernels import layer_of

import minivllm  # noqa: F401 - before torch computes
from minivllm.attention.select import make_backend
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.linear.base import use_huge_pages
from minivllm.runtime.machine import keep_freed_memory

HIDDEN, INNER, EXPERTS, TOP, TOKENS, LAYERS = 1024, 512, 64, 8, 256, 5
GOAL = 1.5


def config() -> Any:
    """Of an OLMoE."""
    from transformers import OlmoeConfig

    return OlmoeConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=64, max_position_embeddings=256, architectures=["OlmoeForCausalLM"],
    )  # fmt: skip


def layers() -> tuple[dict[str, Callable[[torch.Tensor], torch.Tensor]], int]:
    """What to time, with the same weights, and their bytes."""
    from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM

    torch.manual_seed(0)
    theirs = OlmoeForCausalLM._from_config(config()).to(torch.bfloat16).eval()
    backend = make_backend("numba_cpu")
    decoder = Decoder(spec_from_config(config().to_dict()), backend, torch.bfloat16, torch.device("cpu"))
    decoder.load_weights(theirs.state_dict().items())
    blocks, ours = [layer.mlp for layer in theirs.model.layers], [layer.mlp for layer in decoder.layers]
    weights = [p for block in blocks for p in block.experts.parameters()]

    def by(implementation: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            theirs.config._experts_implementation = implementation
            found = [block(x[None]) for block in blocks][-1]
            return (found[0] if isinstance(found, tuple) else found)[0]

        return run

    flat = [p.detach().view(torch.float32).flatten() for p in weights]
    for part in flat:
        use_huge_pages(part)  # as ours lie

    def floor(x: torch.Tensor) -> torch.Tensor:
        for part in flat:
            torch.dot(part, part)  # of torch's ways to read memory the quickest
        return x

    gate_up, down = (torch.randn(n, m).to(torch.bfloat16) for n, m in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    dense = [layer_of(weight, "cpu") for weight in (gate_up, down)]
    each = [torch.randn(TOKENS * TOP, weight.shape[1]).to(torch.bfloat16) for weight in (gate_up, down)]

    def arithmetic(x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            for multiply, rows in zip(dense, each, strict=True):
                multiply(rows)
        return x

    def run_ours(x: torch.Tensor) -> torch.Tensor:
        return [mlp(x) for mlp in ours][-1]

    named = {
        "floor": floor,
        "arithmetic": arithmetic,
        "ours": run_ours,
        "transformers, loop": by("eager"),
        "transformers, grouped": by("grouped_mm"),
    }
    return named, sum(p.numel() * p.element_size() for p in weights) // LAYERS


@torch.inference_mode()
def time_layer(rounds: int) -> dict[str, Any]:
    """Medians of alternating rounds, in milliseconds a layer."""
    named, size = layers()
    keep_freed_memory()
    x = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    want, got = named["transformers, loop"](x).float(), named["ours"](x).float()
    error = float((got - want).abs().max() / want.abs().max())
    assert error < 0.05, f"ours differs by {error}"
    times: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds + 1):
        for name, run in named.items():
            start = time.perf_counter()
            run(x)
            times[name].append(1e3 * (time.perf_counter() - start) / LAYERS)
    typical = {name: statistics.median(found[1:]) for name, found in times.items()}
    return {
        "weights_mb": round(size / 1e6, 1), "tokens": TOKENS, "threads": torch.get_num_threads(),
        "milliseconds": {name: round(value, 2) for name, value in typical.items()},
        "times_the_floor": {name: round(value / typical["floor"], 2) for name, value in typical.items()}, "goal": GOAL,
    }  # fmt: skip


LOAD = """
import resource, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM
import minivllm.engine.llm, minivllm.models.decoder, minivllm.runtime.executor
from minivllm import LLM, SamplingParams
from minivllm.models.hub import resolve_model
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
folder, before, start = str(resolve_model("smollm2")), peak(), time.perf_counter()
if sys.argv[1] == "transformers":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([[5, 6, 7]]))
else:
    llm = LLM(folder, dtype="float32", num_gpu_blocks=8, max_model_len=64, attention_backend="sdpa", skip_tokenizer_init=True)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
print(time.perf_counter() - start, peak() - before)
"""


def time_load(rounds: int) -> dict[str, Any]:
    """Seconds and megabytes: medians of alternating processes."""
    found: dict[str, list[tuple[float, ...]]] = {"ours": [], "transformers": []}
    for _ in range(rounds):
        for name, runs in found.items():
            done = subprocess.run([sys.executable, "-c", LOAD, name], capture_output=True, text=True, check=True)
            runs.append(tuple(map(float, done.stdout.split()[-2:])))
    middle = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in found.items()}
    return {
        name: {"seconds": round(seconds, 2), "peak_mb": round(megabytes)}
        for name, (seconds, megabytes) in middle.items()
    }


def cache_bytes() -> dict[str, Any]:
    """Of DeepSeek-V3 in bfloat16, all 61 layers."""
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
    spec = spec_from_config(
        {"model_type": "deepseek_v3", **sizes, "vocab_size": 129280, "max_position_embeddings": 4096}
    )
    ours = sum(layer.bytes_per_block for layer in spec.kv_cache_specs(16, 2)) // 16
    mixer: Any = spec.layers[0].mixer
    heads = 61 * mixer.num_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim) * 2
    paper = 61 * (512 + 64) * 2
    return {
        "bytes_per_token": ours,
        "paper": paper,
        "keys_and_values_of_all_heads": heads,
        "times_smaller": round(heads / ours, 1),
    }


def main() -> None:
    """Run the parts that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["layer", "load", "cache", []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch and the kernels (default: all)")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    parts = {"layer": lambda: time_layer(args.rounds), "load": lambda: time_load(args.rounds), "cache": cache_bytes}
    results = {name: run() for name, run in parts.items() if name in (args.parts or parts)}
    print(json.dumps(results, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
