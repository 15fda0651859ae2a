"""A manifest reads back as written, and every fault in one is named at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.evals.manifest import Item, load_set, write_manifest
from outrider.prompts.captions import LANGUAGES, TASKS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
SHARED = {
    "references": st.lists(TEXTS, max_size=3).map(tuple),
    "labels": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "transcript": st.none() | TEXTS,
}
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), min_size=1, max_size=3).map(tuple)
PROMPTS = st.builds(Item, TEXTS, prompt=TEXTS, lang=TEXTS, **SHARED)
CHATS = st.builds(Item, TEXTS, messages=MESSAGES, lang=TEXTS, **SHARED)


def recordings(folder: Path) -> st.SearchStrategy[Item]:
    audio = st.sampled_from([folder / "a.wav", folder / "deep" / "b c.flac"])
    return st.builds(Item, TEXTS, audio=audio, lang=st.sampled_from(LANGUAGES), task=st.sampled_from(TASKS), **SHARED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("manifest")
    (base / "deep").mkdir()
    for name in ("a.wav", "deep/b c.flac"):
        (base / name).touch()
    return base


@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(["m.json", "m.jsonl"]))
def test_what_is_written_is_read(data: st.DataObject, name: str, folder: Path) -> None:
    kinds = st.one_of(PROMPTS, CHATS, recordings(folder))
    items = data.draw(st.lists(kinds, min_size=1, max_size=5, unique_by=lambda item: item.id))
    write_manifest(folder / name, items)
    assert load_set(folder / name) == items
    assert load_set(folder / name) == items


def test_a_folder_can_be_moved_with_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.wav").touch()
    write_manifest(tmp_path / "old" / "m.jsonl", [Item("a", tmp_path / "old" / "a.wav")])
    (tmp_path / "old").rename(tmp_path / "new")
    assert load_set(tmp_path / "new" / "m.jsonl")[0].audio == tmp_path / "new" / "a.wav"


GOOD: dict[str, Any] = {"id": "x", "prompt": "p", "lang": "en"}


def errors(tmp_path: Path, *values: Any) -> str:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in values))
    with pytest.raises(DataError) as caught:
        load_set(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"id": None}, "id is missing"),
        ({"id": 7}, "id is a text"),
        ({"lang": None}, "lang is missing"),
        ({"lang": ["en"]}, "lang is a text"),
        ({"prompt": None}, "found none"),
        ({"prompt": "  "}, "prompt is a text that is not blank"),
        ({"prompt": "\ud800"}, "prompt is a text"),
        ({"audio": "a.wav"}, "found audio and prompt"),
        ({"messages": [{"role": "user"}]}, "found prompt and messages"),
        ({"prompt": None, "messages": []}, "messages is a list"),
        ({"prompt": None, "audio": "none.wav"}, "no such file"),
        ({"prompt": None, "audio": "x" * 5000}, "no such file"),
        ({"prompt": None, "audio": "a\0b"}, "no such file"),
        ({"prompt": None, "audio": "none.wav", "lang": "fr"}, "the lang of a recording is one of zh, en"),
        ({"prompt": None, "audio": "none.wav", "task": "long"}, "task is one of default"),
        ({"task": "concise"}, "task is for a recording"),
        ({"references": "one"}, "references is a list"),
        ({"references": [""]}, "references is a list"),
        ({"labels": {"rate": 3}}, "labels is an object"),
        ({"transcript": 3}, "transcript is a text"),
        ({"refs": []}, "unknown key refs"),
    ],
)
def test_a_fault_is_named_with_its_item(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    message = errors(tmp_path, {**GOOD, "id": "first"}, {**GOOD, **changed})
    assert said in message
    assert "item 2 (line 2)" in message
    if isinstance(changed.get("id", ""), str):
        assert "id 'x'" in message


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    message = errors(tmp_path, GOOD, GOOD, {"lang": "en"}, [], {**GOOD, "id": "y", "colour": 1, "lang": None})
    assert "6 faults" in message
    assert "item 2 (line 2), id 'x': an earlier item has this id" in message
    assert "item 3 (line 3): id is missing" in message
    assert "item 4 (line 4): not an object" in message
    assert "id 'y': unknown key colour" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no items"),
        ("[]", "has no items"),
        ("[1", "not a valid JSON list"),
        ('{"id": "a"\n{"id"', "line 2: not valid JSON"),
        ('{"id": "a", "id": "b"}', "key id appears twice"),
    ],
)
def test_a_file_that_is_no_manifest(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_text(text)
    with pytest.raises(DataError, match=said):
        load_set(tmp_path / "m")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\xff\xfe\xff")
    for name in ("m", "nowhere", "."):
        with pytest.raises(DataError):
            load_set(tmp_path / name)
    with pytest.raises(DataError, match="one of the sets demo"):
        load_set("demos")


def test_an_item_has_one_input() -> None:
    for fields in ({}, {"prompt": "p", "audio": Path("a.wav")}):
        with pytest.raises(DataError, match="one of audio, prompt, messages"):
            Item("a", **fields)


def test_the_bundled_set() -> None:
    items = load_set("demo")
    assert len(items) == 12
    assert {item.lang for item in items} == {"zh", "en"}
    assert all(item.audio and item.audio.is_file() and "emotion" in item.labels for item in items)


def test_questions_in_the_form_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    asked = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."], "reference": ["x"]}
    path.write_text(json.dumps(asked) + "\n")
    chat = ({"role": "user", "content": "Compose."},)
    assert load_set(path) == [Item("81", messages=chat, lang="en", labels={"category": "writing"})]
    bad = {"question_id": True, "category": 1, "turns": [], "more": 1}
    path.write_text("\n".join(map(json.dumps, (asked, asked, bad))))
    with pytest.raises(DataError, match="5 faults") as caught:
        load_set(path)
    assert "id 81: an earlier item has this id" in str(caught.value)
