"""Drafts of one round, as a controller observes them."""

from __future__ import annotations

from outrider.decoding.adaptive_draft_length import Drafted
from outrider.decoding.draft_source import DraftSource


def by_model(tokens: int, seconds: float = 0.0) -> dict[DraftSource, Drafted]:
    """Return drafts of a model alone."""
    return {DraftSource.MODEL: Drafted(tokens, seconds)}


def by_lookup(tokens: int) -> dict[DraftSource, Drafted]:
    """Return drafts of prompt lookup alone, which took no time."""
    return {DraftSource.LOOKUP: Drafted(tokens)}
