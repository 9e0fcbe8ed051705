"""Many clients at once, some of whom leave: every answer is right, every block comes back. The benchmark does the same with a real model."""

from pathlib import Path

import pytest

from minivllm.core.config import EngineArgs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_forty_clients_of_whom_some_leave(tiny_args: EngineArgs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import server_load

    flags = (*server_load.EXACT, "--max-model-len", "256", "--num-gpu-blocks", "128")  # too few for all: some give way
    found = server_load.run(tiny_args.model, 40, 2.0, 0.3, *flags, traced=True)
    assert found["problems"] == []
    assert all(one.answers and one.left for one in found["rounds"]) and found["steps"]
