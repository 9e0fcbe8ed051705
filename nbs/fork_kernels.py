"""Starts kernels by fork, so that torch, transformers, pandas and matplotlib are imported once and not once a notebook.

A script for `conftest.py`: it reads a line of JSON for each kernel, its arguments and its working directory, and answers
with its process id. Nothing of minivllm is among the imports, so a chapter still imports what it uses of it, and nothing
that a chapter sets environment variables for, as it does for numba.
"""

import builtins
import gc
import json
import os
import signal
import sys
from types import SimpleNamespace

os.environ["JPY_PARENT_PID"] = str(os.getpid())  # a kernel ends when this process does
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # what a kernel sets
del sys.path[0]  # this folder; a kernel has its working directory there

import IPython
import matplotlib.pyplot  # noqa: F401
import torch  # noqa: F401
from ipykernel.kernelapp import IPKernelApp

shell, IPython.get_ipython = IPython.get_ipython, lambda: SimpleNamespace(kernel=True, config={"IPKernelApp": {}})
builtins.get_ipython = IPython.get_ipython  # pandas and tqdm, when they are imported, look for a notebook: here it is
import pandas  # noqa: F401
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

IPython.get_ipython = shell
del builtins.get_ipython


def run_kernel(arguments: list[str], folder: str) -> None:
    """In the forked process: be the kernel that `python -m ipykernel_launcher ARGUMENTS` starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    IPKernelApp.launch_instance(arguments)


def main() -> None:
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing remains of a kernel that has ended
    for line in sys.stdin:
        kernel = os.fork()
        if not kernel:
            os.setpgid(0, 0)
            return run_kernel(**json.loads(line))
        os.setpgid(kernel, kernel)  # here too: who reads the id may signal the group at once
        print(kernel, flush=True)


if __name__ == "__main__":
    main()
