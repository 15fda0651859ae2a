"""Validation of the numbers in settings. Functions take them by keyword, which the SettingsError names."""

from __future__ import annotations

from outrider.errors import SettingsError, quote
from outrider.numeric import is_integer, is_number


def share(**values: float) -> None:
    """Require numbers between 0 and 1."""
    for name, value in values.items():
        _require(is_number(value) and 0 <= value <= 1, name, "between 0 and 1", value)


def positive(**values: float) -> None:
    """Require finite numbers above 0."""
    for name, value in values.items():
        _require(is_number(value) and value > 0, name, "a finite number above 0", value)


def at_least_zero(**values: float) -> None:
    """Require finite numbers of 0 or more."""
    for name, value in values.items():
        _require(is_number(value) and value >= 0, name, "a finite number, 0 or more", value)


def count(least: int, **values: int) -> None:
    """Require integers of `least` or more."""
    for name, value in values.items():
        _require(is_integer(value) and value >= least, name, f"a whole number, {least} or more", value)


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise SettingsError(f"{name} is {expected}, not {quote(value)}")
