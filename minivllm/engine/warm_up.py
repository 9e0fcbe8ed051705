"""Runs a small batch before the first request, so that kernels are compiled and buffers exist."""

# Generated from nbs/engine/warm_up.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterator

from minivllm.core.config import EngineConfig
from minivllm.core.output import NewRequestData, SchedulerOutput
from minivllm.runtime.executor import Executor
from minivllm.sampling.params import SamplingParams

__all__ = ["PROMPT", "STEPS", "rehearsal", "warm_up"]


# %% nbs/engine/warm_up.ipynb #rehearsal
PROMPT, STEPS = 32, 3
"""Prompt tokens of each request, and tokens that follow, where there is room for so many."""

_PARAMS = (
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=1, top_k=50, top_p=0.9, min_p=0.01, seed=0),
)


def rehearsal(config: EngineConfig) -> Iterator[SchedulerOutput]:
    """Decisions about two made-up requests, one greedy and one not; none if the cache has no room for a single token."""
    cache, limits = config.kv_cache, config.scheduler
    count = min(len(_PARAMS), limits.max_num_seqs, limits.max_num_batched_tokens)
    room = (cache.num_blocks - 1) // (count * len(cache.groups)) * cache.block_size
    length = min(PROMPT, limits.max_num_batched_tokens // count, min(limits.max_model_len, room) - STEPS)
    if length < 1:
        return
    need = -(-(length + STEPS) // cache.block_size)
    prompt = [token % config.model.vocab_size for token in range(length)]
    block, new = 1, []  # block 0 is nobody's
    for i, params in enumerate(_PARAMS[:count]):
        tables = [list(range(block + g * need, block + (g + 1) * need)) for g in range(len(cache.groups))]
        block += need * len(cache.groups)
        new.append(NewRequestData(f"warm-up-{i}", prompt, [], params, tuple(tables), 0, None))
    names = tuple(request.request_id for request in new)
    yield SchedulerOutput(0, dict.fromkeys(names, length), length * count, tuple(new))
    for step in range(1, STEPS + 1):
        yield SchedulerOutput(step, dict.fromkeys(names, 1), count)
    yield SchedulerOutput(STEPS + 1, {}, 0, finished=names)


# %% nbs/engine/warm_up.ipynb #warm_up
def warm_up(executor: Executor, config: EngineConfig) -> None:
    """Carry the rehearsal out, on an executor that has done nothing else yet. Raises what the executor raises, RuntimeError if a request fails."""
    for output in rehearsal(config):
        if errors := executor.execute(output).errors:
            raise RuntimeError(f"the model fails at its first step: {next(iter(errors.values()))}")
