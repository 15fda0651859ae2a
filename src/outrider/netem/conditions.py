"""Network conditions, and their text form `rtt=50ms,bw=2Mbit`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from outrider.errors import SettingsError, quote
from outrider.numeric import as_number

MAX_SECONDS = 86_400.0  # s
MIN_RATE, MAX_RATE = 1.0, 1e12  # bit/s
NONE = "none"
TIME_UNITS = {"us": -6, "ms": -3, "s": 0}  # powers of ten
RATE_UNITS = {"bit": 0, "kbit": 3, "Mbit": 6, "Gbit": 9}
KEYS = ("rtt", "jitter", "bw", "up", "down", "stall", "cut")
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)\s*([^\d\s.].*)", re.ASCII)


@dataclass(frozen=True)
class Conditions:
    """Conditions of a link. The default delays and limits nothing.

    rtt: round-trip time in seconds, half of it each way. jitter: largest deviation of a chunk's one-way delay from
    rtt/2, in seconds, at most rtt/2. up (client to target), down: bit/s, None is unlimited.
    stall_every, stall_for: after every stall_every seconds nothing moves for stall_for seconds. cut_after: age in
    seconds at which every connection is cut.

    Raises:
        SettingsError: a value out of range, or one that contradicts another.
    """

    rtt: float = 0.0
    jitter: float = 0.0
    up: float | None = None
    down: float | None = None
    stall_every: float | None = None
    stall_for: float | None = None
    cut_after: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name in ("rtt", "jitter"):
                object.__setattr__(self, field.name, _validate(field.name, value))
        _require(
            self.jitter <= self.rtt / 2, f"jitter is at most half of rtt ({self.rtt / 2:g} s), not {self.jitter:g} s"
        )
        every, length = self.stall_every, self.stall_for
        _require((every is None) == (length is None), "stall_every and stall_for go together: stall=EVERY:FOR")
        if every is not None and length is not None:
            _require(length < every, f"a stall is shorter than the time between stalls, {every:g} s, not {length:g} s")

    def __str__(self) -> str:
        """Return text that `parse_conditions` reads back to the same value, such as `rtt=50ms,bw=2Mbit`, or `none`."""
        return ",".join(self._items()) or NONE

    def _items(self) -> list[str]:
        words = [f"{name}={_format_time(getattr(self, name))}" for name in ("rtt", "jitter") if getattr(self, name)]
        if self.up is not None and self.up == self.down:
            words.append(f"bw={_format_rate(self.up)}")
        else:
            rates = {"up": self.up, "down": self.down}
            words += [f"{name}={_format_rate(value)}" for name, value in rates.items() if value is not None]
        if self.stall_every is not None and self.stall_for is not None:
            words.append(f"stall={_format_time(self.stall_every)}:{_format_time(self.stall_for)}")
        return words if self.cut_after is None else [*words, f"cut={_format_time(self.cut_after)}"]


def parse_conditions(text: str) -> Conditions:
    """Parse `rtt=50ms,jitter=5ms,bw=2Mbit,stall=5s:800ms,cut=10s`, or `none` for no conditions.

    bw sets both up and down. Times are in us, ms or s, bandwidths in bit, kbit, Mbit or Gbit per second, in any case.

    Raises:
        SettingsError: an unknown or repeated key, a missing unit, or a value out of range.
    """
    if not isinstance(text, str):
        raise SettingsError(f"net is a text such as rtt=50ms,bw=2Mbit, not {quote(text)}")
    if text.strip().lower() == NONE:
        return Conditions()
    values: dict[str, float] = {}
    for item in text.split(","):
        for name, value in _parse_item(item.strip()).items():
            _require(
                name not in values, f"network conditions {quote(text)}: {quote(item.strip())} sets {name} a second time"
            )
            values[name] = value
    return Conditions(**values)


def _parse_item(item: str) -> dict[str, float]:
    key, equals, value = (part.strip() for part in item.partition("="))
    _require(bool(equals), f"network condition {quote(item)}: write KEY=VALUE, such as rtt=50ms, or {NONE} alone")
    match key.lower():
        case "rtt" | "jitter" as name:
            return {name: _parse_quantity(key, value, TIME_UNITS, "50ms")}
        case "up" | "down" as name:
            return {name: _parse_quantity(key, value, RATE_UNITS, "2Mbit")}
        case "bw":
            return dict.fromkeys(("up", "down"), _parse_quantity(key, value, RATE_UNITS, "2Mbit"))
        case "cut":
            return {"cut_after": _parse_quantity(key, value, TIME_UNITS, "10s")}
        case "stall":
            return _parse_stall(value)
    raise SettingsError(f"unknown network condition {quote(key)}: expected any of {', '.join(KEYS)}")


def _parse_stall(value: str) -> dict[str, float]:
    parts = value.split(":")
    _require(len(parts) == 2, f"stall={value}: write stall=EVERY:FOR, such as stall=5s:800ms")
    every, length = (_parse_quantity("stall", part.strip(), TIME_UNITS, "5s:800ms") for part in parts)
    return {"stall_every": every, "stall_for": length}


def _parse_quantity(key: str, text: str, units: dict[str, int], example: str) -> float:
    """Return a number with its unit as the nearest float, in seconds or bit/s."""
    found = NUMBER.fullmatch(text)
    power = {unit.lower(): power for unit, power in units.items()}.get(found[2].lower()) if found else None
    if found is None or power is None:
        choices = ", ".join(units)
        raise SettingsError(f"{key}={text}: write a number of 0 or more and a unit ({choices}), as in {key}={example}")
    return float(f"{found[1]}e{power}")


def _format_time(seconds: float) -> str:
    return _format_quantity(seconds, TIME_UNITS)


def _format_rate(bits: float) -> str:
    return _format_quantity(bits, RATE_UNITS)


def _format_quantity(value: float, units: dict[str, int]) -> str:
    """Return `value` in the largest unit that makes it 1 or more, with all digits that a round trip needs."""
    fitting = [unit for unit, power in units.items() if value >= 10.0**power]
    unit = fitting[-1] if fitting else next(iter(units))
    number = format(Decimal(repr(value)).scaleb(-units[unit]), "f")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _validate(name: str, value: Any) -> float:
    """Return `value` as a float. Raise SettingsError if it is outside the range of the field `name`."""
    value = as_number(value)
    _require(not isinstance(value, bool) and isinstance(value, (int, float)), f"{name} is a number, not {quote(value)}")
    if name in ("up", "down"):
        _require(MIN_RATE <= value <= MAX_RATE, f"{name} is between 1 bit/s and 1000 Gbit/s, not {quote(value)} bit/s")
    else:
        _require(
            0 <= value <= MAX_SECONDS, f"{name} is between 0 s and a day ({MAX_SECONDS:g} s), not {quote(value)} s"
        )
        _require(value > 0 or name in ("rtt", "jitter"), f"{name} is more than 0 s")
    return float(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
