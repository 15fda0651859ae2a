"""Integers and numbers: their checks, and conversion of those of other libraries, such as NumPy."""

from __future__ import annotations

import operator
import sys
from numbers import Real
from typing import Any


def is_integer(value: Any) -> bool:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite int or float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN, infinities, and integers beyond any float


def as_integer(value: Any) -> Any:
    """Return an integer of any type (with `__index__`) as an int, and any other value, bools included, as it is."""
    if type(value) is int or isinstance(value, bool) or _is_foreign_bool(value):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def as_number(value: Any) -> Any:
    """Return a real number of any type as an int or a float, and any other value as it is."""
    number = as_integer(value)
    is_real = isinstance(number, Real) and not isinstance(number, int)
    return float(number) if is_real else number


def _is_foreign_bool(value: Any) -> bool:
    """Return whether a value is a bool of NumPy or torch. Torch's have `__index__`."""
    return str(getattr(value, "dtype", "")).endswith("bool")
