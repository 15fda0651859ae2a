"""The gateway's libraries cost nobody anything who does not serve, and are asked for by name where they lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.cli import edge
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


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"fastapi, httptools, uvicorn: pip install .*gateway"):
        edge._check_installed()
