"""Install commands for missing packages, in the form that matches how outrider was installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
