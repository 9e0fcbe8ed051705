"""Positions of Qwen2.5-VL: as transformers counts them, and the same however a prompt is cut."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_vlms import greedy, picture, save_vlm, vlm

from minivllm import LLM, SamplingParams
from minivllm.attention.step_buffer import StepBuffer
from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.engine.wire import pack, unpack
from minivllm.models.families.registry import spec_from_config
from minivllm.models.rope import RopeSpec
from minivllm.multimodal.mrope import MRope, mrope_positions
from minivllm.runtime.model_runner import step_bytes


def prompt(rng):
    """Kinds of tokens (1: of a picture), and the pictures."""
    kinds, features, grids = [], [], []
    for _ in range(rng.randint(1, 4)):
        kinds += [0] * rng.randint(1, 4)
        if rng.random() < 0.8:
            grid = rng.randint(1, 4), rng.randint(1, 4)
            place = PlaceholderRange(len(kinds), grid[0] * grid[1])
            features.append(MultiModalFeatureSpec("a", "image", place, grid=grid))
            grids.append([1, 2 * grid[0], 2 * grid[1]])
            kinds += [1] * place.length
    return kinds, tuple(features), grids


@pytest.mark.parametrize("seed", range(12))
def test_positions_equal_transformers_and_do_not_depend_on_chunks(seed):
    rng = random.Random(seed)
    kinds, features, grids = prompt(rng)
    ids, types = torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds])
    want, ahead = vlm("qwen2_5_vl").model.get_rope_index(ids, types, torch.tensor(grids) if grids else None)
    got, delta = mrope_positions(features, len(kinds))
    assert (got == want[:, 0].numpy()).all() and delta == int(ahead)
    mrope, at, end = MRope(), 0, len(kinds) + 3  # three decodes
    mrope.add("r", features, len(kinds))
    expected = np.concatenate([got, np.tile(np.arange(len(kinds), end) + delta, (3, 1))], 1)
    while at < end:
        n = min(rng.randint(1, 6), end - at)
        places = np.concatenate([[50], np.arange(at, at + n)])
        step = SimpleNamespace(
            request_ids=["text", "r"], counts=np.array([1, n]), starts=np.array([0, 1, 1 + n]), positions=places
        )
        turned = mrope.positions(step)
        assert (turned[..., 0] == 50).all() and (turned[..., 1:] == expected[:, at : at + n]).all()
        assert turned.ndim == (2 if at < len(kinds) and features else 1)
        at += n
    mrope.drop("r")
    assert not mrope.ahead and not mrope.prompts


def test_a_published_config_is_flat():
    nested = vlm("qwen2_5_vl").config.to_dict()
    text = {k: v for k, v in nested["text_config"].items() if k not in ("model_type", "rope_parameters")}
    rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat = {k: v for k, v in nested.items() if k != "text_config"} | text | rope
    spec, same = spec_from_config(flat), spec_from_config(nested)
    assert spec.layers == same.layers and spec.media.token_id == same.media.token_id == 260
    assert spec.ropes[0].sections == (2, 3, 3)
    with pytest.raises(ValueError, match="strange"):
        spec_from_config(flat | {"strange": 1})


def test_sections_must_fit_the_head():
    with pytest.raises(ValueError, match="mrope_section must be three numbers with the sum 8"):
        RopeSpec(dim=16, max_position=64, sections=(2, 2, 2))
    with pytest.raises(ValueError, match="not with rope type 'dynamic'"):
        RopeSpec(dim=16, max_position=64, sections=(2, 3, 3), kind="dynamic", factor=2.0)


def test_the_arrays_of_a_step_as_on_a_gpu(tmp_path):
    """The three positions travel with the other arrays of a step."""
    path = str(save_vlm("qwen2_5_vl", tmp_path))
    with LLM(path, dtype="float32", max_model_len=128, num_gpu_blocks=40, attention_backend="sdpa") as llm:
        runner = llm.llm_engine.core.executor.runner
        runner.buffer = StepBuffer(step_bytes(runner.config), runner.device)
        runner.planners = [spec.planner(runner.backend, runner.device, runner.buffer) for spec in runner.specs]
        prompt, image = "see <image> and tell", picture(1, 60, 40)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (out,) = llm.generate([{"prompt": prompt, "multi_modal_data": {"image": image}}], params)
    assert out.outputs[0].token_ids == greedy("qwen2_5_vl", prompt, [image], 6)[1]


def test_a_grid_crosses_processes_and_traces():
    for feature in (
        prompt(random.Random(1))[1][0],
        MultiModalFeatureSpec("a", "image", PlaceholderRange(3, 2), whole=True),
    ):
        assert unpack(pack(feature)) == MultiModalFeatureSpec.from_tuple(feature.to_tuple()) == feature
