"""Sampler: ordered logits transforms, then the draw."""

# Generated from nbs/sampling/sampler.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import minivllm.sampling.zoo  # noqa: F401 - its transforms are known by name
from minivllm.sampling.logprobs import HostCopy, Logprob, PendingLogprobs
from minivllm.sampling.params import LOGPROBS_MODES, SamplingParams
from minivllm.sampling.random import uniforms
from minivllm.sampling.state import NO_LOGPROBS, Matcher, SamplingBatch, SamplingState
from minivllm.sampling.transforms import (
    Stage,
    Transform,
    draw,
    place_of,
    standard_stages,
    take_largest,
    transform_name,
    transforms_of,
    with_transforms,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(slots=True)
class SamplerOutput:
    """One step's tokens. token_ids [R] int64 on the host, -1 for a request in `errors`; logprobs: a report per row, or None."""

    token_ids: Tensor
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[str, str] = field(default_factory=dict)


Observer = Callable[[str, Tensor], None]
Accept = Callable[[Tensor, Tensor], Tensor]


def _or_none(token_ids: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive, token_ids, -1)


class Sampler:
    """Chooses one token per row.

    stages: the list of transforms, `standard_stages()` by default. transforms: those of the engine, put into their places
    in the list. logprobs_mode: for requests that do not say; "raw" is what the model said, "processed" what the draw saw.
    argmax: as `take_largest`, for greedy requests; a model's ops may have a faster one.
    """

    def __init__(
        self,
        stages: Sequence[Stage] | None = None,
        transforms: Sequence[Transform] = (),
        logprobs_mode: str = "raw_logprobs",
        argmax: Callable[[Tensor], Tensor] = take_largest,
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs_mode!r}")
        self.stages = with_transforms(standard_stages() if stages is None else stages, transforms)
        self.logprobs_mode, self._argmax = logprobs_mode, argmax

    def __repr__(self) -> str:
        lines = [f"{i:2}. {stage!r}" for i, stage in enumerate(self.stages, 1)]
        return "\n".join(["Sampler", *lines, f"{len(lines) + 1:2}. draw: one token by inverse CDF, or the likeliest"])

    def __call__(self, logits: Tensor, batch: SamplingBatch, observe: Observer | None = None) -> SamplerOutput:
        """Sample. logits [R, V] float32 in the order of the batch; **they are overwritten**.

        observe(name, logits) is called with the logits before the first and after every stage that ran.
        """
        return self.start(logits, batch, observe).finish()

    def start(
        self, logits: Tensor, batch: SamplingBatch, observe: Observer | None = None, accept: Accept | None = None
    ) -> "PendingSample":
        """The same without waiting for a GPU: the tokens stay on the device until the host asks for them with `finish`.

        accept(logits, token_ids): the tokens [R] to take instead, after the transforms and before logprobs are reported.
        """
        shape = (len(batch.rows), batch.state.vocab_size)
        if logits.shape != shape or logits.dtype != torch.float32:
            raise ValueError(f"logits must be float32 {list(shape)}, got {logits.dtype} {list(logits.shape)}")
        errors: dict[str, str] = {}
        wanted: _Wanted = batch.prepared.get(self) or self._wanted(batch)
        raw = wanted.keep("raw", logits) if wanted.modes else None
        if wanted.steps or wanted.errors or observe is not None:
            logits = self._transform(logits, batch, wanted, errors, observe)
        processed = wanted.keep("processed", logits) if wanted.modes else None
        token_ids = self._argmax(logits) if wanted.greedy else self._draw(logits, batch)
        if accept is not None:
            token_ids = torch.where(token_ids < 0, -1, accept(logits, token_ids.clamp(min=0)))
        reports = wanted.report(raw, processed, token_ids) if wanted.modes else []
        copy = HostCopy(token_ids) if token_ids.is_cuda else None
        return PendingSample(batch.request_ids, token_ids, reports, errors, copy)

    def _wanted(self, batch: SamplingBatch) -> "_Wanted":
        if self not in batch.prepared:
            batch.prepared[self] = _Wanted(batch, self)
        wanted: _Wanted = batch.prepared[self]
        return wanted

    def takes_argmax(self, batch: SamplingBatch) -> bool:
        """Whether every token is the argmax of the model's logits, and nothing more is wanted. Then a caller that has the argmax may pass it to `take`."""
        wanted = self._wanted(batch)
        return wanted.greedy and not (wanted.steps or wanted.modes or wanted.errors)

    def take(self, batch: SamplingBatch, token_ids: Tensor) -> "PendingSample":
        """What `start` gives for a batch that `takes_argmax`, with these tokens, int64 [R]; -1 where there is none."""
        return PendingSample(batch.request_ids, token_ids, [], {}, HostCopy(token_ids))

    def share_preparation(self, batch: SamplingBatch, rows: SamplingBatch) -> None:
        """Let `rows`, each of a request of `batch`, use what is prepared for the requests, if that is the same for every row."""
        wanted = self._wanted(batch)
        if not (wanted.steps or wanted.modes or wanted.errors):
            rows.prepared[self] = wanted

    def _transform(
        self, logits: Tensor, batch: SamplingBatch, wanted: "_Wanted", errors: dict[str, str], observe: Observer | None
    ) -> Tensor:
        """Apply what the batch wants; note the errors of requests whose own transforms or grammars failed."""
        if observe is not None:
            observe("model", logits)
        for stage, data, own in wanted.steps:
            if data is not None:
                logits = stage.apply(logits, data, batch)
                if observe is not None:
                    observe(stage.name, logits)
            for i, transform in own:
                _apply_own(logits[i], transform, batch.requests[i], errors)
                if observe is not None:
                    observe(transform_name(transform), logits)
        for request_id, reason in wanted.errors.items():
            errors.setdefault(request_id, reason)
        errors |= {view.request_id: view.error for view in batch.requests if view.error is not None}
        return logits

    def _draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Draw a token for each row that is not greedy, and take the argmax of the others; -1 where there is none."""
        greedy = batch.column("greedy")
        u = batch.uniforms()
        if not greedy.any():
            return _or_none(*draw(logits, u))
        where = (torch.from_numpy(np.flatnonzero(mask)) for mask in (greedy, ~greedy))
        certain, chance = (rows.to(logits.device, non_blocking=True) for rows in where)
        token_ids = torch.empty(len(batch), dtype=torch.int64, device=logits.device)
        token_ids[certain] = self._argmax(logits[certain])
        token_ids[chance] = _or_none(*draw(logits[chance], u[chance]))
        return token_ids

    def explain(
        self,
        logits: Tensor,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        seed: int | None = None,
        matcher: Matcher | None = None,
        tokenizer: Any = None,
        top: int = 5,
    ) -> "pd.DataFrame":
        """The stages of one token, in order, as a DataFrame.

        logits [V] float32: the model's, left unchanged. output_token_ids: what the request had produced before this token.
        seed: as in SamplingState.add. matcher: a fresh one for structured outputs. Columns: stage; kept, how many tokens are
        possible after it; tokens and probabilities, the `top` likeliest of them (ids, or texts with a tokenizer); and in the last
        row the uniform number u (none for greedy) and the chosen token_id. ValueError if no token comes out.
        """
        import pandas as pd

        state = SamplingState(1, logits.shape[-1], logits.device)
        state.add("it", params, prompt_token_ids, output_token_ids, 0 if params.is_greedy else seed, matcher)
        batch = state.batch(["it"])
        rows: list[dict[str, Any]] = []
        output = self(logits.clone()[None], batch, lambda stage, x: rows.append(_snapshot(stage, x[0], tokenizer, top)))
        if output.errors:
            raise ValueError(f"no token: {output.errors['it']}")
        chosen = int(output.token_ids[0])
        last = {"stage": "likeliest" if params.is_greedy else "draw", "kept": 1, "tokens": _texts([chosen], tokenizer)}
        u = None if params.is_greedy else float(uniforms(batch.column("seed"), batch.column("num_output_tokens"))[0])
        table = pd.DataFrame([*rows, last | {"probabilities": [1.0], "u": u, "token_id": chosen}])
        return table.astype({"u": "Float64", "token_id": "Int64"})


def _apply_own(row: Tensor, transform: Transform, view: Any, errors: dict[str, str]) -> None:
    """Replace `row` [V] by what the transform makes of it; on failure, note the error of this request."""
    if view.request_id in errors:
        return
    try:
        new = transform(row, view)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other requests
        errors[view.request_id] = f"transform {transform_name(transform)} raised {type(error).__name__}: {error}"
        return
    if not isinstance(new, Tensor) or new.shape != row.shape:
        got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
        errors[view.request_id] = (
            f"transform {transform_name(transform)} must return logits {list(row.shape)}, returned {got}"
        )
    elif new is not row:
        row.copy_(new)


class _Wanted:
    """What the requests of a batch need from a sampler: found once for a set of requests.

    Attributes:
        greedy: whether all rows take the argmax.
        counts, modes: for rows that want reports: how many tokens to report, and the `logprobs_mode`.
        steps: (stage, its data or None, own transforms after it with their rows) of the stages that have something to do.
        errors: of requests whose own transforms cannot be made, or have no place among the stages.
    """

    def __init__(self, batch: SamplingBatch, sampler: Sampler) -> None:
        asked = batch.column("logprobs")
        self.greedy = bool(batch.column("greedy").all())
        self.counts = {int(i): int(asked[i]) for i in np.flatnonzero(asked != NO_LOGPROBS)}
        self.modes = {i: batch.requests[i].params.logprobs_mode or sampler.logprobs_mode for i in self.counts}
        self.errors = {view.request_id: view.error for view in batch.requests if view.error is not None}
        places = [stage.name for stage in sampler.stages]
        own: dict[str, list[tuple[int, Transform]]] = {place: [] for place in places}
        for i in np.flatnonzero(batch.column("unusual")).tolist():
            view = batch.requests[i]
            if view.transforms is None:
                try:
                    view.transforms = transforms_of(view.params)
                except ValueError as error:  # this request alone fails
                    view.transforms, view.error = [], str(error)
                    self.errors[view.request_id] = view.error
            for transform in view.transforms:
                if (place := place_of(transform)) in own:
                    own[place].append((i, transform))
                    continue
                reason = (
                    f"transform {transform_name(transform)} wants to run after {place!r}, which is none of {places}"
                )
                self.errors.setdefault(view.request_id, reason)
        prepared = ((stage, stage.prepare(batch), own[stage.name]) for stage in sampler.stages)
        self.steps = [(stage, data, after) for stage, data, after in prepared if data is not None or after]

    def keep(self, kind: str, logits: Tensor) -> tuple[list[int], Tensor] | None:
        """A copy of the rows whose mode is of this kind, before later stages overwrite them."""
        rows = [i for i, mode in self.modes.items() if mode.startswith(kind)]
        return (rows, logits[_there(rows, logits.device)]) if rows else None

    def report(
        self, raw: tuple[list[int], Tensor] | None, processed: tuple[list[int], Tensor] | None, token_ids: Tensor
    ) -> list[tuple[list[int], PendingLogprobs]]:
        """Rows that want reports, and the reports."""
        out = []
        for kept in (raw, processed):
            if kept is None:
                continue
            rows, logits = kept
            normalised = torch.tensor([self.modes[i].endswith("logprobs") for i in rows])
            normalised = normalised.to(logits.device, non_blocking=True)
            values = torch.where(normalised[:, None], torch.log_softmax(logits, -1), logits)
            chosen = token_ids[_there(rows, logits.device)].clamp(min=0)
            out.append((rows, PendingLogprobs(values, chosen, [self.counts[i] for i in rows])))
        return out


def _there(rows: list[int], device: torch.device) -> Tensor:
    """Row numbers on a device, sent without waiting for what runs there."""
    return torch.tensor(rows).to(device, non_blocking=True)


@dataclass(slots=True)
class PendingSample:
    """Tokens that are chosen, or will be when the GPU comes to it.

    Attributes:
        request_ids: the request of each row.
        token_ids: int64 [R], on the device, -1 where none can be drawn.
        reports: rows that want log-probabilities, and the log-probabilities.
        errors: by request id.
        copy: the pending copy of the tokens to the host; None if they are there.
    """

    request_ids: Sequence[str]
    token_ids: Tensor
    reports: list[tuple[list[int], PendingLogprobs]]
    errors: dict[str, str]
    copy: HostCopy | None = None

    def finish(self) -> SamplerOutput:
        """Wait for the tokens and the reports, and for nothing else that a GPU does."""
        errors, ids = self.errors, self.request_ids
        token_ids = self.token_ids if self.copy is None else self.copy.wait()
        if int(token_ids.min()) < 0:
            for i in torch.nonzero(token_ids < 0)[:, 0].tolist():
                errors.setdefault(ids[i], "no token can be drawn: every logit is -inf, or one is nan or +inf")
        failed = [i for i, request_id in enumerate(ids) if request_id in errors] if errors else []
        if failed:
            token_ids = token_ids.clone()
            token_ids[failed] = -1
        logprobs: list[dict[int, Logprob] | None] = [None] * len(ids)
        for rows, pending in self.reports:
            for i, report in zip(rows, pending.wait(), strict=True):
                logprobs[i] = None if i in failed else report
        return SamplerOutput(token_ids, logprobs, errors)


def _texts(ids: list[int], tokenizer: Any) -> list[Any]:
    return ids if tokenizer is None else [tokenizer.decode([token]) for token in ids]


def _snapshot(stage: str, row: Tensor, tokenizer: Any, top: int) -> dict[str, Any]:
    kept = int((row > -torch.inf).sum())
    best = torch.softmax(row, -1).topk(min(top, kept))
    tokens, probabilities = _texts(best.indices.tolist(), tokenizer), [round(p, 4) for p in best.values.tolist()]
    return {"stage": stage, "kept": kept, "tokens": tokens, "probabilities": probabilities}
