"""The files of a tokenizer as one message: a JSON object of their texts by name, compressed with zlib."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.files import write_file

REQUIRED = "tokenizer.json"
FILE_NAMES = (REQUIRED, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MAX_PACKED = 32 * 2**20  # bytes
MAX_UNPACKED = 128 * 2**20  # bytes


def pack_tokenizer(tokenizer: Any) -> bytes:
    """Return the files of a tokenizer, or b"" if it has no tokenizer.json or its files are too large."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return b""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = (Path(folder) / name for name in FILE_NAMES)
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    content = json.dumps(texts, sort_keys=True, ensure_ascii=False).encode()
    packed = zlib.compress(content)
    return packed if len(content) <= MAX_UNPACKED and len(packed) <= MAX_PACKED else b""


def digest_of(packed: bytes) -> bytes:
    """Return the SHA-256 of packed files."""
    return hashlib.sha256(packed).digest()


def unpack_tokenizer(packed: bytes, folder: Path) -> None:
    """Write packed files into a directory.

    Raises:
        DataError: the data is not the packed files of a tokenizer.
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(packed, MAX_UNPACKED)
        texts = json.loads(content)
    except (zlib.error, ValueError, RecursionError) as error:
        raise DataError(f"the packed files of a tokenizer cannot be read: {error}") from error
    if not decompressor.eof:
        raise DataError(f"the packed files of a tokenizer are incomplete or exceed {MAX_UNPACKED} bytes")
    is_valid = isinstance(texts, dict) and REQUIRED in texts and texts.keys() <= set(FILE_NAMES)
    if not is_valid or not all(isinstance(text, str) for text in texts.values()):
        raise DataError(f"the packed files of a tokenizer are not texts of {', '.join(FILE_NAMES)} with {REQUIRED}")
    for name, text in texts.items():
        write_file(folder / name, text)
