"""Loading of the decoder for a command, with a progress message about its models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.text import Text

from outrider.api import SpeculativeDecoder
from outrider.cli import interrupts
from outrider.cli.build import enable_gc
from outrider.cli.escape import one_line
from outrider.cli.options import Models, Output
from outrider.cli.terminal import STDERR, configure_logging, print_message
from outrider.engines.load import full_name, resolve_path
from outrider.errors import OutriderError
from outrider.verifiers.base import disconnect


@dataclass(frozen=True)
class Loading:
    """A function that builds the decoder. description: the models being loaded, for the progress message."""

    build: Callable[[], SpeculativeDecoder]
    description: str


@contextmanager
def loaded_decoder(loading: Loading, output: Output) -> Iterator[SpeculativeDecoder]:
    """Yield the decoder. At the end, close the session with a cloud across a network."""
    configure_logging(output)
    message = f"loading {loading.description}" if loading.description else "connecting"
    with STDERR.status(Text(message)) if STDERR.is_terminal else nullcontext():
        decoder = loading.build()
    interrupts.check()
    enable_gc()
    print_message(decoder.summary(), "dim")
    try:
        yield decoder
    finally:
        disconnect(decoder.verifier)


def describe_models(models: Models) -> str:
    """Name the models that this process loads, each with its size where it is known."""
    local = models.cloud.removeprefix("local:") if models.cloud.startswith("local:") else "none"
    edge = "none" if models.edge_model is None else full_name(models.edge_model)
    names = [name for name in (edge, "demo:cloud" if local == "demo" else local) if name != "none"]
    return " and ".join(f"{one_line(name)}{_size_of(name)}" for name in names)


def _size_of(name: str) -> str:
    """Return the bytes of a local checkpoint's weights, in brackets, or an empty string for a hub id."""
    try:
        path = Path(resolve_path(name))
    except OutriderError:  # reported where it is loaded
        return ""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    total = sum(file.stat().st_size for file in files)
    return f" ({decimal(total)})" if total else ""
