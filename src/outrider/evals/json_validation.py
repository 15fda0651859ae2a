"""JSON that others wrote, read with errors that say what is wrong and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import DataError
from outrider.files import read_text

Row = dict[str, Any]
T = TypeVar("T")


# Values -----------------------------------------------------------------------------------------------------


def numbers(values: Row) -> dict[str, float]:
    """The finite numbers among the values."""
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not _is_number(value):
        raise DataError(f"{name}: expected a finite number, not {shorten(value)}")
    return float(value)


def seconds(row: Row, name: str) -> float:
    value = number(_required(row, name), name)
    if value < 0:
        raise DataError(f"{name}: expected 0 or more, not {value:g}")
    return value


def share(value: Any, name: str) -> float:
    share = number(value, name)
    if not 0 <= share <= 1:
        raise DataError(f"{name}: expected a share between 0 and 1, not {share:g}")
    return share


def whole_number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"{name}: expected whole numbers, 0 or more, not {shorten(value)}")
    return value


def string(value: Any, name: str) -> str:
    """A text that can be written: lone surrogates, which JSON can name, are shown as what they are."""
    if not isinstance(value, str):
        raise DataError(f"{name}: expected a text, not {shorten(value)}")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def text(row: Row, name: str) -> str:
    return string(_required(row, name), name)


def entries(row: Row, name: str, *, optional: bool = False) -> list[Any]:
    value = row.get(name) if optional else _required(row, name)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise DataError(f"{name}: expected a list, not {shorten(value)}")
    return value


def mapping(row: Row, name: str) -> Row:
    value = _required(row, name)
    if not isinstance(value, dict):
        raise DataError(f"{name}: expected an object, not {shorten(value)}")
    return value


def _required(row: Row, name: str) -> Any:
    if name not in row:
        raise DataError(f"no {name!r}")
    return row[name]


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


# Files ------------------------------------------------------------------------------------------------------


def rows(path: Path, parse: Callable[[Row], T]) -> tuple[T, ...]:
    lines = read_text(path).split("\n")  # and not splitlines, which cuts at U+2028 inside a text
    rows = tuple(_row(line, parse, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip())
    if not rows:
        raise DataError(f"{path} holds no line")
    return rows


def _row(line: str, parse: Callable[[Row], T], where: str) -> T:
    with error_prefix(where):
        value = _json(line)
        return parse(value)


def read_object(path: Path) -> Row:
    text = read_text(path)
    with error_prefix(str(path)):
        return _json(text)


def _json(text: str) -> Row:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise DataError("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"expected an object, not {shorten(value)}")
    return value


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """Errors raised inside say where."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
