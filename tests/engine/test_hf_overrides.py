"""An unknown config field is refused, unless the user says what to do with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams


def test_an_unknown_field_is_refused_until_it_is_overridden(tiny_model_path: Any, tmp_path: Path) -> None:  # noqa: F811
    folder = shutil.copytree(tiny_model_path("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"strange_field": 7}))
    with pytest.raises(ValueError, match="strange_field=7 is not supported"):
        LLM(folder, num_gpu_blocks=20)
    with LLM(folder, num_gpu_blocks=20, hf_overrides={"strange_field": None}) as llm:
        (output,) = llm.generate("ab", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
