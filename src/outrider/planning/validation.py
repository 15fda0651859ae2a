"""What the cost model's numbers must be. Each takes them by name, for the error that names them."""

from __future__ import annotations

from outrider.config import is_integer, is_number
from outrider.errors import SettingsError


def _require(good: bool, name: str, wanted: str, value: object) -> None:
    if not good:
        raise SettingsError(f"{name} is {wanted}, not {value!r}")


def share(**values: float) -> None:
    for name, value in values.items():
        _require(is_number(value) and 0 <= value <= 1, name, "between 0 and 1", value)


def positive(**values: float) -> None:
    for name, value in values.items():
        _require(is_number(value) and value > 0, name, "a finite number above 0", value)


def at_least_zero(**values: float) -> None:
    for name, value in values.items():
        _require(is_number(value) and value >= 0, name, "a finite number, 0 or more", value)


def count(least: int, **values: int) -> None:
    for name, value in values.items():
        _require(is_integer(value) and value >= least, name, f"a whole number, {least} or more", value)
