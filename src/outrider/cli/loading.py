"""Names and sizes of the models being loaded, for progress messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from outrider.api import SpeculativeDecoder
from outrider.cli.escape import one_line
from outrider.cli.options import Models
from outrider.engines.load import full_name, resolve_path
from outrider.errors import OutriderError


@dataclass(frozen=True)
class Loading:
    """A way to build the decoder. description: the models being loaded, for a progress message."""

    build: Callable[[], SpeculativeDecoder]
    description: str


def describe_models(models: Models) -> str:
    """Name the models that this process loads, each with its size where it is known."""
    local = models.cloud.removeprefix("local:") if models.cloud.startswith("local:") else "none"
    names = [name for name in (full_name(models.edge), "demo:cloud" if local == "demo" else local) if name != "none"]
    return " and ".join(f"{one_line(name)}{_size_of(name)}" for name in names)


def _size_of(name: str) -> str:
    """Return the bytes of a local checkpoint's weights, in brackets; empty for a hub id."""
    try:
        path = Path(resolve_path(name))
    except OutriderError:  # reported where it is loaded
        return ""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    total = sum(file.stat().st_size for file in files)
    return f" ({decimal(total)})" if total else ""
