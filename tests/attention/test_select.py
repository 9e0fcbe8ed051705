"""Choosing a backend by name, or having it chosen."""

import pytest
import torch

from minivllm.attention import select
from minivllm.attention.backend import AttentionSpec
from minivllm.attention.reference import ReferenceBackend
from minivllm.attention.sdpa import SDPABackend

CPU = torch.device("cpu")


def spec(**changes) -> AttentionSpec:
    values = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "scale": 1.0, "block_size": 4, "dtype": torch.float32}
    return AttentionSpec(**{**values, **changes})


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(select, "_BACKENDS", dict(select._BACKENDS))
    monkeypatch.setattr(select, "_AUTO_ORDER", list(select._AUTO_ORDER))


def test_by_name():
    backend, why = select.select_backend("reference", spec(), CPU)
    assert isinstance(backend, ReferenceBackend) and why == "asked for"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'flash'; known: auto, reference, sdpa"):
        select.select_backend("flash", spec(), CPU)


def test_asked_for_but_unable():
    with pytest.raises(ValueError, match=r"'sdpa' cannot run this model on cpu: .*soft_cap=5.0"):
        select.select_backend("sdpa", [spec(), spec(soft_cap=5.0)], CPU)


def test_auto_takes_the_first_that_can_and_says_why_not_the_others():
    odd = {"head_dim": 6}  # not for the CPU kernels
    backend, why = select.select_backend("auto", [spec(**odd), spec(sliding_window=4, **odd)], CPU)
    assert isinstance(backend, SDPABackend) and "fastest" in why and "numba_cpu cannot: head_dim 6" in why
    backend, why = select.select_backend("auto", [spec(**odd), spec(soft_cap=5.0, **odd)], CPU)
    assert isinstance(backend, ReferenceBackend) and "sdpa cannot: " in why and "soft_cap=5.0" in why


def test_auto_prefers_the_kernels():
    pytest.importorskip("numba")
    for one in (spec(), spec(soft_cap=5.0), spec(sliding_window=4), spec(chunk=8)):
        assert select.select_backend("auto", one, CPU)[0].name == "numba_cpu"


def test_register(monkeypatch):
    class Mine(ReferenceBackend):
        name = "mine"

    select.register_backend("mine", Mine, auto_before="numba_cpu")
    assert "mine" in select.backend_names()
    assert isinstance(select.select_backend("auto", spec(), CPU)[0], Mine)
    with pytest.raises(ValueError, match="exists already"):
        select.register_backend("mine", Mine)
    with pytest.raises(ValueError, match="auto_before='nobody'"):
        select.register_backend("other", Mine, auto_before="nobody")


def test_one_that_cannot_be_imported_is_passed_over_by_auto_and_not_by_name():
    select.register_backend("absent", "no_such_module:Backend", auto_before="sdpa")
    backend, why = select.select_backend("auto", spec(head_dim=6), CPU)
    assert isinstance(backend, SDPABackend) and "absent cannot be loaded: No module named 'no_such_module'" in why
    with pytest.raises(ImportError, match="no_such_module"):
        select.select_backend("absent", spec(), CPU)


def test_nobody_can():
    class Never(ReferenceBackend):
        def unsupported(self, spec, device):
            return "never"

    select._BACKENDS.update({"numba_cpu": Never, "sdpa": Never, "reference": Never})
    with pytest.raises(ValueError, match=r"no attention backend runs this model on cpu: .*reference cannot: never"):
        select.select_backend("auto", spec(), CPU)


def test_auto_says_why_not_the_gpu_kernels_and_asking_for_them_says_what_to_do():
    pytest.importorskip("minivllm_kernels.cuda.ops")
    assert (
        "numba_cuda cannot: it needs an NVIDIA GPU, and the device is cpu"
        in select.select_backend("auto", spec(), CPU)[1]
    )
    with pytest.raises(
        ValueError, match=r"'numba_cuda' cannot run .* needs an NVIDIA GPU.*attention_backend='auto' finds"
    ):
        select.select_backend("numba_cuda", spec(), CPU)


def test_a_head_that_is_not_built_is_named_with_those_that_are(monkeypatch):
    ops = pytest.importorskip("minivllm_kernels.cuda.ops")
    monkeypatch.setattr(ops, "device_unsupported", lambda device: None)
    odd, cuda = spec(head_dim=72, dtype=torch.bfloat16), torch.device("cuda")
    with pytest.raises(
        ValueError, match=r"head_dim 72 is not built: the CUDA kernels know 64, 80, 96, 128, 256; .*'auto'"
    ):
        select.select_backend("numba_cuda", odd, cuda)
    assert "head_dim 72 is not built" in select.select_backend("auto", odd, cuda)[1]


def test_sinks_are_refused_by_kernels_that_have_none():
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, block_size=16, dtype=torch.float32, sinks=True
    )
    backend, why = select.select_backend("auto", spec, torch.device("cpu"))
    assert backend.name == "sdpa" and "no attention sinks" in why
    with pytest.raises(ValueError, match="numba_cpu' cannot run this model .* no attention sinks"):
        select.select_backend("numba_cpu", spec, torch.device("cpu"))
