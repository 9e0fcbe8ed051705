"""Many clients at once: is every answer right, does memory stay, is every block given back?

    python benchmarks/server_load.py [--clients 200] [--seconds 60] [--disconnect 0.3] [--model smollm2] [--record]

Two rounds of this many streaming clients, each asking again as soon as it has its answer; a share of the requests is left in the middle. Answers are
compared with those of the same requests alone, so the server runs in batch-invariant mode: otherwise a few answers in a hundred differ because a
matmul of many rows rounds differently, which could not be told from a crossed token. Other flags go to the server; the last one of a kind counts.
Prints what was found; the exit status is 1 if anything was wrong.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from server_overhead import start_server

from minivllm.core.trace import Trace
from minivllm.serving.client import ServerError, get_json, read_events, request

EXACT = ("--dtype", "float32", "--attention-backend", "numba_cpu_invariant")
"""Flags of a server whose answers do not depend on what else is in the batch, not even by rounding."""


@dataclass
class Found:
    """What a round met. ``wrong``: answers that differ from the answer alone. ``seconds``: until the last answer was there."""

    seconds: float = 0.0
    answers: int = 0
    left: int = 0
    tokens: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def bodies(count: int) -> list[dict[str, Any]]:
    """Different requests: greedy and seeded, short and long, with shared beginnings; tokens that the smallest vocabulary has."""
    made = []
    for i in range(count):
        prompt = [100 + k for k in range(16 * (i % 3))] + [(37 * i + k) % 250 for k in range(8 + i % 5)]
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
        made.append({"prompt": prompt, "max_tokens": 8 + 3 * (i % 7), "ignore_eos": True, "stream": True, **sampling})
    return made


async def ask(url: str, body: dict[str, Any], leave_after: int | None = None) -> str | None:
    """The text of the answer; None if the client left after this many events."""
    text = ""
    async with request("POST", url + "/v1/completions", body) as response:
        events = 0
        async for event in read_events(response.aiter_lines()):
            text += event["choices"][0]["text"]
            events += 1
            if events == leave_after:
                return None
    return text


async def run_round(
    url: str, expected: list[tuple[dict[str, Any], str]], clients: int, seconds: float, disconnect: float, seed: int
) -> Found:
    found, begun = Found(), time.monotonic()
    end = begun + seconds

    async def client(number: int) -> None:
        dice = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            body, alone = dice.choice(expected)
            leave = dice.randint(1, 6) if dice.random() < disconnect else None
            try:
                text = await ask(url, body, leave)
            except (OSError, ServerError, asyncio.IncompleteReadError) as error:
                found.errors[f"{type(error).__name__}: {error}"] += 1
                continue
            if text is None:
                found.left += 1
            else:
                found.answers += 1
                found.tokens += body["max_tokens"]
                found.wrong += text != alone

    await asyncio.gather(*(client(number) for number in range(clients)))
    found.seconds = time.monotonic() - begun
    return found


async def gauges(url: str) -> dict[str, float]:
    """Requests anywhere in the server, and the share of blocks in use."""
    async with request("GET", url + "/metrics") as response:
        lines = (await response.aread()).decode().splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found = {name: float(line.split()[-1]) for name in names for line in lines if line.startswith(name + "{")}
    return found | {"load": (await get_json(url + "/load"))["server_load"]}


async def rest(url: str, seconds: float = 20) -> dict[str, float]:
    """The gauges when all is quiet, or after this many seconds."""
    end = time.monotonic() + seconds
    while any((now := await gauges(url)).values()) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return now


def run(
    model: str, clients: int, seconds: float, disconnect: float, *flags: str, requests: int = 24, traced: bool = False
) -> dict[str, Any]:
    """Load a server of its own, started with ``flags``. Returns what was found; ``problems`` is empty if all is well.

    ``traced``: record the run and check the trace; the engine keeps its events in memory, so memory is judged without.
    """
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.parquet"
        server, url = start_server(model, *(["--trace", str(trace)] if traced else []), *flags)
        try:
            program = psutil.Process(server.pid)
            rounds, memory, quiet = asyncio.run(
                two_rounds(url, [program, *program.children()], clients, seconds, disconnect, requests)
            )
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(120)
        grown = [after - before for before, after in zip(*memory, strict=True)]
        for number, found in enumerate(rounds, 1):
            if found.errors or found.wrong or not found.answers:
                errors = dict(found.errors.most_common(3))
                problems.append(f"round {number}: {found.wrong} wrong answers, errors {errors}")
        if any(quiet.values()):
            problems.append(f"not at rest: {quiet}")
        if status != 0:
            problems.append(f"exit status {status}")
        steps = check_trace(trace, problems) if traced else None
        if not traced and max(grown) > 32 << 20:
            problems.append(f"memory has grown by {[g >> 20 for g in grown]} MiB in the second round")
        return {"rounds": rounds, "grown": grown, "steps": steps, "quiet": quiet, "problems": problems}


async def two_rounds(
    url: str, processes: list[psutil.Process], clients: int, seconds: float, disconnect: float, requests: int
) -> tuple[list[Found], list[list[int]], dict[str, float]]:
    """What each round met, the bytes of each process after it, and the gauges at the end."""
    alone = [(body, await ask(url, body) or "") for body in bodies(requests)]
    rounds, memory = [], []
    for number in range(2):
        rounds.append(await run_round(url, alone, clients, seconds, disconnect, number))
        quiet = await rest(url)
        memory.append([process.memory_info().rss for process in processes])
    return rounds, memory, quiet


def check_trace(path: Path, problems: list[str]) -> int:
    """The number of steps of a trace. Notes blocks that are held at its end. Raises TraceError for a broken one."""
    trace = Trace.load(path)
    trace.check()
    held = sum(map(bool, trace.at(trace.num_steps - 1).ref_cnt[1:]))
    if held:
        problems.append(f"{held} blocks are still held at the end of the trace")
    return trace.num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--disconnect", type=float, default=0.3, help="share of the requests that are left in the middle"
    )
    parser.add_argument("--record", action="store_true", help="check the trace of the run, instead of memory")
    args, flags = parser.parse_known_args()
    found = run(args.model, args.clients, args.seconds, args.disconnect, *EXACT, *flags, traced=args.record)
    print(f"{args.clients} clients, two rounds of {args.seconds:.0f} s{', recorded' * args.record}")
    for number, one in enumerate(found["rounds"], 1):
        print(
            f"  round {number}: {one.answers} answers ({one.wrong} wrong), {one.left} left in the middle,"
            f" {sum(one.errors.values())} errors, {one.tokens / one.seconds:.0f} tokens/s"
        )
    if args.record:
        print(f"  the trace of {found['steps']} steps is sound")
    else:
        grown = ", ".join(
            f"{name} {bytes / 2**20:+.1f} MiB" for name, bytes in zip(("server", "engine"), found["grown"], strict=True)
        )
        print(f"  memory in the second round: {grown}")
    print(f"  at rest: {found['quiet']}")
    print("problems:", "; ".join(found["problems"]) or "none")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
