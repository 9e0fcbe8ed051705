"""Facts about made-up machines."""

from dataclasses import replace

import pytest
import torch

from minivllm.attention.numba_cuda import cuda_ops
from minivllm.core.config import EngineArgs
from minivllm.runtime.machine import (
    choose_device,
    choose_sums,
    cpu_memory,
    cpu_quota,
    environment_report,
    has_native_bf16,
    limit_threads,
    machine_facts,
)

MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:         100000 kB\nMemAvailable:    9000000 kB\nHugePages_Total:       0\n"
)


@pytest.fixture
def all_features(monkeypatch):
    monkeypatch.delenv("MINIVLLM_CPU_FEATURES", raising=False)


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def test_memory_outside_of_a_container(proc):
    assert cpu_memory(proc / "meminfo", proc) == (9_000_000 * 1024, 16_000_000 * 1024)


def test_a_container_without_a_limit(proc):
    (proc / "memory.max").write_text("max\n")
    assert cpu_memory(proc / "meminfo", proc) == (9_000_000 * 1024, 16_000_000 * 1024)


@pytest.mark.parametrize(("used", "free"), [("1000000000", 2_000_000_000), ("3500000000", 0)])
def test_a_container_with_a_limit(proc, used, free):
    (proc / "memory.max").write_text("3000000000\n")
    (proc / "memory.current").write_text(used)
    assert cpu_memory(proc / "meminfo", proc) == (free, 3_000_000_000)


def test_cached_files_of_a_container_are_free(proc):
    (proc / "memory.max").write_text("8000000000\n")
    (proc / "memory.current").write_text("7500000000\n")
    (proc / "memory.stat").write_text("anon 900000000\nfile 6500000000\ninactive_file 6400000000\n")
    assert cpu_memory(proc / "meminfo", proc) == (6_900_000_000, 8_000_000_000)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("x", None)]
)
def test_a_container_may_use_part_of_the_cores(tmp_path, text, cores):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cpu_quota(tmp_path) == cores


def test_threads_follow_the_quota(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads(None)
    limit_threads(9)
    limit_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    limit_threads(2)
    assert used == [3]


def test_where_the_system_does_not_say_what_is_free(tmp_path):
    free, total = cpu_memory(tmp_path / "none", tmp_path)
    assert free == total // 2 > 0


def test_bfloat16_of_an_older_torch(all_features, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for answer in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=answer: answer, raising=False)
        assert has_native_bf16("cpu") is answer


@pytest.mark.parametrize(
    ("found", "answer"), [({"avx2": True}, False), ({"amx_bf16": True}, True), ({"arm_bf16": True}, True)]
)
def test_bfloat16_by_capability(all_features, monkeypatch, found, answer):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert has_native_bf16("cpu") is answer


def test_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == "cuda"


def test_who_adds_up(monkeypatch):
    ops, two = cuda_ops(), EngineArgs(tensor_parallel_size=2)
    assert choose_sums("cuda", EngineArgs()) == choose_sums("cpu", two) == (False, "no ranks on GPUs share a layer")
    assert choose_sums("cuda", replace(two, disable_custom_all_reduce=True)) == (False, "asked for: NCCL adds up")
    over_ray = replace(two, distributed_executor_backend="ray")
    assert choose_sums("cuda", over_ray)[1] == "NCCL adds up: with 'ray' the ranks may be on several machines"
    monkeypatch.setattr(ops, "device_unsupported", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_sums("cuda", two) == (False, "NCCL adds up: there are 1 GPUs, not 2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (1, 0))
    assert choose_sums("cuda", two) == (False, "NCCL adds up: GPU 1 cannot read the memory of GPU 0")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one // 8 == other // 8)
    assert choose_sums("cuda", EngineArgs(tensor_parallel_size=8, pipeline_parallel_size=2))[0]  # in each stage
    assert (
        "GPU 6 cannot read the memory of GPU 8"
        in choose_sums("cuda", EngineArgs(tensor_parallel_size=3, pipeline_parallel_size=3))[1]
    )
    assert choose_sums("cuda", two)[0] and f"up to {ops.most_summed_bytes(2) >> 10} KiB" in choose_sums("cuda", two)[1]
    assert "for up to 8 GPUs, not for 9" in choose_sums("cuda", replace(two, tensor_parallel_size=9))[1]


def test_facts():
    facts = machine_facts("cpu", ("sdpa", "why not"), ("torch", "why not"))
    assert 0 < facts.free_memory_bytes <= facts.total_memory_bytes
    assert (facts.attention_backend, facts.attention_backend_why) == ("sdpa", "why not")


def test_the_report_names_versions_and_nobody(monkeypatch):
    import getpass
    import socket

    report = environment_report()
    assert report["torch"].startswith(torch.__version__.split("+")[0])
    text = str(report)
    assert socket.gethostname() not in text and "/home" not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text
