"""Stop rules: EOS ids, stop strings, N sentences, length.

The rules apply to generated tokens only, one token at a time, in this order. The first that matches ends the output
with that token.

A stop string matches when a token completes it, even if it begins in an earlier token or in the middle of a block. The
text keeps it, as in transformers, so that text and ids agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from outrider.decoding.detokenizer import REPLACEMENT_CHARACTER

FinishReason = Literal["eos", "length", "stop", "sentences", "loop"]
DecodeFn = Callable[[list[int]], str]

WINDOW_MARGIN: Final = 8  # tokens decoded before a stop string could begin: some decoders trim their first token

_CLOSING_QUOTES: Final = "\"'”’」』）)】》"
_FULL_STOP: Final = re.compile(rf"[。！？!?]+[{_CLOSING_QUOTES}]*|\.+[{_CLOSING_QUOTES}]*(?=\s|$)")
_ABBREVIATION: Final = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|approx|No|Fig|Vol)|\b[A-HJ-Za-z]|\b(?:e\.g|i\.e|a\.m|p\.m|U\.S))$"
)


@dataclass(frozen=True)
class StopRules:
    """The stop rules of one generation. `sentences` never ends an output shorter than `min_new_tokens`."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    sentences: int | None = None
    min_new_tokens: int = 0

    @property
    def needs_text(self) -> bool:
        """True if a rule needs the decoded text."""
        return bool(self.strings) or self.sentences is not None


def find_finish_reason(rules: StopRules, generated: list[int], decode: DecodeFn | None) -> FinishReason | None:
    """Return the reason if the last of `generated` ends the output, else None.

    decode: converts ids to text, needed if `rules.needs_text`.
    """
    if generated[-1] in rules.eos_ids:
        return "eos"
    if rules.strings and decode and _completes_stop_string(rules.strings, generated, decode):
        return "stop"
    if rules.sentences is not None and decode and _has_enough_sentences(rules, generated, decode):
        return "sentences"
    return "length" if len(generated) >= rules.max_new_tokens else None


def _has_enough_sentences(rules: StopRules, generated: list[int], decode: DecodeFn) -> bool:
    assert rules.sentences is not None
    if len(generated) < rules.min_new_tokens:
        return False
    count = count_sentences(decode(generated))
    return count >= rules.sentences and count > count_sentences(decode(generated[:-1]))


def _completes_stop_string(strings: tuple[str, ...], generated: list[int], decode: DecodeFn) -> bool:
    """Return whether a stop string ends inside the last token.

    Only a window of last tokens is decoded, since most tokens have at least one byte. It is doubled while its text is
    too short. A window that begins inside a character begins with U+FFFD, which does not count.
    """
    window, longest = max(len(text.encode()) for text in strings) + WINDOW_MARGIN, max(map(len, strings))
    while len((tail := decode(generated[-window:])).lstrip(REPLACEMENT_CHARACTER)) <= longest and window < len(
        generated
    ):
        window *= 2
    if not any(text in tail for text in strings):
        return False
    previous_length = len(decode(generated[-window:-1]))
    return any(tail.find(text, max(0, previous_length - len(text) + 1)) >= 0 for text in strings)


def count_sentences(text: str) -> int:
    """Count the complete sentences in Chinese or English text.

    。！？!? end a sentence at once. A full stop ends one before white space or the end of the text, unless it belongs
    to a number that may continue ("3."), an initial or a common abbreviation.
    """
    return sum(_ends_sentence(text, match) for match in _FULL_STOP.finditer(text))


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if not match.group().startswith("."):
        return True
    before = text[: match.start()]
    if not before.strip():
        return False
    at_end = match.end() == len(text)
    if at_end and (before[-1:].isdigit() or match.group().startswith("..")):
        return False
    return not _ABBREVIATION.search(before)
