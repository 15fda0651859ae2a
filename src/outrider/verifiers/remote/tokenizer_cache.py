"""Packed tokenizers of clouds in the user's cache directory, by hash."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from outrider.errors import OutriderError
from outrider.files import write_file
from outrider.protocol.tokenizer_files import MAX_PACKED, digest_of

log = logging.getLogger(__name__)


def read_cached(digest: bytes) -> bytes | None:
    """Return the packed files with this hash, or None if they are not in the cache or were changed."""
    try:
        with _path_of(digest).open("rb") as file:
            packed = file.read(MAX_PACKED + 1)
    except OSError:
        return None
    return packed if digest_of(packed) == digest else None


def write_cached(packed: bytes) -> None:
    """Store packed files. If the directory is not writable, log it. The next run then fetches them again."""
    path = _path_of(digest_of(packed))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, packed)
    except (OSError, OutriderError) as error:
        log.warning("the cloud's tokenizer is not cached: %s", error)


def _path_of(digest: bytes) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider" / "tokenizers" / f"{digest.hex()}.json.z"
