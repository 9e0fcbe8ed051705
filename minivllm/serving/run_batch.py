"""Command `minivllm run-batch`: OpenAI batch files without a server."""

# Generated from nbs/serving/run_batch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json
from starlette.types import ASGIApp
from tqdm.auto import tqdm

from minivllm.engine.arguments import add_engine_arguments, engine_args_from, with_config
from minivllm.engine.async_llm import AsyncLLM
from minivllm.serving.app import ServerOptions, create_app
from minivllm.serving.errors import from_validation

__all__ = ["main", "make_parser", "run_batch"]


async def ask_app(app: ASGIApp, path: str, body: Any) -> httpx.Response:
    """POST a JSON body to an ASGI app, in this process."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
        return await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


class BatchLine(BaseModel):
    """One request of a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str
    method: Literal["POST"]
    url: Annotated[str, Field(pattern="^/v1/")]
    body: dict[str, Any]

    @field_validator("body")
    @classmethod
    def _is_whole(cls, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise ValueError("stream: an answer in a file cannot be streamed")
        return body


def batch_answer(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    """One line of the output file, in OpenAI's form."""
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _custom_id(text: str) -> str | None:
    """The id of a line that is not a valid request, if it has one: it tells the author which line is meant."""
    try:
        found = from_json(text)
    except ValueError:
        return None
    given = found.get("custom_id") if isinstance(found, dict) else None
    return given if isinstance(given, str) else None


async def answer_line(app: ASGIApp, text: str) -> dict[str, Any]:
    """The answer to one line. Never raises for a fault in the line: the answer reports it."""
    try:
        line = BatchLine.model_validate_json(text)
    except ValidationError as invalid:
        message = from_validation(invalid.errors()).message
        return batch_answer(_custom_id(text), None, {"code": "invalid_request", "message": message})
    response = await ask_app(app, line.url, line.body)
    status, body = response.status_code, response.json()
    found = {"status_code": status, "request_id": response.headers.get("x-request-id"), "body": body}
    if status < 400:
        return batch_answer(line.custom_id, found, None)
    fault = body.get("error", {})
    error = {"code": fault.get("code") or str(status), "message": fault.get("message")}
    return batch_answer(line.custom_id, found, error)


async def run_batch(
    app: ASGIApp, source: Path, target: Path, *, window: int, use_tqdm: bool = False
) -> tuple[int, int]:
    """Answer every line of ``source`` in ``target``. ``window``: lines that are open at once. Returns how many lines, and how many failed."""
    count = failed = 0
    open_lines: list[asyncio.Task[dict[str, Any]]] = []
    with (
        source.open(encoding="utf-8") as lines,
        target.open("w", encoding="utf-8") as out,
        tqdm(disable=not use_tqdm) as bar,
    ):

        async def write_first() -> None:
            nonlocal count, failed
            answer = await open_lines.pop(0)
            out.write(json.dumps(answer, ensure_ascii=False) + "\n")
            out.flush()
            count, failed = count + 1, failed + (answer["error"] is not None)
            bar.update()

        for text in lines:
            if text.strip():
                open_lines.append(asyncio.create_task(answer_line(app, text)))
                if len(open_lines) >= window:
                    await write_first()
        while open_lines:
            await write_first()
    return count, failed


def make_parser() -> argparse.ArgumentParser:
    """The flags of `minivllm run-batch`, which are vLLM's."""
    parser = argparse.ArgumentParser(
        prog="minivllm run-batch", description="Answer a file of requests in OpenAI's batch format."
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines, one request each")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="where the answers go, in the order of the requests"
    )
    parser.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names for requests; default: the model's"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags; the command line wins")
    add_engine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `minivllm run-batch`; returns the exit status, 1 if a request failed.

    Raises:
        OSError: a file that cannot be read or written. ValueError: a bad flag or model.
    """
    parser = make_parser()
    args = parser.parse_args(with_config(sys.argv[1:] if argv is None else argv, parser))
    source, target = Path(args.input_file), Path(args.output_file)
    if source.resolve() == target.resolve():
        raise ValueError("--output-file must be another file than --input-file")
    with source.open(encoding="utf-8"):  # before a model is loaded
        pass
    llm = AsyncLLM.from_engine_args(engine_args_from(args))
    try:
        app = create_app(llm, ServerOptions(served_model_name=args.served_model_name, max_body_bytes=1 << 30))
        window = 2 * llm.config.scheduler.max_num_seqs
        count, failed = asyncio.run(run_batch(app, source, target, window=window, use_tqdm=sys.stderr.isatty()))
    finally:
        llm.shutdown()
    print(f"{count} requests, {failed} failed; answers in {target}")
    return 1 if failed else 0
