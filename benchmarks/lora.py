"""Throughput with LoRA adapters in one batch, as a share of the base model's, in one run; and PEFT's, with `--peft`.

    python benchmarks/lora.py [--model smollm2] [--requests 64] [--adapters 0 1 16] [--rank 16] [--dtype auto] [--peft] [--stalls]

Random adapters of all linear layers. `0` is an engine with adapters enabled and none in the batch; `base` is one without. Each round runs
all of them, every second one in reverse, so that what else the machine does meets all alike. The table shows the best of the rounds, and the
median of a round's own ratios to its base. `--stalls`: eight streams of the base, and every five steps a request of an adapter that must be loaded
first, or of the base: how long the streams wait from token to token, in steps of their own. PEFT's way for many adapters is one `generate` with `adapter_names`; its base is the same call with none.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.lora.adapter import CONFIG, WEIGHTS, lora_targets
from minivllm.models.hub import resolve_model
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


def gaps(llm: LLM, loras: list[LoRARequest | None]) -> list[float]:
    """Seconds from token to token of eight streams, while a request of each of these adapters joins, five steps apart."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=5 * len(loras) + 20, ignore_eos=True)
    llm.reset_prefix_cache()
    for i in range(8):
        engine.add_request(f"stream-{i}", [(7 * i + j) % 1000 for j in range(32)], params)
    engine.step()
    found, few = [], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for i, lora in enumerate(loras):
        engine.add_request(f"new-{i}", [(11 * i + j) % 1000 for j in range(8)], few, lora_request=lora)
        for _ in range(5):
            start = time.perf_counter()
            said = {output.request_id for output in engine.step()}
            found.append(time.perf_counter() - start)
            assert all(f"stream-{n}" in said for n in range(8)), "a stream had no token in a step"
    while engine.has_unfinished_requests():
        engine.step()
    return found


def show_stalls(engine: LLM, loras: list[LoRARequest]) -> None:
    """The first round of adapters reads them from the disk, and each takes the slot of another."""
    print("time from token to token of eight streams, ms: median, longest, and the longest in medians")
    for round_ in range(3):
        for name, mix in (("base", [None] * len(loras)), ("adapters", loras)):
            each = gaps(engine, mix)
            middle, worst = median(each), max(each)
            print(f"{round_} {name:>8}  {1e3 * middle:7.1f}  {1e3 * worst:7.1f}  {worst / middle:5.2f}", flush=True)


def peft_tokens_per_second(
    folders: list[Path], model: str, dtype: torch.dtype, requests: int, tokens: int
) -> dict[str, float]:
    """Of transformers with PEFT on the same prompts: the base, one adapter, and all of them in one batch."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=dtype).eval()
    wrapped = peft.PeftModel.from_pretrained(base, folders[0], adapter_name="adapter-0")
    for i, folder in enumerate(folders[1:], 1):
        wrapped.load_adapter(folder, adapter_name=f"adapter-{i}")
    ids = torch.tensor([[(7 * i + j) % 1000 for j in range(32)] for i in range(requests)])
    rates = {}
    for name, mix in (
        ("base", ["__base__"]),
        ("1", ["adapter-0"]),
        (str(len(folders)), [f"adapter-{i}" for i in range(len(folders))]),
    ):
        how = {
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
        }
        names = [mix[i % len(mix)] for i in range(requests)]
        start = time.perf_counter()
        with torch.inference_mode():
            wrapped.generate(input_ids=ids, adapter_names=names, **how)
        rates[name] = requests * tokens / (time.perf_counter() - start)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peft", action="store_true", help="measure PEFT's batched adapters, too")
    parser.add_argument("--stalls", action="store_true", help="measure how long streams wait while adapters are loaded")
    args = parser.parse_args()
    most, sizes = max(args.adapters), {"dtype": args.dtype, "max_model_len": 512}
    targets = lora_targets(load_model(args.model).spec)
    with tempfile.TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / str(i), targets, args.rank) for i in range(most)]
        loras = [LoRARequest(f"adapter-{i}", i + 1, str(folder)) for i, folder in enumerate(folders)]
        if args.stalls:
            show_stalls(LLM(args.model, enable_lora=True, max_loras=2, max_lora_rank=args.rank, **sizes), loras)
            return
        base = LLM(args.model, **sizes)
        engine = LLM(args.model, enable_lora=True, max_loras=most, max_lora_rank=args.rank, **sizes)
        kinds = {"base": (base, [None])} | {str(n): (engine, loras[:n] or [None]) for n in args.adapters}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(args.rounds + 1):  # the first compiles kernels and loads adapters
            for name in list(kinds)[:: 1 if number % 2 else -1]:
                llm, mix = kinds[name]
                rates[name].append(tokens_per_second(llm, args.requests, args.tokens, mix))
        print(
            f"{args.requests} requests, {args.tokens} tokens each, rank {args.rank}, {engine.config.dtype}, {torch.get_num_threads()} threads"
        )
        print("adapters  tokens/s  of base  median ratio")
        best = {name: max(each[1:]) for name, each in rates.items()}
        for name, each in rates.items():
            ratio = median(mine / base for mine, base in zip(each[1:], rates["base"][1:], strict=True))
            print(f"{name:>8}  {best[name]:8.0f}  {best[name] / best['base']:7.2f}  {ratio:12.2f}", flush=True)
        if args.peft:
            dtype = getattr(torch, engine.config.dtype)
            theirs = peft_tokens_per_second(folders, args.model, dtype, args.requests, args.tokens)
            print("PEFT on the same prompts: tokens/s, and share of its base")
            for name, rate in theirs.items():
                print(f"{name:>8}  {rate:8.0f}  {rate / theirs['base']:7.2f}")


if __name__ == "__main__":
    main()
