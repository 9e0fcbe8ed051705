"""Shared by all tests: fast ones run first, and hypothesis draws the same examples every time."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import minivllm  # noqa: F401  # before torch: where MINIVLLM_CPU_FEATURES is set it narrows torch as well

# torch's threads spin while they wait for each other: on a machine that others use too, ten times slower than to sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and every process that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "browser" in fixtures or "site" in fixtures:
            item.add_marker(pytest.mark.slow)
        if "site" in fixtures:  # all pages are built first
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


_imports = 0
_MANY = 100


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every engine collects garbage when it closes. To walk all that was imported by then (transformers alone has 200,000
    objects) takes longer than most tests do, so the collector is told that it stays."""
    global _imports
    if len(sys.modules) > _imports + _MANY:
        gc.collect()
        gc.freeze()
        _imports = len(sys.modules)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; the first call on a machine downloads and converts it."""
    from minivllm.models.hub import resolve_model

    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_path: Path) -> Any:
    """SmolLM2 in transformers, float32, from the same folder: the oracle."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llm(smollm2_path: Path) -> Iterator[Any]:
    """SmolLM2 in float32 with room for everything; shared, so leave no request behind and change no setting."""
    from minivllm import LLM

    with LLM("smollm2", dtype="float32", max_model_len=1024, num_gpu_blocks=1024, max_logprobs=-1) as shared:
        yield shared
