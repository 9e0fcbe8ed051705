"""Quantized files of a model, made once and kept in a folder: by `minivllm quantize`, and by llama.cpp's own quantizer.

python files.py MODEL FOLDER [NAME ...]        (llama.cpp's: its environment must be under FOLDER, see run.py)
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OURS: dict[str, tuple[str, ...]] = {
    "int4": ("--format", "int4"),
    "gptq": ("--format", "int4", "--calibration"),
    "int8": ("--format", "int8"),
    "fp8": ("--format", "fp8"),
    "q8_0": ("--format", "gguf-q8_0"),
    "q4_0": ("--format", "gguf-q4_0"),
}
"""What `minivllm quantize` writes, by the names of files, and its flags."""
THEIRS = {"q4_k": 15}
"""What llama.cpp's quantizer writes from the model in bfloat16, and its number of the kind of file (Q4_K_M)."""
NAMES = (*OURS, *THEIRS)


def is_gguf(name: str) -> bool:
    """Whether a file is for llama.cpp; the others are folders, for vLLM."""
    return name in THEIRS or OURS[name][1].startswith("gguf")


def prose() -> str:
    """A calibration text: the words of this book's chapters about the core and the models."""
    chapters = sorted((HERE.parents[1] / "nbs").glob("[cm]o*/*.ipynb"))
    cells = [cell for chapter in chapters for cell in json.loads(chapter.read_text())["cells"]]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")[:32_000]


def quantized_file(name: str, model: str, folder: Path) -> Path:
    """A file of `NAMES`, made if it is not there; a folder is one in compressed-tensors' format."""
    root = folder / "files" / model.replace("/", "-") / name
    file = root / "model.gguf" if is_gguf(name) else root
    if (root / "made").exists():
        return file
    root.mkdir(parents=True, exist_ok=True)
    if name in THEIRS:
        python = str(folder / "llama-cpp-python" / "bin" / "python")
        from minivllm.models.hub import resolve_model

        whole = root / "bfloat16.gguf"
        subprocess.run([python, str(HERE / "to_gguf.py"), str(resolve_model(model)), str(whole)], check=True)
        subprocess.run([python, __file__, "--llama", str(whole), str(file), str(THEIRS[name])], check=True)
        whole.unlink()
    else:
        flags = [*OURS[name]]
        if flags[-1] == "--calibration":
            (text := root.with_suffix(".txt")).write_text(prose())
            flags.append(str(text))
        command = [sys.executable, "-m", "minivllm.cli", "quantize", model, str(file), *flags]
        subprocess.run(command, check=True)
    (root / "made").touch()
    return file


def by_llama_cpp(source: str, target: str, kind: int) -> None:
    """Quantize a GGUF file. Runs in llama.cpp's environment."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = kind
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


def main() -> None:
    if sys.argv[1] == "--llama":
        return by_llama_cpp(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    model, folder, *names = sys.argv[1:]
    for name in names or NAMES:
        print(name, quantized_file(name, model, Path(folder)))
    return None


if __name__ == "__main__":
    main()
