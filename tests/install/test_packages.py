"""What gets installed: two packages in the wheel, and an editable install that leaves transformers alone."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("minivllm-*.whl")
    return built


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"minivllm", "minivllm_kernels", next(top for top in tops if top.endswith(".dist-info"))}
    sources = {
        p.relative_to(ROOT).as_posix() for p in (ROOT / "minivllm").glob("**/*") if p.is_file() and p.suffix != ".pyc"
    }
    sources |= {p.relative_to(ROOT / "kernels").as_posix() for p in (ROOT / "kernels").glob("**/*.py")}
    assert {name for name in names if ".dist-info/" not in name} == sources


def test_the_wheel_is_named_after_the_version_and_has_its_licence_and_command(wheel):
    import minivllm

    assert wheel.name == f"minivllm-{minivllm.__version__}-py3-none-any.whl"
    files = zipfile.ZipFile(wheel)
    info = f"minivllm-{minivllm.__version__}.dist-info"
    assert "Apache License" in files.read(f"{info}/licenses/LICENSE").decode()
    assert "minivllm = minivllm.cli:main" in files.read(f"{info}/entry_points.txt").decode()


def test_the_wheel_works_without_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import minivllm.core.request, minivllm_kernels; print(minivllm.core.request.__file__, minivllm_kernels.__file__)"
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {sysconfig.get_path('purelib')!r}]; {code}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(path.startswith(str(tmp_path)) for path in done.stdout.split())


def test_the_repository_is_not_on_the_path():
    """Only the two packages are importable, or `import kernels` would find our folder."""
    code = "import importlib.util, sys; print(importlib.util.find_spec('nbs'), importlib.util.find_spec('tests'), sys.path)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None None")
    assert f"'{ROOT}'" not in done.stdout


def test_transformers_and_minivllm_live_together(tmp_path):
    code = "import minivllm, minivllm_kernels, transformers; print(transformers.AutoModelForCausalLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AutoModelForCausalLM"]
