"""Which expert took how many tokens at which step: against the routers of transformers."""

import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.trace import Trace

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[(7 * i + 31 * j) % 250 for j in range(n)] for i, n in enumerate((3, 40, 17, 29))]


@pytest.fixture(scope="module")
def recorded(tiny_model_path):  # noqa: F811
    with LLM(str(tiny_model_path("qwen2-moe")), dtype="float32", num_gpu_blocks=64, max_num_batched_tokens=24) as llm:
        before = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.reset_prefix_cache()
        with llm.record() as trace:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        layers = llm.llm_engine.core.executor.runner.model.layers
        blocks = [block for layer in layers if hasattr(block := layer.mlp, "loads")]
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
        assert len(blocks) == 2 and all(block.loads is None for block in blocks), "no one counts after the recording"
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in before]
    return trace, outputs


@torch.inference_mode()
def chosen(outputs) -> dict[int, list[int]]:
    """By transformers' routers: tokens of each expert, over all that was computed, by layer."""
    model = hf_model("qwen2-moe")
    counts = {1: torch.zeros(8, dtype=torch.int64), 3: torch.zeros(8, dtype=torch.int64)}
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]])
        for layer, logits in zip(counts, model(ids, output_router_logits=True).router_logits, strict=True):
            counts[layer] += torch.bincount(logits.topk(3, -1).indices.flatten(), minlength=8)
    return {layer: count.tolist() for layer, count in counts.items()}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_loads_are_the_choices_of_transformers_routers(recorded, tmp_path, ending):
    trace, outputs = recorded
    trace.check()
    trace.save(tmp_path / f"t.{ending}")
    assert Trace.load(tmp_path / f"t.{ending}").events == trace.events
    frames = trace.to_pandas()
    table, steps = frames["experts"], frames["steps"].set_index("step")
    totals = table.groupby(["layer", "expert"]).num_tokens.sum()
    assert {layer: totals[layer].tolist() for layer in (1, 3)} == chosen(outputs)
    for (step, _), taken in table.groupby(["step", "layer"]).num_tokens.sum().items():
        assert taken == 3 * steps.num_tokens[step], "each token of the step has three experts"
    assert set(table.step) == set(steps.index[steps.num_tokens > 0])


def test_pictures(recorded):
    trace, _ = recorded
    table = trace.to_pandas()["experts"]
    ax = trace.plot_experts()
    assert ax.images[0].get_array().shape == (2, 8) and (ax.get_xlabel(), ax.get_ylabel()) == ("expert", "layer")
    shares = ax.images[0].get_array()
    assert abs(shares.mean(1) - 1).max() < 1e-9 and shares.max() > 1.2
    ax = trace.plot_experts(3)
    assert ax.images[0].get_array().shape == (8, table.step.nunique()) and ax.get_xlabel() == "step"
    with pytest.raises(ValueError, match=r"no experts of layer 2; layers that have: 1, 3"):
        trace.plot_experts(2)
    with pytest.raises(ValueError, match="no experts; layers that have: none"):
        Trace(trace.header).plot_experts()
