"""The words of the captions: wordings of every value of every attribute, in Chinese and English.

No phrase of one value may contain a phrase of another value of the same attribute; `tests/training` checks it.
"""

from __future__ import annotations

from typing import Final

Table = dict[str, dict[str, tuple[str, ...]]]

EMOTIONS: Final[dict[str, dict[str, str]]] = {
    "zh": {
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
    "en": {
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
}

ENDINGS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "default": {
        "zh": ("这些特征透露出{}的情绪。", "整体听上去情绪{}。", "由此推测说话人心情{}。"),
        "en": ("Together these suggest {}.", "Overall the voice conveys {}.", "The mood that comes across is {}."),
    },
    "detailed": {
        "zh": (
            "综合以上各点，这段语音透露出{}的情绪。",
            "把这些特征放在一起看，说话人的情绪应当是{}的。",
            "总的来说，说话人此刻的心情大概是{}的。",
        ),
        "en": (
            "Taken together, these features suggest {}.",
            "All in all, the emotion behind this voice is most likely {}.",
            "Put together, the way of speaking gives an impression of {}.",
        ),
    },
    "concise": {"zh": ("情绪{}。",), "en": ("which suggests {}.",)},
}

CONCISE_PLAIN: Final = {"zh": "各方面都很适中", "en": "talks in an ordinary way"}

CONCISE: Final[dict[str, Table]] = {
    "zh": {
        "rate": {"slow": ("说得慢",), "medium": ("说得不快不慢",), "fast": ("说得快",)},
        "pitch": {"low": ("嗓音偏低",), "medium": ("嗓音不高不低",), "high": ("嗓音偏高", "嗓音尖细")},
        "intonation": {"flat": ("语气平直",), "lively": ("语气多变", "语气活泼")},
        "loudness": {"soft": ("声音很小", "声音轻柔"), "medium": ("声音不大不小",), "loud": ("声音很大", "声音洪亮")},
        "pauses": {"few": ("一气呵成",), "many": ("断断续续", "时断时续")},
    },
    "en": {
        "rate": {"slow": ("speaks slowly",), "medium": ("speaks at normal speed",), "fast": ("speaks quickly",)},
        "pitch": {
            "low": ("sounds deep",),
            "medium": ("sounds neither deep nor shrill",),
            "high": ("sounds shrill", "has a high voice"),
        },
        "intonation": {"flat": ("keeps one tone",), "lively": ("varies the melody", "is full of melody")},
        "loudness": {
            "soft": ("has a quiet voice", "hardly raises the voice"),
            "medium": ("has a voice of normal strength",),
            "loud": ("has a loud voice", "almost shouts"),
        },
        "pauses": {"few": ("hardly stops",), "many": ("stops often", "keeps stopping")},
    },
}

DEFAULT: Final[dict[str, Table]] = {
    "zh": {
        "rate": {
            "slow": ("说话人语速缓慢", "说话人说话很慢", "这段话语速偏慢"),
            "medium": ("这段语音的语速适中", "说话人语速中等", "说话人说话不紧不慢"),
            "fast": ("说话人说话很快", "说话人语速急促", "这段话语速偏快"),
        },
        "pitch": {
            "low": ("音调低沉", "音调偏低", "嗓音低沉"),
            "medium": ("音调适中", "音调中等", "嗓音高低适中"),
            "high": ("音调高亢", "音调偏高", "嗓音高亢"),
        },
        "intonation": {
            "flat": ("语调平稳", "语调平淡", "语气没有什么起伏"),
            "lively": ("语调起伏明显", "语调富有变化", "语气抑扬顿挫"),
        },
        "loudness": {
            "soft": ("音量很轻", "音量偏小", "声音轻微"),
            "medium": ("音量适中", "音量中等", "声音大小适中"),
            "loud": ("音量很大", "音量偏大", "声音响亮"),
        },
        "pauses": {
            "few": ("停顿很少", "几乎没有停顿", "话语连贯"),
            "many": ("停顿很多", "中间有多处停顿", "话语断续"),
        },
    },
    "en": {
        "rate": {
            "slow": ("The speaker talks slowly", "This is slow speech", "Someone talks at a slow rate"),
            "medium": (
                "The speech moves at a moderate rate",
                "This is speech at an ordinary pace",
                "Someone talks at a medium rate",
            ),
            "fast": ("The speaker talks fast", "This is rapid speech", "Someone talks at a fast rate"),
        },
        "pitch": {
            "low": ("in a low pitch", "with a deep voice", "in a low register"),
            "medium": ("in a medium pitch", "with a voice of middling height", "in a middle register"),
            "high": ("in a high pitch", "with a high-pitched voice", "in a high register"),
        },
        "intonation": {
            "flat": ("with flat intonation", "in a monotone", "with little melody"),
            "lively": ("with lively intonation", "with a tone that rises and falls", "with a lot of melody"),
        },
        "loudness": {
            "soft": ("at a soft volume", "very quietly", "with little force"),
            "medium": ("at a medium volume", "at a normal loudness", "with moderate force"),
            "loud": ("at a loud volume", "very loudly", "with great force"),
        },
        "pauses": {
            "few": ("and with few pauses", "almost without a break", "and in one go"),
            "many": ("and with many pauses", "breaking off again and again", "and with frequent breaks"),
        },
    },
}

DETAILED: Final[dict[str, Table]] = {
    "zh": {
        "rate": {
            "slow": ("说话人的语速很慢，每个字都拖得比较长。", "先看语速，这段话说得慢悠悠的。"),
            "medium": ("说话人的语速中等，不急也不缓。", "先看语速，这段话的速度恰到好处。"),
            "fast": ("说话人的语速很快，字与字之间接得很紧。", "先看语速，这段话说得又急又快。"),
        },
        "pitch": {
            "low": ("音调比较低，嗓音听起来浑厚。", "就音调而言，声音处在低音区。"),
            "medium": ("音调不高也不低，听起来很自然。", "就音调而言，声音处在中音区。"),
            "high": ("音调比较高，嗓音听起来尖亮。", "就音调而言，声音处在高音区。"),
        },
        "intonation": {
            "flat": ("语调比较平，前后没有明显的变化。", "语调从头到尾保持在一条线上。"),
            "lively": ("语调有高有低，起伏十分明显。", "语调忽升忽降，很有表现力。"),
        },
        "loudness": {
            "soft": ("音量比较小，像是在轻声低语。", "说话的声音很轻，需要仔细听。"),
            "medium": ("音量不大也不小，听起来很舒服。", "说话的声音大小正常。"),
            "loud": ("音量比较大，每个字都很有力。", "说话的声音很响，远处也能听见。"),
        },
        "pauses": {
            "few": ("句子中间很少停顿，一口气说完。", "整句话连在一起，没有中断。"),
            "many": ("句子中间多次停顿，被分成了几段。", "整句话断成几截，停了好几次。"),
        },
    },
    "en": {
        "rate": {
            "slow": (
                "The pace of the speech is slow, and the words are drawn out.",
                "To begin with the rate, the words come one by one, without haste.",
            ),
            "medium": (
                "The pace of the speech is moderate, neither hurried nor slow.",
                "To begin with the rate, the words come at a comfortable speed.",
            ),
            "fast": (
                "The pace of the speech is fast, and the words follow each other closely.",
                "To begin with the rate, the words come in a rush.",
            ),
        },
        "pitch": {
            "low": ("The pitch is low, and the voice sounds dark.", "As for height, the voice stays in the low range."),
            "medium": (
                "The pitch is average, neither high nor low.",
                "As for height, the voice stays in the middle range.",
            ),
            "high": (
                "The pitch is high, and the voice sounds bright.",
                "As for height, the voice stays in the high range.",
            ),
        },
        "intonation": {
            "flat": (
                "The intonation is even and barely moves.",
                "The melody stays on one line from start to end.",
            ),
            "lively": (
                "The intonation is animated and moves a great deal.",
                "The melody goes up and down in wide steps.",
            ),
        },
        "loudness": {
            "soft": ("The volume is low, close to a whisper.", "The voice is quiet, so one has to listen closely."),
            "medium": ("The volume is normal and easy to listen to.", "The voice is neither loud nor quiet."),
            "loud": ("The volume is high, and every word is forceful.", "The voice is loud and carries far."),
        },
        "pauses": {
            "few": ("There are hardly any pauses.", "The words run on without a stop."),
            "many": ("There are many pauses between the phrases.", "The sentence is broken up by several stops."),
        },
    },
}
