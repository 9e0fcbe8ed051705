"""Run the kernels in numba's CUDA simulator: each file in a separate process, because numba decides at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "simulator").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_simulator(path: Path) -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, cwd=path.parents[3])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
