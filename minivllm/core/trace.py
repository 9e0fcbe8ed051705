"""Trace of scheduler events: recording, state at any step, invariants."""

# Generated from nbs/core/trace.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from os.path import commonprefix
from typing import Any

from minivllm.core import trace_files, trace_tables, views
from minivllm.core.events import SCHEMA, Event, Fold, Recording, State, TraceHeader, by_step, named


class Trace(Recording):
    """Everything that happened to a scheduler from one moment on. Iterating gives the events with their fields by name.

    Attributes:
        header: versions and settings.
        start: the state when recording began.
        events: the list that grows while the engine runs.
        tokenizer: what turns token ids into text, if the engine left it here. Not saved to files.
        samples: what the sampler saw, by request id and output position, if the engine was asked to keep it. Not saved to files.
        ranks: (rank, name, start, seconds, bytes) for what each rank did, on the engine's clock, if that was asked for: `step`,
            `idle` between two steps, the joins within a step, `receive` and `send` between pipeline stages.
        pictures: PIL images of the requests that were added meanwhile, by identifier (see `MultiModalFeatureSpec`). Kept if `samples` are, and
            not saved either.
    """

    SNAPSHOT_EVERY = 256

    def __init__(self, header: TraceHeader, start: State | None = None, events: list[Event] | None = None) -> None:
        empty = State.empty(header.num_blocks, header.num_groups, header.num_cpu_blocks)
        super().__init__(header, start or empty, [] if events is None else events)
        self.samples: dict[tuple[str, int], Any] = {}
        self.pictures: dict[str, Any] = {}
        self.tokenizer: Any = None
        self._snapshots: list[tuple[int, State]] = []
        self._step_starts: list[int] = []
        self._scanned = 0

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Any]:
        return map(named, self.events)

    def __repr__(self) -> str:
        return f"Trace({self.num_steps} steps, {len(self.events)} events, policy {self.header.policy})"

    def _scan(self) -> None:
        """Note where each step begins, for the events that have come since the last scan."""
        for i in range(self._scanned, len(self.events)):
            if self.events[i][0] == "step":
                self._step_starts.append(i)
        self._scanned = len(self.events)

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        self._scan()
        return len(self._step_starts)

    def at(self, step: int) -> State:
        """The whole state after the i-th recorded step; -1 for the last one.

        Raises:
            IndexError: there is no such step.
        """
        count = self.num_steps
        if not -count <= step < count:
            raise IndexError(f"step {step} of a trace with {count} steps")
        ends = [*self._step_starts[1:], len(self.events)]
        return self._fold_to(ends[step % count])

    def _fold_to(self, end: int) -> State:
        done, state = 0, self.start
        for position, snapshot in self._snapshots:
            if position <= end:
                done, state = position, snapshot
        fold = Fold(state)
        steps = 0
        for i in range(done, end):
            if self.events[i][0] == "step":
                steps += 1
                if steps % self.SNAPSHOT_EVERY == 0 and (not self._snapshots or i > self._snapshots[-1][0]):
                    self._snapshots.append((i, fold.state()))
            fold.apply(self.events[i])
        return fold.state()

    def states(self) -> Iterator[tuple[int, State]]:
        """Every recorded step with the state after it, in order. Cheaper than `at` for all of them."""
        fold = Fold(self.start)
        for step, events in by_step(self.events):
            for event in events:
                fold.apply(event)
            if step >= 0:
                yield step, fold.state()

    def check(self) -> None:
        """Fold the whole trace and test every invariant after every step, and each block table for growing only at its end.

        Raises:
            TraceError: names the first bad event or step.
        """
        fold, i, finished = Fold(self.start), 0, set[str]()
        # draft tokens of requests, and by step those that are being verified
        drafts, in_flight = dict[str, int](), dict[int, dict[str, int]]()
        for step, events in by_step(self.events):
            for event in events:
                if event[0] == "draft":
                    drafts |= {name: len(tokens) for name, tokens in event[1].items()}
                elif event[0] == "preempt":
                    drafts.pop(event[1], None)
                elif event[0] == "schedule":
                    in_flight[step] = {name: drafts.pop(name, 0) for name in event[1]}
                elif event[0] == "update":
                    in_flight.pop(event[3] if len(event) > 3 else step, None)
                if fault := self._fault(event, fold.now, finished, in_flight.get(step, {})):
                    raise TraceError(f"event {i} {event}: {fault}")
                try:
                    fold.apply(event)
                except ValueError as error:
                    raise TraceError(f"event {i}: {error}") from error
                i += 1
            if fault := find_fault(fold.state(), drafts=sum(map(Counter, in_flight.values()), Counter())):
                raise TraceError(f"after step {step} (event {i - 1}): {fault}")

    def _fault(self, event: Event, state: State, finished: set[str], drafts: Mapping[str, int]) -> str | None:
        """What is wrong with an event, given the state before it; None if nothing. Keeps `finished` up to date.
        drafts: draft tokens of the step that was decided last."""
        budget = self.header.settings.get("max_num_batched_tokens")
        if event[0] in _OF_A_REQUEST and event[1] in finished:
            return "the request has finished"
        if event[0] in ("add", "finish"):
            (finished.add if event[0] == "finish" else finished.discard)(event[1])
        if event[0] == "schedule" and budget is not None and sum(event[1].values()) > budget:
            return f"more than the budget of {budget} tokens"
        if event[0] == "schedule" and (early := [name for name in event[1] if name in state.remote]):
            return f"{early[0]} is computed while it waits for its blocks"
        if event[0] == "admit" and event[1] in state.remote:
            arrived = state.requests[event[1]].num_computed_tokens
            if not arrived or event[2] != arrived:
                return f"admitted with {event[2]} tokens computed, and {arrived} have arrived"
        return _too_early(state, drafts, *event[2:]) if event[0] == "update" else None

    def why(self, request_id: str, step: int | None = None) -> list[str]:
        """What happened to a request and the reasons for it, in plain words. Decode steps in a row are one line.

        Args:
            step: only what happened in this recorded step; None for the whole life.

        Raises:
            KeyError: the trace has no such request.
        """
        if request_id not in self.names():
            first = ", ".join(map(repr, list(self.names())[:8]))
            raise KeyError(f"no request {request_id!r} in this trace, which begins with the ids {first}")
        lines: list[str] = []
        run: list[list[Any]] = []
        for line in [line for line in _story(self, request_id) if step in (None, line[0])]:
            if not (run and _is_decode(line) and _is_decode(run[-1]) and line[0] == run[-1][0] + 1):
                lines += self._told(run)
                run = []
            run.append(line)
        return lines + self._told(run)

    def _told(self, run: list[list[Any]]) -> list[str]:
        """One line about consecutive steps in which the same happened."""
        if not run:
            return []
        first, what, last = *run[0][:2], run[-1][0]
        when = f"steps {first} to {last}: " if last > first else f"step {first}: " if first >= 0 else ""
        if isinstance(what, str):
            return [when + what]
        count, new = sum(line[1] for line in run), [token for line in run for token in line[2]]
        text = f"{count} token{'s' * (count != 1)} computed"
        if new:
            text += f", sampled {list(new) if self.tokenizer is None else repr(self.tokenizer.decode(new))}"
        return [when + text]

    def names(self, tokenizer: Any = None) -> dict[str, str]:
        """A short name for each request id: the first words in which the prompts differ, or the id where their text is not known.

        Args:
            tokenizer: anything with `decode(token_ids)`; None takes `self.tokenizer`.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        names = {request: request for request in self.start.requests}
        added = {event[1]: event[7] for event in self.events if event[0] == "add"}
        names.update({request: request for request in added})
        if tokenizer is None:
            return names
        parts = {request: _asked(tokenizer, list(prompt)) for request, prompt in added.items() if prompt}
        short = {request: _short(tokenizer, part) for request, part in parts.items()}
        if len(set(short.values())) < len(short):
            same = len(commonprefix(list(parts.values())))
            short = {request: _short(tokenizer, part[same:] or part) for request, part in parts.items()}
        seen: dict[str, int] = {}
        for request, name in short.items():
            seen[name] = seen.get(name, 0) + 1
            names[request] = name if seen[name] == 1 else f"{name} ({seen[name]})"
        return names

    def to_pandas(self) -> dict[str, Any]:
        """Tidy tables, from `steps` and `requests` to `media` and `experts`, by name: see `minivllm.core.trace_tables.tables`."""
        return trace_tables.tables(self)

    def save(self, path: Any, drop_samples: bool = False) -> None:
        """Write to a file, `.jsonl` (JSON lines) or `.parquet`: see `minivllm.core.trace_files`.

        Args:
            drop_samples: save without `samples`, which a file cannot hold.

        Raises:
            ValueError: there are samples, and `drop_samples` is off.
        """
        if self.samples and not drop_samples:
            raise ValueError(
                f"the trace has the logits of {len(self.samples)} samples, and no file of a trace holds them;"
                " save(path, drop_samples=True) leaves them out"
            )
        trace_files.save(self, path)

    @staticmethod
    def load(path: Any) -> Trace:
        """Read a file that `save` wrote."""
        found = trace_files.load(path)
        trace = Trace(found.header, found.start, found.events)
        trace.ranks = found.ranks
        return trace

    def to_perfetto(self, path: Any) -> None:
        """Write a file that opens in Perfetto (ui.perfetto.dev): requests as tracks, steps, counters."""
        trace_files.save_perfetto(self, path)

    def show(self, tokenizer: Any = None, other: Any = None) -> Any:
        """All linked views of the run on one cursor, for a notebook; `.save("run.html")` writes a page without a kernel: see `minivllm.viz`.

        Args:
            tokenizer: anything with `decode(token_ids)`, to show the tokens of a block as text; None takes `self.tokenizer`.
            other: a second run of the same requests (a trace, or the path of one), to compare this one with.
        """
        return views.find("show")(self, tokenizer, other=other)

    def plot_blocks(self, step: int = -1, ax: Any = None) -> Any:
        """Every KV block after a step, drawn with matplotlib; returns the axes."""
        return views.find("BlockMap")(self).plot(ax, step=step)

    def plot_timeline(self, ax: Any = None) -> Any:
        """What each request did in each step, drawn with matplotlib; returns the axes."""
        return views.find("Timeline")(self).plot(ax)

    def plot_drafts(self, request_id: str | None = None, step: int | None = None, ax: Any = None) -> Any:
        """How far drafts were right, drawn with matplotlib; returns the axes: for all, by position in the draft; for one request and step, the
        probabilities of each draft token (see the table `spec_decode`)."""
        return views.find("plot_drafts")(self, request_id, step, ax)

    def plot_prefix_tree(self, ax: Any = None) -> Any:
        """The cached prefixes as a tree, drawn with matplotlib; returns the axes."""
        return views.find("PrefixTree")(self).plot(ax)

    def plot_waste(self, ax: Any = None) -> Any:
        """Memory lost to fragmentation over time, drawn with matplotlib; returns the axes."""
        return views.find("Waste")(self).plot(ax)

    def plot_experts(self, layer: int | None = None, ax: Any = None) -> Any:
        """How many tokens each expert took, drawn with matplotlib; returns the axes: for all layers, or step by step for one (see the
        table `experts`)."""
        return views.find("plot_experts")(self, layer, ax)


class TraceError(ValueError):
    """A trace that contradicts itself. Says at which event."""


_OF_A_REQUEST = {kind for kind, fields in SCHEMA.items() if fields[:1] == ("request",)} - {"add", "finish", "route"}


def _too_early(
    state: State, drafts: Mapping[str, int], gained: dict[str, tuple[int, ...]], step: int | None = None
) -> str | None:
    """Tokens are sampled from the last known token only: all before it must have been computed.

    step: given if a later one has been decided already. It may go on from these tokens, with drafts after them, or have preempted the request.
    """
    for name, new in gained.items():
        request = state.requests.get(name)
        if request is None or (step is not None and request.status != "RUNNING"):
            continue
        ahead = request.num_computed_tokens - request.num_tokens - (len(new) - 1)
        if ahead and not (step is not None and ahead == 1 + drafts.get(name, 0)):
            return f"{name} gained a token, but {request.num_computed_tokens} of its {request.num_tokens} tokens are computed"
    return None


def find_fault(state: State, ahead: int = 0, drafts: Mapping[str, int] | None = None) -> str | None:
    """What contradicts itself in a state, or None: owners against reference counts, free lists, queues, progress.

    ahead: steps that were decided on tokens that are not known yet. drafts: draft tokens of a request in such a step.
    """
    counts = [0] * len(state.ref_cnt)
    for name, request in state.requests.items():
        for table in request.tables:
            for block in table:
                if block:
                    counts[block] += 1
        if not 0 <= request.num_computed_tokens <= request.num_tokens + ahead + (drafts or {}).get(name, 0):
            return f"{request.num_computed_tokens} tokens computed of {request.num_tokens}"
    for block in (block for blocks in state.kept.values() for block in blocks):
        counts[block] += 1
    for block, (count, ref) in enumerate(zip(counts, state.ref_cnt, strict=True)):
        if count != ref:
            return f"block {block} has ref_cnt {ref} but stands in {count} block tables"
    free = set(state.free)
    if len(free) != len(state.free):
        return "a block is twice in the free list"
    for block in range(1, len(counts)):
        if (block in free) != (counts[block] == 0):
            return f"block {block} with ref_cnt {counts[block]} is {'' if block in free else 'not '}in the free list"
    copies = [*state.cpu_free, *(block for request in state.requests.values() for block in request.cpu_blocks)]
    if len(set(copies)) < len(copies):
        return "a block of the swap pool has two owners, or is both owned and free"
    if set(state.waiting) & set(state.running):
        return f"requests both waiting and running: {set(state.waiting) & set(state.running)}"
    if sorted([*state.waiting, *state.running, *state.remote]) != sorted(state.requests):
        return "the queues and the unfinished requests differ"
    for name in state.remote:
        if not any(state.requests[name].tables):
            return f"{name} waits for its blocks to be filled, and holds none"
    return None


REASONS = {
    "max_num_seqs": "as many requests were running as max_num_seqs allows",
    "budget": "the token budget of the step was used up",
    "no_blocks": "too few KV blocks were free",
    "after_preemption": "a running request had just lost its blocks; nobody is admitted in such a step",
    "max_num_partial_prefills": "as many prompts were half done as max_num_partial_prefills allows",
    "in_flight": "it was preempted during a step, and the token of that step has not arrived yet",
    "max_loras": "as many adapters were in use as max_loras allows",
    "encoder_budget": "the encoder had computed as much in this step as max_num_encoder_input_tokens allows",
    "encoder_cache": "the encoder outputs in use left no room for another in encoder_cache_size",
    "no_chunked_prefill": "the rest of the budget is too small for the whole prompt, and enable_chunked_prefill is off",
    "behind": "another request was first in the queue and had to wait",
    "policy": "the policy gave it no tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold caps every request's share",
    "policy_error": "the policy failed, and the step's admissions were taken back",
    "reset_prefix_cache": "the prefix cache was reset",
    "kv_load_failure": "blocks that were to be fetched for it could not be",
    "step_failed": "a step failed, and what it had computed was forgotten",
    "remote_kv": "its KV blocks were being fetched from elsewhere",
    "blocks_in_use": "blocks of an earlier request with the same id were still being copied",
}


def _blocks(event: Any) -> str:
    blocks = [str(block) for block in event.blocks if block]
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(blocks)}"


_TOLD: dict[str, Callable[[Any], str]] = {
    "route": lambda e: (
        f"was sent to replica {e.replica} of {len(e.candidates)}: {e.reason or 'the router gave no reason'}"
    ),
    "add": lambda e: f"arrived with {e.num_prompt} prompt tokens",
    "attributes": lambda e: "asked for " + ", ".join(f"{name}={value!r}" for name, value in e.values.items()),
    "wait": lambda e: f"waited: {REASONS.get(e.reason, e.reason)}",
    "chunk": lambda e: f"got {e.num_tokens} of {e.wanted} tokens: {REASONS.get(e.reason, e.reason)}",
    "admit": lambda e: f"started, {e.num_cached} tokens cached" if e.num_cached else "started",
    "alloc": lambda e: f"took {_blocks(e)}",
    "hit": lambda e: f"shared {_blocks(e)}",
    "encode": lambda e: f"had an input encoded: {e.modality}, {e.num_embeds} embeddings",
    "skip": lambda e: f"gave back {_blocks(e)}, which no later token attends to",
    "kv_wait": lambda e: f"waited: {REASONS['remote_kv']} ({e.num_external} tokens)",
    "kv_arrive": lambda e: f"has its fetched blocks, {e.num_computed} tokens computed",
    "kv_keep": lambda e: f"left {_blocks(e)} to a copy that has not ended" if e.blocks else "left no blocks",
    "preempt": lambda e: (
        f"preempted ({e.mode}): "
        + REASONS.get(e.chosen_by, f"request {e.needed_by} needed blocks and none were free; chosen by {e.chosen_by}")
    ),
    "finish": lambda e: f"finished: {e.reason}",
}


def _story(trace: Trace, request: str) -> list[list[Any]]:
    """What happened to a request, as [step, text]; a step's computed and sampled tokens as [step, count, token ids]."""
    names, lines, open_ = trace.names(), list[list[Any]](), list[list[Any]]()
    for step, events in by_step(trace.events):
        for event in map(named, events):
            if event.kind == "schedule" and request in event.num_scheduled:
                open_.append([step, event.num_scheduled[request], ()])
                lines.append(open_[-1])
            elif event.kind == "update" and request in event.tokens and open_:
                open_.pop(0)[2] = event.tokens[request]
            elif event.kind in _TOLD and event.request == request:
                if event.kind == "preempt":
                    name = names.get(event.needed_by, event.needed_by)
                    event = event._replace(needed_by=name if name == event.needed_by else f"“{name}”")
                lines.append([step, _TOLD[event.kind](event)])
    return lines


def _is_decode(line: list[Any]) -> bool:
    return line[1] == 1 and len(line[2]) == 1


_ROLES = ("system", "user", "assistant", "model", "developer")


def _asked(tokenizer: Any, prompt: list[int]) -> list[int]:
    """The part of a prompt that was written last: between special tokens, without the role that a chat template puts before it."""
    special, parts = set(getattr(tokenizer, "all_special_ids", ())), [list[int]()]
    for token in prompt:
        if token in special:
            parts.append([])
        else:
            parts[-1].append(token)
    for part in reversed(parts):
        role = len(parts) > 1 and part and str(tokenizer.decode(part[:1])).strip() in _ROLES
        rest = part[1:] if role else part
        if rest and str(tokenizer.decode(rest[:8])).strip():
            return rest
    return prompt


def _short(tokenizer: Any, tokens: list[int], most: int = 28) -> str:
    text = " ".join(str(tokenizer.decode(tokens[:24])).split())
    return text if len(text) <= most and len(tokens) <= 24 else text[:most].rsplit(" ", 1)[0].rstrip(",.;:") + "…"
