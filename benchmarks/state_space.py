"""Mamba-2 130M with random weights on a CPU: decode against the memory floor, and prefill against transformers' slow path.

    python benchmarks/state_space.py --threads 2 --dtype float32

The floor of a decode step is the time, in huge pages, of a plain sum over as many bytes as the weights have, and of a multiplication in place
over as many as the states have, since those are written too. Both and the step are measured in turn. States are float32 in any dtype.
"""

import argparse
import json
import time

import numpy as np
import torch

from minivllm.attention.backend import AttentionBatch
from minivllm.attention.select import make_backend
from minivllm.attention.state import cache_layout, plan_states
from minivllm.core.config import KVCacheConfig, make_kv_cache_groups
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.linear.base import use_huge_pages
from minivllm.models.loading import dummy_tensors
from minivllm.runtime.model_runner import zeros_on_demand

SIZES = {
    "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1,
    "vocab_size": 50288, "tie_word_embeddings": True,
}  # fmt: skip
CPU = torch.device("cpu")


class Model:
    """A decoder with its cache. Request r has block r + 1."""

    def __init__(self, backend: str, dtype: torch.dtype, rows: int) -> None:
        spec = spec_from_config({"model_type": "mamba2", **SIZES})
        self.decoder = Decoder(spec, make_backend(backend), dtype, CPU)
        self.decoder.load_weights(dummy_tensors(spec.weight_shapes(), 0))
        groups = make_kv_cache_groups(spec.kv_cache_specs(16))
        config = KVCacheConfig(rows + 1, 16, groups)
        self.decoder.bind(config)
        self.spec = self.decoder.attention_specs(16)[0]
        shape, kind = cache_layout(self.decoder.backend, [self.spec], rows + 1)
        self.caches = [zeros_on_demand(shape, kind, CPU) for _ in range(config.num_tensors)]
        self.state_bytes = spec.num_layers * self.spec.num_bytes
        self.weight_bytes = spec.num_parameters() * dtype.itemsize

    @torch.inference_mode()
    def step(self, rows: int, count: int, computed: int) -> torch.Tensor:
        """`count` tokens of each of `rows` requests; gives the logits of each request's last."""
        lens = np.full(rows, computed + count, np.int32)
        starts = np.arange(rows + 1, dtype=np.int32) * count
        table = np.arange(1, rows + 1, dtype=np.int32)[:, None]
        plan = plan_states(AttentionBatch(starts, lens, table, np.zeros(rows * count, np.int64)), self.spec, CPU)
        ids = torch.arange(rows * count) % 1000
        hidden = self.decoder.forward(ids, torch.zeros_like(ids), self.caches, [plan])
        return self.decoder.compute_logits(hidden[torch.from_numpy(starts[1:].astype(np.int64)) - 1])


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def best(function, times: int) -> float:
    """Seconds of the fastest call but the first."""
    function()
    found = []
    for _ in range(times):
        start = clock()
        function()
        found.append(clock() - start)
    return min(found)


def in_turn(functions, times: int) -> np.ndarray:
    """Seconds of a call of each, [times, functions], measured in turn: a busy machine is busy for all of them."""
    return np.array([[best(function, 1) for function in functions] for _ in range(times)])


def their_prefill(tokens: int, dtype: torch.dtype) -> float:
    """Seconds of transformers' slow path, with the same sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **SIZES)).to(dtype).eval()
    ids = torch.arange(tokens)[None] % 1000
    with torch.inference_mode():
        return best(lambda: model(ids, logits_to_keep=1), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--backend", default="numba_cpu")
    parser.add_argument("--prefill", type=int, nargs="*", default=[256])
    parser.add_argument("--repeats", type=int, default=5, help="of each decode step and its floor")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor seconds, for a machine that others use; with one thread",
    )
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    globals()["clock"] = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = Model(args.backend, dtype, 64)
    print(f"state of a sequence: {model.state_bytes:,} bytes, at any length")
    figures = {}
    for rows in (1, 64):
        weights, states = torch.ones(model.weight_bytes // 4), torch.ones(rows * model.state_bytes // 4)
        for memory in (weights, states):
            use_huge_pages(memory)  # as the engine's lie
        functions = (weights.sum, lambda states=states: states.mul_(1.0), lambda rows=rows: model.step(rows, 1, 5))
        read, rewritten, took = in_turn(functions, args.repeats).T
        floor = read + rewritten
        figures[f"decode {rows}"] = ratio = float(np.median(floor / took))
        times = f"{np.median(took) * 1e3:7.1f} ms, floor {np.median(floor) * 1e3:7.1f} ms"
        print(f"decode, batch {rows:2}: {times}, ratio {ratio:.2f}, the median of {args.repeats} rounds")
    for tokens in args.prefill:
        ours, theirs = best(lambda tokens=tokens: model.step(1, tokens, 0), 3), their_prefill(tokens, dtype)
        figures[f"prefill {tokens}"] = theirs / ours
        print(f"prefill of {tokens}: {ours:.3f} s, transformers {theirs:.3f} s, ratio {theirs / ours:.1f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
