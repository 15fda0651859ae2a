"""Server libraries: help texts load none of them, and an error names the missing ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider import hints
from outrider.errors import SettingsError

HEAVY = ("torch", "numpy", "asyncio", "fastapi", "httptools", "starlette", "uvicorn", "pydantic")


@pytest.mark.network  # a process each
@pytest.mark.parametrize("arguments", [["--help"], ["edge", "--help"]])
def test_help_loads_none_of_them(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['outrider', *{arguments!r}]\nfrom outrider.cli import main\n"
    code += "try: main.main()\nexcept SystemExit: pass\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("extra", "missing"), [("gateway", "fastapi, httptools, uvicorn"), ("cloud", "grpc, grpc_health")]
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, extra: str, missing: str
) -> None:
    monkeypatch.setattr(hints, "find_spec", lambda name: None)
    assert not hints.has_extra(extra)
    with pytest.raises(SettingsError, match=rf"command needs {missing}.*: pip install .*{extra}"):
        hints.check_extra("command", extra)
