"""The captions: a small grammar in two languages and three tasks, and the parser that inverts it.

The wording is a function of the attributes, so that a captioner that hears right can be right token for token: the
wording of each fact is fixed by the mood and by the facts already on the page (`_variant`). Two models that disagree
therefore disagree about what they hear, be it about one fact or about the mood that colours the words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from training.phrases import CONCISE, CONCISE_PLAIN, DEFAULT, DETAILED, EMOTIONS, ENDINGS

Attributes = dict[str, str]

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "rate": ("slow", "medium", "fast"),
    "pitch": ("low", "medium", "high"),
    "intonation": ("flat", "lively"),
    "loudness": ("soft", "medium", "loud"),
    "pauses": ("few", "many"),
}
NAMES: Final = (*VALUES, "emotion")
_PLAIN: Final = {"rate": "medium", "pitch": "medium", "intonation": "flat", "loudness": "medium", "pauses": "few"}
_SALIENCE: Final = ("loudness", "rate", "pauses", "intonation", "pitch")
_JOIN: Final = {"zh": "，", "en": ", "}
_STOP: Final = {"zh": "。", "en": "."}


def combinations() -> Iterator[Attributes]:
    """Every combination of the five audible attributes."""
    for values in itertools.product(*VALUES.values()):
        yield dict(zip(VALUES, values, strict=True))


def emotion(attributes: Attributes) -> str:
    """The mood that a voice with these attributes suggests: a fixed rule, the same for every speaker."""
    rate, lively = attributes["rate"], attributes["intonation"] == "lively"
    if attributes["loudness"] == "loud":
        if rate == "fast":
            return "excited" if lively else "angry"
        return "confident" if lively else "stern"
    if attributes["loudness"] == "soft":
        if rate == "fast":
            return "nervous"
        return "gentle" if lively else ("sad" if rate == "slow" else "tired")
    if attributes["pauses"] == "many":
        return "hesitant" if rate != "fast" else "nervous"
    if rate == "slow":
        return "gentle" if lively else "tired"
    return "cheerful" if lively else "calm"


def caption(attributes: Attributes, task: str, lang: str, shift: int = 0) -> str:
    """The caption of a voice. `shift` rotates every choice of wording; training uses 0.

    Raises:
        KeyError: an attribute, a task or a language is unknown.
    """
    write = {"default": _default, "detailed": _detailed, "concise": _concise}[task]
    return write(attributes, lang, shift + list(EMOTIONS[lang]).index(emotion(attributes)))


def salient(attributes: Attributes) -> list[str]:
    """The one or two facts that a concise caption mentions, in the order of the instruction (none if all is plain)."""
    unusual = [name for name in _SALIENCE if attributes[name] != _PLAIN[name]][:2]
    return [name for name in VALUES if name in unusual]


def stated(attributes: Attributes, task: str) -> Attributes:
    """What a correct caption of this task says: the facts it mentions, and the emotion."""
    names = salient(attributes) if task == "concise" else list(VALUES)
    return {**{name: attributes[name] for name in names}, "emotion": emotion(attributes)}


def _variant(count: int, said: list[int], shift: int) -> int:
    """Which wording comes next: fixed by the facts already said (their value indices) and the mood (in `shift`)."""
    return (sum((i + 1) * value for i, value in enumerate(said)) + shift) % count


def _facts(
    table: dict[str, dict[str, tuple[str, ...]]], names: list[str], attributes: Attributes, shift: int
) -> list[str]:
    said: list[int] = []
    words: list[str] = []
    for name in names:
        options = table[name][attributes[name]]
        words.append(options[_variant(len(options), said, shift)])
        said.append(VALUES[name].index(attributes[name]))
    return words


def _ending(attributes: Attributes, task: str, lang: str, shift: int) -> str:
    said = [VALUES[name].index(attributes[name]) for name in VALUES] if task != "concise" else []
    options = ENDINGS[task][lang]
    return options[_variant(len(options), said, shift)].format(EMOTIONS[lang][emotion(attributes)])


def _default(attributes: Attributes, lang: str, shift: int) -> str:
    facts = _facts(DEFAULT[lang], list(VALUES), attributes, shift)
    ending = _ending(attributes, "default", lang, shift)
    return _JOIN[lang].join(facts) + _STOP[lang] + (" " if lang == "en" else "") + ending


def _detailed(attributes: Attributes, lang: str, shift: int) -> str:
    facts = _facts(DETAILED[lang], list(VALUES), attributes, shift)
    return (" " if lang == "en" else "").join([*facts, _ending(attributes, "detailed", lang, shift)])


def _concise(attributes: Attributes, lang: str, shift: int) -> str:
    facts = _facts(CONCISE[lang], salient(attributes), attributes, shift) or [CONCISE_PLAIN[lang]]
    text = (" and " if lang == "en" else "、").join(facts)
    start = "The speaker " if lang == "en" else "说话人"
    return start + text + _JOIN[lang] + _ending(attributes, "concise", lang, shift)


def parse(text: str, lang: str) -> Attributes:
    """The attributes that a caption states; what it does not state, or states in unknown words, is absent.

    The longest known phrase of each attribute wins, so that "not loud" could never be read as "loud".
    """
    found: Attributes = {}
    for name, table in _lexicon(lang).items():
        hits = [(len(phrase), value) for value, phrases in table.items() for phrase in phrases if phrase in text]
        if hits:
            found[name] = max(hits)[1]
    return found


def _lexicon(lang: str) -> dict[str, dict[str, list[str]]]:
    lexicon: dict[str, dict[str, list[str]]] = {}
    for name, values in VALUES.items():
        tables = (DEFAULT[lang], DETAILED[lang], CONCISE[lang])
        lexicon[name] = {v: [phrase for table in tables for phrase in table[name][v]] for v in values}
    lexicon["emotion"] = {mood: [word] for mood, word in EMOTIONS[lang].items()}
    return lexicon
