"""Ray Serve deployment of the OpenAI-compatible server."""

# Generated from nbs/serving/ray_app.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from fastapi import FastAPI

from minivllm.core.config import EngineArgs
from minivllm.core.plugins import load_plugins
from minivllm.core.ray_cluster import cluster_folder, import_ray, is_local_cluster, join_cluster, leave_cluster
from minivllm.engine.async_llm import AsyncLLM
from minivllm.runtime.machine import choose_device
from minivllm.serving.app import create_app
from minivllm.serving.generation import ServerOptions

logger = logging.getLogger("minivllm.serving")
_DEPLOYMENT = {"name": "minivllm", "max_ongoing_requests": 10_000}  # the engine has its own queue


def _import_serve() -> Any:
    import_ray()
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError("this needs Ray Serve, which is not installed: pip install 'minivllm[scale]'") from error
    return serve


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


_TYPES = {f.name: _name(f.type) for f in (*fields(EngineArgs), *fields(ServerOptions))}
_TYPES |= {"num_replicas": "int | str", "deployment_config": "dict"}


def _value(name: str, given: Any) -> Any:
    """A text as a value of the field's type. Raises ValueError if it is none."""
    kinds = {kind.partition("[")[0] for kind in _TYPES.get(name, "str").split(" | ")}
    if not isinstance(given, str) or kinds <= {"str", "None"}:
        return None if given == "null" and "None" in kinds else given
    try:
        value = json.loads(given)
    except ValueError:
        value = given
    if type(value).__name__.removesuffix("Type") in kinds or ("float" in kinds and type(value) is int):
        return value
    if "str" in kinds:
        return given
    if "list" in kinds:
        return [given]
    raise ValueError(f"{name} must be of type {_TYPES[name]}, got {given!r}")


def split_arguments(args: Mapping[str, Any]) -> tuple[EngineArgs, ServerOptions, dict[str, Any]]:
    """What an engine, its server and Serve are told.

    Args:
        args: fields of `EngineArgs` and `ServerOptions`, `num_replicas`, and as `deployment_config` any option of `serve.deployment`.
            A text is read by the type of its field: numbers, switches and tables as JSON, a list as JSON or its only item.

    Raises:
        TypeError, ValueError: an unknown name, or what replicas cannot have.
    """
    given = {name: _value(name, value) for name, value in args.items()}
    deployment = _DEPLOYMENT | given.pop("deployment_config", {})
    if "num_replicas" in given:
        deployment["num_replicas"] = given.pop("num_replicas")
    options = {field.name: given.pop(field.name) for field in fields(ServerOptions) if field.name in given}
    key = os.environ.get("MINIVLLM_API_KEY") or os.environ.get("VLLM_API_KEY")
    if key and not options.get("api_key"):
        options["api_key"] = [key]
    engine = EngineArgs.from_kwargs(**given)
    if engine.data_parallel_size > 1:
        raise ValueError(f"data_parallel_size={engine.data_parallel_size}: under Ray Serve, replicas are num_replicas")
    if engine.executor not in ("uni", "mp"):
        raise ValueError(f"the ranks of a replica are processes of its machine, 'uni' or 'mp', not {engine.executor!r}")
    if options.get("trace"):
        raise ValueError("trace: all replicas would write the same file; use `record_to` on each engine")
    wanted = {"num_gpus": engine.world_size} if choose_device(engine.device) == "cuda" else {}
    deployment["ray_actor_options"] = wanted | deployment.get("ray_actor_options", {})
    return engine, ServerOptions(**options), deployment


def _keep_to_loopback() -> None:
    """On a cluster of this machine, have the port that a replica opens for other deployments on loopback, not on all interfaces."""
    from ray.serve._private import replica

    if not is_local_cluster():
        return
    if not hasattr(replica, "add_port_to_grpc_server"):
        logger.warning("this version of Ray Serve lets replicas listen on all interfaces")
        return
    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))


def build(args: Mapping[str, Any]) -> Any:
    """The application for `serve run minivllm.serving.ray_app:build name=value ...`, or `serve.run`. args: see `split_arguments`.

    Raises:
        ImportError: Ray Serve is not installed. TypeError, ValueError: see `split_arguments`.
    """
    serve = _import_serve()
    engine_args, options, deployment = split_arguments(args)

    def make_app() -> FastAPI:
        load_plugins()
        _keep_to_loopback()
        return create_app(AsyncLLM.from_engine_args(engine_args, engine_in="process", warm=True), options)

    class Replica:
        app: FastAPI

        def check_health(self) -> None:
            self.app.state.server.llm.check_health()

    return serve.deployment(serve.ingress(make_app)(Replica), **deployment).bind()


@contextmanager
def serving(args: Mapping[str, Any], host: str = "127.0.0.1", port: int = 8000) -> Iterator[str]:
    """Serve within a block, on the cluster of `RAY_ADDRESS` or on one of this machine that ends with the block. Gives the URL.

    Args:
        args: see `split_arguments`.
        host, port: what Serve's proxies listen on.
    """
    serve = _import_serve()
    join_cluster()
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(build(args), name="minivllm", route_prefix="/")
            yield f"http://{host}:{port}"
        finally:  # others may serve on a cluster that was there before
            serve.shutdown() if cluster_folder() else serve.delete("minivllm")
    finally:
        leave_cluster()
