"""Timeline data: run-length encoded activity of every request."""

# Generated from nbs/viz/timeline_data.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.core.events import FoldReader
from minivllm.core.trace import REASONS
from minivllm.viz.payload import Ints, as_rows

KINDS = ("waiting", "preempted", "swapped", "remote", "stalled", "prefill", "decode")
WAITING, PREEMPTED, SWAPPED, REMOTE, STALLED, PREFILL, DECODE = range(len(KINDS))
FINISHES = ("unfinished", "stop", "length", "abort", "error")
_TEXTS = {"": "", "arrived": "arrived during this step", **REASONS}


@dataclass(frozen=True, slots=True)
class TimelineData:
    """What happened to each request in each step, run-length encoded, and the strips beneath.

    Attributes:
        request_ids: in order of arrival; the numbers below index this list.
        reasons: in words; the first is empty.
        prompt, output: tokens of the prompt, and sampled by the end. [num_requests]
        finish: the step in which it ended, -1 if before the first; `num_steps` if not at all. [num_requests]
        finish_kind: index into `FINISHES`. [num_requests]
        request, start, end, kind, tokens, wanted, reason: the spans, by request and then by time; steps `start` to `end - 1`. `kind` indexes
            `KINDS`, `reason` indexes `reasons`. One span per prefill chunk (`tokens` of the `wanted`); decodes in a row are one. [num_spans]
        preemptions: rows of step, request, who needed its blocks, 1 if swapped. [n, 4]
        admissions: rows of step, request, tokens computed already, those of them that were cached at first. [n, 4]
        waits: rows of step, first in the queue, index into `reasons`: from this step on, as long as it waits. [n, 3]
        drafts, media: rows of step, request, and draft tokens verified, those accepted; tokens of media computed, embeddings encoded. [n, 4]
        time: when each step began, and when the last one ended. In seconds. [num_steps + 1]
        step_end: when the result of each step was there; the beginning of the next one if there was none. [num_steps]
        prefill_tokens, decode_tokens, running, waiting: per step; the queues at its end. [num_steps]
        loras: rows of slot, first step, end, index into `adapters`: which LoRA adapter lay in which slot. By slot, then time. [n, 4]
        adapters: their names; with contents behind an `@`, where the engine adds them.
        budget: most tokens of one step, 0 if the trace does not say.
        names: what requests are called, where that is not their id.
        routes: where a router sent a request, and why, in words.
    """

    request_ids: list[str]
    reasons: list[str]
    prompt: Ints
    output: Ints
    finish: Ints
    finish_kind: npt.NDArray[np.uint8]
    request: Ints
    start: Ints
    end: Ints
    kind: npt.NDArray[np.uint8]
    tokens: Ints
    wanted: Ints
    reason: npt.NDArray[np.uint8]
    preemptions: Ints
    admissions: Ints
    waits: Ints
    drafts: Ints
    media: Ints
    loras: Ints
    adapters: list[str]
    time: npt.NDArray[np.float64]
    step_end: npt.NDArray[np.float64]
    prefill_tokens: Ints
    decode_tokens: Ints
    running: Ints
    waiting: Ints
    budget: int
    policy: str
    names: dict[str, str] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.step_end)


class _Life:
    """Where a request stands while the events go by."""

    __slots__ = ("number", "prompt", "output", "kind", "start", "tokens", "wanted", "reason")

    def __init__(self, number: int, prompt: int, output: int, kind: int | None, start: int, reason: int = 0) -> None:
        self.number, self.prompt, self.output = number, prompt, output
        self.kind, self.start, self.reason = kind, start, reason
        self.tokens = self.wanted = 0


class TimelineReader(FoldReader):
    """Turns events into spans: `read(trace, reader)`, then `reader.data()`."""

    def begin(self) -> None:
        self._number = -1
        self.codes = {name: i for i, name in enumerate(_TEXTS)}
        self.ids: list[str] = []
        self.lives: dict[str, _Life] = {}
        self.all: list[_Life] = []
        self.spans: list[tuple[int, ...]] = []
        self.finishes: dict[int, tuple[int, int]] = {}
        rows = (list[tuple[int, ...]]() for _ in range(6))  # as `TimelineData` has them
        self.preemptions, self.admissions, self.waits, self.drafts, self.media, self.loras = rows
        self._ranges: dict[str, list[tuple[int, int]]] = {}  # of media, by request
        self._encoded: dict[str, int] = {}  # embeddings, in this step
        self.routes: dict[str | int, str] = {}  # by number, and by id of those that have not come yet
        self.adapters: dict[str, int] = {}
        self._slots = {slot: (name, 0) for slot, name in self.fold.now.loras.items()}
        self.steps: list[list[int]] = []
        self.starts: list[float] = []
        self.ends: list[float | None] = []
        self._fresh: list[_Life] = []
        self._cuts: dict[str, tuple[int, int]] = {}
        self._head: _Life | None = None
        for name, s in self.fold.now.requests.items():
            known = {"RUNNING": None, "PREEMPTED": PREEMPTED, "SWAPPED": SWAPPED, "WAITING_FOR_REMOTE_KVS": REMOTE}
            kind = known.get(s.status, WAITING)
            self._open(name, s.num_prompt_tokens, s.num_tokens - s.num_prompt_tokens, kind)

    def _code(self, reason: str) -> int:
        """The number of a reason; one that this version does not know is told by its name."""
        return self.codes.setdefault(reason, len(self.codes))

    def _open(self, name: str, prompt: int, output: int, kind: int | None, reason: int = 0) -> _Life:
        life = _Life(len(self.ids), prompt, output, kind, max(self.step, 0), reason)
        self.ids.append(name)
        self.all.append(life)
        self.lives[name] = life
        return life

    def _turn(
        self, life: _Life, kind: int | None, step: int, tokens: int = 0, wanted: int = 0, reason: int = 0
    ) -> None:
        """End a request's span before `step` and begin another."""
        if life.kind is not None and step > life.start:
            self.spans.append((life.number, life.start, step, life.kind, life.tokens, life.wanted, life.reason))
        life.kind, life.start, life.tokens, life.wanted, life.reason = kind, step, tokens, wanted, reason

    def _on_step(self, step: int, time: float) -> None:
        self._number = step
        self.starts.append(time)
        self.ends.append(None)
        self.steps.append([0, 0, 0, 0])
        self._scheduled = False
        for life in self._fresh:  # from now on it stands in the queue like any other
            if life.kind == WAITING:
                self._turn(life, WAITING, self.step)
        self._fresh.clear()

    def end_step(self) -> None:
        now = self.fold.now
        if not self._scheduled:
            self._stall({})
        self.steps[-1][2:] = len(now.running), len(now.waiting) + len(now.remote)
        self._cuts.clear()
        self._encoded.clear()

    def _on_attributes(self, request: str, values: dict[str, Any]) -> None:
        if features := values.get("mm_features"):
            self._ranges[request] = [(first, first + n) for _, _, _, first, n, *_ in features]

    def _on_encode(self, request: str, modality: str, identifier: str, num_embeds: int) -> None:
        self._encoded[request] = self._encoded.get(request, 0) + num_embeds

    def _mark_media(self, num_scheduled: dict[str, int]) -> None:
        for name in self._ranges.keys() & num_scheduled.keys():
            start = self.fold.now.requests[name].num_computed_tokens
            end = start + num_scheduled[name]
            seen = sum(max(0, min(end, b) - max(start, a)) for a, b in self._ranges[name])
            if seen or name in self._encoded:
                self.media.append((self.step, self.lives[name].number, seen, self._encoded.get(name, 0)))

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        self._scheduled, lives, now, decodes, prefill = True, self.lives, self.step, 0, 0
        requests = self.fold.now.requests
        for name, n in num_scheduled.items():
            life = lives[name]
            if life.kind == DECODE:
                decodes += n  # more than one with draft tokens
            elif requests[name].num_computed_tokens >= life.prompt and (
                n == 1 or requests[name].num_tokens - requests[name].num_computed_tokens == 1
            ):
                decodes += n
                self._turn(life, DECODE, now)
            else:
                prefill += n
                self._turn(life, PREFILL, now, n, *self._cuts.get(name, (n, 0)))
        self.steps[-1][:2] = prefill, decodes
        if self._ranges:
            self._mark_media(num_scheduled)
        if len(num_scheduled) < len(self.fold.now.running):
            self._stall(num_scheduled)

    def _stall(self, scheduled: dict[str, int]) -> None:
        for name in self.fold.now.running:
            if name not in scheduled and self.lives[name].kind != STALLED:
                self._turn(self.lives[name], STALLED, self.step)

    def _on_update(self, time: float, tokens: dict[str, list[int]], step: int | None = None) -> None:
        late = 0 if step is None else self._number - step
        if late < len(self.ends):
            self.ends[-1 - late] = time
        for name, new in tokens.items():
            self.lives[name].output += len(new)

    def _on_verify(self, drafts: dict[str, Any], step: int | None = None) -> None:
        at = self.step if step is None else self.step - (self._number - step)
        for name, (tokens, accepted, *_) in drafts.items():
            self.drafts.append((at, self.lives[name].number, len(tokens), accepted))

    def _on_add(self, request: str, num_prompt: int, *fields: Any) -> None:
        reason = self._code("arrived") if self.step >= 0 else 0
        self._fresh.append(self._open(request, num_prompt, len(fields[5]), WAITING, reason))
        if request in self.routes:
            self.routes[self._fresh[-1].number] = self.routes.pop(request)

    def _on_route(self, request: str, time: float, replica: int, candidates: Any, reason: str) -> None:
        self.routes[request] = f"to replica {replica} of {len(candidates)}{reason and f': {reason}'}"

    def _on_wait(self, request: str, reason: str) -> None:
        life, code = self.lives[request], self._code(reason)
        before, self._head = self._head, life
        if before is not None and before is not life and before.kind in (WAITING, PREEMPTED, SWAPPED, REMOTE):
            self._turn(before, before.kind, self.step)
        if life.reason != code:
            self._turn(life, life.kind, self.step, reason=code)
        self.waits.append((self.step, life.number, code))

    def _on_chunk(self, request: str, num_tokens: int, wanted: int, reason: str) -> None:
        self._cuts[request] = (wanted, self._code(reason))

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        life = self.lives[request]
        self._turn(life, None, self.step)
        self.admissions.append((self.step, life.number, num_computed, num_cached))

    def _on_kv_wait(self, request: str, num_external: int) -> None:
        self._turn(self.lives[request], REMOTE, self.step, num_external, reason=self._code("remote_kv"))

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        life = self.lives[request]
        self._turn(life, SWAPPED if mode == "swap" else PREEMPTED, self.step)
        self.preemptions.append((self.step, life.number, self.lives[needed_by].number, int(mode == "swap")))

    def _on_lora_load(self, adapter: str, slot: int) -> None:
        self._slots[slot] = adapter, max(self.step, 0)

    def _on_lora_evict(self, adapter: str, slot: int) -> None:
        name, start = self._slots.pop(slot)
        self.loras.append((slot, start, max(self.step, start + 1), self.adapters.setdefault(name, len(self.adapters))))

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        life = self.lives[request]
        self._turn(life, None, self.step + 1)
        self._ranges.pop(request, None)
        kind = reason if reason in FINISHES else "error"
        self.finishes[life.number] = (self.step, FINISHES.index(kind))

    def data(self, names: dict[str, str] | None = None) -> TimelineData:
        """What was read."""
        for life in self.all:
            if life.number not in self.finishes:
                self._turn(life, None, self.step + 1)
        n = len(self.starts)
        loras = [(*row[:2], min(row[2], n), row[3]) for row in self.loras]
        for slot, (name, start) in self._slots.items():
            loras.append((slot, start, n, self.adapters.setdefault(name, len(self.adapters))))
        spans, steps = as_rows(sorted(self.spans), 7), as_rows([tuple(s) for s in self.steps], 4)
        last = self.ends[-1] if n and self.ends[-1] is not None else self.starts[-1] if n else 0.0
        following = [*self.starts[1:], last][:n]
        finish = [self.finishes.get(i, (n, 0)) for i in range(len(self.ids))]
        return TimelineData(
            request_ids=self.ids, reasons=[_TEXTS.get(name, name) for name in self.codes],
            prompt=np.array([life.prompt for life in self.all], np.int32),
            output=np.array([life.output for life in self.all], np.int32),
            finish=np.array([step for step, _ in finish], np.int32),
            finish_kind=np.array([kind for _, kind in finish], np.uint8),
            request=spans[:, 0], start=spans[:, 1], end=spans[:, 2], kind=spans[:, 3].astype(np.uint8),
            tokens=spans[:, 4], wanted=spans[:, 5], reason=spans[:, 6].astype(np.uint8),
            preemptions=as_rows(self.preemptions, 4), admissions=as_rows(self.admissions, 4), waits=as_rows(self.waits, 3),
            drafts=as_rows(self.drafts, 4), media=as_rows(sorted(self.media), 4),
            loras=as_rows(sorted(loras), 4), adapters=list(self.adapters),
            time=np.array([*self.starts, last]),
            step_end=np.array([later if end is None else end for end, later in zip(self.ends, following, strict=True)], np.float64),
            prefill_tokens=steps[:, 0], decode_tokens=steps[:, 1], running=steps[:, 2], waiting=steps[:, 3],
            budget=int(self.header.settings.get("max_num_batched_tokens") or 0), policy=self.header.policy, names=names or {},
            routes={at: text for at, text in self.routes.items() if isinstance(at, int)},
        )  # fmt: skip
