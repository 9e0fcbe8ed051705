"""The scripts of vLLM's own quick start run here, but for the import and the model's name."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


def run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_offline_generate(smollm2_path):
    lines = run("offline_generate.py")
    assert len(lines) == 3 and all("Generated text: '" in line or 'Generated text: "' in line for line in lines)
    assert lines[0].startswith("Prompt: 'Hello, my name is'") and not any(line.endswith("''") for line in lines)
    assert lines == run("offline_generate.py"), "the engine's seed is fixed, so a second run says the same"


@pytest.mark.slow
def test_offline_chat(smollm2_path):
    lines = run("offline_chat.py")
    assert len(lines) == 4 and len(set(lines)) == 1
    assert "Paris" in lines[0].partition("Generated text")[2]
