"""How nbval runs the notebooks: kernels are forked where the system can, and stored outputs count as run."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.provisioning import local_provisioner

import minivllm  # noqa: F401  # where MINIVLLM_CPU_FEATURES is set it narrows torch, in the kernels' processes too


@cache
def kernel_server() -> subprocess.Popen[str]:
    """The process that forks kernels, one for each worker of the tests. It ends when its input does, with this process."""
    command = [sys.executable, str(Path(__file__).with_name("fork_kernels.py"))]
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # other notebooks run on the other cores
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    )


class ForkedKernel:
    """What jupyter_client uses of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str, **_: Any):
        """Start the kernel of `python -m ipykernel_launcher ...`; its environment is its server's."""
        arguments = command[command.index("ipykernel_launcher") + 1 :]
        server = kernel_server()
        server.stdin.write(json.dumps({"arguments": arguments, "folder": cwd}) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0  # how it ended is not known
        return None

    wait = poll  # it is called when the kernel has ended

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


if sys.platform == "linux":  # elsewhere a fork after such imports is not safe
    local_provisioner.launch_kernel = ForkedKernel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """nbval takes a cell without execution count for one that was never run. Ours are stored without, and were all run."""
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and cell.execution_count is None:
            cell.execution_count = 1
