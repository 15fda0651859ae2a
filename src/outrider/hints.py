"""Install commands for missing packages, in the form that matches how outrider was installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from outrider.errors import SettingsError

PACKAGE = "outrider"


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra.

    A checkout that was installed editable is named by its path and a wheel by its file. Otherwise the extra's own
    requirements are listed, as the package is not on an index.
    """
    source = _source()
    url = str(source.get("url", ""))
    path = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if path and not Path(path).exists():  # a wheel or checkout that was deleted since
        url = path = ""
    if path and source.get("dir_info", {}).get("editable"):
        return f"pip install -e {shlex.quote(f'{path}[{extra}]')}"
    if path and "dir_info" in source:
        return f"pip install {shlex.quote(f'{path}[{extra}]')}"
    if url:
        return f"pip install {shlex.quote(f'{PACKAGE}[{extra}] @ {_pinned(source, url)}')}"
    needed = requirements(extra)
    return f"pip install {' '.join(map(shlex.quote, needed))}"


EXTRA_MODULES = {
    "cloud": ("grpc", "grpc_health", "prometheus_client", "pythonjsonlogger"),
    "gateway": ("fastapi", "httptools", "uvicorn", "grpc", "grpc_health", "prometheus_client", "pythonjsonlogger"),
}


def has_extra(extra: str) -> bool:
    """Return whether the modules of an extra are installed."""
    return not _missing_modules(extra)


def check_extra(command: str, extra: str) -> None:
    """Raise SettingsError with the install command if modules of an extra that the command needs are missing."""
    if missing := _missing_modules(extra):
        raise SettingsError(f"{command} needs {', '.join(missing)}: {install_command(extra)}")


def _missing_modules(extra: str) -> list[str]:
    return [name for name in EXTRA_MODULES[extra] if find_spec(name) is None]


def _source() -> dict[str, Any]:
    """Read where pip took the package from (PEP 610), or {} if it came from an index or is not installed."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _pinned(source: dict[str, Any], url: str) -> str:
    """Return the address of a wheel, or of a repository at its commit."""
    vcs = source.get("vcs_info")
    if not isinstance(vcs, dict):
        return url
    commit = vcs.get("commit_id", "")
    return f"{vcs.get('vcs', 'git')}+{url}" + (f"@{commit}" if commit else "")


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra without its marker, or the extra itself if they are unknown."""
    from packaging.requirements import Requirement

    try:
        listed = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        listed = []
    found = []
    for text in listed:
        requirement = Requirement(text)
        if requirement.marker and "extra" in str(requirement.marker) and requirement.marker.evaluate({"extra": extra}):
            requirement.marker = None
            found.append(str(requirement))
    return found or [f"{PACKAGE}[{extra}]"]
