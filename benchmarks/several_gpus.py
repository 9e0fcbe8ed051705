"""What do two GPUs of one host gain? Sums in each other's memory against NCCL, and tensor, pipeline, data and expert parallelism.

    python benchmarks/several_gpus.py [sums steps pipeline replicas tokens experts handover] [--seconds 150] [--trace FILE] [--output FOLDER]

Each part runs in a separate process, for `--seconds` at most, and prints what it finds; with --output all that was found goes to
several_gpus-CARD.json, into which later runs of other parts are merged. The models have random bfloat16 weights.

- `sums`: microseconds of an all-reduce of bfloat16, by the one-shot kernel and by NCCL, in a CUDA graph of 50 and launched one by one.
- `steps`: milliseconds of a decode step of Qwen3-8B's shape on one GPU, and on two with the kernel and with NCCL alone.
- `pipeline`: the share of the time in which a stage has nothing to do, of prefills in 1 to 8 chunks and of decode by 1 and 2 batches.
- `replicas`: two engines on conversations from the Mooncake trace (--trace), with requests by prefix and one after the other.
- `tokens`: whether a small model with 64 experts a layer, in float32, gives the same tokens on one GPU and on two.
- `experts`: decode steps of a model with 64 experts a layer, whole experts on each GPU, against a part of each, and one GPU.
- `handover`: milliseconds until the first token of a prompt whose blocks another engine has computed.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from routers import conversations
from tensor_parallel import PROMPT, QWEN3_8B, SMALL, engine, model_folder, prompts, save_small, step_times

from minivllm import LLM, SamplingParams
from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.lab.readers import read_workload
from minivllm_kernels.cuda import ops

KIB = tuple(8 << i for i in range(11))  # 8 KiB to 8 MiB
MANY = 50  # sums in a graph
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
MOE = {**QWEN3_8B, **EXPERTS, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4}  # fmt: skip
DUMMY = {"dtype": "bfloat16", "load_format": "dummy"}


def microseconds(run: Callable[[], Any], times: int, repeats: int = 7) -> float:
    """Of one `run`: the median of several loops of `times`, by CUDA events, which both ranks begin together."""
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / times)
    return statistics.median(found)


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of MANY runs."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(MANY):
            run()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def sums_rank(rank: int, ranks: int, folder: str) -> None:
    """One rank of `sums`; the first prints and writes what it found."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device)

    def exchange(handle: bytes) -> list[bytes]:
        handles: list[Any] = [None] * ranks
        dist.all_gather_object(handles, handle)
        return handles

    reduce, rows = ops.PeerAllReduce(rank, ranks, exchange, KIB[-1] << 10), []
    for kib in KIB:
        start = torch.randn(kib << 9, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
        by_kernel, by_nccl = start.clone(), start.clone()
        reduce(by_kernel)
        dist.all_reduce(by_nccl)
        off = (by_kernel.float() - by_nccl.float()).abs().max().item()
        assert off == 0 or ranks > 2, f"{kib} KiB: the kernel and NCCL differ by {off}"
        x = torch.zeros(kib << 9, dtype=torch.bfloat16, device=device)
        row: dict[str, Any] = {"KiB": kib}
        for name, run in (("kernel", lambda: reduce(x)), ("nccl", lambda: dist.all_reduce(x))):  # noqa: B023
            graph = graph_of(run)
            row[f"{name}_graph_us"] = round(microseconds(graph.replay, 4) / MANY, 2)
            row[f"{name}_us"] = round(microseconds(run, 100), 2)
        row["times_as_fast"] = round(row["nccl_graph_us"] / row["kernel_graph_us"], 2)
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # NCCL takes seconds to be taken down


def sums(args: argparse.Namespace, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=sums_rank, args=(r, args.gpus, str(folder)), daemon=True) for r in range(args.gpus)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    args.save(json.loads((folder / "rows.json").read_text()))


def step_rows(found: dict[int, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of what `steps` has found so far. The sums of a step: one after the embedding, two in each layer."""
    us, count, rows = {row["KiB"]: row for row in args.known.get("sums", [])}, 2 * QWEN3_8B["num_hidden_layers"] + 1, []
    for batch, times in found.items():
        row = {"batch": batch} | {f"{name}_ms": round(decode, 3) for name, (_, decode) in times.items()}
        for name, (_, decode) in list(times.items())[1:]:
            row[f"{name}_speedup"] = round(times["one_gpu"][1] / decode, 3)
            if measured := us.get(batch * QWEN3_8B["hidden_size"] * 2 >> 10):
                row[f"{name}_sums_share"] = round(count * measured[f"{name}_graph_us"] / 1e3 / decode, 3)
        rows.append(row | {f"{name}_prefill_ms": round(prefill, 1) for name, (prefill, _) in times.items()})
    return rows


def steps(args: argparse.Namespace, folder: Path) -> None:
    big, found = model_folder(folder / "big", QWEN3_8B), defaultdict(dict)
    ways = {"one_gpu": 1, "kernel": args.gpus, "nccl": args.gpus}
    for name, size in ways.items():
        how = {"num_gpu_blocks": 256 * 13, "max_num_seqs": 256, "max_num_batched_tokens": 32768}
        with engine(big, size, disable_custom_all_reduce=name == "nccl", **DUMMY, **how) as llm:
            for batch in args.batches:
                step_times(llm, batch, 16)  # compiles kernels and captures graphs
                found[batch][name] = step_times(llm, batch, 64)
                print(name, batch, found[batch][name], flush=True)
            args.save(step_rows(found, args))


def prefill_seconds(llm: LLM, chunks: int, tokens: int = 4096) -> float:
    """Until `chunks` prompts of a whole step each have their first tokens; the least of three times."""
    params, found = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), []
    for turn in range(3):
        asked = [{"prompt_token_ids": [(i * 7 + j * 13 + turn) % 251 for j in range(tokens)]} for i in range(chunks)]
        start = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        found.append(time.perf_counter() - start)
    return min(found)


def decode_rate(llm: LLM, requests: int, tokens: int) -> float:
    """Tokens a second of requests, the prefill left out: between two lengths of the same requests."""
    spent = []
    for length in (8, 8, 8 + tokens):  # the first compiles kernels and captures graphs
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts(requests), params, use_tqdm=False)
        spent.append(time.perf_counter() - start)
    return requests * tokens / (spent[2] - spent[1])


def pipeline(args: argparse.Namespace, folder: Path) -> None:
    """Shares of idle time. A stage takes half as long as one chunk, or one batch, alone takes in both."""
    big, result = model_folder(folder / "big", QWEN3_8B), {"prefill": [], "decode": []}
    how = {"num_gpu_blocks": 8 * 4096 // 16 + 600, "max_num_seqs": 128, "max_num_batched_tokens": 4096, "max_model_len": 5000}  # fmt: skip
    rates = {}
    with engine(big, 2, "pipeline", **DUMMY, **how) as llm:
        prefill_seconds(llm, 2)
        alone = prefill_seconds(llm, 1)
        for chunks in (1, 2, 4, 8):
            seconds = prefill_seconds(llm, chunks)
            row = {"chunks": chunks, "ms": round(1e3 * seconds, 1), "idle": round(1 - chunks * alone / 2 / seconds, 3)}
            result["prefill"].append(row | {"computed": round(1 / (chunks + 1), 3)})
            args.save(result)
        for batches in (1, 2):  # as many prompts as fit a step begin together, and stay together
            rates[batches] = decode_rate(llm, batches * 4096 // PROMPT, 64)
            row = {"batches": batches, "requests": batches * 4096 // PROMPT, "tokens_per_second": round(rates[batches])}
            row["idle"] = round(1 - rates[batches] / rates[1] / 2, 3)
            result["decode"].append(row | {"computed": 1 - batches / 2})
            args.save(result)
    with engine(big, 1, **DUMMY, **how) as llm:
        for requests in (32, 64):
            row = {"gpus": 1, "requests": requests, "tokens_per_second": round(decode_rate(llm, requests, 64))}
            result["decode"].append(row)
            args.save(result)


async def serve(args: EngineArgs, asked: list[tuple[list[int], float]], seconds: float) -> dict[str, Any]:
    """Requests at the trace's moments, squeezed into this many seconds."""
    llm = AsyncLLM.from_engine_args(args, engine_in="process", warm=True)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    begin, last = asked[0][1], asked[-1][1]
    firsts: list[float] = []

    async def one(i: int, ids: list[int], moment: float) -> None:
        await asyncio.sleep((moment - begin) / (last - begin) * seconds)
        start, first = time.perf_counter(), None
        async for _ in llm.generate({"prompt_token_ids": [1 + t % 150_000 for t in ids]}, params, f"r{i}"):
            first = first or time.perf_counter() - start
        assert first is not None
        firsts.append(first)

    start = time.perf_counter()
    await asyncio.gather(*(one(i, ids, moment) for i, (ids, moment) in enumerate(asked)))
    spent, stats = time.perf_counter() - start, llm.get_metrics()
    llm.shutdown()
    firsts.sort()
    ms = {f"ttft_p{p}_ms": round(1e3 * firsts[int(p / 100 * (len(firsts) - 1))], 1) for p in (50, 90, 99)}
    hits = stats["prefix_cache_hits"] / stats["prefix_cache_queries"]
    return {
        "seconds": round(spent, 1),
        "hit_rate": round(hits, 3),
        "ttft_mean_ms": round(1e3 * statistics.mean(firsts), 1),
        **ms,
    }


def replicas(args: argparse.Namespace, folder: Path) -> None:
    if args.trace is None:
        raise ValueError("replicas needs --trace: mooncake_conversation.jsonl, or lines of it")
    big, rows = model_folder(folder / "big", QWEN3_8B), []
    requests = conversations(read_workload(args.trace, 4000), 160)
    asked = [(request.prompt_token_ids(), request.arrival_time) for request in requests]
    count = sum(len(ids) for ids, _ in asked)
    print(len(asked), "requests,", count, "prompt tokens", flush=True)
    how = {
        "model": str(big),
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 20000,
        "num_gpu_blocks": 12000,
    }
    for name, size, router in (
        ("two, by prefix", 2, "prefix_aware"),
        ("two, round robin", 2, "round_robin"),
        ("one", 1, "prefix_aware"),
    ):
        engine_args = EngineArgs(**DUMMY, **how, data_parallel_size=size, data_parallel_router=router)
        rows.append({"engines": name, **asyncio.run(serve(engine_args, asked, 10.0))})
        print(rows[-1], flush=True)
        args.save({"requests": len(asked), "prompt_tokens": count, "rows": rows})


EXPERT_WAYS = {"one_gpu": {}, "whole_experts": {"enable_expert_parallel": True}, "part_of_each": {}}


def tokens(args: argparse.Namespace, folder: Path) -> None:
    """Of a small model with 64 experts a layer, in float32."""
    config = {**MOE, **SMALL, "moe_intermediate_size": 128}
    small, answers = save_small(folder / "small", config), {}
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    for name, more in EXPERT_WAYS.items():
        size = 1 if name == "one_gpu" else args.gpus
        with engine(small, size, dtype="float32", num_gpu_blocks=400, **more) as llm:
            outputs = llm.generate(prompts(8), params, use_tqdm=False)
            answers[name] = [list(out.outputs[0].token_ids) for out in outputs]
        print(name, "gives the tokens of one GPU:", answers[name] == answers["one_gpu"], flush=True)
        args.save({name: answer == answers["one_gpu"] for name, answer in answers.items()})


def experts(args: argparse.Namespace, folder: Path) -> None:
    """Milliseconds of a decode step, by batch."""
    big, found = model_folder(folder / "big", MOE), defaultdict(dict)
    for name, more in EXPERT_WAYS.items():
        how = {"num_gpu_blocks": 64 * 13, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
        with engine(big, 1 if name == "one_gpu" else args.gpus, **DUMMY, **how, **more) as llm:
            for batch in (1, 16, 64):
                step_times(llm, batch, 16)
                found[batch][name] = round(step_times(llm, batch, 40)[1], 3)
                print(name, batch, found[batch][name], flush=True)
                args.save([{"batch": batch, **times} for batch, times in found.items()])


async def first_tokens(llm: AsyncLLM, asked: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Tokens of prompts, one after the other, and the median of the milliseconds until a first one."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    found, times = [], []
    for ids in asked:
        start, first = time.perf_counter(), 0.0
        async for output in llm.generate({"prompt_token_ids": ids}, params, f"r{time.monotonic_ns()}"):
            first = first or time.perf_counter() - start
        found.append(list(output.outputs[0].token_ids))
        times.append(1e3 * first)
    return found, statistics.median(times)


def handover(args: argparse.Namespace, folder: Path) -> None:
    """One engine computes prompts of 4,096 tokens, another on the second GPU reads their blocks in its memory, or as files, and decodes."""
    big, rows = model_folder(folder / "big", QWEN3_8B), []
    asked = [[(i * 7 + j * 13 + i * j) % 150_000 for j in range(4096)] for i in range(1, 11)]
    how = {
        "model": str(big),
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 5000,
        "num_gpu_blocks": 3500,
    }
    extras = {"PeerMemoryConnector": {"num_blocks": 3000}, "SharedStorageConnector": {}}
    for connector, extra in extras.items():
        shared, engines = tempfile.mkdtemp(dir="/dev/shm"), []
        for gpu, role in enumerate(("kv_producer", "kv_consumer")):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            extra = {"shared_storage_path": shared} | extra
            config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
            engine_args = EngineArgs(**DUMMY, **how, kv_transfer_config=config)
            engines.append(AsyncLLM.from_engine_args(engine_args, engine_in="process", warm=True))

        async def pass_on(producer: AsyncLLM, consumer: AsyncLLM) -> dict[str, Any]:
            await first_tokens(producer, asked[:2], 8)
            await first_tokens(consumer, asked[:2], 8)
            some = asked[2:] if connector == "PeerMemoryConnector" else asked[2:5]  # noqa: B023 - called at once
            _, computing = await first_tokens(producer, some, 1)
            want, cached = await first_tokens(producer, some, 8)  # all but the last block is in its own cache
            got, reading = await first_tokens(consumer, some, 8)
            stats = consumer.get_metrics()
            row = {"computed_ms": computing, "own_cache_ms": cached, "read_ms": reading}
            return {name: round(ms, 2) for name, ms in row.items()} | {
                "same_tokens": got == want, "tokens_read": stats["external_prefix_cache_hits"], "failures": stats["num_kv_load_failures"],
            }  # fmt: skip

        rows.append({"connector": connector, **asyncio.run(pass_on(*engines))})
        print(rows[-1], flush=True)
        for one in engines:
            one.shutdown()
        shutil.rmtree(shared, ignore_errors=True)
        args.save(rows)


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "sums": sums,
    "steps": steps,
    "pipeline": pipeline,
    "replicas": replicas,
    "tokens": tokens,
    "experts": experts,
    "handover": handover,
}


def run_part(name: str, args: argparse.Namespace, file: Path) -> bool:
    """Run a part in a process of its own, which ends with everything that it has started. Whether it was done."""
    command = [
        sys.executable,
        __file__,
        name,
        "--part",
        str(file),
        "--gpus",
        str(args.gpus),
        "--batches",
        *map(str, args.batches),
    ]
    command += ["--trace", str(args.trace)] if args.trace else []
    print(f"== {name}", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        done = process.wait(args.seconds) == 0
    except subprocess.TimeoutExpired:
        done = False
        print(f"{name} was not done after {args.seconds} s", flush=True)
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--gpus", type=int, default=2, help="for sums, steps, tokens and experts; the others take two")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256], help="for steps")
    parser.add_argument("--seconds", type=float, default=150.0, help="for each part")
    parser.add_argument("--trace", type=Path, help="of Mooncake, for replicas")
    parser.add_argument("--output", type=Path, help="folder for several_gpus-CARD.json")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if args.part is not None:  # we are the process of one part
        args.known = json.loads(args.part.read_text())

        def save(found: Any) -> None:
            new = args.part.with_suffix(".new")
            new.write_text(json.dumps({**args.known, args.parts[0]: found}))
            os.replace(new, args.part)

        args.save = save  # as it goes: what was found stays if the time is over
        with tempfile.TemporaryDirectory() as folder:
            PARTS[args.parts[0]](args, Path(folder))
        return
    card = torch.cuda.get_device_name()
    path = args.output and args.output / f"several_gpus-{card.lower().replace(' ', '-')}.json"
    result = {
        "card": f"{args.gpus} x {card}",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    if path and path.is_file():
        known = json.loads(path.read_text())
        if other := [name for name in result if known.get(name) != result[name]]:
            parser.error(f"{path} was measured with another {', '.join(other)}: give another --output")
        result = known
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        file.write_text(json.dumps(result))
        failed = [name for name in args.parts if not run_part(name, args, file)]
        result = json.loads(file.read_text())
        result["not_done"] = sorted((set(result.get("not_done", [])) - set(args.parts)) | set(failed))
        if path:
            path.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
