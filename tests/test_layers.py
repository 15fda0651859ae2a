"""Imports point downward, as docs/structure.md says."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import outrider

SOURCE = Path(outrider.__file__).parent
ORDER = [
    "errors",
    "files",
    "hints",
    "numeric",
    "config",
    "sampling",
    "decoding",
    "engines",
    "prompts",
    "protocol",
    "transport",
    "netem",
]
ORDER += ["verifiers", "edge", "serving", "cloud", "planning", "aio", "batch", "chat", "api", "evals"]
ORDER += ["integrations", "gateway", "cli"]
# Neither imports the other.
BESIDE = [
    {"edge", "cloud"},
    {"gateway", "cloud"},
    {"protocol", "netem"},
    {"transport", "netem"},
]
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__"))


def imported(path: Path) -> set[str]:
    """Names of outrider's parts, and of other packages, that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_downward(path: Path) -> None:
    part = path.parts[0].removesuffix(".py")
    own = {name.split(".")[1] for name in imported(path) if name.startswith("outrider.")}
    for other in own - {part}:
        assert ORDER.index(other) < ORDER.index(part), f"{part} imports {other}"
        assert {part, other} not in BESIDE, f"{part} and {other} must not import each other"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] in ("sampling", "decoding")], ids=str)
def test_sampling_and_decoding_import_no_models_and_no_sockets(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"transformers", "socket", "asyncio", "grpc", "h2", "ssl", "threading"}


def test_no_import_cycles() -> None:
    """Imports for type checking alone count as well. A cycle raises graphlib.CycleError, which names it."""
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    imports = {name: imported_modules(path, set(paths)) - {name} for name, path in paths.items()}
    assert set(TopologicalSorter(imports).static_order()) == set(paths)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Return those of the modules `known` that a file imports; `from package import name` may import either."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] == "cli"], ids=str)
def test_only_the_cloud_command_imports_the_cloud(path: Path) -> None:
    own = {name for name in imported(path) if name.startswith("outrider.cloud")}
    assert not own or path.name == "cloud.py"


# Evaluation, planning and network emulation are laboratory code: these modules alone may import it.
LABORATORY = {
    "evals": {"cli/evaluate.py", "cli/plan.py", "cli/report.py"},
    "planning": {"cli/calibrate.py", "cli/plan.py"},
    "netem": {"cli/plan.py", "verifiers/connect.py"},
}
# A request to the gateway may name an emulated network, so the gateway parses its conditions.
PARSERS_OF_CONDITIONS = {"gateway/decoder_pool.py", "gateway/generation_options.py"}
PRODUCTION = [path for path in MODULES if path.parts[0] not in LABORATORY]


@pytest.mark.parametrize("path", PRODUCTION, ids=str)
def test_production_imports_no_laboratory(path: Path) -> None:
    names = {name for name in imported(path) if name.startswith("outrider.")}
    if path.as_posix() in PARSERS_OF_CONDITIONS:
        names -= {"outrider.netem.conditions"}
    laboratory = {name.split(".")[1] for name in names} & LABORATORY.keys()
    assert all(path.as_posix() in LABORATORY[part] for part in laboratory), f"{path} imports {names}"


def test_connecting_loads_the_emulator_for_an_emulated_network_only() -> None:
    tree = ast.parse((SOURCE / "verifiers" / "connect.py").read_text(encoding="utf-8"))
    at_load = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    assert not any(name.startswith("outrider.netem") for name in at_load)


def test_the_command_line_loads_no_laboratory_before_a_command_needs_it() -> None:
    """A fresh interpreter imports the parser of every command, and the library's public names."""
    code = "import sys, outrider.cli.app, outrider; print(*(n for n in sys.modules if n.startswith('outrider.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "outrider.cli.app" in loaded
    assert not [name for name in loaded if name.split(".")[1] in LABORATORY]
