"""Validation of JSON files that other programs may have written. Errors name the file, the line and the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import DataError, quote
from outrider.files import parse_json, read_text
from outrider.numeric import is_integer, is_number

Row = dict[str, Any]
T = TypeVar("T")


# Values -----------------------------------------------------------------------------------------------------


def numbers(values: Row) -> dict[str, float]:
    """Return the finite numbers among the values."""
    return {name: float(value) for name, value in values.items() if is_number(value)}


def number(value: Any, name: str) -> float:
    """Return a finite number."""
    if not is_number(value):
        raise DataError(f"{name}: expected a finite number, not {quote(value)}")
    return float(value)


def seconds(row: Row, name: str) -> float:
    """Return a field that is a number of 0 or more."""
    value = number(required(row, name), name)
    if value < 0:
        raise DataError(f"{name}: expected 0 or more, not {value:g}")
    return value


def share(value: Any, name: str) -> float:
    """Return a number between 0 and 1."""
    share = number(value, name)
    if not 0 <= share <= 1:
        raise DataError(f"{name}: expected a share between 0 and 1, not {share:g}")
    return share


def whole_number(value: Any, name: str) -> int:
    """Return an integer from 0 to 2^63 − 1."""
    if not is_integer(value) or not 0 <= value < 2**63:
        raise DataError(f"{name}: expected whole numbers from 0 to 2^63 − 1, not {quote(value)}")
    return int(value)


def string(value: Any, name: str) -> str:
    """Return a string that can be encoded. Lone surrogates, which JSON allows, become their escape sequences."""
    if not isinstance(value, str):
        raise DataError(f"{name}: expected a text, not {quote(value)}")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def text(row: Row, name: str) -> str:
    """Return a field that is a string, as `string` does."""
    return string(required(row, name), name)


def entries(row: Row, name: str, *, optional: bool = False) -> list[Any]:
    """Return a field that is a list. An optional field may be absent or null, and is then empty."""
    value = row.get(name) if optional else required(row, name)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise DataError(f"{name}: expected a list, not {quote(value)}")
    return value


def mapping(row: Row, name: str) -> Row:
    """Return a field that is an object."""
    value = required(row, name)
    if not isinstance(value, dict):
        raise DataError(f"{name}: expected an object, not {quote(value)}")
    return value


def required(row: Row, name: str) -> Any:
    """Return a field that must be present."""
    if name not in row:
        raise DataError(f"{name!r} is missing")
    return row[name]


# Files ------------------------------------------------------------------------------------------------------


def rows(path: Path, parse: Callable[[Row], T]) -> tuple[T, ...]:
    """Parse each line of a JSON Lines file. Blank lines are skipped, and an empty file raises DataError."""
    lines = read_text(path).split("\n")  # splitlines() would also split at U+2028 inside a string
    found = tuple(_row(line, parse, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise DataError(f"{path} has no lines")
    return found


def _row(line: str, parse: Callable[[Row], T], where: str) -> T:
    value = _parse_object(line, where)
    with error_prefix(where):
        return parse(value)


def read_object(path: Path) -> Row:
    """Read a JSON file that holds an object."""
    return _parse_object(read_text(path), str(path))


def _parse_object(text: str, where: str) -> Row:
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, not {quote(value)}")
    return value


@contextmanager
def error_prefix(where: str) -> Iterator[None]:
    """Put `where` in front of the DataErrors that are raised inside."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
