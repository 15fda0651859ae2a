"""Metrics of a text's form: language, repetition and format rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.evals.bootstrap import Measure, Resampling, measure
from outrider.evals.word_segmentation import in_language, words

_LEFTOVER: Final = re.compile(
    r"<\|[^|<>]*\|>|</?s>|<(?:bos|eos|pad|unk|end_of_turn|start_of_turn)>|\[/?INST\]|</?think>|\ufffd"
    r"|^\s*(?:system|user|assistant|human|ai)\s*[::]|^\s*(?:system|user|assistant)\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_ENDED: Final = re.compile(r"[.!?…。！？｡][\"'”’»」』）)\]】*]*\s*$")


@dataclass(frozen=True)
class FormatRules:
    """Limits of a text's length, in words."""

    shortest: int = 2
    longest: int = 400


def language_match(texts: Sequence[str], langs: Sequence[str], how: Resampling) -> Measure | None:
    """Return the share of texts in the script of their language. Languages of unknown script are left out."""
    judged = [(in_language(text, lang), lang) for text, lang in zip(texts, langs, strict=True)]
    known = [(match, lang) for match, lang in judged if match is not None]
    return measure([float(match) for match, _ in known], [lang for _, lang in known], how)


def repetition(texts: Sequence[str], langs: Sequence[str], how: Resampling) -> dict[str, Measure | None]:
    """Return distinct_1 and distinct_2, the mean of different n-grams ÷ n-grams, and the mean of `longest_loop`.

    Distinct-n follows Li et al., A Diversity-Promoting Objective Function for Neural Conversation Models, NAACL 2016,
    but per text, because over a whole corpus it falls with the corpus's size. Texts without n-grams are left out.
    """
    found: dict[str, Measure | None] = {}
    for n in (1, 2):
        rows = [(distinct(words(text), n), lang) for text, lang in zip(texts, langs, strict=True)]
        kept = [(row, lang) for row, lang in rows if row is not None]
        found[f"distinct_{n}"] = measure([row for row, _ in kept], [lang for _, lang in kept], how)
    loops = [float(longest_loop(words(text))) for text in texts]
    return {**found, "longest_loop": measure(loops, langs, how)}


def distinct(tokens: Sequence[str], n: int) -> float | None:
    """Return different n-grams ÷ n-grams, or None without any."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def longest_loop(tokens: Sequence[str]) -> int:
    """Return the length of the longest run of a repeated phrase, or 0 without repetition.

    "a b c b c b" has a run of 5 ("b c", two and a half times).
    """
    longest = 0
    for period in range(1, len(tokens) // 2 + 1):
        run = 0
        for now, before in zip(tokens[period:], tokens, strict=False):
            run = run + 1 if now == before else 0
            if run >= period:
                longest = max(longest, run + period)
    return longest


def compliance(
    texts: Sequence[str], langs: Sequence[str], how: Resampling, rules: FormatRules
) -> dict[str, Measure | None]:
    """Return the share of texts that keep each rule of `check_rules`, and all of them (format_all)."""
    kept = [check_rules(text, rules) for text in texts]
    names = list(check_rules("", rules))
    rows = {f"format_{name}": [float(rules[name]) for rules in kept] for name in names}
    rows["format_all"] = [float(all(rules.values())) for rules in kept]
    return {name: measure(row, langs, how) for name, row in rows.items()}


def check_rules(text: str, rules: FormatRules) -> dict[str, bool]:
    """Check a text against each rule.

    present: not blank. clean: no leftovers of a chat template and no replacement character. ended: ends with sentence
    punctuation. length: within `rules`.
    """
    return {
        "present": bool(text.strip()),
        "clean": not _LEFTOVER.search(text),
        "ended": bool(_ENDED.search(text)),
        "length": rules.shortest <= len(words(text)) <= rules.longest,
    }
