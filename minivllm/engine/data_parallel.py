"""Several engine cores behind a front that looks like one."""

# Generated from nbs/engine/data_parallel.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import os
import selectors
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from minivllm.core.config import EngineArgs
from minivllm.core.output import EngineCoreOutput
from minivllm.core.ray_cluster import cluster_environment, join_cluster, leave_cluster
from minivllm.core.request import Request
from minivllm.core.routing import ROUTERS, PrefixAware, Replica, Router, route
from minivllm.core.scheduler import WallClock
from minivllm.engine.core import next_version, no_step
from minivllm.engine.core_process import EngineCoreClient, RemoteCore
from minivllm.runtime.executors.mp import share_of_cores
from minivllm.runtime.weights import Weights, as_path


def replica_args(args: EngineArgs, rank: int) -> EngineArgs:
    """The settings of one replica.

    Raises:
        ValueError: KV events on an address that has no port to add to.
    """
    changes: dict[str, Any] = {"data_parallel_size": 1}
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        if (address := getattr(args, name)) is not None:
            parts = urlsplit(address)
            if parts.scheme != "tcp" or parts.port is None:
                raise ValueError(
                    f"{name}={address!r}: with data_parallel_size it must be tcp://HOST:PORT; replica r adds r to the port"
                )
            changes[name] = address.removesuffix(str(parts.port)) + str(parts.port + rank)
    return replace(args, **changes)


def replica_environment(args: EngineArgs, rank: int) -> dict[str, str]:
    """Variables that a replica's environment has in addition to this one's: a share of the cores, and its own GPUs."""
    added = share_of_cores(args.data_parallel_size)
    if args.device != "cpu":
        world = args.world_size
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given else [str(i) for i in range(world * args.data_parallel_size)]
        added["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * world : (rank + 1) * world])
    return added


class DataParallelCore(RemoteCore):
    """Several engine cores, with the methods of one. See `EngineCoreClient`, which they are.

    Args:
        cores: the replicas.
        router: chooses one for each request.

    Attributes:
        decisions: the router's last choices, as events (see `core.routing.route`). In a recording each is in the trace of the replica that was chosen.
    """

    on_ray = False  # whether it has joined a Ray cluster, for all replicas

    def __init__(self, cores: Sequence[EngineCoreClient], router: Router) -> None:
        self.cores, self.router = list(cores), router
        self.replicas = [Replica(i) for i in range(len(self.cores))]
        self.config, self.clock = self.cores[0].config, self.cores[0].clock
        self.generation_config = self.cores[0].generation_config
        self.decisions: deque[Any] = deque(maxlen=10_000)
        self._records = False
        self._home: dict[str, tuple[Replica, int]] = {}
        self._generated = [0] * len(self.cores)  # tokens
        self._poll = selectors.DefaultSelector()
        for core in self.cores:
            self._poll.register(core, selectors.EVENT_READ)

    @classmethod
    def start(cls, args: EngineArgs, router: Router | None = None, **options: Any) -> "DataParallelCore":
        """Start `args.data_parallel_size` replicas, all at once. options: see `EngineCoreClient`.

        Raises:
            ValueError, ...: what one of them raises; the others are ended then.
        """
        ranks, shared = range(args.data_parallel_size), {}
        if on_ray := args.executor == "ray":  # one cluster for all, not one each
            join_cluster()
            shared = cluster_environment()

        clock = WallClock()  # one for all, so that their traces can be laid side by side

        def one(rank: int) -> EngineCoreClient:
            environment = replica_environment(args, rank) | shared
            return EngineCoreClient(replica_args(args, rank), environment=environment, clock=clock, **options)

        with ThreadPoolExecutor(len(ranks)) as pool:
            started = [pool.submit(one, rank) for rank in ranks]
        errors = [future.exception() for future in started]
        if (error := next((e for e in errors if e is not None), None)) is not None:
            for future in started:
                if future.exception() is None:
                    future.result().shutdown()
            if on_ray:
                leave_cluster()
            raise error
        if router is None:
            kind = ROUTERS[args.data_parallel_router]
            router = PrefixAware(args.block_size) if kind is PrefixAware else kind()
        front = cls([future.result() for future in started], router)
        front.on_ray = on_ray
        return front

    def add_request(self, request: Request) -> None:
        """Queue a request at the replica that the router chooses. Raises ValueError as `EngineCoreClient.add_request`, or for a number that no replica has."""
        decision: Any = route(self.router, request, self.replicas, self.clock.now())
        replica, core = self.replicas[decision.replica], self.cores[decision.replica]
        if self._records:
            request.route = tuple(decision)
        core.add_request(request)
        self.decisions.append(decision)
        self._home[request.request_id] = replica, request.num_prompt_tokens
        replica.num_requests += 1
        replica.num_tokens += request.num_prompt_tokens

    def engine_of(self, request_id: str) -> int:
        """The number of the replica that has a request; 0 if the request has ended or is unknown."""
        return self._home[request_id][0].index if request_id in self._home else 0

    def engine_stats(self) -> list[dict[str, float]]:
        """`get_stats` of each replica, with the tokens that it has generated (`generation_tokens`)."""
        return [
            core.get_stats() | {"generation_tokens": n} for core, n in zip(self.cores, self._generated, strict=True)
        ]

    def _forget(self, request_id: str) -> Replica | None:
        replica, tokens = self._home.pop(request_id, (None, 0))
        if replica is not None:
            replica.num_requests -= 1
            replica.num_tokens -= tokens
        return replica

    def abort(self, request_ids: Any) -> list[str]:
        """See `EngineCore.abort`."""
        ended: list[str] = []
        for request_id in list(request_ids):
            if (replica := self._forget(request_id)) is not None:
                ended += self.cores[replica.index].abort([request_id])
        return ended

    def fileno(self) -> int:
        """It becomes readable when a replica has outputs."""
        return self._poll.fileno()

    def has_requests(self) -> bool:
        """Whether `step` has something to deliver without waiting."""
        return any(core.has_requests() for core in self.cores)

    def step(self) -> list[EngineCoreOutput]:
        """The outputs that have come; waits for some.

        Raises:
            EngineProcessError: a replica has ended. RuntimeError: replicas sleep, and no other has requests.
        """
        ready = [core for core in self.cores if core.has_requests()]
        if not ready:
            asleep = [core.asleep for core in self.cores if core.asleep]
            if asleep and not any(r.num_requests and not self.cores[r.index].asleep for r in self.replicas):
                raise no_step(asleep[0])
            self._poll.select()
            ready = [core for core in self.cores if core.has_requests()]
        outputs = []
        for i in [i for i, core in enumerate(self.cores) if core in ready]:
            found = self.cores[i].step()
            self._generated[i] += sum(len(output.new_token_ids) for output in found)
            outputs += found
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return outputs

    def get_stats(self) -> dict[str, float]:
        """See `EngineCore.get_stats`: sums over all replicas, for shares the mean, for the version of the weights the smallest."""
        stats = [core.get_stats() for core in self.cores]
        names = dict.fromkeys(name for one in stats for name in one)
        count = {name: len(stats) if name.endswith("_perc") else 1 for name in names}
        found = {name: sum(one.get(name, 0) for one in stats) / count[name] for name in names}
        if "weight_version" in found:
            found["weight_version"] = min(one.get("weight_version", 0) for one in stats)
        return found

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `EngineCore.reset_prefix_cache`. Returns whether all did."""
        done = [core.reset_prefix_cache(reset_running_requests) for core in self.cores]
        return all(done)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `EngineCore.sleep`; all replicas do, or none: if one fails, those that sleep already wake up.

        What they dropped at level 2 must be loaded again by `load_weights`, as the engine then says.
        """
        for core in self.cores:
            core.check_sleep(level, mode)
        done = []
        try:
            for core in self.cores:
                core.sleep(level, mode)
                done.append(core)
        except BaseException:
            for core in done:
                core.wake_up()
            raise

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `EngineCore.wake_up`; all replicas do."""
        for core in self.cores:
            core.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether one of them sleeps."""
        return any(core.asleep for core in self.cores)

    def load_weights(self, weights: Weights = None, version: int | None = None, mode: str = "keep") -> int:
        """See `EngineCore.load_weights`; one replica after the other, when all have said that they can.

        If one fails after all, those before it have the new weights. `get_stats` has the smallest version, until a call succeeds.
        """
        version = next_version(version, int(max(core.get_stats().get("weight_version", 0) for core in self.cores)))
        with as_path(weights) as path:
            for core in self.cores:
                core.check_load_weights(path, mode)
            for core in self.cores:
                core.load_weights(path, version, mode)
        return version

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """See `EngineCore.collective_rpc`; the results of all replicas, one after the other."""
        return [result for core in self.cores for result in core.collective_rpc(method, *args, **kwargs)]

    def record_to(self, path: str) -> None:
        """See `EngineCoreClient.record_to`: a file for each replica, with its number before the suffix."""
        stem, suffix = os.path.splitext(path)
        self._records = True
        for i, core in enumerate(self.cores):
            core.record_to(f"{stem}-{i}{suffix}")

    def prefetch_lora(self, key: str, path: str, digest: str) -> None:
        """See `EngineCore.prefetch_lora`."""
        for core in self.cores:
            core.prefetch_lora(key, path, digest)

    def is_lora_read(self, key: str) -> bool:
        """See `EngineCore.is_lora_read`; by all."""
        return all(core.is_lora_read(key) for core in self.cores)

    def pin_lora(self, key: str) -> None:
        """See `EngineCore.pin_lora`."""
        for core in self.cores:
            core.pin_lora(key)

    def unpin_lora(self, key: str) -> None:
        """See `EngineCore.unpin_lora`."""
        for core in self.cores:
            core.unpin_lora(key)

    def shutdown(self) -> None:
        """End all replicas. Twice is no error."""
        with ThreadPoolExecutor(len(self.cores)) as pool:
            list(pool.map(lambda core: core.shutdown(), self.cores))
        self._poll.close()
        if self.on_ray:
            leave_cluster()
            self.on_ray = False
        if self.grammar is not None:
            self.grammar.shutdown()
