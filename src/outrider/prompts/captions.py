"""The caption tasks: instructions for a speech captioner, in Chinese and English.

A task is one user message: the recording, then the instruction. The instruction names the audible features (rate,
pitch, intonation, loudness, pauses) before the emotion, so that the model describes them before it infers the emotion.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from outrider.errors import PromptError, quote

Task = Literal["default", "detailed", "concise"]
Language = Literal["zh", "en"]

TASKS: Final = get_args(Task)
LANGUAGES: Final = get_args(Language)

_INSTRUCTIONS: Final[dict[tuple[str, str], str]] = {
    ("default", "zh"): "请描述这段语音的语速、音调、语调、音量和停顿，再说明它们透露的情绪。",
    (
        "detailed",
        "zh",
    ): "请逐项详细描述这段语音：语速快慢、音调高低、语调起伏、音量大小、停顿多少，最后说明这些特征透露的情绪。",
    ("concise", "zh"): "请用一句简短的话概括这段语音的说话方式和情绪。",
    ("default", "en"): (
        "Describe the rate, pitch, intonation, loudness and pauses of this speech, then the emotion they suggest."
    ),
    ("detailed", "en"): (
        "Describe this speech in detail, point by point: how fast it is, how high, how its intonation moves, "
        "how loud it is, how often it pauses, and finally the emotion these suggest."
    ),
    ("concise", "en"): "Sum up in one short sentence how this person speaks and the emotion it suggests.",
}


def instruction(task: str, lang: str) -> str:
    """Return the instruction of a caption task.

    Raises:
        PromptError: the task is not one of `TASKS`, or the language not one of `LANGUAGES`.
    """
    if task not in TASKS:
        raise PromptError(f"unknown caption task {quote(task)}: choose one of {', '.join(TASKS)}")
    if lang not in LANGUAGES:
        raise PromptError(f"unknown caption language {quote(lang)}: choose one of {', '.join(LANGUAGES)}")
    return _INSTRUCTIONS[task, lang]


def messages(task: str, lang: str) -> list[dict[str, Any]]:
    """Return the caption task as chat messages: one user message with the recording before the instruction."""
    text = instruction(task, lang)
    return [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": text}]}]
