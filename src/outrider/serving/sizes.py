"""Sizes in bytes, as options write them."""

from __future__ import annotations

import re

from outrider.errors import SettingsError, quote

MIB = 2**20

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"([0-9]{1,15}) ?([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes of "1000", "800kB" (10³) or "512MiB" (2²⁰).

    Raises:
        SettingsError: the text has another form. Units such as "M", for 10⁶ or 2²⁰, are ambiguous and refused.
    """
    found = _BYTES.fullmatch(text.strip())
    if not found or found[2] not in _UNITS:
        raise SettingsError(
            f"{quote(text)} is not a size: write a whole number and a unit, such as 512MiB, 2GiB or 800kB"
        )
    return int(found[1]) * _UNITS[found[2]]
