"""Trace files: Parquet and JSON lines, and export to Perfetto."""

# Generated from nbs/core/trace_files.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minivllm.core.events import TRACE_VERSION, Event, Recording, RequestSnapshot, State, TraceHeader
from minivllm.core.trace_tables import tables


class TraceFileError(ValueError):
    """A file that is not a trace, is broken, or is of a version that this program does not know. Names file and line."""


def _freeze(value: Any) -> Any:
    return tuple(_freeze(v) for v in value) if isinstance(value, list) else value


def encode_event(event: Event) -> list[Any]:
    """An event as plain JSON values."""
    if event[0] == "cache":
        return [*event[:5], [name.hex() for name in event[5]]]
    if event[0] == "evict":
        return ["evict", event[1], event[2].hex()]
    if event[0] == "attributes":
        return ["attributes", event[1], {name: _encode_key(value) for name, value in event[2].items()}]
    return list(event)


def _encode_key(value: Any) -> Any:
    """A cache salt, adapter name or extra key; bytes as `{"bytes": hex}`. Raises TypeError for what JSON cannot hold."""
    if isinstance(value, tuple):
        return [_encode_key(v) for v in value]
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"extra key {value!r} cannot be saved: only str, bytes, int, float, None and tuples of them can")


def _decode_key(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode_key(v) for v in value)
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def decode_event(values: list[Any]) -> Event:
    """The event that `encode_event` was given."""
    kind = values[0]
    if kind == "cache":
        return (*_freeze(values[:5]), tuple(bytes.fromhex(name) for name in values[5]))
    if kind == "evict":
        return ("evict", values[1], bytes.fromhex(values[2]))
    if kind == "attributes":
        return (kind, values[1], {name: _decode_key(value) for name, value in values[2].items()})
    if kind == "draft":
        return (kind, {name: tuple(tokens) for name, tokens in values[1].items()})
    if kind == "verify":
        return (kind, {name: _freeze(about) for name, about in values[1].items()}, *values[2:])
    if kind == "update":
        return (kind, values[1], {name: tuple(tokens) for name, tokens in values[2].items()}, *values[3:])
    return tuple(v if isinstance(v, dict) else _freeze(v) for v in values)


def _encode_start(state: State) -> dict[str, Any]:
    plain = asdict(state)
    plain["hashes"] = [name.hex() if name is not None else None for name in state.hashes]
    return plain


def _decode_start(plain: dict[str, Any]) -> State:
    hashes = [bytes.fromhex(name) if name is not None else None for name in plain["hashes"]]
    requests = {name: RequestSnapshot(**values) for name, values in plain["requests"].items()}
    return State(**{**plain, "hashes": hashes, "requests": requests})


def _head(trace: Recording) -> str:
    ranks = {"ranks": trace.ranks} if trace.ranks else {}
    return json.dumps({"trace": asdict(trace.header), "start": _encode_start(trace.start), **ranks})


def save(trace: Recording, path: str | Path) -> None:
    """Write a trace.

    Args:
        path: ends in `.jsonl` or `.parquet`. An existing file is replaced, a `.jsonl` only when the new one is complete.

    Raises:
        ValueError: another ending. TypeError: an extra key of a request that cannot be saved.
    """
    path = Path(path)
    head = _head(trace)
    lines = (json.dumps(encode_event(event)) for event in trace.events)
    if path.suffix == ".jsonl":
        part = path.with_name(path.name + ".part")  # a file that ends half-way is never left under the wanted name
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(head + "\n")
                file.writelines(line + "\n" for line in lines)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    elif path.suffix == ".parquet":
        _save_parquet(path, head, list(lines), [event[0] for event in trace.events])
    else:
        raise ValueError(f"cannot tell the format of {path.name!r}: a trace is saved as .jsonl or .parquet")


def _save_parquet(path: Path, head: str, lines: list[str], kinds: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"kind": pa.array(kinds, pa.dictionary(pa.int32(), pa.string())), "event": pa.array(lines, pa.string())}
    )
    pq.write_table(table.replace_schema_metadata({"minivllm.trace": head}), path, compression="zstd")


class TraceWriter:
    """Writes a recording while it goes on, in a thread, so that memory need not hold all of it.

    Until `close` the events are JSON lines in `PATH.part`. A disk that is full ends the recording; what was written stays.

    Raises:
        ValueError: the name ends neither in `.jsonl` nor in `.parquet`. OSError: the file cannot be opened.
    """

    BATCH = 2000

    def __init__(self, trace: Recording, path: str | Path) -> None:
        self.trace, self.path, self.num_steps = trace, Path(path), 0
        self.error: OSError | None = None
        if self.path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"cannot tell the format of {self.path.name!r}: a trace is saved as .jsonl or .parquet")
        self._part = self.path.with_name(self.path.name + ".part")
        self._file = self._part.open("wb", buffering=0)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="minivllm-trace")
        self._write(_head(trace) + "\n")

    def push(self, least: int | None = None) -> bool:
        """Hand events over if there are ``least`` of them (default: BATCH). Called between steps. False if the disk is full."""
        if self.error is None and len(self.trace.events) >= (self.BATCH if least is None else least):
            events = self.trace.events.copy()
            self.trace.events.clear()
            self.num_steps += sum(event[0] == "step" for event in events)
            self._pool.submit(lambda: self._write("".join(json.dumps(encode_event(e)) + "\n" for e in events)))
        return self.error is None

    def _write(self, text: str) -> None:
        data, start, written = text.encode(), self._file.tell(), 0
        try:
            while written < len(data) and self.error is None:
                written += self._file.write(data[written:])
        except OSError as error:
            self.error = error
            self._file.truncate(start + data.rfind(b"\n", 0, written) + 1)  # whole lines stay

    def close(self) -> Path:
        """Write the rest. Returns the file that has the events: JSON lines if there was no room for Parquet."""
        self.push(least=1)
        self._pool.shutdown()
        self._file.close()
        if self.path.suffix == ".parquet" and self.error is None:
            try:
                save(load(self._part), self.path)
                self._part.unlink()
                return self.path
            except OSError as error:
                self.error = error
                self.path.unlink(missing_ok=True)
        return self._part.replace(self.path.with_suffix(".jsonl"))


def load(path: str | Path) -> Recording:
    """Read a trace that `save` wrote.

    Raises:
        FileNotFoundError: no such file.
        TraceFileError: not a trace, broken (names the line), or of an unknown version.
    """
    path = Path(path)
    lines = _parquet_lines(path) if path.suffix == ".parquet" else _text_lines(path)
    trace = None
    for number, line in lines:
        try:
            values = json.loads(line)
            if trace is None:
                trace = _make_trace(values, path)
            else:
                trace.events.append(decode_event(values))
        except TraceFileError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise TraceFileError(f"{path.name}, line {number}: not a trace event ({error})") from error
    if trace is None:
        raise TraceFileError(f"{path.name}: the file is empty")
    return trace


def _make_trace(values: Any, path: Path) -> Recording:
    if not isinstance(values, dict) or "trace" not in values:
        raise TraceFileError(f"{path.name}: not a trace of minivllm (its first line has no header)")
    version = values["trace"].get("version")
    if version != TRACE_VERSION:
        raise TraceFileError(f"{path.name}: a trace of version {version}; this program reads version {TRACE_VERSION}")
    ranks = [tuple(span) for span in values.get("ranks", ())]
    return Recording(TraceHeader(**values["trace"]), _decode_start(values["start"]), ranks=ranks)


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from enumerate(file, start=1)
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path.name}: not a text file ({error.reason})") from error


def _parquet_lines(path: Path) -> Iterator[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise TraceFileError(f"{path.name}: not a Parquet file ({error})") from error
    head = (table.schema.metadata or {}).get(b"minivllm.trace")
    if head is None:
        raise TraceFileError(f"{path.name}: a Parquet file, but not a trace of minivllm")
    yield 1, head.decode()
    yield from enumerate(table.column("event").to_pylist(), start=2)


_ROUTER = 3  # the number of its process


def _span(pid: int, tid: int | None, name: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
    more = {"args": args} if args else {}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": seconds * 1e6, **more}


def _label(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    """The name of a process, or of one of its tracks."""
    what = {"pid": pid, "name": "process_name"} if tid is None else {"pid": pid, "tid": tid, "name": "thread_name"}
    return {"ph": "M", **what, "args": {"name": name}}


def perfetto_events(trace: Recording) -> list[dict[str, Any]]:
    """The trace as a list of Chrome trace events; times in microseconds. Requests that a router sent here are on the track of this replica."""
    frames = tables(trace)
    steps, requests = frames["steps"], frames["requests"]
    budget = trace.header.settings.get("max_num_batched_tokens")
    start = dict(zip(steps["step"], steps["start"] * 1e6, strict=True))
    length = dict(zip(steps["step"], (steps["end"] - steps["start"]).fillna(0), strict=True))
    track = {request_id: i + 1 for i, request_id in enumerate(requests["request_id"])}
    events = [_label(1, "engine"), _label(2, "requests"), *(_label(2, r, tid) for r, tid in track.items())]
    for row in steps.itertuples():
        events.append(_span(1, 1, "step", start[row.step], length[row.step], step=row.step, tokens=row.num_tokens))
        counters = {
            "tokens": {"prefill": row.num_prefill_tokens, "decode": row.num_decodes},
            "budget": None if budget is None else {"unused": budget - row.num_tokens},
            "blocks": {"used": row.used_blocks, "cached": row.cached_blocks},
            "requests": {"running": row.num_running, "waiting": row.num_waiting},
        }
        events += [
            {"ph": "C", "pid": 1, "name": name, "ts": start[row.step], "args": values}
            for name, values in counters.items()
            if values is not None
        ]
    for row in requests[requests["queue_time"].notna()].itertuples():
        events.append(_span(2, track[row.request_id], "waiting", row.arrival * 1e6, row.queue_time))
    for row in frames["decisions"].itertuples():
        at, tid = start.get(row.step, 0.0), track.get(row.request_id)
        if row.decision in ("prefill", "decode"):
            tokens = int(row.num_tokens)
            events.append(_span(2, tid, row.decision, at, length[row.step], tokens=tokens, step=row.step))
        elif row.decision == "policy error" or row.decision.startswith("preempt"):
            scope = {"s": "p", "pid": 1, "tid": 1} if tid is None else {"s": "t", "pid": 2, "tid": tid}
            events.append({"ph": "i", **scope, "name": row.decision, "ts": at, "args": {"why": row.reason}})
    return events + _route_events(frames["routes"]) + _rank_events(trace)


def _route_events(routes: Any) -> list[dict[str, Any]]:
    """A process for the router, with a track for each replica."""
    events = list[dict[str, Any]]()
    for (at, request), rows in routes.groupby(["time", "request_id"], sort=False):
        chosen = rows[rows["chosen"]].iloc[0]
        args = {"why": chosen.reason} | {f"replica {r.replica}": _plain(r) for r in rows.itertuples()}
        place = {"pid": _ROUTER, "tid": int(chosen.replica) + 1}
        events.append({"ph": "i", "s": "t", **place, "name": request, "ts": at * 1e6, "args": args})
    tracks = [_label(_ROUTER, f"replica {t - 1}", t) for t in {e["tid"] for e in events}]
    return ([_label(_ROUTER, "router")] if events else []) + tracks + events


def _plain(row: Any) -> str:
    score = "" if math.isnan(row.score) else f", score {row.score:g}"
    return f"{row.num_requests} requests, {row.num_tokens} tokens{score}"


def _rank_events(trace: Recording) -> list[dict[str, Any]]:
    """A process for each rank, whose joins lie within its steps."""
    pid = {rank: 10 + rank for rank, *_ in trace.ranks}
    return [_label(at, f"rank {rank}") for rank, at in pid.items()] + [
        _span(pid[rank], 1, name, start * 1e6, seconds, **({"bytes": size} if size else {}))
        for rank, name, start, seconds, size in trace.ranks
    ]


def save_perfetto(trace: Recording | Sequence[Recording], path: str | Path) -> None:
    """Write a file for ui.perfetto.dev (or chrome://tracing). Several traces: those of all replicas of one router."""
    events = perfetto_events(trace) if isinstance(trace, Recording) else _of_replicas(trace)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _of_replicas(traces: Sequence[Recording]) -> list[dict[str, Any]]:
    """Events of all replicas: each replica's processes get their own numbers and names; the router's process is shared."""
    events = []
    for i, trace in enumerate(traces):
        for event in perfetto_events(trace):
            if event["pid"] != _ROUTER:
                event["pid"] += 1000 * (i + 1)
                if event["name"] == "process_name":
                    event["args"] = {"name": f"replica {i}: {event['args']['name']}"}
            events.append(event)
    return events
