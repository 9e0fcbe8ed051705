"""The hub's resolver, over a cache folder of huggingface_hub that is filled by hand: no network."""

import asyncio
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from minivllm.lora.adapter import CONFIG, WEIGHTS
from minivllm.lora.resolver import HubResolver

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the repository me/adapters: one adapter at its top, one in the folder sql."""
    repo = tmp_path / "models--me--adapters"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    for folder in ("", "sql"):
        place = repo / "snapshots" / COMMIT / folder
        place.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            (place / name).write_text("{}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    return repo / "snapshots" / COMMIT


def found(resolver: HubResolver, name: str) -> Path | None:
    request = asyncio.run(resolver.resolve_lora("base", name))
    return None if request is None else Path(request.lora_path)


def test_names_in_the_repository(cache):
    resolver = HubResolver("me/adapters")
    assert found(resolver, "me/adapters") == cache
    assert found(resolver, "me/adapters/sql") == cache / "sql"
    assert found(resolver, "me/adapters/other") is None


@pytest.mark.parametrize("name", ["me/others", "me/adapters2", "me/adapters/../x", "me/adapters/", "adapters", "x"])
def test_no_other_name_is_asked_for(cache, monkeypatch, name):
    monkeypatch.setattr(HubResolver, "_download", lambda *about: pytest.fail(f"asked the hub for {about}"))
    assert found(HubResolver("me/adapters"), name) is None


def test_a_hub_that_cannot_be_reached_has_no_adapter(cache, caplog):
    assert found(HubResolver("you/adapters"), "you/adapters") is None
    assert "the hub has not given adapter 'you/adapters'" in caplog.text
