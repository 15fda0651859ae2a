"""What strangers install: the wheel has every file of the package, the page and the bundled pair among them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src"


@pytest.mark.network  # a process
def test_the_wheel_has_the_whole_package(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    listed = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (PACKAGE / "outrider").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sorted(str(path.relative_to(PACKAGE)) for path in files) == sorted(n for n in listed if "dist-info" not in n)
    assert wheel.stat().st_size < 30 * 2**20
