"""OpenAI-compatible FastAPI app, server options and `minivllm serve`."""

# Generated from nbs/serving/app.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import asyncio
import json
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib.metadata import version as installed_version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, Field
from starlette.middleware.cors import CORSMiddleware

from minivllm.engine.arguments import add_engine_arguments, engine_args_from, with_config
from minivllm.engine.async_llm import AsyncLLM
from minivllm.runtime.machine import freeze_gc_heap
from minivllm.serving.answers import tool_use
from minivllm.serving.chat import chat_router, render_request
from minivllm.serving.completions import completions_router
from minivllm.serving.embeddings import embeddings_router
from minivllm.serving.errors import ApiError, as_api_error, hide_paths, install_error_handlers
from minivllm.serving.generation import ServerOptions, ServerState, encode
from minivllm.serving.lora import lora_router, serve_adapters
from minivllm.serving.metrics import Metrics
from minivllm.serving.middleware import AccessLog, ApiKey, BodyLimit, JsonRoute, SiteCheck, http_protocol
from minivllm.serving.pooling import pooling_router
from minivllm.serving.protocol import DetokenizeRequest, TokenizeRequest
from minivllm.serving.responses import responses_router
from minivllm.viz.assets import document
from minivllm.viz.dashboard import Dashboard

__all__ = [
    "CollectiveRPC", "UpdateWeights", "create_app", "development_router", "listen", "main", "make_parser",
    "only_query", "options_from", "run_server", "server_config",
]  # fmt: skip

logger = logging.getLogger("minivllm.serving")


def create_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """The OpenAI-compatible app of a running engine, which it shuts down at its own end.

    ``app.state.server`` is the `ServerState` that its endpoints share.
    """
    options = options or ServerOptions()
    state = ServerState(llm, options)
    serve_adapters(state)
    metrics = Metrics(lambda: state.llm, state.model_names[0])
    state.observe = metrics.observe
    llm.observe(state.observe)
    hide_paths(
        {str(llm.config.model.path): "the model", str(llm.get_tokenizer().name_or_path): "the model"}
        | dict.fromkeys(
            (sys.prefix, sys.base_prefix, sys.modules["minivllm"].__path__[0], os.path.expanduser("~")), "..."
        )
    )
    app = FastAPI(title="minivllm", version=installed_version("minivllm"), lifespan=_lifespan(state, options.trace))
    app.state.server = state
    generating = (completions_router, chat_router, responses_router)
    endpoints = (*generating, embeddings_router, pooling_router, token_router, lora_router)
    for router in (*(make(state) for make in endpoints), operation_router(state, metrics)):
        app.include_router(router)
    if options.dashboard:
        app.include_router(dashboard_router(llm))
    if any(os.environ.get(name) == "1" for name in ("MINIVLLM_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")):
        app.include_router(development_router(state))
    install_error_handlers(app)
    _add_middleware(app, options)
    return app


def _add_middleware(app: FastAPI, options: ServerOptions) -> None:
    """Wrap the app. The last middleware added is the outermost."""
    origins = options.allowed_origins
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    if options.api_key:
        app.add_middleware(ApiKey, keys=options.api_key)
    app.add_middleware(SiteCheck, origins=origins, hosts=options.allowed_hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(AccessLog, as_json=options.log_json)


def _lifespan(state: ServerState, trace_file: str | None) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if trace_file is not None:
            await state.llm.record_to(trace_file)
        yield
        await asyncio.to_thread(state.llm.shutdown)

    return lifespan


def token_router(state: ServerState) -> APIRouter:
    """`/tokenize` and `/detokenize`, in vLLM's form."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, or of messages."""
        await state.find_model(body.model)
        state.check_model(body.model)
        try:
            if body.prompt is not None:
                tokens = await encode(state, body.prompt, body.add_special_tokens is not False)
            else:
                prompt = await state.llm.run_input(lambda: render_request(state, body, tool_use(body, state.parsers)))
                tokens = prompt["prompt_token_ids"]
        except Exception as error:
            raise as_api_error(error) from error
        tokenizer = state.llm.get_tokenizer()
        return {
            "count": len(tokens),
            "max_model_len": state.llm.config.scheduler.max_model_len,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        await state.find_model(body.model)
        state.check_model(body.model)
        limit = state.llm.config.model.vocab_size
        if max(body.tokens, default=0) >= limit:
            i = next(i for i, token in enumerate(body.tokens) if token >= limit)
            message = f"tokens[{i}] is {body.tokens[i]}; token ids of this model are 0..{limit - 1}"
            raise ApiError(400, message, param=f"tokens[{i}]")
        return {"prompt": await state.llm.run_input(lambda: state.llm.get_tokenizer().decode(body.tokens))}

    return router


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    refused = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    about = {"id": f"modelperm-{name}", "object": "model_permission", "created": state.started}
    config, adapter = state.llm.config, state.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "minivllm",
        "root": config.model.name if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else state.model_names[0],
        "max_model_len": config.scheduler.max_model_len,
        "permission": [{**about, **allowed, **refused, "organization": "*", "group": None}],
    }


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped and waits for SIGCONT; False where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def operation_router(state: ServerState, metrics: Metrics) -> APIRouter:
    """What is served, and how it is."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The names that clients may use."""
        return {"object": "list", "data": [_model_card(state, name) for name in state.model_names]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """One of them."""
        return _model_card(state, state.check_model(name))

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """200 while the engine lives and its process is not stopped, else 503."""
        state.llm.check_health()
        core = state.llm.llm_engine.core
        processes = [getattr(one, "process", None) for one in getattr(core, "cores", [core])]
        if any(process is not None and _is_stopped(process.pid) for process in processes):
            raise ApiError(503, "the engine's process is stopped (SIGSTOP)", code="engine_stopped")
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of minivllm."""
        return {"version": installed_version("minivllm")}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Requests that are running or waiting."""
        return {"server_load": state.in_flight}

    @router.get("/metrics")
    async def prometheus() -> Response:
        """For Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> dict[str, bool]:
        """Forget all cached prefixes; 409 while requests use them and are not to be reset."""
        if (await state.llm.reset_prefix_cache(reset_running_requests)) is False:
            raise ApiError(409, "requests are running, and their blocks cannot be forgotten; try again later")
        return {"success": True}

    return router


class UpdateWeights(BaseModel):
    """Body of `/update_weights_from_disk`, in SGLang's form. abort_all_requests: else they go on with the new weights."""

    model_config = {"extra": "forbid"}
    model_path: str
    weight_version: int | None = Field(None, ge=0)
    abort_all_requests: bool = False


class CollectiveRPC(BaseModel):
    """Body of `/collective_rpc`, as vLLM has it: arguments are text."""

    model_config = {"extra": "forbid"}
    method: str = Field(pattern="^[^_]")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    timeout: float | None = Field(None, gt=0)


async def only_query(request: Request, *names: str) -> None:
    """Raise ApiError for fields of the query other than ``names``, and for a body: they would be ignored."""
    if unknown := sorted(set(request.query_params) - set(names)):
        raise ApiError(400, f"{unknown[0]!r} is unknown; the query may have: {', '.join(names)}", param=unknown[0])
    if await request.body():
        raise ApiError(400, f"{request.url.path} takes no body; the query may have: {', '.join(names)}")


def development_router(state: ServerState) -> APIRouter:
    """Routes for those who own the machine, as vLLM has them with VLLM_SERVER_DEV_MODE=1: sleep, other weights, calls of ranks."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/sleep")
    async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
        """Give memory back; requests wait until it is back."""
        await only_query(request, "level", "mode")
        await done(state.llm.sleep(level, mode))
        return Response()

    @router.post("/wake_up")
    async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take memory back."""
        await only_query(request, "tags")
        await done(state.llm.wake_up(tags))
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether requests wait for memory."""
        return {"is_sleeping": await state.llm.is_sleeping()}

    @router.post("/update_weights_from_disk")
    async def update_weights(body: UpdateWeights) -> dict[str, Any]:
        """Other weights, from a folder of this machine."""
        mode = "abort" if body.abort_all_requests else "keep"
        version = await done(state.llm.load_weights(body.model_path, body.weight_version, mode), "model_path")
        return {"success": True, "message": "the weights were changed", "weight_version": version}

    @router.post("/collective_rpc")
    async def collective_rpc(body: CollectiveRPC) -> dict[str, list[Any]]:
        """What a method of every rank returns: objects and lists as they are, all else as text."""
        found = await done(state.llm.collective_rpc(body.method, body.timeout, body.args, body.kwargs))
        return {"results": [x if x is None or isinstance(x, dict | list) else str(x) for x in found]}

    async def done(work: Awaitable[Any], param: str | None = None) -> Any:
        """The result of ``work``. Raises ApiError: 400 for a wrong request, 409 for one that is not possible now."""
        try:
            return await work
        except (ValueError, TypeError, OSError) as error:
            raise ApiError(400, str(error), param=param) from error
        except RuntimeError as error:
            state.llm.check_health()
            raise ApiError(409, str(error)) from error

    return router


def dashboard_router(llm: AsyncLLM) -> APIRouter:
    """`/dashboard`, a page that shows the engine live, and `/dashboard/samples?after=NUMBER`, which it asks for what is new."""
    router = APIRouter()
    dashboard = Dashboard(llm, source="dashboard/samples")

    @router.get("/dashboard", response_class=HTMLResponse)
    async def page() -> str:
        """A self-contained page."""
        if not dashboard.monitor.ended:
            dashboard.start()
        return document("minivllm", dashboard.to_html())

    @router.get("/dashboard/samples")
    async def samples(after: int = -1) -> dict[str, Any]:
        """The samples after the one with this number."""
        return dashboard.new_samples(after)

    return router


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound. Raises OSError that names host and port if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    return sock


def server_config(
    app: FastAPI, *, shutdown_timeout: float = 30.0, max_head_bytes: int = 1 << 16, **options: Any
) -> uvicorn.Config:
    """uvicorn's settings for an app. ``max_head_bytes``: of the request line and headers. ``options``: uvicorn's own."""
    return uvicorn.Config(
        app,
        http=http_protocol(max_head_bytes),
        h11_max_incomplete_event_size=max_head_bytes,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(shutdown_timeout),
        **options,
    )


class _Server(uvicorn.Server):
    """Ends with status 0 at SIGTERM, after the open requests; uvicorn's own would raise the signal again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def run_server(
    app: FastAPI,
    sock: socket.socket,
    *,
    make_engine: Callable[[], AsyncLLM] | None = None,
    max_engine_restarts: int = 0,
    **options: Any,
) -> int:
    """Serve until a signal, or until the engine dies. Returns the exit status, 1 for a dead engine.

    Args:
        make_engine: Makes another engine when one has died, ``max_engine_restarts`` times at most.
        options: Of `server_config`.
    """
    server, state = _Server(server_config(app, **options)), app.state.server
    left = max_engine_restarts if make_engine is not None else 0

    def died(error: BaseException) -> None:
        nonlocal left
        logger.critical("the engine has failed", exc_info=error)
        if left == 0 or server.should_exit:
            server.should_exit = True
            return
        left -= 1
        threading.Thread(target=restart, name="minivllm-restart", daemon=True).start()

    def restart() -> None:
        assert make_engine is not None
        logger.warning("starting another engine; %d more may follow", left)
        try:
            engine = make_engine()
        except Exception as error:
            logger.critical("no other engine could be started", exc_info=error)
            server.should_exit = True
            return
        engine.on_death = died
        engine.observe(state.observe)
        state.llm = engine
        logger.info("serving again")

    state.llm.on_death = died
    host, port = sock.getsockname()[:2]
    scheme = "https" if options.get("ssl_certfile") else "http"
    logger.info("serving %s on %s://%s:%d", ", ".join(state.model_names), scheme, host, port)
    server.run(sockets=[sock])
    state.llm.shutdown()
    return 1 if state.llm.errored else 0


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"a port is in 0..65535, got {text}")
    return int(text)


_PROGRAM_FLAGS: dict[str, dict[str, Any]] = {
    "--host": {"default": "127.0.0.1", "help": "address to listen on (default: this machine only)"},
    "--port": {"type": _port, "default": 8000, "help": "port (default: 8000; 0: any that is free)"},
    "--shutdown-timeout": {
        "type": float, "default": 30.0, "help": "seconds that open requests get at the end (default: 30)"
    },
    "--disable-frontend-multiprocessing": {
        "action": "store_true", "help": "run the engine in a thread of the server, not in a separate process"
    },
    "--max-engine-restarts": {
        "type": int, "default": 0,
        "help": "engines to start after one has died, before the server ends with status 1 (default: 0)",
    },
    "--h11-max-incomplete-event-size": {
        "type": int, "default": 1 << 16, "metavar": "BYTES",
        "help": "largest head of a request: its first line and headers (default: 65536)",
    },
    "--ssl-keyfile": {"help": "private key, for https"},
    "--ssl-certfile": {"help": "certificate, for https"},
    "--log-level": {
        "default": "info", "choices": ["debug", "info", "warning", "error"], "help": "(default: info)"
    },
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The flags of `minivllm serve`."""
    parser = argparse.ArgumentParser(prog="minivllm serve", description="Serve a model over the OpenAI API.")
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="alias, folder, .gguf file or hub id (same as --model)"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins")
    group = parser.add_argument_group("server")
    for flag, settings in _PROGRAM_FLAGS.items():
        group.add_argument(flag, **settings)
    for f in fields(ServerOptions):
        flag, kind, text = "--" + f.name.replace("_", "-"), str(f.type).removesuffix(" | None"), f.metadata["help"]
        if kind == "<class 'bool'>":
            group.add_argument(flag, action="store_true", help=text)
        elif kind == "list[str]":
            group.add_argument(flag, action="extend", nargs="+", default=[], metavar="TEXT", help=text)
        else:
            of = {"<class 'int'>": int, "int": int, "float": float}.get(kind, str)
            text = f"{text} (default: {f.default})"
            group.add_argument(flag, type=of, default=f.default, metavar=f.name.upper(), help=text)
    add_engine_arguments(parser)
    return parser


def _words(given: Sequence[str]) -> list[str]:
    """Words, or vLLM's way to give them: one JSON list."""
    if len(given) == 1 and given[0].startswith("["):
        try:
            found = json.loads(given[0])
        except ValueError as error:
            raise ValueError(f"{given[0]!r} is neither a word nor a JSON list: {error}") from None
        if not all(isinstance(word, str) for word in found):
            raise ValueError(f"{given[0]!r} must be a JSON list of strings")
        return list(found)
    return list(given)


def options_from(args: argparse.Namespace) -> ServerOptions:
    """The flags as ServerOptions. Raises ValueError."""
    given = {f.name: getattr(args, f.name) for f in fields(ServerOptions)}
    for name in ("allowed_origins", "allowed_hosts", "api_key"):
        given[name] = _words(given[name])
    key = os.environ.get("MINIVLLM_API_KEY") or os.environ.get("VLLM_API_KEY")
    if not given["api_key"] and key:
        given["api_key"] = [key]
    local = {"127.0.0.1", "localhost", "::1"}
    if args.host in local and not given["api_key"] and not given["allowed_hosts"]:
        given["allowed_hosts"] = sorted(local)
    if args.host not in local and not given["api_key"]:
        logger.warning("no --api-key: anyone who can reach %s may use this server", args.host)
    return ServerOptions(**given)


def _check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises ValueError that names the file, before a model is loaded for nothing."""
    if certificate is None:
        if key is not None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        names = certificate if key is None else f"{certificate}, --ssl-keyfile {key}"
        raise ValueError(f"--ssl-certfile {names}: {error.strerror or error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `minivllm serve` and `python -m minivllm.serving.app`; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(with_config(sys.argv[1:] if argv is None else argv, parser))
    args.model = args.model_tag or args.model
    level = args.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options, engine_args = options_from(args), engine_args_from(args)
    if args.max_engine_restarts and args.disable_frontend_multiprocessing:
        raise ValueError("--max-engine-restarts needs an engine in a separate process")
    if args.max_engine_restarts and options.trace:
        raise ValueError("--trace records one engine from its start to its end; it excludes --max-engine-restarts")
    if engine_args.skip_tokenizer_init:
        raise ValueError("--skip-tokenizer-init: a server answers in text, and needs a tokenizer")
    _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    place = "thread" if args.disable_frontend_multiprocessing else "process"
    sock = listen(args.host, args.port)

    def make_engine() -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_args, engine_in=place, warm=True)

    try:
        app = create_app(make_engine(), options)
    except BaseException:
        sock.close()
        raise
    freeze_gc_heap()
    return run_server(
        app,
        sock,
        make_engine=make_engine,
        max_engine_restarts=args.max_engine_restarts,
        shutdown_timeout=args.shutdown_timeout,
        max_head_bytes=args.h11_max_incomplete_event_size,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
    )


if __name__ == "__main__" and "get_ipython" not in globals():
    try:
        sys.exit(main())
    except (ValueError, RuntimeError, OSError) as error:
        print(f"minivllm serve: error: {error}", file=sys.stderr)
        sys.exit(2)
