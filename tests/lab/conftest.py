"""The published workload files, where there are any."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trace_files() -> Path:
    """The folder of published traces: `traces` in $MINIVLLM_DATA, or in ../shared/data beside the repository."""
    named = os.environ.get("MINIVLLM_DATA")
    folder = (Path(named) if named else Path(__file__).parents[3] / "shared" / "data") / "traces"
    if not folder.is_dir():
        pytest.skip(f"no published traces in {folder}; name their folder in MINIVLLM_DATA")
    return folder
