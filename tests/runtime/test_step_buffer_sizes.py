"""The buffer of a step's arrays holds those of the largest step with draft tokens. The real buffer, no GPU needed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM
from minivllm.attention.step_buffer import BufferFull, StepBuffer
from minivllm.runtime.device_drafts import DeviceDrafts
from minivllm.runtime.model_runner import step_bytes


class FixedDecode:
    """Reserves what the plan of the CUDA kernels reserves; see `NumbaCudaFixedDecode`."""

    def __init__(self, num_rows, spec, buffer):
        self.buffer = buffer
        buffer.reserve((num_rows,), np.int64)
        buffer.reserve((num_rows + 1500, 8), np.int32)

    def fill(self, batch):
        self.buffer.reserve(batch.block_table.shape, np.int32)
        return 0

    def plan(self):
        return None


SYNTHETIC = {"method": "synthetic", "num_speculative_tokens": 4, "synthetic_acceptance_rate": 0.7}


@pytest.fixture(
    params=[None, {"method": "ngram", "num_speculative_tokens": 4}, SYNTHETIC], ids=["plain", "drafts", "device drafts"]
)
def runner(request, tiny_model_path):  # noqa: F811
    """A runner as on a GPU, with vLLM's default sizes, whose graphs give no more than how many rows they replay."""
    override = {"max_position_embeddings": 8192}
    with LLM(tiny_model_path("llama"), num_gpu_blocks=600, max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=2048,
             hf_overrides=override, speculative_config=request.param) as llm:  # fmt: skip
        runner = llm.llm_engine.core.executor.runner
        runner.buffer = StepBuffer(step_bytes(runner.config), torch.device("cpu"))
        runner.backend = SimpleNamespace(fixed_decode=FixedDecode)
        runner.graphs = SimpleNamespace(run=lambda key, make: (torch.zeros(key[0], 1),), clear=lambda: None)
        if request.param is SYNTHETIC:
            runner.device_drafts = DeviceDrafts(runner.config, 256, torch.device("cpu"))
        yield runner


def largest_step(runner):
    rows = runner.config.scheduler.max_sampled_rows(runner.config.speculative)
    of, table = np.arange(rows), np.zeros((rows, 512), np.int32)
    attention = SimpleNamespace(seq_lens=of, block_table=table)
    counts, samples = np.ones(rows, np.int64), np.zeros(rows, np.bool_)
    return SimpleNamespace(
        token_ids=of,
        positions=of,
        rows=of,
        row_of_token=of,
        counts=counts,
        samples=samples,
        attention=[attention] * len(runner.specs),
    )


def test_the_largest_step_is_replayed(runner):
    step = largest_step(runner)
    assert len(step.token_ids) == (1280 if runner.drafter else 256)
    hidden, rows, _, _ = runner._replay(step, step.positions, runner.buffer, ahead=False)
    assert len(hidden) == len(rows) == len(step.token_ids)


def test_a_step_that_does_not_fit_is_not_replayed(runner):
    """It is launched kernel by kernel, for what `put` has no room for travels by itself."""
    step, small = largest_step(runner), StepBuffer(100_000, torch.device("cpu"))
    with pytest.raises(BufferFull):
        small.reserve((200_000,), np.int32)
    assert runner._replay(step, step.positions, small, ahead=False) is None and runner.graphs is not None
