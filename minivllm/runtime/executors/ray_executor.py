"""Executor with a Ray actor for each rank."""

# Generated from nbs/runtime/executors/ray_executor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import logging
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from minivllm.core.plugins import load_plugins
from minivllm.core.ray_cluster import (
    cluster_death,
    cluster_folder,
    import_ray,
    is_local_cluster,
    join_cluster,
    leave_cluster,
    on_cluster_death,
)
from minivllm.runtime.executor import EnginePlan
from minivllm.runtime.executors.mp import Calls, MultiprocExecutor, WorkerError, share_of_cores
from minivllm.runtime.executors.worker import Launch, Worker, pack_answer

logger = logging.getLogger("minivllm.runtime")


class RankActor:
    """A rank in an actor's process. Only `call` and `start` run in the thread that computes."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._later: dict[int, Future[Any]] = {}
        self._folder = ""

    def where(self, node_ip: str, parent: str | None) -> tuple[int, str, int, int]:
        """Its process id, a new folder in `parent`, a port that is free on `node_ip`, and which of the GPUs that it sees is its own."""
        mine, seen = import_ray().get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = seen.split(",").index(str(mine[0])) if mine and seen else int(mine[0]) if mine else 0
        self._folder = tempfile.mkdtemp(prefix="minivllm-", dir=parent)
        with socket.socket() as sock:
            sock.bind((node_ip, 0))
            return os.getpid(), self._folder, sock.getsockname()[1], gpu

    def start(self, launch: Launch) -> bytes:
        """Join the other ranks."""
        how = f"%(asctime)s %(levelname)s %(name)s rank {launch.rank}: %(message)s"
        logging.basicConfig(level=launch.log_level, format=how)
        try:
            load_plugins()
            self.worker = Worker(launch)
        except Exception as error:  # noqa: BLE001 - said by the engine
            return pack_answer(0, launch.rank, error, failed=True)
        return pack_answer(0, launch.rank, None)

    def call(self, number: int, message: bytes, answers: bool) -> bytes | int | None:
        """What a call returns, or its number if that comes `later`; None if no caller waits for it."""
        worker = self.worker
        assert worker is not None
        try:
            result = worker.call(*pickle.loads(message))
        except Exception as error:  # noqa: BLE001 - the engine decides what follows from it
            return pack_answer(number, worker.rank, error, failed=True)
        if isinstance(result, Future):
            self._later[number] = result
            return number
        return pack_answer(number, worker.rank, result) if answers else None

    def later(self, number: int) -> bytes:
        """Wait for what a call has begun."""
        done, worker = self._later.pop(number), self.worker
        assert worker is not None
        error = done.exception()
        return pack_answer(number, worker.rank, done.result() if error is None else error, error is not None)

    def stay(self) -> None:
        """Never returns: fails when the process ends."""
        threading.Event().wait()

    def stacks(self) -> str:
        """Where its threads are."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    def end(self) -> None:
        """Leave the other ranks."""
        if self.worker is not None:
            self.worker.close()

    def clean(self) -> None:
        """Remove its folder, which may be on another machine than the engine. No rank needs it any more."""
        shutil.rmtree(self._folder, ignore_errors=True)


_SIDE = "side"  # threads of an actor for what must not wait behind a step


class RayWorkers(Calls):
    """Actors that answer calls.

    Args:
        size: number of ranks.
        device: `cpu` or `cuda`.

    Attributes:
        pids: process ids of the actors.

    Raises:
        ImportError, ConnectionError: see `join_cluster`. ValueError: the cluster has no room. Exception: what a rank raises while it starts.
    """

    def __init__(self, size: int, device: str) -> None:
        super().__init__(size)
        self._ray = join_cluster()
        self.actors: list[Any] = []
        self.pids: list[int] = []
        self._group: Any = None
        self._folders: list[str] = []
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="minivllm-ray", daemon=True)
        self._thread.start()
        on_cluster_death(self._lose_cluster)
        try:
            ips = self._place(device)
            self._launch(device, ips)
            self._calls[0].future.result()
        except BaseException:
            self.close(0.0)
            raise

    def _lose_cluster(self, death: str) -> None:
        self._fail(WorkerError(death))

    def _place(self, device: str) -> list[str]:
        """Make an actor for each rank; the addresses of their machines."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, size = self._ray, self.size
        cpus = 0.01 if is_local_cluster() else min(1.0, int(100 * ray.cluster_resources().get("CPU", 0) / size) / 100)
        bundle = {"GPU": 1.0} if device == "cuda" else {"CPU": max(0.01, cpus)}
        self._group = placement_group([bundle] * size, strategy="PACK")
        if not self._group.wait(60):
            raise ValueError(
                f"{size} ranks need {bundle} each of the Ray cluster, which has {ray.available_resources()} free"
            )
        threads = share_of_cores(size)
        threads["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # ranks read each other's memory
        for rank in range(size):
            make = ray.remote(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
                concurrency_groups={_SIDE: 4},
                runtime_env={"env_vars": threads},
            )
            self.actors.append(make(RankActor).remote())
        table = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [table[nodes[rank]] for rank in range(size)]

    def _launch(self, device: str, ips: list[str]) -> None:
        """Tell the ranks where they meet, and have them start."""
        ray, parent = self._ray, cluster_folder()
        asked = [actor.where.remote(ip, parent) for actor, ip in zip(self.actors, ips, strict=True)]
        self.pids, self._folders, ports, gpus = map(list, zip(*ray.get(asked), strict=True))
        address = None if len(set(ips)) == 1 else f"tcp://{ips[0]}:{ports[0]}"
        level = logging.getLogger().getEffectiveLevel()
        for rank, actor in enumerate(self.actors):
            self._follow(rank, actor.stay.options(concurrency_group=_SIDE).remote())
            launch = Launch(rank, self.size, device, self._folders[0], level, gpus[rank], address)
            self._follow(rank, actor.start.remote(launch))

    def _follow(self, rank: int, ref: Any) -> None:
        """Have what a call returns, or how it fails, put into the queue."""
        ref.future().add_done_callback(lambda done: self._answers.put((rank, done)))

    def _listen(self) -> None:
        while True:
            rank, done = self._answers.get()
            if done is None:
                return
            if (error := done.exception()) is not None:
                self._fail(WorkerError(self._how_it_ended(rank, error)))
            elif type(answer := done.result()) is int:
                self._follow(rank, self.actors[rank].later.options(concurrency_group=_SIDE).remote(answer))
            elif answer is not None:
                self._take(*pickle.loads(answer))

    def _has_lost_one(self) -> bool:
        waiting, deadline = [], time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            try:
                rank, done = self._answers.get(timeout=left)
            except Empty:
                break
            if done is not None and (error := done.exception()) is not None:
                self._fail(WorkerError(self._how_it_ended(rank, error)))
                return True
            waiting.append((rank, done))
        for item in waiting:
            self._answers.put(item)
        return False

    def _how_it_ended(self, rank: int, error: BaseException) -> str:
        reason = str(error).strip().rpartition("\n")[2].strip()
        process = f" (process {self.pids[rank]})" if self.pids else ""
        return f"worker {rank} of {self.size}{process} has died; Ray says: {reason[:300]}"

    def _send(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: tuple[int, ...]
    ) -> None:
        message = pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)
        for rank, actor in enumerate(self.actors):
            self._follow(rank, actor.call.remote(number, message, rank in ranks))

    def _kill(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(Exception):  # it is gone already, or Ray is
                self._ray.kill(actor)

    def stacks(self, seconds: float = 2.0) -> str:
        asked = [actor.stacks.options(concurrency_group=_SIDE).remote() for actor in self.actors]
        ready, _ = self._ray.wait(asked, num_returns=self.size, timeout=seconds)

        def said(ref: Any) -> str:
            if ref not in ready:
                return "does not react: stopped"
            try:
                return str(self._ray.get(ref))
            except Exception as error:  # noqa: BLE001 - the others may have something to say
                return f"has ended: {type(error).__name__}"

        return "\n".join(
            f"worker {rank} of {self.size} (process {self.pids[rank]}):\n{said(ref)}" for rank, ref in enumerate(asked)
        )

    def close(self, seconds: float = 10.0) -> None:
        if self._closing:
            return
        if self.failure is None and seconds:
            self._ray.wait([actor.end.remote() for actor in self.actors], num_returns=self.size, timeout=seconds)
            cleaned = [actor.clean.options(concurrency_group=_SIDE).remote() for actor in self.actors]
            self._ray.wait(cleaned, num_returns=self.size, timeout=seconds)
        self._closing = True
        self._fail(RuntimeError("this engine was closed: its executor was shut down"))
        self._kill()
        if self._group is not None and not cluster_death():
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._answers.put((0, None))
        self._thread.join()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        leave_cluster()


class RayExecutor(MultiprocExecutor):
    """Runs the model in Ray actors, one for each rank. See `MultiprocExecutor`.

    Args:
        workers: actors that run no model now, to use instead of new ones; they stay when the executor is shut down.
    """

    def __init__(self, plan: EnginePlan, workers: RayWorkers | None = None) -> None:
        super().__init__(plan, workers or RayWorkers(plan.config.args.world_size, plan.config.device))
        self._own = workers is None
