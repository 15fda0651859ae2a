"""The folder of a run. Each result is written at once, so that a killed run can resume.

    run.json        configuration, versions and hardware. A run resumes only if they are the same.
    results.jsonl   one line per (item, mode): the result, without times
    timings.jsonl   the times of answered items
    traces.jsonl    one line per item, with --trace (planning/traces.py)
    summary.json    the metrics (evals/scoring.py), written at every end of the run
    lock            locked by the writing process

An answer is complete when its line in results.jsonl is written. Its timing is written before. On resume, an incomplete
last line of a file is dropped. At the end of a run, the files are sorted in canonical order.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import DataError, OutriderError, SettingsError, quote
from outrider.files import read_json, write_file

Row = dict[str, Any]
Key = tuple[str, ...]
TRACE = "trace"  # the mode in the line of a failed trace
_MISSING = object()
NOT_COMPARED = ("configuration.data.name", "hardware.memory_bytes")


def pair_key(row: Row) -> Key:
    """Return (id, mode) of a line."""
    return str(row["id"]), str(row["mode"])


def item_key(row: Row) -> Key:
    """Return (id,) of a line."""
    return (str(row["id"]),)


class JsonLinesFile:
    """A file of JSON lines with unique keys, to which lines are appended durably.

    Raises:
        DataError: a line before the last is invalid or repeats a key.
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
            os.truncate(self.path, self._size)  # the incomplete line of a killed writer
        for n, line in enumerate(data[: self._size].split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                key = self._key(row)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                fault = f"not a line of a run ({type(error).__name__}: {error})"
                raise DataError(f"{self.path}, line {n}: {fault}") from error
            if key in self.rows:
                raise DataError(f"{self.path}, line {n}: {' '.join(key)} appears twice")
            self.rows[key] = row

    def add(self, row: Row) -> None:
        """Append a line and sync it to disk."""
        line = _encode(row) + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError("the file system wrote only part of a line")
                os.fsync(file.fileno())
        except OSError as error:
            raise OutriderError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self.rows[self._key(row)] = row

    def retain(self, keys: Iterable[Key]) -> None:
        """Keep only the lines of these keys, in this order. The file changes atomically."""
        rows = {key: self.rows[key] for key in keys if key in self.rows}
        if list(rows) != list(self.rows):
            write_file(self.path, b"".join(_encode(row) + b"\n" for row in rows.values()))
        self.rows = rows


class Store:
    """A run's folder, locked while it is open.

    Raises:
        SettingsError: the folder cannot be used, belongs to a run with another configuration (the message names the
            first different field), or another process writes to it.
        DataError: the folder contains invalid files.
    """

    def __init__(self, folder: Path, about: Row) -> None:
        self.folder = folder
        self._lock = _lock(folder)
        try:
            _check_run_file(folder, about)
            self.results = JsonLinesFile(folder / "results.jsonl", pair_key)
            self.timings = JsonLinesFile(folder / "timings.jsonl", pair_key)
            self.traces = JsonLinesFile(folder / "traces.jsonl", item_key)
            # Drop timings without an answer, and answers without a timing.
            results, timings = self.results.rows, self.timings.rows
            complete = [key for key, row in results.items() if "token_ids" not in row or key in timings]
            self.results.retain(complete)
            self.timings.retain([key for key in timings if key in self.results.rows])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def is_done(self, item: str, mode: str) -> bool:
        """Return whether an item has a result in a mode."""
        return (item, mode) in self.results.rows or (mode == TRACE and (item,) in self.traces.rows)

    def add(self, result: Row, timing: Row | None = None) -> None:
        """Store an answer with its timing, or a failed or skipped item without one."""
        if timing is not None:
            self.timings.add(timing)
        self.results.add(result)

    def forget_failures(self) -> None:
        """Drop failures, so that the run retries them."""
        self.results.retain([key for key, row in self.results.rows.items() if "error" not in row])

    def finish(self, items: Sequence[str], modes: Sequence[str]) -> None:
        """Sort the lines by item and mode."""
        pairs = [(item, mode) for item in items for mode in (*modes, TRACE)]
        self.results.retain(pairs)
        self.timings.retain(pairs)
        self.traces.retain([(item,) for item in items])

    def summarise(self, figures: Row) -> None:
        """Write summary.json."""
        write_file(self.folder / "summary.json", _encode(figures, indent=2) + b"\n")


def difference(old: Row, new: Row) -> tuple[str, object, object] | None:
    """Return the path of the first different field with both values, or None."""
    before, now = _flatten(old), _flatten(new)
    for name in [*now, *before]:
        if name not in NOT_COMPARED and before.get(name, _MISSING) != now.get(name, _MISSING):
            return name, before.get(name), now.get(name)
    return None


def _check_run_file(folder: Path, about: Row) -> None:
    """Write run.json, or compare with the existing one."""
    path = folder / "run.json"
    if not path.exists():
        if any((folder / name).exists() for name in ("results.jsonl", "timings.jsonl", "traces.jsonl")):
            raise DataError(f"{folder} has results but no run.json, so their configuration is unknown")
        write_file(path, _encode(about, indent=2) + b"\n")
        return
    recorded = read_json(path)
    found = difference(recorded, json.loads(json.dumps(about)))
    if found is not None:
        name, old, new = found
        raise SettingsError(
            f"{folder} holds another run: {name} is {quote(old)} there and {quote(new)} now; change the folder or the "
            "options"
        )


def _flatten(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    parts = (_flatten(part, f"{path}.{name}".strip(".")) for name, part in value.items())
    return {key: leaf for part in parts for key, leaf in part.items()}


def _lock(folder: Path) -> int:
    """Return a locked file. The system releases the lock when this process ends."""
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


def _encode(row: Row, indent: int | None = None) -> bytes:
    """Encode an object. Lone surrogates, which UTF-8 cannot encode, stay JSON escapes."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, indent=indent).encode("utf-8", "backslashreplace")
