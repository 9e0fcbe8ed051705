"""Readers for workload files: Azure, Mooncake, BurstGPT, ShareGPT, vllm bench serve."""

# Generated from nbs/lab/readers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from minivllm.core.plugins import check_maker, load_plugins
from minivllm.core.trace import Trace
from minivllm.lab.workload import Workload, WorkloadRequest, text

__all__ = [
    "WorkloadFileError", "read_sharegpt", "read_workload", "register_reader", "split_into_tokens",
    "tell_format",
]  # fmt: skip


class WorkloadFileError(ValueError):
    """A workload file that is broken, or of no known format. Names file and line."""


def _whole(row: dict[str, Any], key: str, least: int = 0) -> int:
    """A whole number out of a row. Raises ValueError that says what was there instead."""
    value = row.get(key)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{key!r} must be a whole number, at least {least}, got {value!r}")
    return number


def _seconds(value: Any, what: str) -> float:
    """A moment in seconds. Raises ValueError for what is no number, or not finite."""
    number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
    if number is None or not isfinite(number):
        raise ValueError(f"{what} must be a finite number of seconds, got {value!r}")
    return number


def _row_reader(path: Path, rows: Iterable[tuple[int, Any]], make: Callable[[int, Any], Any]) -> Iterator[Any]:
    """Make a request of each row; say on which line it failed, or which comes before the one in front of it."""
    i, last = 0, 0.0
    for line, row in rows:
        try:
            made = make(i, row)
            if made is not None and not last <= made.arrival_time:
                raise ValueError(
                    f"arrives at {made.arrival_time:g} s, before the one in front of it ({last:g} s); sort the file"
                )
        except (ValueError, KeyError, TypeError) as error:
            what = f"missing {error}" if isinstance(error, KeyError) else error
            raise WorkloadFileError(f"{path.name}, line {line}: {what}") from error
        if made is not None:
            i, last = i + 1, made.arrival_time
            yield made


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of each row of a CSV file that has (at least) these columns."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise WorkloadFileError(f"{path.name}, line 1: no column {', '.join(map(repr, missing))} in {header}")
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise WorkloadFileError(
                    f"{path.name}, line {reader.line_num}: {len(fields)} fields, the header has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, fields, strict=True))


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of each line of a JSON lines file."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise WorkloadFileError(
                        f"{path.name}, line {number}: not JSON ({error.msg} at column {error.colno})"
                    ) from error


def _json_items(path: Path, chunk: int = 1 << 16) -> Iterator[tuple[int, Any]]:
    """Line number and value of each element of a JSON array, one at a time."""
    decoder, buffer, line, opened = json.JSONDecoder(), "", 1, False
    with path.open(encoding="utf-8-sig") as file:
        more = True
        while True:
            skip = re.match(r"[\s,]*" if opened else r"\s*\[\s*", buffer)
            if skip:
                line, buffer, opened = line + skip.group().count("\n"), buffer[skip.end() :], True
            if opened and buffer.startswith("]"):
                return
            if opened and buffer:
                try:
                    value, end = decoder.raw_decode(buffer)
                except json.JSONDecodeError as error:
                    if not more:
                        where = line + buffer.count("\n", 0, error.pos)
                        raise WorkloadFileError(f"{path.name}, line {where}: not JSON ({error.msg})") from error
                else:
                    if end < len(buffer) or not more:
                        yield line, value
                        line, buffer = line + buffer.count("\n", 0, end), buffer[end:]
                        continue
            if not more:
                raise WorkloadFileError(f"{path.name}, line {line}: the array is not closed")
            text_read = file.read(max(chunk, len(buffer)))
            more, buffer = bool(text_read), buffer + text_read


_ANSWERS = 1 << 36  # the space of made-up answers, apart from all prompts


def read_azure(path: str | Path) -> Workload:
    """The Azure LLM inference traces of 2023 and 2024: CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`. Prompts share nothing."""
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    return _read_csv(path, columns, lambda row: datetime.fromisoformat(row["TIMESTAMP"].strip()))


def _read_csv(
    path: str | Path, columns: tuple[str, str, str], moment: Callable[[dict[str, str]], Any],
    fields: Callable[[dict[str, str]], dict[str, Any]] = lambda row: {},
) -> Workload:  # fmt: skip
    """Requests from the columns for time, prompt tokens and answer tokens. The first row's `moment`, a datetime or seconds, is 0."""
    path = Path(path)

    def make(workload: Workload) -> Iterator[WorkloadRequest]:
        first: Any = None

        def request(i: int, row: dict[str, str]) -> WorkloadRequest | None:
            nonlocal first
            at = moment(row)
            first = at if first is None else first
            since = at - first
            since = since.total_seconds() if isinstance(at, datetime) else since
            return _unshared(workload, i, since, _whole(row, columns[1]), _whole(row, columns[2]), **fields(row))

        yield from _row_reader(path, _csv_rows(path, columns), request)

    return Workload(path.stem, make)


def _unshared(
    workload: Workload, i: int, moment: float, prompt: int, output: int, **fields: Any
) -> WorkloadRequest | None:
    """A request that shares nothing; None, counted, for one without tokens (it failed where it was recorded)."""
    if prompt < 1 or output < 1:
        workload.skipped["no prompt tokens" if prompt < 1 else "no answer tokens"] += 1
        return None
    return WorkloadRequest(str(i), moment, (text(i, prompt),), text(_ANSWERS + i, output), **fields)


MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16


def read_mooncake(path: str | Path, block_size: int = MOONCAKE_BLOCK) -> Workload:
    """Mooncake's traces: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 prompt tokens).

    Hash id `h` becomes the tokens `512 * h` to `512 * h + 511`, so prompts share a prefix exactly where their ids agree.
    """
    return _read_hashed(path, block_size, lambda row: _whole(row, "timestamp") / 1000)


def read_bailian(path: str | Path, block_size: int = BAILIAN_BLOCK) -> Workload:
    """Bailian's traces of Qwen models: as Mooncake's, with `timestamp` in seconds, `hash_ids` of 16 tokens, `chat_id` and `parent_chat_id`."""
    return _read_hashed(path, block_size, lambda row: _seconds(row.get("timestamp"), "'timestamp'"))


def _read_hashed(path: str | Path, block_size: int, seconds: Callable[[dict[str, Any]], float]) -> Workload:
    path = Path(path)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, got {block_size}")

    def make(workload: Workload) -> Iterator[WorkloadRequest]:
        sessions: dict[Any, str] = {}  # by turn: the first one of its conversation

        def request(i: int, row: Any) -> WorkloadRequest | None:
            if not isinstance(row, dict):
                raise TypeError(f"an object was expected, got {type(row).__name__}")
            moment, length, output = seconds(row), _whole(row, "input_length"), _whole(row, "output_length")
            if length < 1 or output < 1:
                return _unshared(workload, i, moment, length, output)
            prompt, turn = _hashed_prompt(row["hash_ids"], length, block_size), row.get("chat_id")
            session = None if turn is None else sessions.get(row.get("parent_chat_id"), str(turn))
            sessions[turn] = session or ""
            return WorkloadRequest(str(i), moment, prompt, text(_ANSWERS + i, output), session=session)

        yield from _row_reader(path, _json_rows(path), request)

    return Workload(path.stem, make)


def _hashed_prompt(hash_ids: Any, length: int, block_size: int) -> tuple[range, ...]:
    blocks = -(-length // block_size)
    if not isinstance(hash_ids, list) or len(hash_ids) != blocks:
        given = len(hash_ids) if isinstance(hash_ids, list) else hash_ids
        raise ValueError(f"'hash_ids' must have {blocks} ids of {block_size} tokens for {length} tokens, got {given}")
    if not all(isinstance(h, int) and not isinstance(h, bool) and 0 <= h < 1 << 50 for h in hash_ids):
        raise ValueError("'hash_ids' must be whole numbers from 0 to 2**50 - 1")
    last = length - (blocks - 1) * block_size
    lengths = [block_size] * (blocks - 1) + [last]
    return tuple(range(h * block_size, h * block_size + n) for h, n in zip(hash_ids, lengths, strict=True))


def read_burstgpt(path: str | Path) -> Workload:
    """BurstGPT: CSV with `Timestamp` (s), `Model`, `Request tokens`, `Response tokens`, and perhaps `Session ID`. Prompts share nothing."""
    return _read_csv(
        path,
        ("Timestamp", "Request tokens", "Response tokens"),
        lambda row: _seconds(row["Timestamp"], "'Timestamp'"),
        lambda row: {"user": row.get("Model"), "session": row.get("Session ID") or None},
    )


def split_into_tokens(words: str) -> list[int]:
    """A stand-in for a tokenizer: words in pieces of at most six letters, digits and signs one by one. Equal pieces, equal ids."""
    return [
        int.from_bytes(piece.encode(), "big") % _PIECES
        for piece in re.findall(r"\s?[^\W\d_]{1,6}|\d|[^\w\s]|_|\s+", words)
    ]


_PIECES = (1 << 31) - 1  # a prime

_ANSWERS_FROM = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}


def read_sharegpt(
    path: str | Path, tokenize: Callable[[str], Sequence[int]] = split_into_tokens, think_time: float = 0.0
) -> Workload:
    """Conversations as ShareGPT writes them: a JSON array, or JSON lines, of `{"id", "conversations": [{"from", "value"}, ...]}`.

    OpenAI's names (`messages`, `role`, `content`) are understood as well.

    Args:
        tokenize: text -> token ids.
        think_time: seconds from an answer to the next question.
    """
    path = Path(path)

    def make(workload: Workload) -> Iterator[WorkloadRequest]:
        def conversation(i: int, row: Any) -> WorkloadRequest | None:
            turns = _turns(row)
            first = _answer_after(turns, 0, (), f"{row.get('id', i)}-{i}", 0.0, tokenize, think_time)
            if first is None:
                workload.skipped["a conversation without a question and an answer"] += 1
            return first

        with path.open(encoding="utf-8-sig") as file:
            is_array = file.read(4096).lstrip().startswith("[")
        yield from _row_reader(path, _json_items(path) if is_array else _json_rows(path), conversation)

    return Workload(path.stem, make)


def _turns(row: Any) -> list[tuple[str, str]]:
    """(speaker, text) of each message."""
    messages = row.get("conversations", row.get("messages")) if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise TypeError("no list 'conversations' or 'messages'")
    turns = []
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"a message must be an object, got {type(message).__name__}")
        who, what = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(who, str) or not isinstance(what, str):
            raise TypeError(
                f"a message needs the texts 'from' and 'value' (or 'role' and 'content'), got keys {sorted(message)}"
            )
        turns.append((who, what))
    return turns


def _answer_after(
    turns: list[tuple[str, str]], start: int, history: tuple[Sequence[int], ...], name: str, moment: float,
    tokenize: Callable[[str], Sequence[int]], think_time: float,
) -> WorkloadRequest | None:  # fmt: skip
    """The request for the next answer at or after turn `start`; None if there is none."""
    for i, (who, what) in enumerate(turns[start:], start):
        ids = tokenize(what)
        if who in _ANSWERS_FROM and ids and any(history):
            break
        history = (*history, ids)
    else:
        return None
    after = (*history, ids)

    def follow_up(finished: float) -> WorkloadRequest | None:
        return _answer_after(turns, i + 1, after, name, finished + think_time, tokenize, think_time)

    more = follow_up if any(w in _ANSWERS_FROM and said for w, said in turns[i + 1 :]) else None
    return WorkloadRequest(f"{name}-{i}", moment, history, ids, user=name, session=name, follow_up=more)


def read_bench_serve(path: str | Path, seed: int = 0) -> Workload:
    """The result file of `vllm bench serve --save-result --save-detailed`. Prompts share nothing.

    Arrival times are the recorded `start_times`. In files without them, all requests arrive at 0 if `request_rate` was infinite, and
    otherwise at moments drawn with `seed`.
    """
    path = Path(path)
    result = _bench_result(path)
    inputs, outputs = result["input_lens"], result["output_lens"]
    starts = result.get("start_times", [0.0] * len(inputs))
    first = min(starts, default=0.0)
    order = sorted(range(len(inputs)), key=lambda i: starts[i])

    def make(workload: Workload) -> Iterator[WorkloadRequest]:
        made = (_unshared(workload, i, starts[i] - first, inputs[i], outputs[i]) for i in order)
        return (request for request in made if request is not None)

    workload, rate = Workload(path.stem, make), result.get("request_rate") or "inf"
    if "start_times" in result or rate in ("inf", float("inf")):
        return workload
    try:
        return workload.arriving(float(rate), float(result.get("burstiness", 1.0)), seed)
    except (ValueError, TypeError) as error:
        raise WorkloadFileError(f"{path.name}, line 1: {error}") from error


def _bench_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise WorkloadFileError(f"{path.name}, line {error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(result, dict) or "input_lens" not in result or "output_lens" not in result:
        raise WorkloadFileError(
            f"{path.name}, line 1: no 'input_lens' and 'output_lens'; run `vllm bench serve` with --save-result --save-detailed"
        )
    if not result.get("start_times"):
        result.pop("start_times", None)
    lists = {key: result[key] for key in ("input_lens", "output_lens", "start_times") if key in result}
    try:
        if len({len(values) for values in lists.values()}) > 1:
            raise ValueError(f"lists of different length: { {key: len(values) for key, values in lists.items()} }")
        for key, values in lists.items():
            for i, value in enumerate(values):
                name = f"{key}[{i}]"
                if isinstance(value, str):
                    raise TypeError(f"{name} must be a number, got {value!r}")
                if key == "start_times":
                    _seconds(value, name)
                else:
                    _whole({name: value}, name)
    except (ValueError, TypeError) as error:
        raise WorkloadFileError(f"{path.name}, line 1: {error}") from error
    return result


_READERS: dict[str, tuple[Callable[[str], bool], Callable[[Path], Workload]]] = {}
_FORMATS = ("azure", "mooncake", "bailian", "burstgpt", "sharegpt", "bench", "trace")


def register_reader(format: str, recognizes: Callable[[str], bool], read: Callable[[Path], Workload]) -> None:
    """Make a format of files known to `read_workload`.

    Args:
        recognizes: whether a file that begins with this text (at most a MiB) has the format; asked if no other format fits.
        read: makes the workload.

    Raises:
        ValueError: the name is taken.
        TypeError: `recognizes` or `read` is no function.
    """
    if format in _FORMATS or format in _READERS:
        raise ValueError(f"workload format {format!r} exists already")
    for function in (recognizes, read):
        check_maker(f"workload format {format!r}", function)
    _READERS[format] = recognizes, read


def read_workload(
    path: str | Path, limit: int | None = None, *, format: str | None = None,
    tokenize: Callable[[str], Sequence[int]] = split_into_tokens, block_size: int | None = None,
) -> Workload:  # fmt: skip
    """A workload from a file of any known format: Azure, Mooncake, Bailian, BurstGPT, ShareGPT, `vllm bench serve`, or a trace of minivllm.

    Args:
        limit: only the first `limit` requests (conversations, for ShareGPT).
        format: its name; None to tell it from the content.
        tokenize: text -> token ids, for files of texts.
        block_size: tokens of a hash id, for Mooncake and Bailian; None for 512 and 16.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown `format`, a `limit` or `block_size` that makes no sense here.
        WorkloadFileError: of no known format. A broken line is found when the workload is walked through.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    load_plugins()
    if format is not None and format not in (*_FORMATS, *_READERS):
        raise ValueError(f"format must be one of {', '.join((*_FORMATS, *_READERS))}; got {format!r}")
    kind, size = format or tell_format(path), {} if block_size is None else {"block_size": block_size}
    hashed = {"mooncake": lambda path: read_mooncake(path, **size), "bailian": lambda path: read_bailian(path, **size)}
    if size and kind not in hashed:
        raise ValueError(f"block_size goes with files of hash ids, and {path.name} is of the format {kind!r}")
    known: dict[str, Callable[[Path], Workload]] = {
        "azure": read_azure, "burstgpt": read_burstgpt, "bench": read_bench_serve, **hashed,
        "sharegpt": partial(read_sharegpt, tokenize=tokenize), "trace": lambda path: Workload.from_trace(Trace.load(path)),
    }  # fmt: skip
    workload = (known[kind] if kind in known else _READERS[kind][1])(path)
    return workload if limit is None else workload.head(limit)


def tell_format(path: str | Path) -> str:
    """`azure`, `mooncake`, `bailian`, `burstgpt`, `sharegpt`, `bench`, `trace` or a registered one, told from a file's content."""
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(1 << 20)
    if start.startswith(b"PAR1"):
        return "trace"
    begin = start.decode("utf-8-sig", errors="replace").lstrip()
    line = begin.split("\n", 1)[0].strip()
    if "ContextTokens" in line:
        return "azure"
    if "Request tokens" in line:
        return "burstgpt"
    if begin.startswith("["):
        if re.search(r'"(conversations|messages)"\s*:\s*\[', begin):
            return "sharegpt"
    elif begin.startswith("{"):
        keys = set(re.findall(r'"(\w+)"\s*:', line if line.endswith("}") else begin))
        if "hash_ids" in keys:
            return "bailian" if "chat_id" in keys else "mooncake"
        if keys & {"conversations", "messages"}:
            return "sharegpt"
        if "trace" in keys:
            return "trace"
        if "input_lens" in keys or "num_prompts" in keys:
            return "bench"
    for name, (recognizes, _) in _READERS.items():
        if recognizes(begin):
            return name
    shown = line[:60] + "..." * (len(line) > 60)
    raise WorkloadFileError(
        f"{path.name}, line 1: no known workload format. It begins with {shown!r}. Known: Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens),"
        " BurstGPT CSV (Timestamp,...,Request tokens,...), Mooncake JSON lines (hash_ids), Bailian JSON lines (hash_ids, chat_id), ShareGPT JSON (conversations),"
        " vllm bench serve JSON (input_lens), traces of minivllm (.jsonl, .parquet)"
    )
