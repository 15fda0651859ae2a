"""Patterns that make llguidance's grammars of formats as strict as the formats' definitions.

llguidance intersects them with its own grammar. They also exclude two valid forms: leap seconds, because only some
minutes have one, and mail addresses with an IP address in brackets.
"""

from __future__ import annotations

from typing import Any, Final

_LEAP_YEARS: Final = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    r"([0-9]{4}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|[0-9]{4}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|[0-9]{{4}}-02-(0[1-9]|1[0-9]|2[0-8])|{_LEAP_YEARS}-02-29)"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Labels of up to 63 characters. With "--" as third and fourth characters they would be internationalised names
# (RFC 5891, 4.2.3.1).
_LABEL: Final = (
    "[a-zA-Z0-9](([a-zA-Z0-9-]{0,2}|[a-zA-Z0-9-]([a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58})[a-zA-Z0-9])?"
)
_HOST: Final = rf"{_LABEL}(\.{_LABEL})*"
FORMAT_PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "date": (rf"^{_DATE}$",),
    "time": (rf"^{_TIME}$",),
    "date-time": (rf"^{_DATE}[tT]{_TIME}$",),
    "hostname": (rf"^{_HOST}$", "^.{1,253}$"),
    "email": (rf"^[^@]+@{_HOST}$", "^[^@]{1,64}@[^@]{1,253}$"),  # RFC 5321, 4.5.3.1
}


def add_patterns(part: dict[str, Any]) -> None:
    """Add the patterns of a part's `format`, in place."""
    name, others = part.get("format"), part.get("allOf", [])
    if isinstance(name, str) and name in FORMAT_PATTERNS and isinstance(others, list):
        part["allOf"] = [*others, *({"pattern": pattern} for pattern in FORMAT_PATTERNS[name])]
