"""kill -9 of each kind of process of an engine: waiters get an error, and no process, shared memory or folder is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import LOOPBACK, listening
from tiny_models import tiny_model_path

from minivllm.core import ray_cluster
from minivllm.core.ray_cluster import start_guard

__all__ = ["tiny_model_path"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVE = """
import asyncio, json, os, sys
from minivllm.core import ray_cluster
from minivllm.core.config import EngineArgs
from minivllm.engine.async_llm import AsyncLLM, EngineDeadError
from minivllm.sampling.params import SamplingParams
path, backend, place, transfer = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

async def ask(engine, name):
    try:
        while True:
            async for _ in engine.generate("abcd", params):
                pass
    except EngineDeadError as error:
        return str(error)

async def main():
    args = EngineArgs(model=path, dtype="float32", device="cpu", num_gpu_blocks=60, max_model_len=128,
                      attention_backend="sdpa", distributed_executor_backend=backend, tensor_parallel_size=1 if backend == "uni" else 2,
                      kv_transfer_config=json.loads(transfer))
    engine = AsyncLLM.from_engine_args(args, engine_in=place)
    asking = [asyncio.create_task(ask(engine, i)) for i in range(4)]
    await asyncio.sleep(0.5)
    found = dict(ray_cluster._Connection.vital)
    if place == "thread":
        workers = engine.llm_engine.core.executor.workers
        found["worker"] = workers.pids[1] if backend == "ray" else workers.processes[1].pid
    else:
        found["core"] = engine.llm_engine.core.process.pid
    if ray_cluster._Connection.guard is not None:
        found["guard"] = ray_cluster._Connection.guard.pid
    print(json.dumps([found | {"front": os.getpid()}, ray_cluster.cluster_folder()]), flush=True)
    print(json.dumps(await asyncio.gather(*asking)), flush=True)
    engine.shutdown()

asyncio.run(main())
"""
DEATHS = {  # who is killed: (executor, where the engine is, what waiters hear)
    "front of ranks": ("mp", "process", None),
    "core": ("mp", "process", "the engine's process was killed by SIGKILL"),
    "core with stores": ("mp", "process", "the engine's process was killed by SIGKILL"),
    "core with one store": ("uni", "process", "the engine's process was killed by SIGKILL"),
    "rank": ("mp", "process", "worker 1 of 2 (process {}) was killed by SIGKILL"),
    "front": ("ray", "thread", None),
    "worker": ("ray", "thread", "worker 1 of 2 (process {}) has died; Ray says"),
    "raylet": ("ray", "thread", "Ray's raylet (process {}) has ended"),
    "gcs_server": ("ray", "thread", "Ray's gcs_server (process {}) has ended"),
    "guard": ("ray", "thread", None),
}


def wait_until(condition, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def shared_memory(pids) -> set[str]:
    """Files in /dev/shm that these processes have open or mapped."""
    found = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            found |= {link for link in links if link.startswith("/dev/shm/")}
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
        except OSError:
            pass
    return {name for name in found if not name.endswith(" (deleted)")}


def below(pid: int, folder: str | None) -> set[psutil.Process]:
    """Processes that this one has started, also those whose parent has ended."""
    found = set(psutil.Process(pid).children(recursive=True))
    for link in Path("/proc").glob("[0-9]*/fd/*") if folder else ():
        try:
            if os.readlink(link).startswith(folder):
                found.add(psutil.Process(int(link.parts[2])))
        except (OSError, psutil.Error):
            pass
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", [pytest.param(v, marks=[pytest.mark.long] if DEATHS[v][0] == "ray" else []) for v in DEATHS]
)
def test_after_a_kill_nothing_is_left(victim, tiny_model_path, tmp_path):
    backend, place, said = DEATHS[victim]
    if backend == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")
    env = dict(os.environ, OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", TMPDIR=str(tmp_path))
    env.pop("RAY_ADDRESS", None)
    stores, transfer = tmp_path / "stores", None
    if "store" in victim:  # each rank keeps blocks in memory that has a name there
        extra = {"shared_storage_path": str(stores), "num_blocks": 8}
        transfer = {"kv_connector": "PeerMemoryConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    command = [sys.executable, "-c", SERVE, str(tiny_model_path("llama")), backend, place, json.dumps(transfer)]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert front.stdout is not None
    pids, folder = json.loads(front.stdout.readline())
    others = below(front.pid, folder)
    all_pids = [front.pid, *(process.pid for process in others)]
    assert len(all_pids) > (1 if backend == "uni" else 3) and listening(all_pids) <= LOOPBACK
    if victim == "rank":
        pids["rank"] = second_rank(others)
    memory = shared_memory(all_pids)
    assert len(list(stores.glob("store-*"))) == (0 if transfer is None else 1 if backend == "uni" else 2)
    os.kill(pids[victim.split()[0]], signal.SIGKILL)
    if victim == "guard":  # another one takes its place, and does its work
        wait_until(
            lambda: any(
                folder in " ".join(p.cmdline())
                for p in psutil.Process(front.pid).children()
                if runs(p) and p.pid != pids["guard"] and "-I" in p.cmdline()
            )
        )
        others |= below(front.pid, folder)
        front.kill()
    if said is not None:
        errors = next(json.loads(line) for line in front.stdout if line.startswith('["'))  # Ray prints there, too
        assert len(errors) == 4 and all(said.format(pids[victim.split()[0]]) in error for error in errors), errors
    assert front.wait(60) == (-signal.SIGKILL if said is None else 0)
    wait_until(lambda: not any(map(runs, others)))
    wait_until(lambda: not (folder and Path(folder).exists()))
    if transfer:
        stores.rmdir()  # it is the user's, and empty
    assert not any(map(os.path.exists, memory)) and not list(tmp_path.iterdir())


def second_rank(processes) -> int:
    """The process of rank 1, by its command line: `start_module` gives the number last but one."""
    (found,) = [
        p.pid for p in processes if "minivllm.runtime.executors.worker" in p.cmdline() and p.cmdline()[-2] == "1"
    ]
    return found


@pytest.mark.parametrize("message", [b"", b"all is well"])
def test_a_guard_that_was_killed_is_replaced_at_the_end(tmp_path, monkeypatch, message):
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "log").touch()
    guard = start_guard(str(folder))
    monkeypatch.setattr(ray_cluster._Connection, "guard", guard)
    monkeypatch.setattr(ray_cluster._Connection, "folder", str(folder))
    guard.kill()
    guard.wait()
    ray_cluster._end_guard(message)
    assert not folder.exists() and ray_cluster.cluster_folder() is None
