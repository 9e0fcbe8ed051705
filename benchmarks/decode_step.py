"""How far is a decode step from the memory's speed? Prints, for each batch size, its share of the floor.

    python benchmarks/decode_step.py [--output FOLDER] [--model 0.6B] [--context 1024] [--batch 1 16 64 256] [--products 1 2 4 8 16 32 64 128 256]

The model has the shape of Qwen3-0.6B (or `--model 8B`) and random bfloat16 weights. A step is what the engine's model runner replays as one
CUDA graph, with the matmul that gives the logits and their argmax in it, or, of more rows than it chooses for, after it. The floor is the time
in which the card, at the bandwidth of a copy measured in the same run (bytes read plus bytes written), moves the weights
and the keys and values once. Then the same step with every matmul by cuBLAS, by our own kernels, and by these with no kernel starting early.
"""

import argparse
import json
import math
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from kernels import CUDA, copy_bandwidth, median_ms, random_batch
from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm.attention.step_buffer import StepBuffer
from minivllm.core.config import KVCacheConfig, make_kv_cache_groups
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.linear import cuda as cuda_linear
from minivllm.runtime.decode_graphs import DecodeGraphs
from minivllm.runtime.model_runner import GREEDY_ROWS
from minivllm_kernels.cuda.launch import _launches as launches

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "0.6B": QWEN3,
    "8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                   "tie_word_embeddings": False},
}  # fmt: skip
BLOCK = 16


def make_decoder(config: dict, max_model_len: int) -> Decoder:
    spec = spec_from_config(config)
    decoder = Decoder(spec, NumbaCudaBackend(), torch.bfloat16, CUDA, max_model_len=max_model_len)
    generator, kind = torch.Generator(CUDA).manual_seed(0), {"device": CUDA, "dtype": torch.bfloat16}
    shapes = spec.weight_shapes().items()
    norms = ((name, torch.ones(shape, **kind)) for name, shape in shapes if name.endswith("norm.weight"))
    others = (
        (name, 0.02 * torch.randn(shape, generator=generator, **kind)) for name, shape in shapes if len(shape) == 2
    )
    decoder.load_weights(chain(norms, others))
    return decoder


@torch.inference_mode()
def step_ms(decoder: Decoder, batch: int, context: int) -> tuple[float, float]:
    """Milliseconds of the step's graph alone, and with the product and the choice behind it."""
    spec = decoder.spec.attention_specs(BLOCK, torch.bfloat16)[0]
    host, blocks = random_batch(np.ones(batch, int), np.full(batch, context), BLOCK)
    host.slot_mapping = host.block_table[:, -1].astype(np.int64) * BLOCK + (context - 1) % BLOCK
    decoder.bind(KVCacheConfig(blocks, BLOCK, make_kv_cache_groups(decoder.spec.kv_cache_specs(BLOCK, 2))))
    shape = decoder.backend.kv_cache_shape(blocks, spec)
    caches = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for _ in decoder.layers]
    buffer, graphs = StepBuffer(8 << 20, CUDA), DecodeGraphs(CUDA, 1 << 30)
    buffer.begin()
    (ids, token_ids), (at, positions) = (buffer.reserve((batch,), np.int64) for _ in range(2))
    ids[:], at[:] = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, batch), context - 1
    fixed = decoder.backend.fixed_decode(batch, spec, buffer)
    assert fixed is not None
    key = fixed.fill(host)
    buffer.send()

    def make(chooses):
        def step():
            hidden = decoder.forward(token_ids, positions, caches, [plan])
            return (hidden, decoder.compute_argmax(hidden)) if chooses else (hidden,)

        plan = fixed.plan()
        return step, plan

    def layers():
        return graphs.run((False, key), partial(make, False))[0]

    def whole():
        return (
            graphs.run((True, key), partial(make, True)) if batch <= GREEDY_ROWS else decoder.compute_argmax(layers())
        )

    layers(), whole()
    return median_ms(layers), median_ms(whole)


def by_product(decoder: Decoder, batches: list[int], context: int) -> list[dict]:
    """The step with every product by cuBLAS, with ours, and with ours when no kernel starts early."""
    rows, most = [], cuda_linear.MOST_ROWS
    print("rows  products  layers ms  step ms")
    for batch in batches:
        for kind in ("cublas", "ours", "ours in turn"):
            for launch in launches.values() if kind == "ours in turn" else ():
                launch.attributes = 0, 0  # no kernel starts before the one before it has ended
            cuda_linear.MOST_ROWS = 0 if kind == "cublas" else most
            layers, whole = step_ms(decoder, batch, context)
            rows.append({"rows": batch, "kind": kind, "layers_ms": layers, "step_ms": whole})
            print(f"{batch:4}  {kind:8} {layers:10.3f} {whole:8.3f}")
            torch.cuda.empty_cache()
        launches.clear()  # loaded anew, with their attributes
    cuda_linear.MOST_ROWS = most
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="0.6B", help="whose shape")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument(
        "--products",
        type=int,
        nargs="*",
        default=[1, 2, 4, 8, 16, 32, 64, 128, 256],
        help="batches to try each product with",
    )
    parser.add_argument("--output", type=Path, help="folder for decode_step-CARD.json, or decode_step-8b-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    card, copy = torch.cuda.get_device_name(), copy_bandwidth()
    decoder = make_decoder(SHAPES[args.model], args.context)
    shapes, config = decoder.spec.weight_shapes(), SHAPES[args.model]
    embedding = 0 if config["tie_word_embeddings"] else math.prod(shapes["model.embed_tokens.weight"])  # hardly read
    weights = 2 * (sum(math.prod(shape) for shape in shapes.values()) - embedding)
    kv_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    rows = []
    print(f"{card}, copy {copy:.0f} GB/s, weights {weights / 1e6:.0f} MB, context {args.context}")
    print("batch  layers ms  step ms  floor ms  of floor  tokens/s")
    for batch in args.batch:
        layers, whole = step_ms(decoder, batch, args.context)
        floor = (weights + batch * args.context * kv_token) / copy / 1e6
        rows.append(
            {"batch": batch, "layers_ms": layers, "step_ms": whole, "floor_ms": floor, "of_floor": floor / whole}
        )
        print(f"{batch:5} {layers:10.3f} {whole:8.3f} {floor:9.3f} {floor / whole:9.2f} {batch / whole * 1e3:9.0f}")
        torch.cuda.empty_cache()
    products = by_product(decoder, args.products, args.context)
    if args.output:
        model = "" if args.model == "0.6B" else f"-{args.model.lower()}"
        name = f"decode_step{model}-{card.lower().replace(' ', '-')}.json"
        about = {"card": card, "model": args.model, "copy_gb_s": copy, "context": args.context}
        result = {**about, "rows": rows, "products": products}
        (args.output / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
