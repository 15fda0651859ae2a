"""Conversion of published corpora of described speech to manifests. Nothing is downloaded.

SECap (github.com/thuhcsi/SECap, its 600 test clips, in Chinese), by `from_secap`:

    fid2captions.json   {"tx_emotion_00201000015": "…", …}, or lines "id<space or tab>caption"
    text.txt            lines "id<space or tab>transcript"
    wav/ID.wav          a folder of recordings, or wav.scp with lines "id<space or tab>path"

MER2024 and its relatives (MER2023, EMER, OV-MERD, MER2025's MER-Caption+), by `from_mer`: CSV files that share a
column of names, each with some of the columns below, and a folder of recordings NAME.wav:

    names                   name, names
    captions, per language  reason, caption, description; chi_reasons, caption_zh; eng_reasons, caption_en
    transcripts             chinese, english; sentence, transcription, subtitle
    labels                  openset ("[happy, calm]"), discrete, emotion
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from outrider.errors import DataError, SettingsError, quote
from outrider.evals.manifest import ErrorCollector, Item
from outrider.files import parse_json, read_text
from outrider.prompts.captions import LANGUAGES

AUDIO: Final = (".wav", ".flac", ".ogg", ".mp3")
_EMPTY: Final = frozenset({"", "[]", "nan"})  # how these corpora write an empty cell

# field -> its possible columns, of which the first in a file counts. "caption:zh" is a caption in Chinese.
MER_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "name": ("name", "names"),
        "caption": ("reason", "caption", "description"),
        "caption:zh": ("chi_reasons", "caption_zh", "reason_zh"),
        "caption:en": ("eng_reasons", "caption_en", "reason_en"),
        "transcript": ("sentence", "transcription", "subtitle"),
        "transcript:zh": ("chinese",),
        "transcript:en": ("english",),
        "label:openset": ("openset",),
        "label:emotion": ("discrete", "emotion"),
    }
)


@dataclass
class _Rows:
    """Values by id with their lines, and the collected errors."""

    errors: ErrorCollector
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    fields: frozenset[str] = frozenset()

    def put(self, where: str, key: str, value: Any) -> None:
        """Store a value, or collect an error if the key is empty or not unique."""
        if not key:
            self.errors.add(where, "no name")
        elif key in self.values:
            self.errors.add(where, f"{key} is on {self.lines[key]} already")
        else:
            self.values[key], self.lines[key] = value, where


def from_secap(captions: Path, audio: Path, transcripts: Path | None = None, *, lang: str = "zh") -> list[Item]:
    """Return an item for every caption of a corpus in SECap's layout.

    Args:
        captions: a JSON object, or lines "id caption".
        audio: the folder of recordings, or a .scp file with paths relative to its folder or to the parent folder.
        transcripts: in the same form as captions. Those without a caption are ignored.

    Raises:
        DataError: an invalid line, a repeated id, or a missing recording.
    """
    _check_lang(lang)
    found = _table(captions)
    spoken = _table(transcripts).values if transcripts else {}
    listed = _table(audio) if audio.is_file() else None
    items = []
    for key, caption in found.values.items():
        path = _listed(audio, listed.values.get(key)) if listed else _recording(audio, key)
        if path is None:
            found.errors.add(found.lines[key], f"{key}: no recording in {audio}")
        else:
            items.append(Item(key, path, lang=lang, references=(caption,), transcript=spoken.get(key)))
    found.errors.check()
    return items


def from_mer(
    tables: Sequence[Path], audio: Path, *, lang: str, columns: Mapping[str, str | Sequence[str]] | None = None
) -> list[Item]:
    """Return an item for every name with a caption in `lang`, of a corpus in MER's layout.

    Args:
        tables: CSV files that are joined by their column of names, such as track3_train_ovmerd.csv (captions),
            track2_train_ovmerd.csv (labels) and subtitle_chieng.csv (transcripts). The first sets the order.
        audio: the folder of recordings.
        lang: the language of the captions, also of a caption column without a language in its name.
        columns: field -> column or columns that replace those of `MER_COLUMNS`. "label:X" adds a label X. A column
            that is named here must be in one of the tables.

    Raises:
        DataError: a table without a column of names or without known columns, a row of another length than the
            header, a repeated name, no caption in any table, or a missing recording.
        SettingsError: an unknown field in `columns`, or an unknown language.
    """
    _check_lang(lang)
    fields = _columns(columns or {})
    read = [_csv(path, fields) for path in tables]
    if not read:
        raise DataError("no table is given")
    absent = sorted(set(columns or {}).difference(*(rows.fields for rows in read)))
    if absent:
        raise DataError(f"{', '.join(map(str, tables))}: no table has the column given for {', '.join(absent)}")
    items = []
    for key, first in read[0].values.items():
        merged = dict(first)
        for other in read[1:]:
            merged = {**other.values.get(key, {}), **merged}
        caption = merged.get(f"caption:{lang}", merged.get("caption"))
        if caption is None:
            continue
        path = _recording(audio, key)
        if path is None:
            read[0].errors.add(read[0].lines[key], f"{key}: no recording in {audio}")
        else:
            items.append(_mer_item(key, path, lang, caption, merged))
    read[0].errors.check()
    if not items:
        raise DataError(f"{', '.join(map(str, tables))}: no caption in {lang} for any name of the first table")
    return items


def _mer_item(key: str, path: Path, lang: str, caption: str, merged: Mapping[str, str]) -> Item:
    labels = {name.removeprefix("label:"): value for name, value in merged.items() if name.startswith("label:")}
    transcript = merged.get(f"transcript:{lang}", merged.get("transcript"))
    return Item(key, path, lang=lang, references=(caption,), labels=labels, transcript=transcript)


def _check_lang(lang: str) -> None:
    if lang not in LANGUAGES:
        raise SettingsError(f"lang {quote(lang)}: expected one of {', '.join(LANGUAGES)}")


def _columns(given: Mapping[str, str | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    unknown = sorted(name for name in given if name not in MER_COLUMNS and not name.startswith("label:"))
    if unknown:
        raise SettingsError(f"no such field {', '.join(unknown)}: expected {', '.join(MER_COLUMNS)} or label:NAME")
    chosen = {name: (columns,) if isinstance(columns, str) else tuple(columns) for name, columns in given.items()}
    return {**MER_COLUMNS, **chosen}


def _table(path: Path) -> _Rows:
    """Read a JSON object of strings, or lines "id value" that are split at the first white space."""
    rows = _Rows(ErrorCollector(path))
    for where, key, value in _entries(path, read_text(path)):
        if value:
            rows.put(where, key, value)
        else:
            rows.errors.add(where, f"{key} has no value")
    rows.errors.check()
    if not rows.values:
        raise DataError(f"{path} has no lines")
    return rows


def _entries(path: Path, text: str) -> Iterator[tuple[str, str, str]]:
    if path.suffix != ".json":
        for n, line in enumerate(text.split("\n"), 1):
            if line.strip():
                key, *rest = line.strip().split(maxsplit=1)
                yield f"line {n}", key, rest[0] if rest else ""
        return
    value = parse_json(text, str(path))
    if not isinstance(value, dict) or not all(isinstance(caption, str) for caption in value.values()):
        raise DataError(f"{path}: expected an object of texts by id")
    for n, (key, caption) in enumerate(value.items(), 1):
        yield f"entry {n}", key, caption.strip()


def _csv(path: Path, fields: Mapping[str, tuple[str, ...]]) -> _Rows:
    """Read the fields of each row by its name, without empty cells."""
    rows = _Rows(ErrorCollector(path))
    table = _csv_rows(csv.reader(io.StringIO(read_text(path), newline=""), strict=True), rows.errors)
    header = [column.strip() for column in next(table, ("", []))[1]]
    has = {name: next((header.index(c) for c in columns if c in header), None) for name, columns in fields.items()}
    places = {name: place for name, place in has.items() if place is not None}
    rows.fields = frozenset(places)
    if "name" not in places or len(places) < 2:
        known = ", ".join(column for columns in fields.values() for column in columns)
        raise DataError(f"{path} has the columns {', '.join(header)}: it needs a name and one other of {known}")
    for where, row in table:
        if len(row) == len(header):
            cells = {name: row[place].strip() for name, place in places.items()}
            name = cells.pop("name")
            rows.put(where, name, {field: text for field, text in cells.items() if text.lower() not in _EMPTY})
        else:
            rows.errors.add(where, f"{len(row)} cells under {len(header)} columns")
    rows.errors.check()
    return rows


def _csv_rows(reader: Any, errors: ErrorCollector) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows that are not blank with their first lines. A cell may span several lines."""
    while True:
        start = f"line {reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            errors.add(start, f"not valid CSV: {error}")
            return
        if row:
            yield start, row


def _recording(folder: Path, key: str) -> Path | None:
    """Return the recording of an id in a folder. The id may include the file's suffix."""
    names = [key] if key.lower().endswith(AUDIO) else [key + ending for ending in AUDIO]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _listed(scp: Path, path: str | None) -> Path | None:
    """Resolve a path of a .scp file, relative to its folder or to the parent folder."""
    if path is None:
        return None
    return next((base / path for base in (scp.parent, scp.parent.parent) if (base / path).is_file()), None)
