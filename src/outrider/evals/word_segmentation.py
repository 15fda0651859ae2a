"""Segmentation of a text in any language into words, and detection of its script."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any, Final

from outrider.errors import SettingsError
from outrider.hints import install_command

HAN: Final = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_PIECES: Final = re.compile(rf"[{HAN}]+|[^\W_{HAN}]+")  # runs of Han characters, runs of other letters and digits
_SCRIPTS: Final = {
    "Han": re.compile(rf"[{HAN}]"),
    "Kana": re.compile("[\u3040-\u30ff]"),
    "Hangul": re.compile("[\u1100-\u11ff\uac00-\ud7af]"),
    "Latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]+"),
    "Cyrillic": re.compile("[\u0400-\u052f]+"),
    "Arabic": re.compile("[\u0600-\u06ff]+"),
    "Devanagari": re.compile("[\u0900-\u097f]+"),
    "Greek": re.compile("[\u0370-\u03ff]+"),
    "Hebrew": re.compile("[\u0590-\u05ff]+"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
}
_WRITTEN_IN: Final = {
    "zh": ("Han",),
    "ja": ("Han", "Kana"),
    "ko": ("Hangul",),
    "th": ("Thai",),
    "el": ("Greek",),
    "he": ("Hebrew",),
    "hi": ("Devanagari",),
    **dict.fromkeys(("ar", "fa", "ur"), ("Arabic",)),
    **dict.fromkeys(("ru", "uk", "bg"), ("Cyrillic",)),
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "tr", "vi", "id"), ("Latin",)),
}


def primary_language(lang: str) -> str:
    """Return the language of a tag, such as "zh" of "zh-CN"."""
    return re.split("[-_]", lang)[0].lower()


@lru_cache(maxsize=65_536)
def words(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case, without punctuation. rjieba segments Chinese.

    On ASCII text these are the tokens of rouge-score's own tokenizer without stemming.
    """
    found: list[str] = []
    for piece in _PIECES.findall(text.lower()):
        found += _segmenter().cut(piece) if _SCRIPTS["Han"].match(piece) else [piece]
    return tuple(found)


@lru_cache(maxsize=1)
def _segmenter() -> Any:
    return import_extra("rjieba")


def import_extra(package: str) -> Any:
    """Import a package of the extra `eval`.

    Raises:
        SettingsError: the package is not installed.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SettingsError(f"text metrics need {package}: {install_command('eval')}") from error


def in_language(text: str, lang: str, share: float = 0.8) -> bool | None:
    """Return whether at least `share` of a text is in the script of `lang`, or None for an unknown script.

    Characters of Han, kana, hangul and Thai count one each, as do words of other scripts. A text without letters is in
    no language. Languages of one script, such as English and French, are not distinguished.
    """
    scripts = _WRITTEN_IN.get(primary_language(lang))
    if scripts is None:
        return None
    counts = Counter({name: len(pattern.findall(text)) for name, pattern in _SCRIPTS.items()})
    total = counts.total()
    return total > 0 and sum(counts[name] for name in scripts) >= share * total
