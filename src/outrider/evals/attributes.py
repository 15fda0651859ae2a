"""Attributes that captions state, in the phrases of the bundled pair.

phrases.json has the phrases that the pair was trained to write (training/phrases.py, which a test compares). A text in
other words states none of these attributes. For other models, pass a parser to `metrics.score`.

Timbre and tension are attributes of emotion captions that the bundled pair does not write. `evals.voice_quality` reads
them from any wording that has one of its words beside a noun of the voice. Words of two attributes:

- A word inside a phrase of the pair belongs to that phrase: "嗓音低沉" and "the voice sounds dark" after "The pitch is
  low" state the pitch, and "声音轻柔" states the loudness.
- "低沉", "轻柔", "soft" and "deep" state the timbre only beside 音色, 音质, "timbre" or "voice quality".
- "紧张" is the emotion, "紧张度" is the tension: "紧张度较高" states no emotion. "Tense" states the tension, beside
  "voice", "tone" or the like only, and never the emotion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from outrider.evals.bootstrap import Measure, Resampling, measure
from outrider.evals.manifest import Item
from outrider.evals.voice_quality import QUALITIES, TENSION_NOUN_ZH, qualities
from outrider.evals.word_segmentation import primary_language
from outrider.files import read_json

Parse = Callable[[str, str], dict[str, str]]  # (text, language) -> attributes

# language -> attribute -> value -> the phrases that state it
_PHRASES: Final[dict[str, dict[str, dict[str, list[str]]]]] = read_json(Path(__file__).with_name("phrases.json"))
NAMES: Final = (*_PHRASES["en"], *QUALITIES)


def parse(text: str, lang: str) -> dict[str, str]:
    """Return the attributes that a caption in Chinese or English states in known phrases.

    The longest matching phrase of an attribute wins, so that "not loud" cannot be read as "loud".
    """
    found: dict[str, str] = {}
    taken: list[tuple[int, int]] = []
    plain = re.sub(TENSION_NOUN_ZH, lambda match: "\0" * len(match[0]), text)  # 紧张 is an emotion, 紧张度 is not
    for name, values in _PHRASES.get(primary_language(lang), {}).items():
        hits = [(len(phrase), value, phrase) for value, each in values.items() for phrase in each if phrase in plain]
        if hits:
            found[name] = max(hits)[1]
            taken += [match.span() for *_, phrase in hits for match in re.finditer(re.escape(phrase), plain)]
    return found | qualities(text, primary_language(lang), taken)


def accuracy(
    items: Sequence[Item], texts: Sequence[str], how: Resampling, parse: Parse = parse, names: Sequence[str] = NAMES
) -> dict[str, Measure | None]:
    """Return, per attribute, the share of correct texts among the items with a label for it.

    attribute_all: the share of texts that state exactly the labels of their item among `names`.
    """
    judged = [
        ({name: item.labels[name] for name in names if name in item.labels}, parse(text, item.lang), item.lang)
        for item, text in zip(items, texts, strict=True)
    ]
    judged = [(truth, stated, lang) for truth, stated, lang in judged if truth]
    scores = {}
    for name in names:
        rows = [(float(stated.get(name) == truth[name]), lang) for truth, stated, lang in judged if name in truth]
        scores[f"attribute_{name}"] = measure([row for row, _ in rows], [lang for _, lang in rows], how)
    named = [{name: value for name, value in stated.items() if name in names} for _, stated, _ in judged]
    exact = [float(own == truth) for own, (truth, _, _) in zip(named, judged, strict=True)]
    scores["attribute_all"] = measure(exact, [lang for *_, lang in judged], how)
    return scores
