"""What strangers install: the wheel has every file of the package, the page and the bundled pair among them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outrider.cli.subprocess_cloud import cloud_process
from tests.support.processes import HANG_S

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


SERVERS = {
    "grpcio",
    "grpcio-health-checking",
    "prometheus-client",
    "python-json-logger",
    "fastapi",
    "uvicorn",
    "starlette",
}
WITHOUT_SERVERS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"grpc", "grpc_health", "prometheus_client", "pythonjsonlogger", "fastapi", "uvicorn"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
from outrider.__main__ import main
main()
"""


def test_an_edge_without_extras_needs_no_server_package() -> None:
    required = [Requirement(text) for text in metadata.requires("outrider") or []]
    base = {each.name for each in required if each.marker is None or "extra" not in str(each.marker)}
    assert "h2" in base
    assert not base & SERVERS


def without_servers(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_SERVERS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.network
def test_the_demo_runs_in_one_process_without_server_packages() -> None:
    done = without_servers("demo", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "both models run in this process; for a cloud process: pip install" in done.stderr
    assert without_servers("demo", "--net", "rtt=80ms").returncode == 2


@pytest.mark.network
def test_an_edge_without_server_packages_verifies_in_a_grpc_cloud() -> None:
    with cloud_process("demo") as address:
        done = without_servers(
            "generate", "--prompt-ids", "5 6 7", "--cloud", f"grpc://{address}", "--max-new-tokens", "8"
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.network
@pytest.mark.parametrize(("command", "extra"), [("cloud", "cloud"), ("edge", "gateway")])
def test_servers_without_their_packages_name_the_extra(command: str, extra: str) -> None:
    arguments = ["demo"] if command == "cloud" else []
    done = without_servers(command, *arguments, "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert f"outrider {command} needs" in done.stderr
    assert extra in done.stderr
