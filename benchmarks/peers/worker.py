"""One engine in a process of its own, in whatever environment it needs: reads cases from stdin, answers on stdout.

    python worker.py PEER MODEL DTYPE THREADS

A line on stdin is a case, `{"requests": [[token_ids, n], ...]}`: all requests at once, greedy, n tokens each, end tokens ignored.
The answer is a line `{"seconds": ..., "tokens": ...}`. The first line on stdout says that a first token is there. At the end of
stdin the process says its peak memory. Imports nothing of minivllm unless that is the peer.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]
Run = Callable[[Sequence[Request]], int]
"""Answers requests; returns how many tokens came out."""
MAX_LEN, MAX_SEQS = 1024, 64
CACHE_TOKENS = 20480
"""Of the KV cache of those that are told in tokens: as many as the cases need at most."""
SERVERS: list[subprocess.Popen[bytes]] = []
"""Started by a peer, ended with this process."""
KV_BYTES = 400 << 20
"""Of our KV cache: a little more than the cases need. vLLM's is set in GB and not below what they need."""


def _all_together(llm: Any, sampling_params: Any) -> Run:
    """The same calls for minivllm and vLLM."""

    def run(requests: Sequence[Request]) -> int:
        params = [sampling_params(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in requests], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    return run


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def minivllm(
    model: str, dtype: str, threads: int, prefix_caching: bool = True, drafts: dict[str, Any] | None = None
) -> Run:
    import torch

    from minivllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    limits = {"max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS, "kv_cache_memory_bytes": KV_BYTES}
    llm = LLM(model, dtype=dtype, enable_prefix_caching=prefix_caching, speculative_config=drafts, **limits)
    return _all_together(llm, SamplingParams)


def vllm_cpu(model: str, dtype: str, threads: int, drafts: dict[str, Any] | None = None) -> Run:
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that this process's memory is all of it
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": MAX_LEN, "max_num_seqs": MAX_SEQS, "disable_log_stats": True}
    llm = LLM(model, dtype=dtype, speculative_config=drafts, **limits)
    return _all_together(llm, SamplingParams)


def llama_cpp_python(model: str, dtype: str, threads: int) -> Run:
    """One request after the other: the Python package has no continuous batching."""
    import llama_cpp.llama_cpp as raw
    from llama_cpp import Llama

    if crashes_with_tiles():
        default = raw.llama_model_default_params

        def without_layouts() -> Any:
            params = default()
            params.use_extra_bufts = False
            return params

        raw.llama_model_default_params = without_layouts  # `Llama` has no argument for it

    llm = Llama(model, n_ctx=MAX_LEN, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(requests: Sequence[Request]) -> int:
        tokens = 0
        for prompt, n in requests:  # `generate` keeps what this prompt has in common with the one before
            for _, _token in zip(range(n), llm.generate(prompt, temp=0.0, repeat_penalty=1.0), strict=False):
                tokens += 1
        return tokens

    return run


def load_llama(model: str, threads: int, tokens: int, sequences: int) -> tuple[Any, Any, Any, int]:
    """llama.cpp's own interface: the module, a context, an empty batch, and the size of the vocabulary."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    how = llama_cpp.llama_model_default_params()
    how.use_extra_bufts = not crashes_with_tiles()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), how)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = tokens, 2048, 512
    params.n_seq_max, params.kv_unified = sequences, True
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(loaded, params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    return llama_cpp, context, llama_cpp.llama_batch_init(2048, 0, 1), vocabulary


def crashes_with_tiles() -> bool:
    """Whether the CPU has AMX: weights in the layout for it end in a general protection fault in llama.cpp of 0.3.36, built by GCC 12."""
    return Path("/proc/cpuinfo").exists() and "amx_int8" in Path("/proc/cpuinfo").read_text()


def fill_batch(batch: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
    """Rows: token, position, sequence, whether logits are wanted."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = sequence


def llama_batch(model: str, dtype: str, threads: int) -> Run:
    """llama.cpp by its own calls: each step is one batch with a token of every request that is still running."""
    import numpy as np

    llama_cpp, context, batch, vocabulary = load_llama(model, threads, CACHE_TOKENS, MAX_SEQS)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of `fill_batch`; gives the most likely next tokens where logits are wanted."""
        fill_batch(batch, rows)
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        asked = [i for i, row in enumerate(rows) if row[3]]
        logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,)) for i in asked]
        return [int(row.argmax()) for row in logits]

    def run(requests: Sequence[Request]) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        prompts = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, (prompt, _) in enumerate(requests)
            for position, token in enumerate(prompt)
        ]
        last: list[int] = []
        for start in range(0, len(prompts), 2048):
            last += decode(prompts[start : start + 2048])
        count = 1
        while running := [i for i, (_, n) in enumerate(requests) if n > count]:
            found = decode([(last[i], len(requests[i][0]) + count - 1, i, True) for i in running])
            for i, token in zip(running, found, strict=True):
                last[i] = token
            count += 1
        return sum(n for _, n in requests)

    return run


LLAMA_DRAFTS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4")
"""Its own sizes, 12 and 48, hardly ever match in a short text."""


def llama_server(model: str, dtype: str, threads: int, *drafts: str) -> Run:
    """llama.cpp's own server; requests beyond its slots wait there. drafts: arguments of its speculation."""
    import socket
    from concurrent.futures import ThreadPoolExecutor
    from http.client import HTTPConnection

    slots = 32  # each has a part of the KV cache to itself
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("llama-server")
    arguments = {"-m": model, "-t": threads, "-tb": threads, "-np": slots, "-c": CACHE_TOKENS, "--port": port}
    server = subprocess.Popen([str(program), *(str(part) for pair in arguments.items() for part in pair), *drafts])
    SERVERS.append(server)

    def ask(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", port)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ready() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        try:
            return ask("GET", "/health")[0] == 200
        except ConnectionRefusedError:
            return False

    def complete(request: Request) -> int:
        prompt, n = request
        body = {"prompt": prompt, "n_predict": n, "ignore_eos": True, "temperature": 0, "samplers": ["temperature"]}
        status, answer = ask("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {answer}")
        return int(answer["tokens_predicted"])

    def run(requests: Sequence[Request]) -> int:
        with ThreadPoolExecutor(len(requests)) as pool:
            return sum(pool.map(complete, requests))

    while not ready():
        time.sleep(0.01)
    return run


def transformers_generate(model: str, dtype: str, threads: int) -> Run:
    """Batches of 16 of similar output length, padded on the left; only tokens that were asked for count."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def run(requests: Sequence[Request]) -> int:
        ordered = sorted(requests, key=lambda r: r[1])
        for start in range(0, len(ordered), 16):
            batch = ordered[start : start + 16]
            longest, new = max(len(p) for p, _ in batch), max(n for _, n in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, (prompt, _) in enumerate(batch):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            decoder.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return sum(n for _, n in requests)

    return run


def transformers_continuous(model: str, dtype: str, threads: int) -> Run:
    """One manager for all cases. Left to itself its cache would take nine tenths of the memory."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    page = 32
    limits = ContinuousBatchingConfig(
        page_size=page, num_blocks=CACHE_TOKENS // page, max_batch_tokens=2048, max_requests_per_batch=MAX_SEQS
    )
    manager = decoder.init_continuous_batching(greedy, limits)
    manager.start()

    def run(requests: Sequence[Request]) -> int:
        for prompt, n in requests:
            manager.add_request(prompt, max_new_tokens=n)
        tokens = finished = 0
        while finished < len(requests):
            answer = manager.get_result(timeout=1)
            if answer is None and not manager.is_running():
                raise RuntimeError("the manager of transformers has ended")
            if answer is not None and answer.is_finished():
                tokens, finished = tokens + len(answer.generated_tokens), finished + 1
        return tokens

    return run


PEERS: dict[str, Callable[[str, str, int], Run]] = {
    "minivllm": minivllm,
    "minivllm-uncached": partial(minivllm, prefix_caching=False),
    "minivllm-ngram": partial(minivllm, drafts=DRAFTS),
    # it would know the answers of earlier rounds, which are much the same
    "minivllm-suffix": partial(
        minivllm,
        drafts={"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0},
    ),
    "vllm-cpu": vllm_cpu,
    "vllm-cpu-ngram": partial(vllm_cpu, drafts=DRAFTS),
    "llama-cpp-python": llama_cpp_python,
    "llama-batch": llama_batch,
    "llama-server": llama_server,
    "llama-server-ngram": lambda *about: llama_server(*about, *LLAMA_DRAFTS),
    "transformers": transformers_generate,
    "transformers-cb": transformers_continuous,
}


def peak_mb() -> float:
    """Most memory that this process has held, or the server that has answered for it, in MB."""
    import resource

    who = resource.RUSAGE_CHILDREN if SERVERS else resource.RUSAGE_SELF
    peak = resource.getrusage(who).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def main() -> None:
    peer, model, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not reach the runner
    try:
        run = PEERS[peer](model, dtype, int(threads))
        run([(list(range(100, 164)), 1)])
        print(json.dumps({"first_token": True}), file=answers, flush=True)
        for line in sys.stdin:
            requests = [(prompt, n) for prompt, n in json.loads(line)["requests"]]
            start = time.perf_counter()
            tokens = run(requests)
            print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), file=answers, flush=True)
    finally:
        for server in SERVERS:
            server.kill()
            server.wait()
    print(json.dumps({"peak_mb": peak_mb()}), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
