"""Engine configuration: frozen dataclasses, and `resolve` that chooses defaults and says why."""

# Generated from nbs/core/config.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import difflib
import os
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

from minivllm.core.plugins import load_plugins
from minivllm.core.policy import POLICIES
from minivllm.core.speculative import SpeculativeConfig


class KVCacheRules:
    """What the scheduler and the views must know of one kind of KV cache. The base class is full attention.

    A new kind is a subclass, registered under a name with `register_kv_cache_kind`. All methods are pure.

    Attributes:
        has_window: whether a spec of this kind needs a `window`.
        prefix_cacheable: whether its blocks may be found by content and shared.
        event_kind: its name in KV events.
        label: name of such a group in views, a format string with fields of `spec`.
        is_state: a block does not hold tokens, but the state of a recurrence after all tokens up to some position.
    """

    has_window = False
    prefix_cacheable = True
    event_kind = "full_attention"
    label = "full attention"
    is_state = False

    def check(self, spec: KVCacheSpec) -> None:
        """Raise ValueError if the numbers of a spec do not suit this kind."""
        if (spec.window is None) == self.has_window:
            need = "needs a window" if self.has_window else "has no window"
            raise ValueError(f"KVCacheSpec of kind {spec.kind!r} {need}, got window={spec.window}")

    def visible(self, spec: KVCacheSpec, query: int, key: int) -> bool:
        """Whether the token at position `query` attends to the one at `key`."""
        return key <= query

    def skipped(self, spec: KVCacheSpec, num_computed_tokens: int) -> tuple[int, int]:
        """First and last + 1 of the tokens that no token from position `num_computed_tokens` on attends to.

        Blocks that lie within are given back, and a prefix hit of `num_computed_tokens` tokens does not need them.
        """
        return 0, 0

    def num_blocks(self, spec: KVCacheSpec, num_tokens: int) -> int:
        """Length of the block table of a request with `num_tokens` tokens."""
        return -(-num_tokens // spec.block_size)

    def first_kept(self, spec: KVCacheSpec, held: int, num_tokens: int) -> int:
        """Which entry of a table that grows from `held` entries to those of `num_tokens` tokens is the first to get a block.

        The new entries before it get the null block. Default: none do.
        """
        return held

    def max_blocks(self, spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks held at once by a request of `num_tokens` tokens, computed at most `max_step_tokens` at a time."""
        return self.num_blocks(spec, num_tokens)

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        """Bytes of one block in one layer; by default keys and values of every head, each with a scale of `scale_bytes` (an option)."""
        head = spec.head_dim * spec.dtype_bytes + dict(spec.options).get("scale_bytes", 0)
        return 2 * spec.block_size * spec.num_kv_heads * head

    def describe(self, spec: KVCacheSpec) -> str:
        """What a view calls a group of this kind."""
        return self.label.format(spec=spec)


KV_CACHE_KINDS: dict[str, KVCacheRules] = {"full": KVCacheRules()}
_BUILT_IN = ("full", "sliding_window", "chunked_local", "latent", "encoder_only", "state", "state_all", "state_align")


def register_kv_cache_kind(name: str, rules: KVCacheRules) -> None:
    """Make `KVCacheSpec(kind=name)` possible. A kind that a user registered may be registered again, a built-in one may not.

    Raises:
        ValueError: the name is that of a built-in kind.
        TypeError: `rules` is no `KVCacheRules` object.
    """
    if name in _BUILT_IN and name in KV_CACHE_KINDS:
        raise ValueError(f"the KV cache kind {name!r} is built in; register another name")
    if not isinstance(rules, KVCacheRules):
        raise TypeError(
            f"KV cache kind {name!r}: expected an object of a class that inherits from KVCacheRules, got {rules!r}"
        )
    KV_CACHE_KINDS[name] = rules


class SlidingWindowRules(KVCacheRules):
    """A token attends to itself and to `window - 1` tokens before it."""

    has_window = True
    event_kind = "sliding_window"
    label = "sliding window of {spec.window}"

    def visible(self, spec: KVCacheSpec, query: int, key: int) -> bool:
        return query - spec.window < key <= query  # type: ignore[operator]

    def skipped(self, spec: KVCacheSpec, num_computed_tokens: int) -> tuple[int, int]:
        return 0, max(0, num_computed_tokens - spec.window + 1)  # type: ignore[operator]

    def max_blocks(self, spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
        blocks = -(-(spec.window + max_step_tokens) // spec.block_size) + 1  # type: ignore[operator]
        return min(self.num_blocks(spec, num_tokens), blocks)


class ChunkedLocalRules(SlidingWindowRules):
    """A token attends to the tokens before it in its own chunk of `window` tokens."""

    event_kind = "chunked_local_attention"
    label = "chunks of {spec.window}"

    def visible(self, spec: KVCacheSpec, query: int, key: int) -> bool:
        return key <= query and key // spec.window == query // spec.window  # type: ignore[operator]

    def skipped(self, spec: KVCacheSpec, num_computed_tokens: int) -> tuple[int, int]:
        return 0, num_computed_tokens // spec.window * spec.window  # type: ignore[operator]


class LatentRules(KVCacheRules):
    """One vector per token, from which the keys and values of all heads are made (DeepSeek-AI, *DeepSeek-V2*, 2024)."""

    event_kind = "mla_attention"
    label = "latent vectors of {spec.head_dim}"

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        return spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes


class EncoderOnlyRules(KVCacheRules):
    """Attention that goes both ways: a prompt is computed in one step, and nothing is kept of it."""

    prefix_cacheable = False
    event_kind = "encoder_only_attention"
    label = "no cache"

    def visible(self, spec: KVCacheSpec, query: int, key: int) -> bool:
        return True

    def num_blocks(self, spec: KVCacheSpec, num_tokens: int) -> int:
        return 0


register_kv_cache_kind("sliding_window", SlidingWindowRules())
register_kv_cache_kind("chunked_local", ChunkedLocalRules())
register_kv_cache_kind("latent", LatentRules())
register_kv_cache_kind("encoder_only", EncoderOnlyRules())


class StateRules(KVCacheRules):
    """One block per request, which every step overwrites. vLLM's `mamba_cache_mode="none"`.

    With the option `ring`, that many blocks: the state after position p is in block `p % ring`, so that the states of the last
    `ring` tokens are kept, and rejected draft tokens can be taken back. vLLM calls these speculative blocks.

    A spec's `head_dim` is the bytes of the state, `dtype_bytes` is 1; its option `page_bytes` is the size of a block of the
    pool, if that is larger.
    """

    prefix_cacheable = False
    event_kind = "mamba"
    label = "a state of {spec.head_dim:,} bytes"
    is_state = True

    def check(self, spec: KVCacheSpec) -> None:
        KVCacheRules.check(self, spec)
        if self.bytes_per_block(spec) < spec.head_dim:
            raise ValueError(f"a state of {spec.head_dim} bytes does not fit a block of {self.bytes_per_block(spec)}")

    def visible(self, spec: KVCacheSpec, query: int, key: int) -> bool:
        """The state after the token before it, and itself."""
        return query - 1 <= key <= query

    def num_blocks(self, spec: KVCacheSpec, num_tokens: int) -> int:
        return dict(spec.options).get("ring", 1) if num_tokens else 0

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        return dict(spec.options).get("page_bytes", spec.head_dim)


class CheckpointedStateRules(StateRules):
    """A block for every `block_size` tokens, with the state at its end. vLLM's `mamba_cache_mode="all"`."""

    prefix_cacheable = True
    label = StateRules.label + ", kept every {spec.block_size} tokens"

    def skipped(self, spec: KVCacheSpec, num_computed_tokens: int) -> tuple[int, int]:
        return 0, max(0, num_computed_tokens - 1)

    def num_blocks(self, spec: KVCacheSpec, num_tokens: int) -> int:
        return KVCacheRules.num_blocks(self, spec, num_tokens)

    def max_blocks(self, spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
        return min(self.num_blocks(spec, num_tokens), -(-max_step_tokens // spec.block_size) + 1)


class AlignedStateRules(CheckpointedStateRules):
    """A step keeps the state at the last boundary of blocks that it reaches, and its last one. vLLM's `mamba_cache_mode="align"`.

    vLLM lets a prompt's steps end at such boundaries; here a step that crosses one is cut there when it is executed.
    """

    label = StateRules.label + ", kept once a step"

    def first_kept(self, spec: KVCacheSpec, held: int, num_tokens: int) -> int:
        return max(held, num_tokens // spec.block_size - 1)

    def max_blocks(self, spec: KVCacheSpec, num_tokens: int, max_step_tokens: int) -> int:
        return min(self.num_blocks(spec, num_tokens), 3)  # what the step reads, and two that it writes


STATE_KINDS = {"none": "state", "align": "state_align", "all": "state_all"}
"""The kind of a state by `mamba_cache_mode`."""
register_kv_cache_kind("state", StateRules())
register_kv_cache_kind("state_all", CheckpointedStateRules())
register_kv_cache_kind("state_align", AlignedStateRules())


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """How one layer keeps its keys and values.

    Attributes:
        kind: `full`, `sliding_window` (the last `window` tokens), `chunked_local` (the current chunk of `window` tokens),
            `latent` (one vector of `head_dim` numbers per token), `encoder_only` (nothing), `state`, `state_all` and
            `state_align` (see `StateRules`), or the name of a registered kind.
        block_size: tokens per block.
        num_kv_heads: key-value heads.
        head_dim: size of one head.
        window: tokens, for the kinds that have one.
        dtype_bytes: bytes per stored number.
        options: further numbers that the kind's rules read, as pairs of name and value.

    Raises:
        ValueError: the kind is not registered, or its rules refuse a number.
    """

    kind: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype_bytes: int = 4
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KV_CACHE_KINDS:
            raise ValueError(f"KVCacheSpec.kind must be one of {', '.join(KV_CACHE_KINDS)}; got {self.kind!r}")
        for name in ("block_size", "num_kv_heads", "head_dim", "dtype_bytes", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"KVCacheSpec.{name} must be at least 1, got {value}")
        self.rules.check(self)

    @property
    def rules(self) -> KVCacheRules:
        """The rules of its kind."""
        return KV_CACHE_KINDS[self.kind]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one layer, keys and values together."""
        return self.rules.bytes_per_block(self)


def pad_states(specs: Sequence[KVCacheSpec]) -> list[KVCacheSpec]:
    """The specs with the blocks of states made as large as the largest block."""
    most = max(spec.bytes_per_block for spec in specs)
    return [
        replace(spec, options=tuple((dict(spec.options) | {"page_bytes": most}).items()))
        if spec.rules.is_state
        else spec
        for spec in specs
    ]


def unify_block_size(specs: Sequence[KVCacheSpec], block_size: int) -> int:
    """The least multiple of `block_size` tokens whose keys and values take as many bytes as a state; vLLM unifies sizes so, too.

    specs: one per layer, for blocks of `block_size`. Without both states and attention, `block_size` itself.
    """
    states = [spec.bytes_per_block for spec in specs if spec.rules.is_state]
    others = [spec.bytes_per_block for spec in specs if not spec.rules.is_state]
    return block_size * max(1, -(-max(states) // min(others))) if states and others else block_size


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table.

    Attributes:
        spec: how each of them keeps its cache.
        layers: their numbers in the model; `layers[i]` uses cache tensor `i`.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]


def make_kv_cache_groups(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers of equal kind into groups of equally many layers.

    Args:
        specs: one per layer, in model order. All must need equally many bytes per block, states at most as many.

    Raises:
        ValueError: no layers, or layers whose blocks differ in size.
    """
    if not specs:
        raise ValueError("make_kv_cache_groups: the model has no layer that keeps anything")
    specs = pad_states(specs)
    sizes = {spec.bytes_per_block for spec in specs}
    if len(sizes) > 1:
        raise ValueError(
            f"make_kv_cache_groups: layers need blocks of different sizes, {sorted(sizes)} bytes; one pool cannot hold both."
            " Beside states, a larger block_size helps"
        )
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    size = gcd(*(len(layers) for layers in by_spec.values()))
    return tuple(
        KVCacheGroup(spec, tuple(layers[i : i + size]))
        for spec, layers in by_spec.items()
        for i in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool and the groups that share it.

    Attributes:
        num_blocks: physical blocks, the null block 0 among them.
        block_size: tokens per block.
        groups: at least one.
        num_cpu_blocks: blocks of the swap pool, 0 for none.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    num_cpu_blocks: int = 0

    @property
    def num_tensors(self) -> int:
        """Cache tensors to allocate: layers per group (in a pipeline stage: layers of the group that has most there)."""
        return max(len(group.layers) for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one physical block over all tensors."""
        return self.num_tensors * self.groups[0].spec.bytes_per_block


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the KV cache manager reads.

    Attributes:
        block_size: tokens per block.
        num_gpu_blocks: physical blocks on the device that computes (also when that is a CPU), null block included.
        num_cpu_blocks: blocks of the swap pool.
        enable_prefix_caching: keep and reuse full blocks by content.
        prefix_cache_index: `hash` (chained block hashes) or `radix` (a tree of blocks); both find the same hits.
        watermark: share of the blocks kept free when a waiting request is admitted.
    """

    block_size: int = 16
    num_gpu_blocks: int = 1024
    num_cpu_blocks: int = 0
    enable_prefix_caching: bool = True
    prefix_cache_index: str = "hash"
    watermark: float = 0.0

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("num_gpu_blocks", self.num_gpu_blocks, 2, "block 0 is the null block")
        _at_least("num_cpu_blocks", self.num_cpu_blocks, 0)
        _one_of("prefix_cache_index", self.prefix_cache_index, ("hash", "radix"))
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler reads. Names and defaults are vLLM's, except `starvation_limit` and `generates`, which are ours, and `max_num_partial_prefills`.

    Attributes:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: token budget of a step, prefill and decode together.
        max_model_len: most tokens of a request, prompt and output together.
        enable_chunked_prefill: a prompt may be computed in pieces.
        long_prefill_token_threshold: no request gets more tokens than this in a step; 0 for no cap.
        max_num_partial_prefills: most requests in the middle of a prompt at once; None for no cap. (vLLM's default is 1, which its V1 scheduler does not use.)
        policy: a name of `minivllm.core.policy.POLICIES`, when no policy object is given.
        scheduler_reserve_full_isl: admit a request only if its whole prompt fits into the free blocks, not just its first chunk.
        max_loras: most different LoRA adapters in a step; 0 for no limit (and no adapter weights).
        generates: the model predicts tokens, so that a prompt must leave room for one.
        max_num_encoder_input_tokens: most embeddings of media that are encoded in a step; None for `max_num_batched_tokens`.
        encoder_cache_size: most embeddings of media that are kept; None for `max_num_batched_tokens`.
        starvation_limit: a policy may let younger requests overtake the oldest waiting one, preempt one request, or give a request no
            tokens in consecutive steps, at most this often.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    max_loras: int = 0
    max_num_encoder_input_tokens: int | None = None
    encoder_cache_size: int | None = None
    starvation_limit: int = 1000
    generates: bool = True

    def __post_init__(self) -> None:
        _at_least("starvation_limit", self.starvation_limit, 1)
        _at_least("max_loras", self.max_loras, 0)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _at_least(name, getattr(self, name), 1)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in ("max_num_partial_prefills", "max_num_encoder_input_tokens", "encoder_cache_size"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _one_of("policy", self.policy, tuple(POLICIES))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}), or not every running request could decode in a step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len"
                f" ({self.max_model_len}) when enable_chunked_prefill=False, or long prompts could never run"
            )

    @property
    def encoder_limits(self) -> tuple[int, int]:
        """`encoder_cache_size` and `max_num_encoder_input_tokens`, with their defaults."""
        most = self.max_num_batched_tokens
        return self.encoder_cache_size or most, self.max_num_encoder_input_tokens or most

    def max_sampled_rows(self, speculative: SpeculativeConfig | None) -> int:
        """Most positions that a step samples from: per request its last token, and each of its draft tokens."""
        width = 1 if speculative is None else 1 + speculative.num_speculative_tokens
        return min(self.max_num_seqs * width, self.max_num_batched_tokens)


def _at_least(name: str, value: int, least: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{f' ({why})' if why else ''}, got {value}")


def _one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    if value not in tuple(allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """What a model makes of a whole prompt. Names are vLLM's.

    Attributes:
        tasks: the tasks that it can do, of `embed`, `token_embed`, `classify`, `token_classify` and `score`; the usual one first.
        pooling_type: `cls` (the first token), `mean` or `last`: which hidden states stand for the prompt.
        normalize: vectors are scaled to length 1.
        labels: names of the classes.
        activation: turns logits into class scores: `softmax`, `sigmoid` or `identity`.
        matryoshka_dimensions: sizes that a vector may be cut to; empty for any.
        token_types: kinds of text that it tells apart, such as the first of a pair and the second; 0 for none.
        generates: it predicts tokens too.
        whole_prompts: its attention goes both ways, so prompts are not cut and no cache is kept.
    """

    tasks: tuple[str, ...] = ("embed", "token_embed", "score")
    pooling_type: str = "mean"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: str = "softmax"
    matryoshka_dimensions: tuple[int, ...] = ()
    token_types: int = 0
    generates: bool = True
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine needs to know of a model, without the model.

    Attributes:
        name: as the user gave it.
        path: folder that it was loaded from.
        vocab_size: rows of the output layer.
        num_layers: attention layers.
        max_position_embeddings: longest sequence that the model was made for.
        kv_specs: one per layer, for the block size and dtype in use.
        weight_bytes: size of the weights in the dtype in use.
        checkpoint_dtype: dtype named by the model's own configuration.
        hidden_size: numbers in a hidden state; None where it is not needed.
        reads_media: there is an encoder of pictures.
        pooling: how it turns a whole prompt into vectors or class scores.
        draft_bytes_per_block: bytes per KV block of draft layers, which use the same block ids.
        padding: what tensor parallelism pads by zeros, in words.
    """

    name: str
    path: str
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    kv_specs: tuple[KVCacheSpec, ...]
    weight_bytes: int
    checkpoint_dtype: str = "float32"
    hidden_size: int | None = None
    reads_media: bool = False
    pooling: PoolingFacts = PoolingFacts()
    draft_bytes_per_block: int = 0
    padding: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the engine needs to know of the machine.

    Attributes:
        device: `cpu` or `cuda`, the one that would be chosen for "auto".
        free_memory_bytes: free memory of that device, before the weights are loaded.
        total_memory_bytes: all memory of that device.
        has_bf16: the device multiplies bfloat16 natively.
        attention_backend: the backend chosen for "auto" (or the one asked for).
        attention_backend_why: the reason for it.
        linear_kernel, linear_kernel_why: the matmuls that the model gets, and the reason for them.
        sums_by_peers, sums_by_peers_why: whether ranks add up in each other's memory, and the reason.
    """

    device: str
    free_memory_bytes: int
    total_memory_bytes: int
    has_bf16: bool
    attention_backend: str
    attention_backend_why: str
    linear_kernel: str = "torch"
    linear_kernel_why: str = "default"
    sums_by_peers: bool = False
    sums_by_peers_why: str = "default"


_INT4 = "int4_per_group_weight_only"
GROUP_SIZES = (32, 64, 128)
"""Inputs of a weight of 4 bits that share a scale; the first is the default."""
QUANTIZATIONS = {"int8_per_channel_weight_only": "int8", _INT4: f"int4_{GROUP_SIZES[0]}", "fp8": "fp8"}
"""The linear method of each quantization made at load. `models.linear.layer.register_quantization` adds to them."""


# what a weight takes, its share of the scales included, by the linear kernel that multiplies with it
INTEGER_BITS = {"int8": 8.0} | {f"int4_{group}": 4 + 32 / group for group in GROUP_SIZES}
WEIGHT_BITS = INTEGER_BITS | {"fp8": 8.0}


KV_CACHE_DTYPES = {"auto": None, "fp8": (1, 0), "fp8_e4m3": (1, 0), "int8_per_token_head": (1, 4)}
"""Bytes of a number and of the scale of a head; None for numbers of the model's dtype. The second and the third mean the same."""


RUNNERS = ("auto", "generate", "pooling")
MODEL_IMPLS = ("auto", "minivllm", "transformers")


ALL2ALL_BACKENDS = ("allgather_reducescatter", "all_to_all")
"""How ranks with whole experts join. The first is vLLM's default; as there, ranks that all have every token only add up."""


_LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def _arg(default: Any, help: str, choices: Collection[str] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("True or False", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a string", (str, os.PathLike)),
    "dict": ("a dict", (dict,)),
    "None": ("None", (type(None),)),
}


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Raise TypeError for a value that is of none of the types in an annotation such as `int | None`."""
    kinds = [kind.partition("[")[0] for kind in annotation.split(" | ")]
    if isinstance(value, bool) and "bool" not in kinds or not any(isinstance(value, _TYPES[kind][1]) for kind in kinds):
        raise TypeError(f"{name} must be {' or '.join(_TYPES[kind][0] for kind in kinds)}, got {value!r}")


ROUTER_NAMES = ("prefix_aware", "least_loaded", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Which KV connector an engine has, and what for. Names are vLLM's.

    Attributes:
        kv_connector: its name.
        kv_role: `kv_producer` saves blocks, `kv_consumer` fetches them, `kv_both` does both.
        kv_load_failure_policy: `recompute`: a request whose blocks cannot be fetched computes them.
        kv_connector_extra_config: settings that only the connector reads.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("kv_role", self.kv_role, ("kv_producer", "kv_consumer", "kv_both"))
        _one_of("kv_load_failure_policy", self.kv_load_failure_policy, ("recompute",))
        if not isinstance(self.kv_connector_extra_config, dict):
            raise TypeError(f"kv_connector_extra_config must be a dict, got {self.kv_connector_extra_config!r}")

    @property
    def is_producer(self) -> bool:
        """Whether it saves blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether it fetches blocks."""
        return self.kv_role != "kv_producer"


@dataclass(frozen=True, kw_only=True)
class _ModelArgs:
    """What is loaded, and where it is computed."""

    model: str = _arg("smollm2", "alias, folder, .gguf file or hub id")
    tokenizer: str | None = _arg(None, "folder or hub id of the tokenizer; default: the model's own")
    skip_tokenizer_init: bool = _arg(False, "load no tokenizer: prompts are token ids, and answers too")
    model_impl: str = _arg("auto", "whose code computes the model; auto: ours if it is there", MODEL_IMPLS)
    runner: str = _arg("auto", "whether it generates or pools; auto: as the model's files say", RUNNERS)
    pooler_config: dict[str, Any] | None = _arg(None, "of vectors: pooling_type, normalize (as JSON in a flag)")  # noqa: RUF009
    hf_overrides: dict[str, Any] | None = _arg(None, "replaces entries of config.json (as JSON in a flag)")  # noqa: RUF009
    revision: str | None = _arg(None, "branch, tag or commit of a hub id")
    download_dir: str | None = _arg(None, "where downloaded models are kept")
    load_format: str = _arg("auto", "where weights come from", ("auto", "safetensors", "gguf", "dummy"))
    dtype: str = _arg("auto", "of weights and activations", ("auto", "float32", "bfloat16", "float16"))
    device: str = _arg("auto", "where to compute", ("auto", "cpu", "cuda"))
    distributed_executor_backend: str | None = _arg(
        None, "uni: in the engine's process; mp: one a rank; ray: actors; external_launcher: torchrun"
    )
    tensor_parallel_size: int = _arg(1, "ranks that share every layer")
    pipeline_parallel_size: int = _arg(1, "stages, each with some of the layers")
    data_parallel_size: int = _arg(1, "whole engines behind one server")
    data_parallel_router: str = _arg("prefix_aware", "which of them gets a request", ROUTER_NAMES)
    enable_expert_parallel: bool = _arg(False, "ranks that share a layer hold whole experts, not a part of each")
    all2all_backend: str = _arg(
        ALL2ALL_BACKENDS[0], "experts see all tokens and add up, or tokens go to their ranks", ALL2ALL_BACKENDS
    )
    disable_custom_all_reduce: bool = _arg(False, "ranks on GPUs add up by NCCL alone, not in each other's memory")
    seed: int = _arg(0, "of the requests that bring no seed of their own, and of dummy weights")


@dataclass(frozen=True, kw_only=True)
class EngineArgs(_ModelArgs):
    """What a user may say of an engine. None and "auto" mean "choose"."""

    max_model_len: int | None = _arg(None, "most tokens of a request, prompt and output together")
    block_size: int = _arg(16, "tokens per KV block")
    kv_cache_dtype: str = _arg("auto", "of keys and values: the model's, or a byte each (e4m3, int8)", KV_CACHE_DTYPES)
    num_gpu_blocks: int | None = _arg(None, "physical KV blocks, null block included; default: from memory")
    num_cpu_blocks: int = _arg(0, "KV blocks of the swap pool")
    kv_cache_memory_bytes: int | None = _arg(None, "memory for the KV cache; default: from gpu_memory_utilization")
    gpu_memory_utilization: float = _arg(0.9, "share of a GPU's memory; on a CPU half of it, of what is free")
    enable_prefix_caching: bool = _arg(True, "reuse KV blocks of equal prefixes")
    prefix_cache_index: str = _arg("hash", "how cached prefixes are found", ("hash", "radix"))
    mamba_cache_mode: str | None = _arg(None, "which states are kept as checkpoints; default: none", tuple(STATE_KINDS))
    watermark: float = _arg(0.0, "share of KV blocks kept free when a request is admitted")
    max_num_seqs: int | None = _arg(None, "most requests running at once")
    max_num_batched_tokens: int | None = _arg(None, "token budget of a step")
    enable_chunked_prefill: bool = _arg(True, "compute long prompts in pieces")
    long_prefill_token_threshold: int = _arg(0, "most tokens of one request in a step; 0: no cap")
    max_num_partial_prefills: int | None = _arg(None, "most requests in the middle of a prompt at once")
    max_num_encoder_input_tokens: int | None = _arg(None, "most embeddings of media encoded in a step")
    encoder_cache_size: int | None = _arg(None, "most embeddings of media kept")
    limit_mm_per_prompt: dict[str, int] | None = _arg(None, 'most media of a prompt: {"image": n, "audio": n}')  # noqa: RUF009
    enable_prompt_embeds: bool = _arg(False, "take embeddings in the place of a prompt's tokens (prompt_embeds)")
    enable_mm_embeds: bool = _arg(False, "take embeddings in the place of media (image_embeds, audio_embeds)")
    mm_processor_cache_gb: float = _arg(1.0, "GiB of processed media kept")
    scheduler_reserve_full_isl: bool = _arg(True, "admit a request only if its whole prompt fits the free blocks")
    starvation_limit: int = _arg(1000, "how often a policy may pass over the oldest request, or preempt one")
    scheduling_policy: str = _arg("fcfs", "who gets tokens first: fcfs, priority, fair_share or another name")
    preemption_mode: str = _arg("recompute", "what happens to a preempted request's blocks", ("recompute", "swap"))
    attention_backend: str = _arg("auto", "name of an attention backend, or auto")
    enforce_eager: bool = _arg(False, "launch every kernel by itself: no CUDA graphs, on a CPU no single launch")
    quantization: str | None = _arg(None, "linear layers in fewer bits, made at load (int: on a CPU)", QUANTIZATIONS)
    quantization_config: dict[str, Any] | None = _arg(None, "of int4: group_size 32, 64 or 128 (as JSON)")  # noqa: RUF009
    speculative_config: dict[str, Any] | None = _arg(None, "of draft tokens (as JSON in a flag)")  # noqa: RUF009
    kv_transfer_config: dict[str, Any] | None = _arg(None, "settings of a KV connector (JSON on the command line)")  # noqa: RUF009
    enable_lora: bool = _arg(False, "let requests bring LoRA adapters")
    max_loras: int = _arg(1, "most different adapters in a step")
    max_lora_rank: int = _arg(16, "largest rank of an adapter")
    max_cpu_loras: int | None = _arg(None, "adapters kept in main memory; default: max_loras")
    max_logprobs: int = _arg(20, "most log-probabilities a request may ask for per token; -1: the whole vocabulary")
    async_scheduling: bool | None = _arg(None, "decide a step, and deliver tokens, while the model computes")
    logprobs_mode: str = _arg("raw_logprobs", "what `logprobs` reports", _LOGPROBS_MODES)
    kv_events_endpoint: str | None = _arg(None, "ZeroMQ address to publish KV events on, such as tcp://127.0.0.1:5557")
    kv_events_replay_endpoint: str | None = _arg(None, "ZeroMQ address that replays KV events")
    kv_events_topic: str = _arg("", "first frame of every KV event message")
    generation_config: str = _arg("auto", "sampling defaults: auto (the model's), or vllm (neutral)", ("auto", "vllm"))

    def __post_init__(self) -> None:
        load_plugins()
        self._check()

    def _check(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if not choices:
                _check_type(f.name, value, str(f.type))
            elif value != f.default:
                _one_of(f.name, value, choices)
        _one_of("scheduling_policy", self.scheduling_policy, tuple(POLICIES))
        least = {"block_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_gpu_blocks": 2,
                 "num_cpu_blocks": 0, "kv_cache_memory_bytes": 1, "max_loras": 1, "max_lora_rank": 1,
                 "max_cpu_loras": self.max_loras, "max_num_encoder_input_tokens": 1, "encoder_cache_size": 1}  # fmt: skip
        for name, value in least.items():
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), value)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs must be -1 or at least 0, got {self.max_logprobs}")
        if not (self.pooler_config or {}).keys() <= {"pooling_type", "normalize"}:
            raise ValueError(f"pooler_config must be a dict of pooling_type and normalize, got {self.pooler_config!r}")
        self._check_quantization()
        self._check_media()
        self._check_parallel()
        if not self.enable_lora and (self.max_loras, self.max_lora_rank, self.max_cpu_loras) != (1, 16, None):
            raise ValueError("max_loras, max_lora_rank and max_cpu_loras need enable_lora=True")
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")
        if self.preemption_mode == "swap" and self.num_cpu_blocks < 1:
            raise ValueError('preemption_mode="swap" needs num_cpu_blocks of at least 1, got 0')
        if self.preemption_mode != "swap" and self.num_cpu_blocks:
            raise ValueError(f'num_cpu_blocks={self.num_cpu_blocks} needs preemption_mode="swap"')

    def _check_media(self) -> None:
        limits = self.limit_mm_per_prompt or {}
        if set(limits) - {"image", "audio"} or not all(type(n) is int and n >= 0 for n in limits.values()):
            raise ValueError(
                f'limit_mm_per_prompt must be {{"image" or "audio": whole number of at least 0}}, got {limits!r}'
            )
        if not 0 <= self.mm_processor_cache_gb < 2**20:
            raise ValueError(f"mm_processor_cache_gb must be at least 0, got {self.mm_processor_cache_gb}")

    def _check_parallel(self) -> None:
        if self.world_size > 1 and self.distributed_executor_backend == "uni":
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} and pipeline_parallel_size={self.pipeline_parallel_size}"
                " need distributed_executor_backend='mp': 'uni' has one rank"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("enable_expert_parallel needs tensor_parallel_size of at least 2")
        if self.all2all_backend != ALL2ALL_BACKENDS[0] and not self.enable_expert_parallel:
            raise ValueError(f"all2all_backend={self.all2all_backend!r} needs enable_expert_parallel")
        if (
            self.executor in ("mp", "ray")
            and self.speculative is not None
            and not isinstance(self.speculative.method, str)
        ):
            raise ValueError(
                "speculative_config: a proposer that is an object cannot be handed to worker processes;"
                " it needs distributed_executor_backend='uni'"
            )

        drafts = None if self.speculative is None else self.speculative.method
        if self.world_size > 1 and drafts not in (None, "ngram", "suffix", "synthetic"):
            raise ValueError(
                f"speculative_config: method {drafts!r} is implemented for one rank; with several, ngram and suffix are"
            )
        if self.kv_transfer is not None:
            if drafts not in (None, "ngram", "suffix", "synthetic"):
                raise ValueError(f"kv_transfer_config is not implemented with speculative_config of method {drafts!r}")
            if self.executor == "external_launcher" and self.kv_transfer.kv_connector != "OffloadingConnector":
                raise ValueError(
                    "with distributed_executor_backend='external_launcher' all processes must find the same blocks;"
                    f" kv_connector {self.kv_transfer.kv_connector!r} does not promise that"
                )
            if not self.enable_prefix_caching:
                raise ValueError("kv_transfer_config finds blocks by their prefix; it needs enable_prefix_caching")
        if self.pipeline_parallel_size > 1 and self.async_scheduling:
            raise ValueError(
                "async_scheduling is not implemented with pipeline_parallel_size; stages overlap by themselves"
            )

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def expert_sharing(self) -> tuple[bool, bool]:
        """Whether ranks hold whole experts, and whether tokens travel to them."""
        return self.enable_expert_parallel, self.all2all_backend == "all_to_all"

    @property
    def executor(self) -> str:
        """The executor: the one asked for, or the one for this number of ranks."""
        return self.distributed_executor_backend or ("uni" if self.world_size == 1 else "mp")

    def _check_quantization(self) -> None:
        config = self.quantization_config
        if config is None:
            return
        if not isinstance(config, dict) or set(config) != {"group_size"}:
            raise ValueError(f'quantization_config must be {{"group_size": n}}, got {config!r}')
        if self.quantization != _INT4:
            raise ValueError(f"quantization_config goes with quantization={_INT4!r}, not with {self.quantization!r}")
        _one_of('quantization_config["group_size"]', config["group_size"], GROUP_SIZES)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The checked `kv_transfer_config`; None if there is none."""
        given = self.kv_transfer_config
        if given is None:
            return None
        known = [f.name for f in fields(KVTransferConfig)]
        if not isinstance(given, dict) or "kv_connector" not in given or set(given) - set(known):
            raise ValueError(
                f"kv_transfer_config must be a dict with kv_connector and any of {', '.join(known)}; got {given!r}"
            )
        return KVTransferConfig(**given)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The checked `speculative_config`; None if there is none."""
        return None if self.speculative_config is None else SpeculativeConfig.from_dict(self.speculative_config)

    @property
    def linear_kernel(self) -> str | None:
        """The linear kernel that `quantization` asks for, for int4 the one of its group size; None for no quantization."""
        if self.quantization_config is not None:
            return f"int4_{self.quantization_config['group_size']}"
        return None if self.quantization is None else QUANTIZATIONS[self.quantization]

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Make from keywords.

        Raises:
            TypeError: for an unknown keyword; names the nearest known one.
        """
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise TypeError(f"unknown engine argument {name!r}{hint}")
        return cls(**kwargs)


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting, its value, and why it has it."""

    setting: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of an engine. Made by `resolve`, not written to afterwards."""

    args: EngineArgs
    model: ModelFacts
    cache: CacheConfig
    scheduler: SchedulerConfig
    kv_cache: KVCacheConfig
    dtype: str
    device: str
    attention_backend: str
    seed: int
    decisions: tuple[Decision, ...]
    async_scheduling: bool = False

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """See `EngineArgs.speculative`."""
        return self.args.speculative

    def explain(self) -> str:
        """A table of every setting that was chosen, and why. One line each."""
        rows = [(d.setting, str(d.value), d.why) for d in self.decisions]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)


def choose_dtype(asked: str, checkpoint_dtype: str, device: str, has_bf16: bool) -> Decision:
    """The dtype to compute in: the one asked for, or the checkpoint's if the device is good at it."""
    if asked != "auto":
        return Decision("dtype", asked, "asked for")
    if device == "cpu" and not has_bf16:
        return Decision("dtype", "float32", "this CPU has no native bfloat16")
    if device == "cpu" and checkpoint_dtype in ("float16", "float32"):
        return Decision(
            "dtype", "bfloat16", f"half the bytes to read of {checkpoint_dtype}, and this CPU computes it natively"
        )
    if checkpoint_dtype == "float32":
        return Decision("dtype", "bfloat16", "half the bytes to read of float32")
    return Decision("dtype", checkpoint_dtype, "the checkpoint's own")


_CPU_KV_CACHE_BYTES = 4 * 2**30


def _choose_num_blocks(
    args: EngineArgs, model: ModelFacts, machine: MachineFacts, cache_bytes: int, useful: int
) -> Decision:
    """How many physical blocks to allocate.

    Args:
        cache_bytes: bytes of one block over all tensors.
        useful: blocks beyond which no request could use more.

    Raises:
        ValueError: the memory does not hold two blocks.
    """
    if args.num_gpu_blocks is not None:
        why = "attention goes both ways: no cache is kept" if model.pooling.whole_prompts else "asked for"
        return Decision("num_gpu_blocks", args.num_gpu_blocks, why)
    if args.kv_cache_memory_bytes is not None:
        room, why = args.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif machine.device == "cpu":
        room = int(machine.free_memory_bytes * args.gpu_memory_utilization / 2) - model.weight_bytes
        why = f"half of gpu_memory_utilization={args.gpu_memory_utilization:g} of the free memory, less the weights"
        if room > _CPU_KV_CACHE_BYTES:
            room = _CPU_KV_CACHE_BYTES
            why = "4 GiB, the most that is taken on a CPU unless kv_cache_memory_bytes says otherwise"
    else:
        room = int(machine.total_memory_bytes * args.gpu_memory_utilization) - model.weight_bytes
        room -= machine.total_memory_bytes - machine.free_memory_bytes
        why = f"gpu_memory_utilization={args.gpu_memory_utilization:g}, less the weights and what others use"
    blocks = room // cache_bytes
    if blocks < 2:
        raise ValueError(
            f"no room for the KV cache: {room:,} bytes ({why}) hold {max(blocks, 0)} blocks of {cache_bytes:,} bytes, at least 2 are needed."
            " Lower max_model_len or block_size, or give kv_cache_memory_bytes or num_gpu_blocks"
        )
    if blocks > useful:
        return Decision("num_gpu_blocks", useful, "all that max_num_seqs requests of max_model_len can fill")
    return Decision("num_gpu_blocks", blocks, why)


_CPU_MAX_NUM_SEQS, _GPU_MAX_NUM_SEQS = 128, 256


_DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


def _shared(cls: type[CacheConfig | SchedulerConfig], args: EngineArgs, **chosen: Any) -> dict[str, Any]:
    """Fields of a configuration: the chosen ones, and the others as the user gave them under the same name."""
    return {f.name: chosen[f.name] if f.name in chosen else getattr(args, f.name) for f in fields(cls)}


def _left_as_given(args: EngineArgs, known: set[str]) -> list[Decision]:
    """The settings for which nothing had to be chosen: as the user gave them, or their defaults."""
    values = {f: getattr(args, f.name) for f in fields(args) if f.name not in known}
    return [
        Decision(f.name, value, "default" if value == f.default else "asked for")
        for f, value in values.items()
        if value not in (None, "auto")
    ]


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage. As in vLLM, layers that are left over go to the stages before the last, from the back.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size={stages}: the model has {num_layers} layers, and each stage needs one"
        )
    sizes, left = [num_layers // stages] * stages, num_layers % stages
    for i in range(left):
        sizes[(-2 - i) % stages] += 1
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class RankHeads(NamedTuple):
    """Attention heads of each rank of tensor parallelism: query heads, key-value heads, and how many ranks hold the same of these."""

    queries: int
    keys: int
    copies: int


def rank_heads(num_heads: int, num_kv_heads: int, ranks: int) -> RankHeads:
    """How attention heads are shared out.

    Heads of zeros are added where they do not divide: to the key-value heads up to a multiple of the ranks or, if there are fewer, up
    to a divisor, so that equally many ranks hold each; then to the query heads of each.

    Args:
        num_heads, num_kv_heads: query heads and key-value heads of the model.
        ranks: of tensor parallelism.

    Returns:
        Heads of each rank, those of zeros included.
    """
    keys = -(-num_kv_heads // ranks)
    copies = ranks // next(n for n in range(num_kv_heads, ranks + 1) if ranks % n == 0) if num_kv_heads < ranks else 1
    return RankHeads(keys * -(-num_heads // (num_kv_heads * copies)), keys, copies)


def stage_groups(groups: Sequence[KVCacheGroup], layers: range) -> tuple[KVCacheGroup, ...]:
    """The KV cache groups with the layers that one stage has of each."""
    return tuple(replace(group, layers=tuple(i for i in group.layers if i in layers)) for group in groups)


def _bytes_per_block(groups: Sequence[KVCacheGroup], model: ModelFacts, stages: int) -> int:
    """Bytes of one block in the cache tensors of the stage that has most of them, and in those of a draft model."""
    local = [stage_groups(groups, layers) for layers in stage_layers(model.num_layers, stages)]
    tensors = max(len(group.layers) for stage in local for group in stage)
    return tensors * groups[0].spec.bytes_per_block + model.draft_bytes_per_block


def _explain_machine(args: EngineArgs, machine: MachineFacts, padding: str) -> list[Decision]:
    """The attention backend, and what follows from several ranks."""
    attention = Decision("attention_backend", machine.attention_backend, machine.attention_backend_why)
    if args.world_size == 1:
        return [attention]
    decisions = [attention, Decision("distributed_executor_backend", args.executor, f"{args.world_size} ranks")]
    if machine.device == "cpu" and not args.enforce_eager:
        why = "ranks add up between the matmuls, so a step cannot be one launch"
        decisions.append(Decision("enforce_eager", True, why))
    if padding:
        why = f"asked for; to be equal, weights and cache of the ranks have zeros: {padding}"
        decisions.append(Decision("tensor_parallel_size", args.tensor_parallel_size, why))
    if args.tensor_parallel_size > 1:
        decisions.append(Decision("disable_custom_all_reduce", not machine.sums_by_peers, machine.sums_by_peers_why))
    return decisions


def _explain_cache(args: EngineArgs, machine: MachineFacts, dtype: Decision) -> list[Decision]:
    """The dtype of keys and values, unless there is no more to say than that it was asked for."""
    if args.kv_cache_dtype == "auto":
        return [Decision("kv_cache_dtype", dtype.value, "the dtype of the model")]
    if not machine.attention_backend.startswith("numba_cuda"):
        return []
    why = "asked for; prompts are computed by mma.sync, since wgmma reads no such cache"
    return [Decision("kv_cache_dtype", args.kv_cache_dtype, why)]


def _without_cache(args: EngineArgs) -> EngineArgs:
    """The settings of a model whose attention goes both ways. Raises ValueError for one that means nothing there."""
    for name in ("speculative_config", "enable_lora", "kv_cache_dtype", "num_cpu_blocks", "tensor_parallel_size"):
        if getattr(args, name) != getattr(EngineArgs, name):
            raise ValueError(f"{name} is not implemented for a model whose attention goes both ways")
    return replace(args, enable_chunked_prefill=False, enable_prefix_caching=False, num_gpu_blocks=2)


def _check_drafts(args: EngineArgs, model: ModelFacts, mode: str) -> None:
    """Refuse draft tokens if the states of the model cannot be rolled back when some are rejected."""
    if args.speculative is None:
        return
    method = args.speculative.method
    if method in ("draft_model", "medusa", "eagle", "eagle3", "mtp"):
        raise ValueError(
            f"speculative_config: model {model.name!r} has state-space layers, for which method {method!r} is not implemented;"
            " ngram, suffix, synthetic and objects are"
        )
    if mode != "none":
        raise ValueError(
            f"speculative_config: with draft tokens only the last states are kept, so mamba_cache_mode={mode!r} cannot be"
        )


def choose_state_cache(args: EngineArgs, model: ModelFacts) -> tuple[list[KVCacheSpec], list[Decision], dict[str, Any]]:
    """The specs of the layers; the decisions about states (none for a model without states); and the settings of `CacheConfig` that
    they change.

    Raises:
        ValueError: an argument that this model cannot follow.
    """
    specs = list(model.kv_specs)
    if not any(spec.rules.is_state for spec in specs):
        if args.mamba_cache_mode is not None:
            raise ValueError(
                f"mamba_cache_mode={args.mamba_cache_mode!r}: model {model.name!r} has no state-space layers"
            )
        return specs, [], {}
    if args.kv_cache_dtype != "auto" and all(spec.rules.is_state for spec in specs):
        raise ValueError(f"kv_cache_dtype={args.kv_cache_dtype!r}: model {model.name!r} has no keys and values")
    mode = args.mamba_cache_mode or "none"
    if mode != "none" and not args.enable_prefix_caching:
        raise ValueError(f"mamba_cache_mode={mode!r} keeps states for prefix caching, but enable_prefix_caching is off")
    _check_drafts(args, model, mode)
    why = "default" if args.mamba_cache_mode is None else "asked for"
    decisions = [Decision("mamba_cache_mode", mode, why)]
    if mode == "none" and args.enable_prefix_caching:
        why = 'states are not kept; mamba_cache_mode="all" keeps one for every block, "align" one for every step'
        decisions.append(Decision("enable_prefix_caching", False, why))
    block_size = unify_block_size(specs, args.block_size)
    if block_size != args.block_size:
        why = f"a multiple of {args.block_size}, so that its keys and values are as large as a state"
        decisions.append(Decision("block_size", block_size, why))
    kinds = [STATE_KINDS[mode] if spec.rules.is_state else spec.kind for spec in specs]
    specs = [replace(s, kind=kind, block_size=block_size) for s, kind in zip(specs, kinds, strict=True)]
    if args.speculative is not None:
        ring = (("ring", 1 + args.speculative.num_speculative_tokens),)
        specs = [replace(spec, options=(*spec.options, *ring)) if spec.rules.is_state else spec for spec in specs]
    return specs, decisions, {d.setting: d.value for d in decisions[1:]}


def tokens_held(specs: Sequence[KVCacheSpec], num_blocks: int, most: int, max_step_tokens: int) -> int:
    """The most tokens of one request, at most `most`, that `num_blocks` blocks can hold. specs: one per group."""

    def fits(tokens: int) -> bool:
        return sum(spec.rules.max_blocks(spec, tokens, max_step_tokens) for spec in specs) <= num_blocks

    return bisect_left(range(1, most + 1), True, key=lambda tokens: not fits(tokens))


def resolve(args: EngineArgs, model: ModelFacts, machine: MachineFacts, dtype: Decision) -> EngineConfig:
    """Choose every setting that the user left open. Pure: same input, same configuration.

    Raises:
        ValueError: a setting is out of range for this model or machine; the message names value and range.
    """
    why = "asked for" if args.device != "auto" else "the best one found"
    decisions = [dtype, Decision("device", machine.device, why)]

    def choose(setting: str, asked: Any, default: Any, why: str) -> Any:
        decisions.append(Decision(setting, default if asked is None else asked, why if asked is None else "asked for"))
        return decisions[-1].value

    args = _without_cache(args) if model.pooling.whole_prompts else args
    longest = model.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ValueError(f"max_model_len={args.max_model_len} is longer than the model was made for ({longest})")
    max_model_len = choose("max_model_len", args.max_model_len, longest, "the model's own limit")
    usual = f"default on {machine.device}"
    default_seqs, why = _CPU_MAX_NUM_SEQS if machine.device == "cpu" else _GPU_MAX_NUM_SEQS, usual
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < default_seqs:
        default_seqs = args.max_num_batched_tokens
        why = "max_num_batched_tokens, so that every running request can decode"
    max_num_seqs = choose("max_num_seqs", args.max_num_seqs, default_seqs, why)
    budget, why = max(_DEFAULT_BATCHED_TOKENS[machine.device], max_num_seqs), usual
    if not args.enable_chunked_prefill and budget < max_model_len:
        budget, why = max_model_len, "max_model_len, since prompts may not be cut"
    budget = choose("max_num_batched_tokens", args.max_num_batched_tokens, budget, why)
    overlaps = machine.device != "cpu" and args.pipeline_parallel_size == 1
    overlap = choose("async_scheduling", args.async_scheduling, overlaps, usual)
    decisions += _explain_machine(args, machine, model.padding) + _explain_cache(args, machine, dtype)
    decisions.append(Decision("linear_kernel", machine.linear_kernel, machine.linear_kernel_why))
    specs, about_states, chosen = choose_state_cache(args, model)
    decisions += about_states
    block_size, groups = specs[0].block_size, make_kv_cache_groups(specs)
    bytes_per_block = _bytes_per_block(groups, model, args.pipeline_parallel_size)
    useful = max_num_seqs * sum(g.spec.rules.num_blocks(g.spec, max_model_len) for g in groups) + 1
    blocks = _choose_num_blocks(args, model, machine, bytes_per_block, useful)
    decisions.append(blocks)
    holds = tokens_held([g.spec for g in groups], blocks.value - 1, max_model_len, budget)
    if holds < max_model_len:
        if args.max_model_len is not None:
            raise ValueError(
                f"max_model_len={max_model_len} does not fit the KV cache: {blocks.value} blocks of {block_size} tokens"
                f" in {len(groups)} groups hold {holds} tokens. Lower max_model_len or give more num_gpu_blocks"
            )
        max_model_len, most = holds, Decision("max_model_len", holds, "all that the KV cache can hold of one request")
        decisions = [*(d for d in decisions if d.setting != "max_model_len"), most]
    cache = CacheConfig(**_shared(CacheConfig, args, num_gpu_blocks=blocks.value, **chosen))
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "max_model_len": max_model_len}
    limits |= {"max_loras": args.max_loras if args.enable_lora else 0, "generates": model.pooling.generates}
    scheduler = SchedulerConfig(**_shared(SchedulerConfig, args, policy=args.scheduling_policy, **limits))
    decisions += _left_as_given(args, {d.setting for d in decisions})
    kv_cache = KVCacheConfig(blocks.value, block_size, groups, args.num_cpu_blocks)
    return EngineConfig(
        args=args, model=model, cache=cache, scheduler=scheduler, kv_cache=kv_cache, dtype=dtype.value, device=machine.device,
        attention_backend=machine.attention_backend, seed=args.seed, decisions=tuple(decisions), async_scheduling=overlap,
    )  # fmt: skip
