"""What surrounds the kernels, without a GPU: parameter layout, the PTX cache, refusals."""

import ctypes
import dataclasses
import gc
import os
import re
import socket
import subprocess
import sys

import pytest
import torch

from minivllm.attention.backend import AttentionSpec
from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm_kernels.cuda import launch, ops, pointwise, simt


@pytest.mark.parametrize("signature", ["i32 f32", "i32 u32*", "f32 i64 i32 i32* f32 u32", "i64 i32 i32"])
def test_the_layout_is_that_of_a_c_struct(signature):
    kinds = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "f32": ctypes.c_float, "i64": ctypes.c_int64}
    fields = [(f"a{i}", kinds.get(kind, ctypes.c_void_p)) for i, kind in enumerate(signature.split())]
    struct = type("Struct", (ctypes.Structure,), {"_fields_": fields})
    assert launch.Layout(signature).offsets == [getattr(struct, name).offset for name, _ in fields]


def test_ptx_is_compiled_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "compiler_missing", lambda: None)
    compiled = []
    monkeypatch.setattr(
        simt.CudaKernel, "ptx", lambda self, cc: compiled.append((self.name, cc)) or f"ptx of {self.name}"
    )
    a, b = pointwise.silu_mul("float16", 64), pointwise.silu_mul("float16", 128)
    for _ in range(2):
        assert launch.cached_ptx(a, (9, 0)) == f"ptx of {a.name}"
    launch.cached_ptx(b, (9, 0))
    launch.cached_ptx(a, (8, 0))
    assert compiled == [(a.name, (9, 0)), (b.name, (9, 0)), (a.name, (8, 0))]
    assert len(list((tmp_path / "kernels").iterdir())) == 3


def test_launch_bounds_enter_the_ptx():
    text = ".visible .entry name(\n\t.param .u64 a\n)\n{\n ret; }"
    assert ")\n.maxntid 64, 1, 1\n.minnctapersm 3\n\n{" in simt._with_bounds(text, 64, 3)
    assert "minnctapersm" not in simt._with_bounds(text, 64, 0) and "cluster" not in simt._with_bounds(text, 64, 3)
    assert ".explicitcluster\n.reqnctapercluster 4, 1, 1\n" in simt._with_bounds(text, 64, 0, 4)


def test_cards_before_hopper_get_kernels_that_start_one_after_the_other():
    text = "a;\n// begin inline asm\ngriddepcontrol.wait;\n// end inline asm\nb;\n"
    assert simt._without_overlap(text) == "a;\n// begin inline asm\n// end inline asm\nb;\n"


def test_only_a_kernel_that_waits_by_itself_may_start_before_the_one_before_has_ended(monkeypatch):
    asked = []

    class Driver:
        load = staticmethod(lambda ptx, name: 7)
        check = staticmethod(lambda code, what: None)

        @staticmethod
        def launch(config, function, parameters, extra):
            *shape, stream, attributes, count = launch.CONFIG.unpack(config.raw)
            kind = launch.OVERLAP.unpack(ctypes.string_at(attributes, launch.OVERLAP.size)) if count else None
            asked.append((shape, stream, function, kind))
            return 0

    kernel = pointwise.silu_mul("float16", 64)
    monkeypatch.setattr(launch, "driver", Driver)
    for ptx, kind in (("... griddepcontrol.wait; ...", (launch.OVERLAP_ID, 1)), ("...", None)):
        monkeypatch.setattr(launch, "cached_ptx", lambda kernel, cc, ptx=ptx: ptx)
        launch.Launch(kernel, (9, 0))(3, 2, 1 << 40, 0, 0)
        assert asked.pop() == ([3, 2, 1, kernel.threads, 1, 1, 0], 1 << 40, 7, kind)
        for tokens, found in ((16, kind), (17, None)):
            launch.Launch(kernel, (9, 0))(tokens, 2, 1 << 40, 0, 0)
            assert asked.pop()[3] == found, "many blocks start in turn"


def test_a_missing_or_old_compiler_is_named(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert "numba-cuda is not installed (pip install" in launch.compiler_missing()
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch.importlib.metadata, "version", lambda name: "0.9.1")
    assert "numba-cuda 0.9.1 is too old, 0.30 is needed (pip install" in launch.compiler_missing()


def test_driver_errors_say_what_to_do():
    driver = launch.Driver.__new__(launch.Driver)

    class Names:
        @staticmethod
        def cuGetErrorName(code, name):
            name._obj.value = b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"

    driver.cuda = Names()
    driver.check(0, "nothing")
    with pytest.raises(
        launch.CudaError, match=r"loading k failed with CUDA_ERROR_UNSUPPORTED_PTX_VERSION \(222\).*older"
    ):
        driver.check(222, "loading k")


def test_the_backend_says_why_it_cannot():
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.1, block_size=16, dtype=torch.bfloat16)
    assert "NVIDIA GPU, and the device is cpu" in NumbaCudaBackend().unsupported(spec, torch.device("cpu"))


def rotate(at=0, table_at=0):
    """One token, with qkv and the table that many numbers after an address that 16-byte loads can read."""
    qkv, table = torch.zeros(at + 3 * 64).half()[at:].view(1, -1), torch.zeros(table_at + 64)[table_at:].view(1, -1)
    place = torch.zeros(1, dtype=torch.int64)
    ops.rope_and_cache(qkv, torch.zeros(2, 4, 16, 1, 64).half(), table, place, place, num_heads=1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rotate(at=1), "the rows of qkv must start at multiples of 16 bytes"),
        (lambda: rotate(table_at=1), "the rows of table must start at multiples of 16 bytes"),
        (
            lambda: pointwise.rope_and_cache("float16", 1, 1, 72, 16, True),
            "head_dim 72: the kernels take multiples of 16",
        ),
        (lambda: ops.rms_norm(torch.zeros(1, 64), torch.zeros(64), 1e-6), "torch.bfloat16 or torch.float16"),
        (lambda: ops.silu_mul(torch.zeros(4, 24).half()), "n a multiple of 8"),
        (lambda: ops.check_cache(torch.zeros(2, 4, 16, 1, 4).half()), "16-byte pieces"),
        (lambda: pointwise.add_rms_norm("bfloat16", 100), "hidden size 100"),
        (lambda: simt.half_ops("float32"), "bfloat16 and float16, not for 'float32'"),
        (lambda: pointwise.silu_mul("float16", 64).simulate((1, 1)), "NUMBA_ENABLE_CUDASIM=1"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_the_kernels_import_without_torch():
    code = "import minivllm_kernels.cuda.decode, minivllm_kernels.cuda.prefill, minivllm_kernels.cuda.launch, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_asking_about_a_cpu_does_not_import_numba():
    code = (
        "import sys, torch; from minivllm.attention.select import make_backend; from minivllm.attention.backend import *;"
        "spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=64, scale=1., block_size=16, dtype=torch.half);"
        "make_backend('numba_cuda').unsupported(spec, torch.device('cpu')); print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


COMPILES = """
import os, pathlib, time
from minivllm_kernels.cuda import launch, simt
launch.compiler_missing = lambda: None

def ptx(self, cc):  # when three processes are at it
    if "copy_blocks" in self.name:  # the first of all, before there are three
        return ""
    folder, end = pathlib.Path(os.environ["MINIVLLM_CACHE"]), time.time() + 30
    (folder / f"process {os.getpid()}").touch()
    while len(list(folder.glob("process *"))) < 3:
        assert time.time() < end
        time.sleep(0.01)
    return f"{self.name} for {cc} by {os.getpid()}"

simt.CudaKernel.ptx = ptx
"""


@pytest.fixture
def ahead(monkeypatch, tmp_path):
    """Four kernels, three cores, and a fake compiler. Other processes do not have that compiler."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)  # tests of the simulator may have set it
    monkeypatch.setattr(launch, "_compilers", None)
    monkeypatch.setattr(launch, "compiler_missing", lambda: None)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(simt.CudaKernel, "ptx", lambda self, cc: f"{self.name} for {cc} by this process")
    return [pointwise.silu_mul("float16", 64 * n) for n in range(1, 5)]


def set_up_compilers(monkeypatch, code):
    """Let the processes that compile ahead run `code` first."""
    before, after = launch.COMPILER.split("from minivllm_kernels", 1)
    monkeypatch.setattr(launch, "COMPILER", before + code + "from minivllm_kernels" + after)


def test_kernels_are_compiled_ahead_by_other_processes(monkeypatch, ahead):
    set_up_compilers(monkeypatch, COMPILES)
    launch.cached_ptx(ahead[1], (9, 0))
    assert launch.compile_ahead([*ahead, ahead[0]], (9, 0)) == 3
    assert launch.compile_ahead(ahead, (9, 0)) == 0  # they are at it
    texts = [launch.cached_ptx(kernel, (9, 0)) for kernel in ahead]
    assert texts[1] == f"{ahead[1].name} for (9, 0) by this process"
    others = texts[:1] + texts[2:]
    assert len({text.split()[-1] for text in others} - {"process"}) == 3
    assert [text.rsplit(" ", 1)[0] for text in others] == [f"{ahead[i].name} for (9, 0) by" for i in (0, 2, 3)]
    assert launch.compile_ahead(ahead, (9, 0)) == 0
    assert launch.compile_ahead([dataclasses.replace(ahead[0], name="of a chapter", maker=None)], (9, 0)) == 0


def test_what_fails_ahead_is_compiled_here(monkeypatch, ahead, caplog):
    missing = "from minivllm_kernels.cuda import launch\nlaunch.compiler_missing = lambda: 'it is gone'\n"
    set_up_compilers(monkeypatch, missing)
    assert launch.compile_ahead(ahead[:2], (8, 0)) == 2
    for kernel in ahead[:2]:
        assert launch.cached_ptx(kernel, (8, 0)) == f"{kernel.name} for (8, 0) by this process"
    assert len(caplog.records) == 2
    assert "compiling kernels ahead failed" in caplog.text and "cannot be compiled: it is gone" in caplog.text


def test_one_core_compiles_nothing_ahead(monkeypatch, ahead):
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0})
    assert launch.compile_ahead(ahead, (9, 0)) == 0
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(launch, "compiler_missing", lambda: "no compiler")
    assert launch.compile_ahead(ahead, (9, 0)) == 0


def test_where_no_process_can_be_started_kernels_are_compiled_here(monkeypatch, ahead, caplog):
    monkeypatch.setattr(launch.sys, "executable", "/no/such/python")
    assert launch.compile_ahead(ahead, (9, 0)) == 0
    assert "no process can be started to compile kernels ahead" in caplog.text
    assert launch.cached_ptx(ahead[0], (9, 0)).endswith("by this process")


def test_no_more_is_compiled_for_a_process_that_is_gone(monkeypatch, ahead):
    set_up_compilers(monkeypatch, COMPILES)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(launch.os, "getpid", lambda: gone.pid)
    assert launch.compile_ahead(ahead, (9, 0)) == 4
    launch._compilers.jobs.close()
    assert launch._compilers.process.wait(20) == 0
    assert not launch.cache_dir().exists()


@pytest.fixture
def early(monkeypatch, ahead):
    """Four kernels, and a process that has started before they were known."""
    set_up_compilers(monkeypatch, COMPILES)
    assert launch.start_compilers()
    process = launch._compilers.process
    assert launch.start_compilers() and launch._compilers.process is process
    yield ahead, process
    process.wait(20)


def test_a_process_that_started_early_compiles(early, tmp_path):
    kernels, process = early
    assert [launch.compile_ahead(kernels[:n], (9, 0)) for n in (1, 1, 4)] == [1, 0, 3]
    pids = {int(launch.cached_ptx(kernel, (9, 0)).split()[-1]) for kernel in kernels}
    assert len(list(tmp_path.glob("process *"))) == 3 and process.pid not in pids
    assert process.wait(20) == 0
    assert not launch.start_compilers()  # kernels of this version are in the cache


def test_a_kernel_that_comes_when_the_queue_is_closed_finds_another_process(early):
    kernels, process = early
    assert launch.compile_ahead(kernels[:3], (9, 0)) == 3
    launch.cached_ptx(kernels[0], (9, 0))
    assert launch.compile_ahead(kernels, (9, 0)) == 1 and launch._compilers.process is not process
    assert "by this process" not in launch.cached_ptx(kernels[3], (9, 0))


def test_a_process_without_a_job_ends(monkeypatch, ahead):
    set_up_compilers(monkeypatch, COMPILES + "launch.IDLE_SECONDS = 0.01\n")
    assert launch.start_compilers()
    assert launch._compilers.process.wait(20) == 0
    assert os.pread(launch._compilers.errors.fileno(), 1000, 0) == b""


def test_nothing_starts_early_where_kernels_are_in_the_cache_or_nothing_can_be_compiled(monkeypatch, ahead):
    monkeypatch.setattr(launch, "Compilers", None)
    launch.cached_ptx(ahead[0], (9, 0))
    assert not launch.start_compilers()
    launch.ptx_file(ahead[0], (9, 0)).unlink()
    with pytest.raises(TypeError):
        launch.start_compilers()
    monkeypatch.setattr(launch, "compiler_missing", lambda: "no compiler")
    assert not launch.start_compilers()


def test_kernels_are_loaded_as_they_are_compiled(monkeypatch, ahead):
    """Those in the cache stay for their first launch; one that no process compiled any more is loaded, too."""
    loaded, paths = [], [launch.ptx_file(kernel, (9, 0)) for kernel in ahead]
    paths[0].parent.mkdir()

    class Slow:
        polls, jobs = 0, socket.socket()

        def is_running(self):
            self.polls += 1
            if self.polls == 5:
                paths[2].touch()
            return self.polls < 20

    paths[0].touch()
    monkeypatch.setattr(launch, "_ahead", dict.fromkeys(paths[1:3], Slow()))
    monkeypatch.setattr(launch, "launcher", lambda *about: loaded.append(about))
    launch.load_compiled(ahead, 0, (9, 0))
    assert loaded == [(ahead[2], 0, (9, 0)), (ahead[1], 0, (9, 0))]
    assert Slow.jobs.fileno() < 0  # no other kernel will come


def test_the_queue_needs_no_numba():
    code = "import sys; import minivllm_kernels.cuda.launch; assert not {'numba', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_collector_is_on_again_after_a_compilation_and_numba_is_as_it_was():
    class Numba:
        run = "slowly"

    seen = []

    def stop(*args, **kwargs):
        seen.append((gc.isenabled(), Numba.run))
        raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simt.cuda, "compile", stop)
        patch.setattr(simt, "_exchanged", lambda cc: [(Numba, "run", f"faster for {cc}")])
        for on in (True, False):
            (gc.enable if on else gc.disable)()
            with pytest.raises(NotImplementedError):
                pointwise.silu_mul("float16", 64).ptx((8, 0))
            assert gc.isenabled() == on and Numba.run == "slowly"
            gc.enable()
    assert seen == [(False, "faster for (8, 0)")] * 2


def test_shapes_that_a_kernel_takes():
    x, device = torch.empty(3, 16, dtype=torch.float16), torch.device("cpu")
    for shape in ((3, 16), (None, 16), (3, None)):
        ops.check("x", x, shape, torch.float16, device)
    for shape, says in (((None, 8), "[any, 8], not [3, 16]"), ((48,), "[48], not"), ((3, 16, 1), "[3, 16, 1], not")):
        with pytest.raises(ValueError, match=re.escape(f"x must have shape {says}")):
            ops.check("x", x, shape, torch.float16, device)
    with pytest.raises(ValueError, match=re.escape("x must be torch.bfloat16 on cpu, not torch.float16 on cpu")):
        ops.check("x", x, (3, 16), torch.bfloat16, device)


def test_rows_that_16_byte_loads_can_read():
    x = torch.empty(4, 32, dtype=torch.float16)
    longer, repeated, heads = x[:, :16], x[:1].expand(4, 32), x.view(4, 2, 16)
    for rows in (x, x[1:2], longer, repeated, heads, heads[:, :1], x[:0]):
        ops.check_rows("x", rows)
    for rows in (x.T, x[:, ::2], heads.transpose(1, 2), heads[:, :, :8]):
        with pytest.raises(ValueError, match="x must be contiguous within a row, but has strides"):
            ops.check_rows("x", rows)
    for rows in (x[:, 1:17], torch.empty(4, 20, dtype=torch.float16)):
        with pytest.raises(ValueError, match="rows of x must start at multiples of 16 bytes"):
            ops.check_rows("x", rows)
