"""The caption tasks."""

import pytest

from outrider.errors import PromptError
from outrider.prompts.captions import LANGUAGES, TASKS, instruction, messages


def test_every_task_has_its_own_wording_in_both_languages() -> None:
    texts = {instruction(task, lang) for task in TASKS for lang in LANGUAGES}
    assert len(texts) == len(TASKS) * len(LANGUAGES) == 6


def test_the_recording_comes_before_the_instruction() -> None:
    (turn,) = messages("default", "zh")
    assert [part["type"] for part in turn["content"]] == ["audio", "text"]


@pytest.mark.parametrize(("task", "lang"), [("long", "zh"), ("default", "fr")])
def test_unknown_tasks_and_languages_are_named(task: str, lang: str) -> None:
    with pytest.raises(PromptError, match="choose one of"):
        instruction(task, lang)
