"""What does tensor parallelism gain on several GPUs? Milliseconds a decode step, and of a prefill, by one GPU and by more.

    python benchmarks/tensor_parallel.py [--sizes 1 2] [--batches 1 16 64 256] [--steps 64] [--output FOLDER]

The model has the shape of Qwen3-8B and random bfloat16 weights. Every request has its own prompt of 128 tokens. A prefill lasts until
the first tokens are there; a decode step is the median of what follows, as the engine sees it. Before that, a small Qwen3 in float32 is
asked for greedy tokens by each number of GPUs, as tensor ranks and as pipeline stages: they must be the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_gpu import tokenizer

from minivllm import LLM, SamplingParams

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
PROMPT = 128


def engine(folder: Path, size: int, kind: str = "tensor", **more: Any) -> LLM:
    how = {"device": "cuda", f"{kind}_parallel_size": size, "enable_prefix_caching": False, "max_model_len": 1024}
    return LLM(str(folder), **how | more)


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [(i * 7 + j * 13) % 251 for j in range(PROMPT)]} for i in range(count)]


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 256, "eos_token_id": 257}))
    tokenizer().save_pretrained(folder)
    return folder


def save_small(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A small model with random float32 weights, by transformers. config: None for a Qwen3."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**(config or {**QWEN3_8B, **SMALL}), "torch_dtype": "float32"}
    model_folder(folder, config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().save_pretrained(folder)
    return folder


def step_times(llm: LLM, batch: int, steps: int) -> tuple[float, float]:
    """Milliseconds until the first tokens, and of a later step, the median."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts(batch)):
        engine.add_request(f"{batch}-{i}-{time.monotonic_ns()}", prompt, params)
    times, begin = [], time.perf_counter()
    while not engine.step():
        pass
    first = time.perf_counter() - begin
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    return 1e3 * first, statistics.median(times[4:-4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--output", type=Path, help="folder for tensor_parallel-CARD.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        small, answers = save_small(Path(name) / "small"), []
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        ways = [(size, kind) for size in args.sizes for kind in ("tensor", "pipeline")]
        for size, kind in ways:
            with engine(small, size, kind, dtype="float32", num_gpu_blocks=400) as llm:
                outputs = llm.generate(prompts(8), params, use_tqdm=False)
                answers.append([list(out.outputs[0].token_ids) for out in outputs])
        same = {f"{kind} {size}": answer == answers[0] for (size, kind), answer in zip(ways, answers, strict=True)}
        print("greedy float32 tokens are those of the first:", same, flush=True)
        big = model_folder(Path(name) / "big", QWEN3_8B)
        for size in args.sizes:
            how = {"dtype": "bfloat16", "load_format": "dummy", "num_gpu_blocks": 256 * 13, "max_num_seqs": 256}
            with engine(big, size, max_num_batched_tokens=32768, **how) as llm:
                for batch in args.batches:
                    step_times(llm, batch, 16)  # compiles kernels and captures graphs
                    prefill, decode = step_times(llm, batch, args.steps)
                    rows.append(
                        {"gpus": size, "batch": batch, "prefill_ms": round(prefill, 2), "decode_ms": round(decode, 3)}
                    )
                    print(rows[-1], flush=True)
    first = {row["batch"]: row for row in rows if row["gpus"] == args.sizes[0]}
    print("gpus  batch  prefill ms  decode ms  times as fast")
    for row in rows:
        row["speedup"] = round(first[row["batch"]]["decode_ms"] / row["decode_ms"], 3)
        print(
            f"{row['gpus']:4}  {row['batch']:5}  {row['prefill_ms']:10.1f}  {row['decode_ms']:9.3f}  {row['speedup']:13.2f}"
        )
    if args.output:
        card = torch.cuda.get_device_name()
        result = {"card": card, "model": "Qwen3-8B's shape", "same_tokens": same, "prompt": PROMPT, "rows": rows}
        path = args.output / f"tensor_parallel-{card.lower().replace(' ', '-')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
