"""Throughput with LoRA adapters in one batch, as a share of the base model's, in one run.

    python benchmarks/lora.py [--model smollm2] [--requests 64] [--adapters 0 1 4 16] [--rank 16] [--dtype auto]

Random adapters of all linear layers. `0` is an engine with adapters enabled and none in the batch; `base` is one without. Each
round runs all of them in turn, so that what else the machine does meets all alike; the table shows the best of the rounds.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.lora.adapter import CONFIG, WEIGHTS, lora_targets
from minivllm.models.loading import load_model


def write_adapter(folder: Path, targets: dict[str, tuple[int, int]], rank: int) -> Path:
    """A random adapter of all linear layers but the output layer."""
    folder.mkdir()
    tensors, modules = {}, list(targets)[2:]
    for module in modules:
        outputs, inputs = targets[module]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank) * 0.01
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def tokens_per_second(llm: LLM, requests: int, tokens: int, loras: list[LoRARequest | None]) -> float:
    prompts = [[(7 * i + j) % 1000 for j in range(32)] for i in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    llm.generate(prompts, params, lora_request=[loras[i % len(loras)] for i in range(requests)], use_tqdm=False)
    return requests * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    most, sizes = max(args.adapters), {"dtype": args.dtype, "max_model_len": 512}
    targets = lora_targets(load_model(args.model).spec)
    with tempfile.TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / str(i), targets, args.rank) for i in range(most)]
        loras = [LoRARequest(f"adapter-{i}", i + 1, str(folder)) for i, folder in enumerate(folders)]
        base = LLM(args.model, **sizes)
        engine = LLM(args.model, enable_lora=True, max_loras=most, max_lora_rank=args.rank, **sizes)
        kinds = {"base": (base, [None])} | {str(n): (engine, loras[:n] or [None]) for n in args.adapters}
        best = dict.fromkeys(kinds, 0.0)
        for _ in range(args.rounds + 1):  # the first compiles kernels and loads adapters
            for name, (llm, mix) in kinds.items():
                best[name] = max(best[name], tokens_per_second(llm, args.requests, args.tokens, mix))
    print(
        f"{args.requests} requests, {args.tokens} tokens each, rank {args.rank}, {engine.config.dtype}, {torch.get_num_threads()} threads"
    )
    print("adapters  tokens/s  share of base")
    for name, rate in best.items():
        print(f"{name:>8}  {rate:8.0f}  {rate / best['base']:13.2f}")


if __name__ == "__main__":
    main()
