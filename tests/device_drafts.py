"""What the kernels of `minivllm_kernels.cuda.drafts` compute, in plain Python; and an engine on a CPU whose steps go ahead of the host by it."""

from types import SimpleNamespace

import numpy as np
import torch

from minivllm.attention.backend import AttentionBatch
from minivllm.attention.numba_cpu import NumbaCPUPlan
from minivllm.attention.step_buffer import StepBuffer
from minivllm.runtime import device_drafts
from minivllm.runtime.device_drafts import DeviceDrafts
from minivllm.runtime.model_runner import step_bytes
from minivllm.spec_decode.proposers import NgramProposer


def verify_drafts(token_ids, compared, requests, ids, counts, guesses, luck, *, vocab_size, lookup):
    """Arrays or tensors on the host."""
    k = guesses.shape[1]
    for row, first, drafted in np.asarray(requests).tolist():
        if row < 0:
            continue
        going = True
        start = int(counts[row])
        for place in range(drafted + 1):
            draft = int(guesses[row, place]) if place < drafted else -1
            compared[first + place] = draft
            if luck is not None and draft >= 0:
                token_ids[first + place] = draft if luck[row, start + place] else (draft + 1) % vocab_size
            token = int(token_ids[first + place])
            if going:
                ids[row, int(counts[row])] = token
                counts[row] += 1
                going = draft >= 0 and token == draft
        known = np.asarray(ids[row, : int(counts[row])])
        drafts = [int(known[-1])] * k if lookup is None else NgramProposer(*lookup).guess(known, k)
        guesses[row] = torch.tensor(drafts or [-1] * k, dtype=torch.int32)


class Graphs:
    """Runs the steps that would be captured, and counts those that are replayed as they are."""

    def __init__(self):
        self.steps, self.replayed = {}, 0

    def __contains__(self, key):
        return key in self.steps

    def clear(self):
        self.steps.clear()

    def run(self, key, make):
        self.steps[key], _ = make()
        return self.steps[key]()

    def replay(self, key):
        self.replayed += 1
        return self.steps[key]()


class Fixed:
    """A plan of single tokens, made again when the tokens have found their places."""

    def __init__(self, backend, spec, device):
        self.backend, self.spec, self.device = backend, spec, device

    def fill(self, batch):
        self.batch = batch
        return 0

    def plan(self):
        self.made = object.__new__(NumbaCPUPlan)
        return self.made

    def place(self, token_ids, positions, places, rows, tokens):
        old, size = self.batch, self.spec.block_size
        lengths, slots = old.seq_lens.copy(), old.slot_mapping.copy()
        for t in np.flatnonzero(np.asarray(places) >= 0):
            row, place = int(rows[t]), int(places[t])
            position = int(tokens.counts[row]) - 1 + place
            assert position < old.seq_lens[t], "the host plans for the most tokens that there can be"
            token_ids[t] = tokens.ids[row, position] if place == 0 else max(0, int(tokens.guesses[row, place - 1]))
            positions[t], lengths[t] = position, position + 1
            slots[t] = old.block_table[t, position // size] * size + position % size
        self.made.__dict__.update(
            self.backend.plan(
                AttentionBatch(old.query_start_loc, lengths, old.block_table, slots), self.spec, self.device
            ).__dict__
        )


def go_ahead(llm, monkeypatch):
    """Let an engine with `drafts_on_device` work as on a GPU, on the CPU."""
    runner = llm.llm_engine.core.executor.runner
    monkeypatch.setattr(device_drafts, "cuda_ops", lambda: SimpleNamespace(verify_drafts=verify_drafts))
    runner.buffer, runner.graphs = StepBuffer(step_bytes(runner.config), runner.device), Graphs()
    runner.device_drafts = DeviceDrafts(runner.config, runner.model.spec.vocab_size, runner.device)
    runner.ladder = tuple(range(1, 200))
    runner._may_replay = lambda graphs: True  # no CPU backend is captured so
    monkeypatch.setattr(
        type(runner.backend), "fixed_decode", lambda self, rows, spec, buffer: Fixed(self, spec, runner.device)
    )
    return llm
