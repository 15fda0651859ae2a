"""The tokenizer that a cloud sends, for an edge with another one or without one."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.engines.load import load_tokenizer
from outrider.engines.prompt_lookup import DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM, PromptLookup
from outrider.errors import CloudRefused, DataError, ModelError
from outrider.protocol.tokenizer_files import unpack_tokenizer
from outrider.verifiers.base import ModelInfo


def read_target_tokenizer(target: ModelInfo) -> PromptLookup | None:
    """Return the tokenizer that the target's server sends, or None if it sends none.

    Raises:
        CloudLost: the server cannot be reached.
        CloudRefused: the files cannot be used.
    """
    if target.read_tokenizer is None:
        return None
    try:
        tokenizer = _load(target.read_tokenizer())
    except (DataError, ModelError) as error:
        raise CloudRefused(f"{target.name} sent a tokenizer that cannot be used: {error}") from error
    return PromptLookup(
        tokenizer,
        target.name,
        DEFAULT_MIN_NGRAM,
        DEFAULT_MAX_NGRAM,
        target.eos_ids,
        is_captions_only=target.captions_only,
    )


@lru_cache(4)
def _load(packed: bytes) -> Any:
    """Return the tokenizer of packed files. All decoders of one target share it."""
    with tempfile.TemporaryDirectory() as folder:
        unpack_tokenizer(packed, Path(folder))
        return load_tokenizer(folder)
