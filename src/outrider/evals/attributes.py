"""Attributes that captions state, in the phrases of the bundled pair.

The phrases are those that the pair was trained to write (training/phrases.py, which a test compares). A text in other
words states none of these attributes. For other models, pass a parser to `metrics.score`.

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
from functools import lru_cache
from typing import Final

from outrider.evals.bootstrap import Measure, Resampling, measure
from outrider.evals.manifest import Item
from outrider.evals.voice_quality import QUALITIES, TENSION_NOUN_ZH, qualities
from outrider.evals.word_segmentation import primary_language

Parse = Callable[[str, str], dict[str, str]]  # (text, language) -> attributes

# attribute -> value -> the phrases that state it
_PHRASES: Final[dict[str, dict[str, dict[str, str]]]] = {
    "zh": {
        "rate": {
            "slow": (
                "说话人语速缓慢|说话人说话很慢|这段话语速偏慢|说话人的语速很慢，每个字都拖得比较长。|"
                "先看语速，这段话说得慢悠悠的。|说得慢"
            ),
            "medium": (
                "这段语音的语速适中|说话人语速中等|说话人说话不紧不慢|说话人的语速中等，不急也不缓。|"
                "先看语速，这段话的速度恰到好处。|说得不快不慢"
            ),
            "fast": (
                "说话人说话很快|说话人语速急促|这段话语速偏快|说话人的语速很快，字与字之间接得很紧。|"
                "先看语速，这段话说得又急又快。|说得快"
            ),
        },
        "pitch": {
            "low": "音调低沉|音调偏低|嗓音低沉|音调比较低，嗓音听起来浑厚。|就音调而言，声音处在低音区。|嗓音偏低",
            "medium": (
                "音调适中|音调中等|嗓音高低适中|音调不高也不低，听起来很自然。|就音调而言，声音处在中音区。|"
                "嗓音不高不低"
            ),
            "high": (
                "音调高亢|音调偏高|嗓音高亢|音调比较高，嗓音听起来尖亮。|就音调而言，声音处在高音区。|嗓音偏高|嗓音尖细"
            ),
        },
        "intonation": {
            "flat": (
                "语调平稳|语调平淡|语气没有什么起伏|语调比较平，前后没有明显的变化。|"
                "语调从头到尾保持在一条线上。|语气平直"
            ),
            "lively": (
                "语调起伏明显|语调富有变化|语气抑扬顿挫|语调有高有低，起伏十分明显。|语调忽升忽降，很有表现力。|"
                "语气多变|语气活泼"
            ),
        },
        "loudness": {
            "soft": (
                "音量很轻|音量偏小|声音轻微|音量比较小，像是在轻声低语。|说话的声音很轻，需要仔细听。|声音很小|声音轻柔"
            ),
            "medium": (
                "音量适中|音量中等|声音大小适中|音量不大也不小，听起来很舒服。|说话的声音大小正常。|声音不大不小"
            ),
            "loud": (
                "音量很大|音量偏大|声音响亮|音量比较大，每个字都很有力。|说话的声音很响，远处也能听见。|声音很大|"
                "声音洪亮"
            ),
        },
        "pauses": {
            "few": (
                "停顿很少|几乎没有停顿|话语连贯|句子中间很少停顿，一口气说完。|整句话连在一起，没有中断。|一气呵成"
            ),
            "many": (
                "停顿很多|中间有多处停顿|话语断续|句子中间多次停顿，被分成了几段。|整句话断成几截，停了好几次。|"
                "断断续续|时断时续"
            ),
        },
        "emotion": {
            "excited": "激动",
            "angry": "愤怒",
            "confident": "自信",
            "stern": "严厉",
            "nervous": "紧张",
            "gentle": "温柔",
            "sad": "悲伤",
            "tired": "疲惫",
            "hesitant": "犹豫",
            "cheerful": "愉快",
            "calm": "平静",
        },
    },
    "en": {
        "rate": {
            "slow": (
                "The speaker talks slowly|This is slow speech|Someone talks at a slow rate|"
                "The pace of the speech is slow, and the words are drawn out.|"
                "To begin with the rate, the words come one by one, without haste.|speaks slowly"
            ),
            "medium": (
                "The speech moves at a moderate rate|This is speech at an ordinary pace|"
                "Someone talks at a medium rate|The pace of the speech is moderate, neither hurried nor slow.|"
                "To begin with the rate, the words come at a comfortable speed.|speaks at normal speed"
            ),
            "fast": (
                "The speaker talks fast|This is rapid speech|Someone talks at a fast rate|"
                "The pace of the speech is fast, and the words follow each other closely.|"
                "To begin with the rate, the words come in a rush.|speaks quickly"
            ),
        },
        "pitch": {
            "low": (
                "in a low pitch|with a deep voice|in a low register|The pitch is low, and the voice sounds dark.|"
                "As for height, the voice stays in the low range.|sounds deep"
            ),
            "medium": (
                "in a medium pitch|with a voice of middling height|in a middle register|"
                "The pitch is average, neither high nor low.|As for height, the voice stays in the middle range.|"
                "sounds neither deep nor shrill"
            ),
            "high": (
                "in a high pitch|with a high-pitched voice|in a high register|"
                "The pitch is high, and the voice sounds bright.|As for height, the voice stays in the high range.|"
                "sounds shrill|has a high voice"
            ),
        },
        "intonation": {
            "flat": (
                "with flat intonation|in a monotone|with little melody|The intonation is even and barely moves.|"
                "The melody stays on one line from start to end.|keeps one tone"
            ),
            "lively": (
                "with lively intonation|with a tone that rises and falls|with a lot of melody|"
                "The intonation is animated and moves a great deal.|The melody goes up and down in wide steps.|"
                "varies the melody|is full of melody"
            ),
        },
        "loudness": {
            "soft": (
                "at a soft volume|very quietly|with little force|The volume is low, close to a whisper.|"
                "The voice is quiet, so one has to listen closely.|has a quiet voice|hardly raises the voice"
            ),
            "medium": (
                "at a medium volume|at a normal loudness|with moderate force|"
                "The volume is normal and easy to listen to.|The voice is neither loud nor quiet.|"
                "has a voice of normal strength"
            ),
            "loud": (
                "at a loud volume|very loudly|with great force|The volume is high, and every word is forceful.|"
                "The voice is loud and carries far.|has a loud voice|almost shouts"
            ),
        },
        "pauses": {
            "few": (
                "and with few pauses|almost without a break|and in one go|There are hardly any pauses.|"
                "The words run on without a stop.|hardly stops"
            ),
            "many": (
                "and with many pauses|breaking off again and again|and with frequent breaks|"
                "There are many pauses between the phrases.|The sentence is broken up by several stops.|"
                "stops often|keeps stopping"
            ),
        },
        "emotion": {
            "excited": "excitement",
            "angry": "anger",
            "confident": "confidence",
            "stern": "sternness",
            "nervous": "nervousness",
            "gentle": "tenderness",
            "sad": "sadness",
            "tired": "weariness",
            "hesitant": "hesitation",
            "cheerful": "cheerfulness",
            "calm": "calm",
        },
    },
}

NAMES: Final = (*_PHRASES["en"], *QUALITIES)


def parse(text: str, lang: str) -> dict[str, str]:
    """Return the attributes that a caption in Chinese or English states in known phrases.

    The longest matching phrase of an attribute wins, so that "not loud" cannot be read as "loud".
    """
    found: dict[str, str] = {}
    taken: list[tuple[int, int]] = []
    plain = re.sub(TENSION_NOUN_ZH, lambda match: "\0" * len(match[0]), text)  # 紧张 is an emotion, 紧张度 is not
    for name, phrases in _lexicon(primary_language(lang)).items():
        hits = [(phrase, value) for phrase, value in phrases if phrase in plain]
        if hits:
            found[name] = max((len(phrase), value) for phrase, value in hits)[1]
            taken += [match.span() for phrase, _ in hits for match in re.finditer(re.escape(phrase), plain)]
    return found | qualities(text, primary_language(lang), taken)


@lru_cache
def _lexicon(lang: str) -> dict[str, list[tuple[str, str]]]:
    table = _PHRASES.get(lang, {})
    return {
        name: [(phrase, value) for value, joined in values.items() for phrase in joined.split("|")]
        for name, values in table.items()
    }


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
    exact = [float(_restrict(stated, names) == truth) for truth, stated, _ in judged]
    scores["attribute_all"] = measure(exact, [lang for *_, lang in judged], how)
    return scores


def _restrict(stated: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: stated[name] for name in names if name in stated}
