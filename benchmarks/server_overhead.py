"""What does HTTP cost? Time per token of 32 streams through the server, over the same streams from AsyncLLM in this process.

    python benchmarks/server_overhead.py [--streams 32] [--tokens 128] [--rounds 3] [--model smollm2]

The rounds of the three ways are taken in turn, and the best of each counts. Server, engine and clients share the machine: the clients' own
work is in the figure of HTTP, so they parse nothing but the count of tokens at the end.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from minivllm import AsyncLLM, EngineArgs, SamplingParams
from minivllm.sampling.params import RequestOutputKind
from minivllm.serving.client import get_json, request

USAGE = re.compile(rb'"completion_tokens":(\d+)')
SETTINGS = {"num_gpu_blocks": 1024, "max_model_len": 512}


def prompts(streams: int) -> list[list[int]]:
    return [[1000 + 40 * i + k for k in range(16)] for i in range(streams)]


async def through_async_llm(llm: AsyncLLM, streams: int, tokens: int) -> int:
    """Tokens received."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def one(prompt: list[int]) -> int:
        return sum([len(output.outputs[0].token_ids) async for output in llm.generate(prompt, params)])

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts(streams))))


async def through_http(url: str, streams: int, tokens: int) -> int:
    async def one(prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        found = None
        async with request("POST", url + "/v1/completions", body) as response:
            async for piece in response.aiter_bytes():
                found = USAGE.search(piece) or found
        return int(found[1]) if found else 0

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts(streams))))


def start_server(model: str, *more: str) -> tuple["subprocess.Popen[str]", str]:
    """A server of this package in a process of its own, and its address."""
    flags = [word for name, value in SETTINGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, "-P", "-m", "minivllm.cli", "serve", model, "--port", "0", *flags, *more]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = next((line for line in server.stderr if " on http" in line), None)
    if line is None:
        raise RuntimeError(f"the server has not started: status {server.wait()}")
    threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()  # a full pipe would stop it
    url = line.strip().rpartition(" on ")[2]
    for _ in range(400):
        try:
            asyncio.run(get_json(url + "/v1/models"))
            break
        except OSError:
            time.sleep(0.05)
    return server, url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    for flag, default in (("--streams", 32), ("--tokens", 128), ("--rounds", 3)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    count = args.streams * args.tokens
    here = AsyncLLM.from_engine_args(EngineArgs(model=args.model, **SETTINGS))
    apart = AsyncLLM.from_engine_args(EngineArgs(model=args.model, **SETTINGS), engine_in="process")
    server, url = start_server(args.model, "--log-level", "info")
    ways: dict[str, Callable[[], Awaitable[int]]] = {
        "AsyncLLM, engine in a thread": lambda: through_async_llm(here, args.streams, args.tokens),
        "AsyncLLM, engine in a process": lambda: through_async_llm(apart, args.streams, args.tokens),
        "HTTP, server as started by `serve`": lambda: through_http(url, args.streams, args.tokens),
    }

    async def measure(way: Callable[[], Awaitable[int]]) -> float:
        begin = time.perf_counter()
        got = await way()
        assert got == count, f"{got} tokens came, {count} were asked for"
        return (time.perf_counter() - begin) / count

    best: dict[str, Any] = {}
    try:
        for turn in range(args.rounds + 1):  # the first one warms up
            for name, way in ways.items():
                seconds = asyncio.run(measure(way))
                if turn:
                    best[name] = min(seconds, best.get(name, seconds))
    finally:
        server.send_signal(signal.SIGTERM)
        for llm in (here, apart):
            llm.shutdown()
        server.wait(30)
    *inside, http = best.values()
    print(f"{args.streams} streams of {args.tokens} tokens, {args.model}, best of {args.rounds}")
    for name, seconds in best.items():
        print(f"{name:36} {seconds * 1e6:8.0f} us a token")
    print("HTTP over an engine in a thread, in a process:", *(f"{http / seconds - 1:+.1%}" for seconds in inside))


if __name__ == "__main__":
    main()
