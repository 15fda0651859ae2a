"""A hint's command works for the way outrider was installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from outrider import hints

REQUIRES = [
    "torch<3,>=2.6",
    "fastapi<1,>=0.115; extra == 'gateway'",
    "uvicorn<1,>=0.34; extra == 'gateway'",
    "triton; platform_system == 'Linux' and extra == 'dev'",
    "gguf<1,>=0.10; extra == 'gguf-dense'",
]


class Installed:
    def __init__(self, source: Any) -> None:
        self.text = None if source is None else source if isinstance(source, str) else json.dumps(source)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.text


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def as_(source: Any) -> None:
        monkeypatch.setattr(metadata, "distribution", lambda name: Installed(source))
        monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)

    return as_


def test_an_editable_checkout_is_named_by_its_path(installed: Any, tmp_path: Path) -> None:
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(hints.install_command("gateway")) == ["pip", "install", "-e", f"{checkout}[gateway]"]


def test_a_folder_is_named_by_its_path(installed: Any, tmp_path: Path) -> None:
    installed({"url": tmp_path.as_uri(), "dir_info": {}})
    assert shlex.split(hints.install_command("gateway")) == ["pip", "install", f"{tmp_path}[gateway]"]


def test_a_wheel_is_named_by_its_file(installed: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "outrider-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(hints.install_command("gateway")) == ["pip", "install", f"outrider[gateway] @ {wheel.as_uri()}"]


def test_a_repository_is_named_by_its_commit(installed: Any) -> None:
    installed({"url": "https://example.org/outrider.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    (_, _, what) = shlex.split(hints.install_command("gateway"))
    assert what == "outrider[gateway] @ git+https://example.org/outrider.git@abc"


@pytest.mark.parametrize("source", [None, "no json", "[]", {"url": "file:///no/such/wheel.whl", "archive_info": {}}])
def test_else_the_extra_s_requirements_are_listed(installed: Any, source: Any) -> None:
    installed(source)
    assert shlex.split(hints.install_command("gateway")) == ["pip", "install", "fastapi<1,>=0.115", "uvicorn<1,>=0.34"]


def test_every_hint_in_the_source_is_made_here_and_names_an_extra_that_exists() -> None:
    source = Path(hints.__file__).parent
    extras = set(metadata.metadata("outrider").get_all("Provides-Extra") or [])
    named = set()
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert path.name == "hints.py" or "pip install" not in text, path
        named |= {part.split("'")[0] for part in text.split("install_command('")[1:]}
    assert named
    assert named <= extras | {"gguf-dense", "media"}  # what an older installation of a checkout does not list yet
