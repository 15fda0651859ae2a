"""Installs the clients: `python tests/clients/environment.py .cache/clients`.

Python's clients get a virtual environment, as they need many packages and other versions of `openai` than the tests.
JavaScript's get an npm project. What cannot be installed is named on stderr and in `missing.json`, with the reason, and
its tests are skipped with it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PACKAGE = HERE / "js" / "package.json"


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    inputs = REQUIREMENTS.read_text(encoding="utf-8") + PACKAGE.read_text(encoding="utf-8")
    done = folder / "installed-for"
    if done.exists() and done.read_text(encoding="utf-8") == inputs:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    missing = {**install_python(folder / "venv"), **install_javascript(folder / "js")}
    for name, reason in missing.items():
        sys.stderr.write(f"{name} is not installed, and its tests are skipped: {reason}\n")
    (folder / "missing.json").write_text(json.dumps(missing), encoding="utf-8")
    if not missing:
        done.write_text(inputs, encoding="utf-8")


def requirements() -> list[str]:
    """Return the lines of requirements.txt, without comments."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def install_python(folder: Path) -> dict[str, str]:
    """Install all of requirements.txt, or else each that can be. Return the reasons by package."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Compiling all modules takes longer than compiling those that are imported.
    install = [*pip, "install", "--no-compile", "--only-binary", ":all:"]
    if failure(install, requirements()) is None:
        return {}
    reasons = {package: failure(install, [package]) for package in requirements()}
    return {re.split("[^a-z-]", package)[0]: reason for package, reason in reasons.items() if reason is not None}


def install_javascript(folder: Path) -> dict[str, str]:
    """Install package.json. Return the reason for each of its packages, named `npm:…`, if that fails."""
    packages = [f"npm:{name}" for name in json.loads(PACKAGE.read_text(encoding="utf-8"))["dependencies"]]
    if shutil.which("node") is None or shutil.which("npm") is None:
        return dict.fromkeys(packages, "this machine has no Node.js with npm")
    folder.mkdir()
    shutil.copy(PACKAGE, folder)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    reason = failure(command, [])
    return {} if reason is None else dict.fromkeys(packages, reason)


def failure(command: list[str], packages: list[str]) -> str | None:
    """Run an installer. Return the last line of its error output if it fails."""
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["the installer printed no reason"])[-1]


if __name__ == "__main__":
    main()
