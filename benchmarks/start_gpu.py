"""How long until the first token of a new process on a GPU? Random weights in Qwen3-0.6B's shape.

    python benchmarks/start_gpu.py [--rounds 3] [--output FOLDER]

A process imports minivllm, builds an engine and generates a token. A cold process finds no kernel compiled, neither by us nor
by the driver; a warm one finds all. Printed are seconds since the process began, as medians of the rounds, and then the profile
of one more warm process. The first process of all is not counted: it writes the bytecode of all modules, which an installed
package already has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import json, sys, time
folder, began, device, profiled = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4] == "profiled"
import torch
marks = {"torch": time.time() - began}
from minivllm import LLM, SamplingParams
marks["imports"] = time.time() - began
import cProfile, contextlib, pstats
profile = cProfile.Profile()
with profile if profiled else contextlib.nullcontext():
    how = dict(load_format="dummy", dtype="bfloat16", device=device, max_model_len=2048)
    llm = LLM(folder, **how, **(dict(gpu_memory_utilization=0.6) if device == "cuda" else dict(num_gpu_blocks=256)))
    marks["built"] = time.time() - began
    for name, tokens in ("first token", 1), ("8 more", 8):
        llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
        marks[name] = time.time() - began
if profiled:
    pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70).sort_stats("tottime").print_stats(25)
print(json.dumps(marks))
llm.close()
"""


def start(folder: Path, cache: Path, device: str, profiled: bool = False) -> dict[str, float]:
    """Seconds from the start of a process until it has imported, built and answered. Its caches lie in the folder `cache`."""
    places = {"MINIVLLM_CACHE": str(cache / "minivllm"), "CUDA_CACHE_PATH": str(cache / "driver")}
    places |= {"PYTHONPYCACHEPREFIX": str(cache.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", CHILD, str(folder), str(time.time()), device, "profiled" if profiled else "plain"]
    done = subprocess.run(  # noqa: PLW1510 - the reason is printed below
        command,
        env=os.environ | places,
        stdout=subprocess.PIPE,
        stderr=None if profiled else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the process failed: {(done.stderr or '')[-2000:]}")
    marks = json.loads(done.stdout.splitlines()[-1])
    return {**marks, "kernels": len(list((cache / "minivllm" / "kernels").glob("*.ptx")))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch
    from engine_gpu import model_folder

    rounds: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model").mkdir()
        folder = model_folder(Path(name) / "model")
        start(folder, Path(name) / "first", args.device)
        for number in range(args.rounds):
            for kind, found in rounds.items():
                found.append(start(folder, Path(name) / f"cache{number}", args.device))
                print(kind, {mark: round(seconds, 2) for mark, seconds in found[-1].items()}, flush=True)
        start(folder, Path(name) / "cache0", args.device, profiled=True)
    medians = {
        kind: {m: round(statistics.median(r[m] for r in found), 2) for m in found[0]} for kind, found in rounds.items()
    }
    print("medians", medians)
    if args.output:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        path = args.output / f"start-{name.lower().replace(' ', '-')}.json"
        about = {
            "machine": name,
            "cores": len(os.sched_getaffinity(0)),
            "model": "Qwen3-0.6B's shape",
            "seconds": medians,
        }
        path.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
