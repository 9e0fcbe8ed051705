"""Shared by all tests: fast ones run first, and hypothesis draws the same examples every time."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; the first call on a machine downloads and converts it."""
    from minivllm.models.hub import resolve_model

    return resolve_model("smollm2")
