"""Timbre and tension of a voice in captions. `evals.attributes` documents words of two attributes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

TENSION_NOUN_ZH: Final = "紧张度|紧张程度"
QUALITIES: Final = ("timbre", "tension")


class _Attribute(NamedTuple):
    """Nouns and words, each a regular expression.

    own: the attribute's names. voice: further nouns that `beside_voice` words may describe.
    beside_voice, beside_own: value -> words that state it beside any noun, and beside a name of the attribute only.
    """

    own: str
    voice: str
    beside_voice: dict[str, str]
    beside_own: dict[str, str]


_ATTRIBUTES: Final[dict[str, dict[str, _Attribute]]] = {
    "zh": {
        "timbre": _Attribute(
            "音色|音质",
            "声音|嗓音|声线|嗓子",
            {
                "bright": "明亮|清亮|亮丽",
                "dark": "暗沉|沉闷|阴沉",
                "hoarse": "沙哑|嘶哑|沙沙的|粗哑|喑哑|干哑|哑",
                "crisp": "清脆|脆亮",
                "full": "浑厚|厚实|厚重|饱满|圆润",
                "soft": "柔和|柔美|绵软",
            },
            {"bright": "(?<!响)亮", "dark": "低沉|昏暗|暗", "soft": "轻柔|柔软"},
        ),
        "tension": _Attribute(
            TENSION_NOUN_ZH,
            "声音|嗓音|声线|嗓子|声带|喉部|喉咙|音色|发声|语气",
            {"tense": "紧绷|绷紧|绷得|紧涩", "relaxed": "放松|松弛"},
            {"tense": "高|强|大", "medium": "中等|适中|不高不低", "relaxed": "低|弱|小"},
        ),
    },
    "en": {
        "timbre": _Attribute(
            r"timbre|tone colou?r|voice quality|vocal quality",
            "voice|tone|sounds?",
            {
                "bright": "bright|brilliant",
                "dark": "dark|sombre|somber",
                "hoarse": "hoarse|husky|raspy|gravelly|croaky",
                "crisp": "crisp|ringing",
                "full": "full(?! of)|rich|resonant|sonorous",
                "soft": "mellow|velvety",
            },
            {"dark": "deep", "soft": "soft|gentle"},
        ),
        "tension": _Attribute(
            "tension|tenseness",
            "voice|tone|throat|vocal cords|vocal folds|phonation|timbre",
            {"tense": "tense|strained|taut|tight", "relaxed": "relaxed|loose"},
            {"tense": "high|strong|great|marked", "medium": "medium|moderate|average", "relaxed": "low|little|slight"},
        ),
    },
}

# A negated word states nothing. 不仅, 不但, 不失 and 无比 negate nothing.
_NEGATED: Final = {
    "zh": re.compile(r"(?:不(?![仅但失])|没|无(?!比)|未|并非)[^，。；：！？、,.;但而]{0,4}$"),
    "en": re.compile(r"(?:\b(?:not|no|never|neither|nor|without|hardly|barely)|n't)(?: (?!but\b)[\w-]+){0,3} $", re.I),
}
# Between a noun and its word, a noun of another attribute, an article, a possessive or a verb begins another phrase.
_ZH_GAP: Final = r"(?:(?!音调|音量|语速|语调|情绪|心情|停顿)[^，。；：！？、,.;\s的])"
_EN_OTHERS: Final = (
    "the|his|her|their|with|pitch|register|volume|loudness|pace|rate|speed|speech|intonation|pauses?|mood"
)
_EN_BEFORE: Final = rf"(?:,? (?!(?:{_EN_OTHERS}|an?|is|are|sounds?)\b)[\w-]+){{0,3}}? "
_EN_AFTER: Final = rf":?(?: (?!(?:{_EN_OTHERS})\b)[\w-]+){{0,4}}? "


def qualities(text: str, lang: str, taken: Sequence[tuple[int, int]] = ()) -> dict[str, str]:
    """Return the timbre and the tension that a text states. The first of several values counts.

    Args:
        taken: half-open ranges of the text that state another attribute. A word inside one does not count.
    """
    found: dict[str, str] = {}
    for name, patterns in _patterns(lang).items():
        hits = [
            (match.start("word"), value)
            for value, pattern in patterns
            for match in pattern.finditer(text)
            if not _NEGATED[lang].search(text[: match.start("word")])
            and not any(low <= match.start("word") and match.end("word") <= high for low, high in taken)
        ]
        if hits:
            found[name] = min(hits)[1]
    return found


@lru_cache
def _patterns(lang: str) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return, by attribute, (value, pattern) pairs. Each pattern's group `word` is the word that states the value."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, attribute in _ATTRIBUTES.get(lang, {}).items():
        own, voice, beside_voice, beside_own = attribute
        rows = [(f"{own}|{voice}", *row) for row in beside_voice.items()] + [(own, *row) for row in beside_own.items()]
        found[name] = [
            (value, re.compile(pattern, re.I))
            for nouns, value, words in rows
            for pattern in _orders(lang, nouns, words)
        ]
    return found


def _orders(lang: str, nouns: str, words: str) -> tuple[str, ...]:
    """Return the patterns of a word after its noun and, in English or with 的, before it."""
    if lang == "zh":
        return (
            rf"(?:{nouns})(?:[：:]\s?)?{_ZH_GAP}{{0,8}}?(?P<word>{words})",
            f"(?P<word>{words}){_ZH_GAP}{{0,4}}?的(?:{nouns})",
        )
    return (
        rf"\b(?:{nouns})\b{_EN_AFTER}(?P<word>{words})\b",
        rf"\b(?P<word>{words})\b{_EN_BEFORE}(?:{nouns})\b",
    )
