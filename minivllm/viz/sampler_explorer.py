"""Sampler explorer: the stages of one token, with sliders."""

# Generated from nbs/viz/sampler_explorer.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from minivllm.viz.palette import LIGHT
from minivllm.viz.payload import Payload
from minivllm.viz.view import View

__all__ = ["SIDE", "STAGES", "SamplerExplorer", "check_stages", "page_params"]

PRECISIONS = ("float32", "float16")


def planes(values: np.ndarray) -> bytes:
    """The first bytes of all values, then their second bytes, and so on: neighbours that are alike, which deflate well."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


STAGES = (
    "grammar", "allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "penalties", "temperature", "min_p", "top_k", "top_p",
)  # fmt: skip
"""What the page can compute, in its order."""

_PLAIN = (
    "temperature", "min_p", "top_k", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words_token_ids", "min_tokens",
)  # fmt: skip


def page_params(record: Any) -> dict[str, Any]:
    """The parameters of a `SampleRecord` for the page, the seed as text (JavaScript has no 64-bit numbers).

    Raises:
        NotImplementedError: it was sampled with functions of the user's.
    """
    if own := [*(record.params.logits_processors or ()), *(record.params.extra_args or ())]:
        names = ", ".join(f if isinstance(f, str) else getattr(f, "__name__", type(f).__name__) for f in own)
        raise NotImplementedError(
            f"SamplerExplorer: logits_processors ({names}) are Python functions, which a page cannot run"
        )
    plain = {name: getattr(record.params, name) for name in _PLAIN}
    return plain | {"seed": str(record.seed), "stop_token_ids": sorted(record.params.all_stop_token_ids)}


def check_stages(sampler: Any) -> None:
    """Raises NotImplementedError if a sampler has stages that the page cannot compute."""
    names = tuple(stage.name for stage in sampler.stages)
    if names != STAGES:
        more = [name for name in names if name not in STAGES]
        what = f"the stages {', '.join(more)}" if more else "another order of the stages"
        raise NotImplementedError(f"SamplerExplorer: this engine's sampler has {what}, which a page cannot compute")


def grammar_mask(record: Any, grammar: Any) -> np.ndarray | None:
    """What the grammar allowed at this token: uint8 [4 * ceil(V / 32)], a bit a token, lowest first; None without a grammar.

    Raises:
        ValueError: there is one, and no compiler is given.
    """
    if record.params.structured_outputs is None:
        return None
    if grammar is None:
        raise ValueError(
            "this token was sampled under a grammar: give its compiler too, SamplerExplorer(record, grammar=...)"
        )
    matcher = grammar.matcher(record.params.structured_outputs)
    for token in record.output_token_ids:
        matcher.accept(token)
    mask = np.zeros(-(-len(record.logits) // 32), np.int32)
    matcher.fill(mask)
    return mask.view(np.uint8)


NUM_TEXTS = 400


def named_tokens(record: Any, mask: np.ndarray | None) -> list[int]:
    """The tokens that get a text: likeliest ones with and without the grammar, and those that parameters and texts name."""
    logits, p = record.logits, record.params
    ids = set(_likeliest(logits)) | set(p.logit_bias or ()) | set(p.allowed_token_ids or ()) | set(p.all_stop_token_ids)
    ids |= (
        {ids[-1] for ids in p.bad_words_token_ids or ()} | set(record.prompt_token_ids) | set(record.output_token_ids)
    )
    if mask is not None:
        allowed = np.unpackbits(mask, bitorder="little")[: len(logits)].astype(bool)
        ids |= set(_likeliest(np.where(allowed, logits, -np.inf)))
    return sorted(token for token in ids if token < len(logits))


def _likeliest(logits: np.ndarray) -> Iterable[int]:
    count = min(NUM_TEXTS, len(logits))
    return np.argpartition(-logits, count - 1)[:count].tolist()


if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class SamplerExplorer(View):
    """The stages of one sampled token, with sliders for the sampling parameters, and the pictures of the prompt. All logits travel, so the page needs no kernel.

    Three ways to say which token:

    - ``SamplerExplorer(record)``: a `SampleRecord`, say ``trace.samples["0", 3]``;
    - ``SamplerExplorer(llm, "The sky is", params)``: the model completes a prompt; ``step`` says which output token, from 0;
    - ``SamplerExplorer(llm, trace=trace, request="0", step=3)``: out of a trace recorded with ``samples=True``.

    Args:
        step: the output token, counted from 0.
        request: an output or a request id (of a trace; not needed if it has samples of one request only).
        tokenizer, grammar: for a bare record: they give tokens their texts, and grammars their mask.
        precision: "float32", or "float16" for half the size; the odds are those of the rounded logits then.

    Raises:
        KeyError: the trace has no record of this token. ValueError: contradictory or missing arguments.
        NotImplementedError: the token was sampled with Python functions, which a page cannot run.
    """

    module: ClassVar[str] = "sampler_explorer"
    title = "Why this token"
    wide = True
    figure_size = (7.0, 4.0)

    def __init__(
        self, source: Any, prompt: Any = None, params: Any = None, *, trace: Any = None, request: Any = None,
        step: int = 0, tokenizer: Any = None, grammar: Any = None, precision: str = "float32",
    ) -> None:  # fmt: skip
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        self.precision = precision
        self.media: list[tuple[int, int, Any]] = []  # first token, token behind the last, picture or None
        self.sampler: Any = None
        self.tokenizer, self.grammar = tokenizer, grammar
        if hasattr(source, "logits") and hasattr(source, "params"):
            _refuse("a record", prompt=prompt, params=params, trace=trace, request=request)
            self.record = source
        elif hasattr(source, "llm_engine") and hasattr(source, "generate"):
            _refuse("a model, which has its own", tokenizer=tokenizer, grammar=grammar)
            core = source.llm_engine.core
            self.tokenizer, self.grammar = source.get_tokenizer(), core.grammar
            (self.sampler,) = core.executor.collective_rpc("get_sampler")
            check_stages(self.sampler)
            if trace is not None:
                _refuse("a trace", prompt=prompt, params=params)
            else:
                trace, request = _generate(source, prompt, params, step)
            name, self.record = _recorded(trace, request, step)
            self.media = _media(trace, name)
        else:
            raise TypeError(f"SamplerExplorer shows a SampleRecord or asks an LLM, got {type(source).__name__}")
        self.params = page_params(self.record)
        self.mask = grammar_mask(self.record, self.grammar)
        if precision == "float16":
            self.record = replace(self.record, logits=self.record.logits.astype(np.float16).astype(np.float32))

    def build(self) -> Payload:
        note = (
            "The logits are rounded to float16, to about one part in two thousand; all that is shown follows from them."
        )
        payload = Payload({"recorded": self.params, "subtitle": self._place()})
        payload.header["note"] = note if self.precision == "float16" else None
        named = () if self.tokenizer is None else named_tokens(self.record, self.mask)
        texts = {token: self.tokenizer.decode([token]) for token in named}
        payload.header["token"] = {
            "precision": self.precision,
            "logits": payload.add_bytes(planes(self.record.logits.astype(self.precision))),
            "bitmask": None if self.mask is None else payload.add_bytes(self.mask.tobytes()),
            "texts": payload.add_json(texts),
            "prompt": payload.add_numbers(self.record.prompt_token_ids),
            "output": payload.add_numbers(self.record.output_token_ids),
        }
        payload.header["pictures"] = [_thumbnail(picture) for picture in self.pictures]
        return payload

    @property
    def pictures(self) -> list[Any]:
        """Those of the prompt, as PIL images."""
        return [picture for _, _, picture in self.media if picture is not None]

    def _place(self) -> str:
        """Where the token stands: the end of the text before it."""
        before = [*self.record.prompt_token_ids, *self.record.output_token_ids]
        place = f"Output token {len(self.record.output_token_ids)}"
        if self.tokenizer is None:
            return f"{place}, after {len(before)} tokens"
        inside = {i for first, end, _ in self.media for i in range(first, end)}
        before = [token for i, token in enumerate(before) if i not in inside]
        text = " ".join(self.tokenizer.decode(before[-48:]).split())
        return f"{place}, after “{'…' if len(text) > 90 else ''}{text[-90:]}”"

    def explain(self, top: int = 5) -> pd.DataFrame:
        """The stages as a DataFrame: see `minivllm.sampling.sampler.Sampler.explain`."""
        return self.record.explain(self.sampler, grammar=self.grammar, tokenizer=self.tokenizer, top=top)

    def describe(self) -> str:
        table = self.explain(top=1)
        stages, last = table.iloc[:-1], table.iloc[-1]
        sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in self.pictures)
        lines = [self._place(), *([f"  pictures: {sizes}"] if sizes else [])]
        for row in stages.itertuples():
            best = f"likeliest {row.tokens[0]!r} {row.probabilities[0]:.2%}"
            lines.append(f"  {row.stage:18} {row.kept:>7} tokens, {best}")
        how = "the likeliest" if last.stage == "likeliest" else f"drawn with u = {last.u:.4f}"
        return "\n".join([*lines, f"  chosen: {last.tokens[0]!r}, {how}"])

    def draw(self, axes: Axes, top: int = 12) -> None:
        """The likeliest tokens before the first and after the last stage; the chosen one is marked."""
        table = self.explain(top=top)
        first, last, chosen = table.iloc[0], table.iloc[-2], table.iloc[-1].tokens[0]
        before, after = (dict(zip(row.tokens, row.probabilities, strict=True)) for row in (first, last))
        names = list(dict.fromkeys([*after, *before]))[:top]
        y = np.arange(len(names))
        axes.barh(y - 0.2, [before.get(name, 0) for name in names], 0.4, color=LIGHT["free"], label="model")
        axes.barh(y + 0.2, [after.get(name, 0) for name in names], 0.4, color=LIGHT["accent"], label="after all stages")
        labels = [f"{'▶ ' if name == chosen else ''}{name!r}" for name in names]
        axes.set_yticks(y, labels, family="monospace", parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("probability")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        for i, picture in enumerate(self.pictures[:3]):
            beside = axes.inset_axes((0.78, 0.72 - 0.24 * i, 0.2, 0.22))
            beside.imshow(np.asarray(picture))
            beside.set_axis_off()


def _refuse(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"SamplerExplorer: {name} does not go with {what}")


def _generate(llm: Any, prompt: Any, params: Any, step: int) -> tuple[Any, str]:
    """The trace of a completion of more than `step` tokens, and its request."""
    if prompt is None:
        raise ValueError("SamplerExplorer: a model needs a prompt, or a trace: SamplerExplorer(llm, prompt, params)")
    params = llm.get_default_sampling_params() if params is None else params
    if params.num_children != 1:
        raise ValueError(f"SamplerExplorer shows one completion; params ask for {params.num_children}")
    needed = max(step + 1, params.min_tokens)
    with llm.record(samples=True) as trace:
        (output,) = llm.generate([prompt], params.clone(max_tokens=needed), use_tqdm=False)
    length = len(output.outputs[0].token_ids)
    if step >= length:
        raise ValueError(f"SamplerExplorer: the completion ended after {length} tokens; there is no token {step}")
    return trace, output.request_id


def _media(trace: Any, request: str) -> list[tuple[int, int, Any]]:
    """First token, token behind the last, and the picture (None for what is none) of each input of a request besides text."""
    found: list[tuple[int, int, Any]] = []
    for event in trace.events:
        if event[0] == "attributes" and event[1] == request:
            features = event[2].get("mm_features", ())
            found = [(first, first + n, trace.pictures.get(name)) for name, _, _, first, n, *_ in features]
    return found


SIDE = 160  # pixels of a picture on the page, at most


def _thumbnail(picture: Any) -> str:
    """A picture as a `data:` URL. Small ones are enlarged, so that their pixels are seen."""
    longest = max(picture.size)
    if longest > SIDE:
        small = picture.copy()
        small.thumbnail((SIDE, SIDE))
    else:
        scale = SIDE // longest
        small = picture.resize((picture.width * scale, picture.height * scale), 0)
    file = io.BytesIO()
    small.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _recorded(trace: Any, request: Any, step: int) -> tuple[str, Any]:
    """A request of a trace, and what was recorded of a token of it."""
    names = sorted({name for name, _ in trace.samples})
    if request is None and len(names) != 1:
        raise ValueError(f"SamplerExplorer: say which request of the trace: {', '.join(names) or 'it has no samples'}")
    name = names[0] if request is None else getattr(request, "request_id", request)
    if (name, step) not in trace.samples:
        known = f"samples of {', '.join(names[:5])}" if names else "no samples; record with record(samples=True)"
        raise KeyError(f"output token {step} of request {name!r} is not in this trace: it has {known}")
    return name, trace.samples[name, step]
