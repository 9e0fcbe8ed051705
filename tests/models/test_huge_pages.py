"""Weights in huge pages: only Linux knows, and it may have none."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from minivllm.models.linear.base import HUGE_PAGE, move_to_huge_pages, use_huge_pages
from minivllm.models.linear.layer import Linear

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's own")
def test_a_weight_moves_into_huge_pages_and_keeps_its_numbers():
    if not HUGE.exists() or "[never]" in HUGE.read_text():
        pytest.skip("this system gives no huge pages")
    new = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no memory that has moved before
    weight = torch.frombuffer(new, dtype=torch.float32)
    weight.copy_(torch.arange(len(weight)))
    before = huge_kilobytes()
    mover = move_to_huge_pages([torch.ones(7), weight])
    assert mover is not None
    mover.join()
    assert huge_kilobytes() > before
    assert torch.equal(weight, torch.arange(len(weight), dtype=torch.float32))


def test_memory_that_cannot_move_is_left_alone():
    for tensor in (torch.ones(7), torch.ones(HUGE_PAGE, device="meta")):
        use_huge_pages(tensor)
        assert move_to_huge_pages([tensor]) is None


def test_a_method_says_what_it_reads():
    layer = Linear(64, {"a": 64}, dtype=torch.float32, device=torch.device("cpu"), method="cpu")
    layer.method.process_weights_after_loading()
    assert layer.method.memory is not None and layer.method.memory.numel() == 64 * 64
