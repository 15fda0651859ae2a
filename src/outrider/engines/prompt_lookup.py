"""Prompt lookup: drafts without a model, copied from earlier occurrences of the last tokens.

The method is that of transformers' `prompt_lookup_num_tokens` and of vLLM's speculative method `ngram`
(`prompt_lookup_min`, `prompt_lookup_max`). Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.engines.load import captions_only, load_audio_features, load_tokenizer, read_eos_ids
from outrider.engines.vocabulary import Vocabulary, check_eos_ids
from outrider.errors import SettingsError, quote
from outrider.numeric import as_integer, is_integer

if TYPE_CHECKING:  # importing it loads transformers
    from outrider.engines.torch.model_families import AudioFeatures

DEFAULT_MIN_NGRAM, DEFAULT_MAX_NGRAM = 1, 16
MAX_NGRAM = 256


class PromptLookup(Vocabulary):
    """The settings of prompt lookup, and the target's tokenizer and audio settings if known. See `prompt_lookup`."""

    max_length = None

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        min_ngram: int,
        max_ngram: int,
        eos_ids: tuple[object, ...] = (),
        *,
        audio: AudioFeatures | None = None,
        is_captions_only: bool = False,
    ) -> None:
        self.tokenizer, self.name, self.audio, self.captions_only = tokenizer, name, audio, is_captions_only
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.row_count = 0 if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
        eos = getattr(tokenizer, "eos_token_id", None)
        known = eos_ids if eos is None or eos in eos_ids else (*eos_ids, eos)
        self.eos_ids = check_eos_ids(name, known, self.row_count, "generation_config.json")

    def __repr__(self) -> str:
        return f"<PromptLookup {self.name}>"


def prompt_lookup(
    tokenizer: Any = None, *, min_ngram: int = DEFAULT_MIN_NGRAM, max_ngram: int = DEFAULT_MAX_NGRAM
) -> PromptLookup:
    """Return a drafter without a model, as the `draft` of `SpeculativeDecoder`.

    It finds the longest earlier occurrence of the last tokens in prompt and output (of several, the earliest), and
    drafts the tokens that followed it. Without an occurrence there is no draft, and the verdict adds one token. The
    output always equals the target's own.

    Args:
        tokenizer: the target's, as a directory, a hub id, or a tokenizer of transformers. Weights are not needed. A
            directory's generation_config.json lists end tokens, which vLLM and SGLang do not send. Recordings need its
            config.json and preprocessor_config.json as well. None uses the tokenizer of a verifier in this process.
            With other verifiers, prompts and outputs are then token ids.
        min_ngram: the minimum number of matching tokens, 1 or more.
        max_ngram: the maximum number of tokens compared, up to 256.

    Raises:
        ModelError: there is no such tokenizer, or it cannot be loaded.
        SettingsError: min_ngram or max_ngram is out of range.
    """
    min_ngram, max_ngram = as_integer(min_ngram), as_integer(max_ngram)
    if not (is_integer(min_ngram) and is_integer(max_ngram) and 1 <= min_ngram <= max_ngram <= MAX_NGRAM):
        raise SettingsError(
            f"prompt lookup: expected 1 <= min_ngram <= max_ngram <= {MAX_NGRAM}, not min_ngram {quote(min_ngram)} and "
            f"max_ngram {quote(max_ngram)}"
        )
    if tokenizer is None:
        return PromptLookup(None, "lookup", min_ngram, max_ngram)
    if isinstance(tokenizer, (str, Path)):
        name = str(tokenizer)
        return PromptLookup(
            load_tokenizer(name),
            f"lookup:{name}",
            min_ngram,
            max_ngram,
            read_eos_ids(name),
            audio=load_audio_features(name),
            is_captions_only=captions_only(name),
        )
    if not hasattr(tokenizer, "get_vocab"):
        raise SettingsError(f"prompt lookup: a tokenizer is a name or one of transformers, not {quote(tokenizer)}")
    return PromptLookup(tokenizer, "lookup", min_ngram, max_ngram)
