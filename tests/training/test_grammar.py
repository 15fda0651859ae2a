"""The parser inverts the grammar, for every combination of attributes, every task, language and wording."""

from __future__ import annotations

import itertools

import pytest

from training.grammar import VALUES, caption, combinations, emotion, parse, stated
from training.phrases import CONCISE, DEFAULT, DETAILED, EMOTIONS
from training.sentences import sentences
from training.speech import draw_spec

TASKS = ("default", "detailed", "concise")


@pytest.mark.parametrize(("task", "lang"), list(itertools.product(TASKS, ("zh", "en"))))
@pytest.mark.parametrize("shift", range(6))
def test_the_parser_recovers_every_caption(task: str, lang: str, shift: int) -> None:
    for attributes in combinations():
        assert parse(caption(attributes, task, lang, shift), lang) == stated(attributes, task)


@pytest.mark.parametrize("lang", ["zh", "en"])
def test_no_phrase_hides_inside_another_value(lang: str) -> None:
    for name, values in VALUES.items():
        words = [(v, w) for t in (DEFAULT, DETAILED, CONCISE) for v in values for w in t[lang][name][v]]
        for (value, word), (other, longer) in itertools.product(words, words):
            assert value == other or word not in longer, (word, longer)


def test_every_mood_is_reached_and_has_a_word() -> None:
    moods = {emotion(attributes) for attributes in combinations()}
    assert moods == set(EMOTIONS["zh"]) == set(EMOTIONS["en"])
    assert len(moods) >= 6


def test_captions_are_varied() -> None:
    for task, lang in itertools.product(("default", "detailed"), ("zh", "en")):
        assert len({caption(a, task, lang) for a in combinations()}) == len(list(combinations()))


def test_parse_ignores_what_is_not_said() -> None:
    assert parse("", "en") == {}
    assert parse("The speaker talks fast", "en") == {"rate": "fast"}


def test_a_seed_fixes_the_clip() -> None:
    first, again, other = draw_spec(7, False), draw_spec(7, False), draw_spec(8, False)
    assert first == again != other


def test_held_out_sentences_are_not_trained_on() -> None:
    for lang in ("zh", "en"):
        train = {" ".join(units) for units in sentences(lang, held_out=False)}
        held = {" ".join(units) for units in sentences(lang, held_out=True)}
        assert len(train) >= 78
        assert len(held) >= 16
        assert not train & held
