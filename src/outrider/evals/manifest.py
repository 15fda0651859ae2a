"""Manifests of items to evaluate, with their input, references and labels.

A manifest is a JSON list, or JSON lines, of objects with the fields of `Item`. Absent fields take their defaults:

    {"id": "a1", "audio": "clips/a1.flac", "lang": "zh", "references": ["语速缓慢。"], "labels": {"rate": "slow"}}
    {"id": "q1", "prompt": "Once upon a time", "lang": "en"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from outrider.errors import DataError, quote
from outrider.files import read_json, read_text, write_file
from outrider.prompts.captions import LANGUAGES, TASKS

SOURCES: Final = ("audio", "prompt", "messages")
BUNDLED: Final = Path(__file__).parents[1] / "demo" / "clips"
SETS: Final = ("demo",)
_QUESTION: Final = ("question_id", "category", "turns")


JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One input. Exactly one of audio (a recording), prompt (plain text) and messages (a chat) is set.

    lang: the language of the answer, "zh", "en" or another tag, of which a recording takes "zh" or "en" only.
    references: texts of good answers. labels: facts about the item, for accuracy and for slices. Those of a recording
    are the attributes of a correct caption. transcript: of a recording. task: the caption task of a recording.
    """

    id: str
    audio: Path | None = None
    prompt: str | None = None
    lang: str = field(default="en", kw_only=True)
    messages: tuple[JsonObject, ...] | None = field(default=None, kw_only=True)
    references: tuple[str, ...] = field(default=(), kw_only=True)
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)
    transcript: str | None = field(default=None, kw_only=True)
    task: str = field(default="default", kw_only=True)

    def __post_init__(self) -> None:
        if sum(getattr(self, source) is not None for source in SOURCES) != 1:
            raise DataError(f"item {quote(self.id)}: exactly one of {', '.join(SOURCES)} is required")


KEYS: Final = tuple(f.name for f in fields(Item))
Record = tuple[str, Any]  # a JSON value, with its place in the file
ItemOrErrors = Item | list[str]


@dataclass
class ErrorCollector:
    """Collects the errors of a file, to raise them together."""

    path: Path
    found: list[str] = field(default_factory=list)

    def add(self, where: str, error: str) -> None:
        """Collect an error."""
        self.found.append(f"{where}: {error}")

    def check(self) -> None:
        """Raise DataError if any error was collected."""
        if self.found:
            count = f"{len(self.found)} faults" if len(self.found) > 1 else "1 fault"
            raise DataError(f"{self.path}: {count}\n" + "\n".join(f"  {fault}" for fault in self.found))


def load_set(name: str | Path) -> list[Item]:
    """Load a named set ("demo", the bundled clips), a manifest, or a file in Spec-Bench's form.

    Spec-Bench's form is {"question_id", "category", "turns"} per line. The first turn becomes the chat, the category
    a label, and the language is English.

    Raises:
        DataError: no such set or file, or errors in it, all of which are listed.
    """
    if str(name) == "demo":
        return _demo()
    path = Path(name)
    if not path.is_file():
        raise DataError(f"{name}: neither a file nor one of the sets {', '.join(SETS)}")
    records = read_records(path)
    first = records[0][1]
    if isinstance(first, dict) and "turns" in first:
        return _build(path, records, _question, "question_id")
    return _build(path, records, _item, "id")


def write_manifest(path: str | Path, items: Iterable[Item]) -> None:
    """Write a manifest, as a JSON list if the file's name ends in .json, else as JSON lines."""
    path = Path(path)
    folder, rows = path.parent.absolute(), []
    for item in items:
        row = {key: getattr(item, key) for key in KEYS}
        if item.audio is not None:  # relative inside the manifest's folder, so that the folder can move
            audio = item.audio.absolute()
            row["audio"] = str(audio.relative_to(folder) if audio.is_relative_to(folder) else audio)
        kept = {key: value for key, value in row.items() if value not in (None, (), {})}
        rows.append(json.dumps(kept, ensure_ascii=False))
    text = "[\n" + ",\n".join(rows) + "\n]\n" if path.suffix == ".json" else "".join(row + "\n" for row in rows)
    write_file(path, text)


def read_records(path: Path) -> list[Record]:
    """Return the values of a JSON list or of JSON lines with their places in the file.

    Raises:
        DataError: the file cannot be read, is empty, or is not valid JSON.
    """
    text = read_text(path)
    records: list[Record] = []
    errors = ErrorCollector(path)
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not a valid JSON list: {error}") from error
        records = [(f"item {n}", value) for n, value in enumerate(values, 1)]
    else:
        for n, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    records.append((f"item {len(records) + 1} (line {n})", json.loads(line, object_pairs_hook=_unique)))
                except (ValueError, RecursionError) as error:
                    errors.add(f"line {n}", f"not valid JSON: {error}")
    errors.check()
    if not records:
        raise DataError(f"{path} has no items")
    return records


def _unique(pairs: list[Record]) -> JsonObject:
    """Return an object. Raise ValueError for a repeated key, of which json.loads would drop one."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"key {', '.join(twice)} appears twice")
    return dict(pairs)


def _build(path: Path, records: list[Record], make: Callable[[JsonObject, Path], ItemOrErrors], key: str) -> list[Item]:
    """Build items from records with `make`. key: the field of the record's id."""
    errors, items, seen = ErrorCollector(path), [], set()
    for where, value in records:
        made = make(value, path.parent) if isinstance(value, dict) else ["not an object"]
        name = value.get(key) if isinstance(value, dict) else None
        where = where if name is None else f"{where}, id {quote(name)}"
        if name is not None and str(name) in seen:
            errors.add(where, "an earlier item has this id")
        seen.add(str(name))
        if isinstance(made, Item):
            items.append(made)
        else:
            for error in made:
                errors.add(where, error)
    errors.check()
    return items


def _item(value: JsonObject, folder: Path) -> ItemOrErrors:
    errors = list(_find_errors(value, folder))
    if errors:
        return errors
    known = {key: given for key, given in value.items() if given is not None}
    if "audio" in known:
        known["audio"] = folder / known["audio"]
    for key in ("references", "messages"):
        if key in known:
            known[key] = tuple(known[key])
    return Item(**known)


def _find_errors(value: JsonObject, folder: Path) -> Iterator[str]:
    unknown = sorted(set(value) - set(KEYS))
    if unknown:
        yield f"unknown key {', '.join(unknown)}: expected any of {', '.join(KEYS)}"
    if value.get("id") is None:
        yield "id is missing"
    if value.get("lang") is None:
        yield "lang is missing"
    for key in ("id", "lang", "audio", "prompt", "transcript", "task"):
        if value.get(key) is not None and not is_text(value[key]):
            yield f"{key} is a text that is not blank, not {quote(value[key])}"
    yield from _find_field_errors(value)
    sources = [key for key in SOURCES if value.get(key) is not None]
    if len(sources) != 1:
        yield f"exactly one of {', '.join(SOURCES)} is required, found {' and '.join(sources) or 'none'}"
    if sources == ["audio"]:
        yield from _find_recording_errors(value, folder)
    elif is_text(value.get("task")) and value["task"] != "default":
        yield "task is for a recording: put the instruction of a text into its prompt"


def _find_field_errors(value: JsonObject) -> Iterator[str]:
    references, labels, messages = value.get("references"), value.get("labels"), value.get("messages")
    if references is not None and not (isinstance(references, list) and all(map(is_text, references))):
        yield f"references is a list of texts that are not blank, not {quote(references)}"
    if labels is not None and not (isinstance(labels, dict) and all(map(is_text, (*labels, *labels.values())))):
        yield f"labels is an object of texts that are not blank, not {quote(labels)}"
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and is_text(m.get("role")) for m in messages)
    ):
        yield "messages is a list of objects, each with a role"


def _find_recording_errors(value: JsonObject, folder: Path) -> Iterator[str]:
    if is_text(value["audio"]) and not os.path.isfile(folder / value["audio"]):  # also false for invalid names
        yield f"no such file: {folder / value['audio']}"
    if is_text(value.get("lang")) and value["lang"] not in LANGUAGES:
        yield f"the lang of a recording is one of {', '.join(LANGUAGES)}, not {quote(value['lang'])}"
    if is_text(value.get("task")) and value["task"] not in TASKS:
        yield f"task is one of {', '.join(TASKS)}, not {quote(value['task'])}"


def is_text(value: Any) -> bool:
    """Return whether a value is a string that is not blank and can be encoded in UTF-8."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= c <= "\udfff" for c in value)


def _question(value: JsonObject, _folder: Path) -> ItemOrErrors:
    """Build an item from a question of Spec-Bench. Its "reference" differs in meaning by category and is ignored."""
    number, category, turns = value.get("question_id"), value.get("category"), value.get("turns")
    errors = [f"unknown key {key}" for key in sorted(set(value) - {*_QUESTION, "reference"})]
    if isinstance(number, bool) or not (isinstance(number, int) or is_text(number)):
        errors.append(f"question_id is a number or a text, not {quote(number)}")
    if not is_text(category):
        errors.append(f"category is a text, not {quote(category)}")
    if not isinstance(turns, list) or not turns or not all(map(is_text, turns)):
        return [*errors, "turns is a list of texts, at least one"]
    if errors:
        return errors
    chat = ({"role": "user", "content": turns[0]},)
    return Item(str(number), lang="en", messages=chat, labels={"category": str(category)})


def _demo() -> list[Item]:
    """Return the bundled clips with the default task. clips.json has their order, attributes and references."""
    clips = read_json(BUNDLED / "clips.json")
    return [
        Item(
            Path(clip["file"]).stem,
            BUNDLED / clip["file"],
            lang=clip["lang"],
            labels=dict(clip["attributes"]),
            references=tuple(clip["references"]),
            transcript=clip["text"],
        )
        for clip in clips
    ]
