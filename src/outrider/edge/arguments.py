"""Checks of the arguments of `SpeculativeDecoder` and its methods, before a model runs."""

from __future__ import annotations

from typing import Any

from outrider.config import GenerationSettings, check_type
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import PromptError, SettingsError, quote
from outrider.numeric import as_integer, is_integer


def build_settings(settings: dict[str, object], cache_salt: object) -> GenerationSettings:
    """Return the settings of a generation. Raise SettingsError if one of them, or the salt, is not valid."""
    check_type("cache_salt", cache_salt, str, "a text")
    return GenerationSettings.build(settings)


def read_ids(ids: object) -> list[int]:
    """Return token ids as ints. Raise PromptError if they are none."""
    found: list[Any] = list(map(as_integer, ids)) if isinstance(ids, list | tuple) else [None]
    if not all(is_integer(token) and token >= 0 for token in found):
        raise PromptError(f"ids is a list of token ids, not {quote(ids)}")
    return found


def describe_engine(engine: Any) -> str:
    """Return a model's name, number format, quantisation and device."""
    kinds = (str(engine.dtype).removeprefix("torch."), getattr(engine, "quantization", None), str(engine.device))
    return f"{engine.name} ({', '.join(kind for kind in kinds if kind)})"


def check_arguments(
    draft: object, verifier: object, lookup: object, reader: object, *, watch: object, lazy: object
) -> None:
    """Raise SettingsError if an argument of `SpeculativeDecoder` has a wrong type. Options check themselves."""
    check_type("watch", watch, bool, "True or False")
    check_type("lazy", lazy, bool, "True or False")
    if reader is not None and not isinstance(reader, PromptLookup) and not hasattr(reader, "forward_many"):
        raise SettingsError(f"reader is an engine or a prompt lookup from prompt_lookup(…), not {quote(reader)}")
    if lookup is not None and not isinstance(lookup, PromptLookup):
        raise SettingsError(f"lookup is a prompt lookup from prompt_lookup(…), not {type(lookup).__name__}")
    if lookup is not None and not hasattr(draft, "forward_many"):
        raise SettingsError("lookup is for an edge engine as draft. Without one, give draft=prompt_lookup(…)")
    if draft is not None and not isinstance(draft, PromptLookup) and not hasattr(draft, "forward_many"):
        raise SettingsError(
            f"draft is an engine, as from load_engine(…), or prompt_lookup(…), not {type(draft).__name__}"
        )
    if verifier is not None and not hasattr(verifier, "describe"):
        raise SettingsError(f"verifier is one from local(…) or connect(…), not {type(verifier).__name__}")
