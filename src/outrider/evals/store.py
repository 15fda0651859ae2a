"""The folder of a run: written line by line as answers come, so that a run that was killed goes on where it was.

    run.json        the configuration, the versions and the hardware: a run goes on only under the same ones
    results.jsonl   one line per (item, mode): what came of it, and no times
    timings.jsonl   how long it took, for those that gave an answer
    traces.jsonl    one line per item, with --trace (planning/traces.py)
    summary.json    what all of it comes to (evals/scoring.py), made anew at every end of the run
    lock            held by whoever writes

An answer is there when its line in results.jsonl is; its timing is written first. A line that is torn at the end of a
file is dropped when the run goes on. When all is done, the files are put in canonical order.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import DataError, OutriderError, SettingsError
from outrider.files import read_json, write_file

Row = dict[str, Any]
Key = tuple[str, ...]
TRACE = "trace"  # what stands for a mode in the line of a trace that failed
_MISSING = object()
NOT_COMPARED = ("configuration.data.name", "hardware.memory_bytes")


def pair_key(row: Row) -> Key:
    return str(row["id"]), str(row["mode"])


def item_key(row: Row) -> Key:
    return (str(row["id"]),)


class JsonLinesFile:
    """A file of JSON lines, one per key, to which lines are added for good.

    Raises:
        DataError: a line before the last one is no such line, or repeats a key.
    """

    def __init__(self, path: Path, key: Callable[[Row], Key]) -> None:
        self.path, self._key = path, key
        self.rows: dict[Key, Row] = {}
        self._size = 0
        if path.exists():
            self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        self._size = data.rfind(b"\n") + 1
        if self._size < len(data):
            os.truncate(self.path, self._size)  # the torn line of a writer that was killed
        for n, line in enumerate(data[: self._size].split(b"\n")[:-1], 1):
            key, row = self._parse(line, n)
            if key in self.rows:
                raise DataError(f"{self.path}, line {n}: {' '.join(key)} is there twice")
            self.rows[key] = row

    def _parse(self, line: bytes, n: int) -> tuple[Key, Row]:
        try:
            row = json.loads(line)
            return self._key(row), row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{self.path}, line {n}: no line of a run ({type(error).__name__}: {error})") from error

    def add(self, row: Row) -> None:
        """Write a line, for good."""
        line = _encode(row) + b"\n"
        with _writing(self.path), self.path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                raise OSError("the file system took only part of a line")
            os.fsync(file.fileno())
        self.rows[self._key(row)] = row

    def retain(self, keys: Iterable[Key]) -> None:
        """Keep only the lines of these keys, in this order; all of the file or nothing of it changes."""
        rows = {key: self.rows[key] for key in keys if key in self.rows}
        if list(rows) != list(self.rows):
            write_file(self.path, b"".join(_encode(row) + b"\n" for row in rows.values()))
        self.rows = rows


class Store:
    """A run's folder, locked for as long as it is open.

    Raises:
        SettingsError: the folder cannot be used, belongs to a run with another configuration (the first field that
            differs is named), or another process writes to it.
        DataError: what is in it is not what a run leaves.
    """

    def __init__(self, folder: Path, about: Row) -> None:
        self.folder = folder
        self._lock = _lock(folder)
        try:
            _check_run_file(folder, about)
            self.results = JsonLinesFile(folder / "results.jsonl", pair_key)
            self.timings = JsonLinesFile(folder / "timings.jsonl", pair_key)
            self.traces = JsonLinesFile(folder / "traces.jsonl", item_key)
            self._drop_incomplete()
        except BaseException:
            self.close()
            raise

    def _drop_incomplete(self) -> None:
        """Forget timings whose answer was not written any more, and answers whose timing is not there."""
        complete = {key for key, row in self.results.rows.items() if "token_ids" not in row or key in self.timings.rows}
        self.results.retain([key for key in self.results.rows if key in complete])
        self.timings.retain([key for key in self.timings.rows if key in complete])

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    def is_done(self, item: str, mode: str) -> bool:
        return (item, mode) in self.results.rows or (mode == TRACE and (item,) in self.traces.rows)

    def add(self, result: Row, timing: Row | None = None) -> None:
        """An answer with its timing; a failure, or an item that a mode does not take, without one."""
        if timing is not None:
            self.timings.add(timing)
        self.results.add(result)

    def add_trace(self, trace: Row) -> None:
        self.traces.add(trace)

    def forget_failures(self) -> None:
        """So that they are tried again."""
        self.results.retain([key for key, row in self.results.rows.items() if "error" not in row])

    def finish(self, items: Sequence[str], modes: Sequence[str]) -> None:
        """Put the lines in the order of the items and, for each, of the modes."""
        pairs = [(item, mode) for item in items for mode in (*modes, TRACE)]
        self.results.retain(pairs)
        self.timings.retain(pairs)
        self.traces.retain([(item,) for item in items])

    def summarise(self, figures: Row) -> None:
        """Write summary.json."""
        write_file(self.folder / "summary.json", _document(figures))


def difference(old: Row, new: Row) -> tuple[str, Any, Any] | None:
    """The first field that differs, by its path, with both values; None where nothing does."""
    before, now = _flatten(old), _flatten(new)
    for name in [*now, *before]:
        if name not in NOT_COMPARED and before.get(name, _MISSING) != now.get(name, _MISSING):
            return name, before.get(name), now.get(name)
    return None


def _check_run_file(folder: Path, about: Row) -> None:
    """Write run.json, or compare with the one that is there."""
    path = folder / "run.json"
    if not path.exists():
        if any((folder / name).exists() for name in ("results.jsonl", "timings.jsonl", "traces.jsonl")):
            raise DataError(f"{folder} holds results but no run.json that says what they are of")
        write_file(path, _document(about))
        return
    recorded = read_json(path)
    found = difference(recorded, json.loads(json.dumps(about)))
    if found is not None:
        name, old, new = found
        raise SettingsError(
            f"{folder} holds another run: {name} is {old!r} there and {new!r} now; use another folder, or what was used"
        )


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        key: leaf for name, part in value.items() for key, leaf in _flatten(part, f"{path}.{name}".strip(".")).items()
    }


def _lock(folder: Path) -> int:
    """An open lock file; the system gives it back when this process ends, however it does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise SettingsError(f"{folder} is being written by process {owner or '(unknown)'}") from None
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except OSError as error:
        os.close(lock)
        raise OutriderError(f"{folder / 'lock'} cannot be written: {error.strerror}") from error
    return lock


def _encode(row: Row) -> bytes:
    """A line; halves of surrogate pairs, which are no UTF-8, stay in it as JSON's escapes."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _document(row: Row) -> bytes:
    """A whole file, for people too."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, indent=2).encode("utf-8", "backslashreplace") + b"\n"


class _writing:
    """What the file system refuses, as an error that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, OSError):
            raise OutriderError(f"{self._path} cannot be written: {error.strerror or error}") from error
