"""What a network does to the bytes: frozen, read from and written as `rtt=50ms,bw=2Mbit`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from outrider.errors import SettingsError

LONGEST = 86_400.0  # s
SLOWEST, FASTEST = 1.0, 1e12  # bit/s
NONE = "none"
TIME_UNITS = {"us": -6, "ms": -3, "s": 0}  # powers of ten
RATE_UNITS = {"bit": 0, "kbit": 3, "Mbit": 6, "Gbit": 9}
KEYS = ("rtt", "jitter", "bw", "up", "down", "stall", "cut")
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)\s*([^\d\s.].*)", re.ASCII)


@dataclass(frozen=True)
class Conditions:
    """What a link does to all that passes it; the default does nothing.

    rtt: round-trip time in seconds, half of it each way. jitter: each chunk's one-way delay differs from rtt/2 by up
    to that many seconds, either way; so at most rtt/2. up (client to target), down: bit/s, None is unlimited.
    stall_every, stall_for: after every stall_every seconds nothing moves for stall_for seconds. cut_after: every
    connection is cut that many seconds after it was made.

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
                object.__setattr__(self, field.name, _checked(field.name, value))
        _need(self.jitter <= self.rtt / 2, f"jitter is at most half of rtt ({self.rtt / 2:g} s), not {self.jitter:g} s")
        every, length = self.stall_every, self.stall_for
        _need((every is None) == (length is None), "stall_every and stall_for go together: stall=EVERY:FOR")
        if every is not None and length is not None:
            _need(length < every, f"a stall is shorter than the time between stalls, {every:g} s, not {length:g} s")

    def __str__(self) -> str:
        """Text that `conditions` reads back to the same value, such as `rtt=50ms,bw=2Mbit`, or `none`."""
        return ",".join(self._words()) or NONE

    def _words(self) -> list[str]:
        words = [f"{name}={_time(getattr(self, name))}" for name in ("rtt", "jitter") if getattr(self, name)]
        if self.up is not None and self.up == self.down:
            words.append(f"bw={_rate(self.up)}")
        else:
            rates = {"up": self.up, "down": self.down}
            words += [f"{name}={_rate(value)}" for name, value in rates.items() if value is not None]
        if self.stall_every is not None and self.stall_for is not None:
            words.append(f"stall={_time(self.stall_every)}:{_time(self.stall_for)}")
        return words if self.cut_after is None else [*words, f"cut={_time(self.cut_after)}"]


def conditions(text: str) -> Conditions:
    """Read `rtt=50ms,jitter=5ms,bw=2Mbit,stall=5s:800ms,cut=10s`; bw is up and down; `none` is no condition.

    Times are in us, ms or s, bandwidths in bit, kbit, Mbit or Gbit per second, in any case.

    Raises:
        SettingsError: an unknown or repeated key, a missing unit, a value out of range; says what would be right.
    """
    if text.strip().lower() == NONE:
        return Conditions()
    values: dict[str, float] = {}
    for word in text.split(","):
        for name, value in _read_word(word.strip()).items():
            _need(name not in values, f"{word.strip()!r} sets again what stood before it in {text!r}")
            values[name] = value
    return Conditions(**values)


def _read_word(word: str) -> dict[str, float]:
    key, equals, value = (part.strip() for part in word.partition("="))
    _need(bool(equals), f"network condition {word!r}: write KEY=VALUE, such as rtt=50ms, or {NONE} alone")
    match key.lower():
        case "rtt" | "jitter" as name:
            return {name: _read(key, value, TIME_UNITS, "50ms")}
        case "up" | "down" as name:
            return {name: _read(key, value, RATE_UNITS, "2Mbit")}
        case "bw":
            return dict.fromkeys(("up", "down"), _read(key, value, RATE_UNITS, "2Mbit"))
        case "cut":
            return {"cut_after": _read(key, value, TIME_UNITS, "10s")}
        case "stall":
            return _read_stall(value)
    raise SettingsError(f"unknown network condition {key!r}: expected any of {', '.join(KEYS)}")


def _read_stall(value: str) -> dict[str, float]:
    parts = value.split(":")
    _need(len(parts) == 2, f"stall={value}: write stall=EVERY:FOR, such as stall=5s:800ms")
    every, length = (_read("stall", part.strip(), TIME_UNITS, "5s:800ms") for part in parts)
    return {"stall_every": every, "stall_for": length}


def _read(key: str, text: str, units: dict[str, int], example: str) -> float:
    """A number with its unit, in seconds or bit/s: the float nearest to what is written."""
    found = NUMBER.fullmatch(text)
    power = {unit.lower(): power for unit, power in units.items()}.get(found[2].lower()) if found else None
    if found is None or power is None:
        choices = ", ".join(units)
        raise SettingsError(f"{key}={text}: write a number of 0 or more and a unit ({choices}), as in {key}={example}")
    return float(f"{found[1]}e{power}")


def _time(seconds: float) -> str:
    return _written(seconds, TIME_UNITS)


def _rate(bits: float) -> str:
    return _written(bits, RATE_UNITS)


def _written(value: float, units: dict[str, int]) -> str:
    """`value` in the largest unit that makes it 1 or more, with every digit it takes to read it again."""
    fitting = [unit for unit, power in units.items() if value >= 10.0**power]
    unit = fitting[-1] if fitting else next(iter(units))
    number = format(Decimal(repr(value)).scaleb(-units[unit]), "f")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


def _checked(name: str, value: Any) -> float:
    """`value` as a float in the range of the field `name`."""
    _need(not isinstance(value, bool) and isinstance(value, (int, float)), f"{name} is a number, not {value!r}")
    if name in ("up", "down"):
        _need(SLOWEST <= value <= FASTEST, f"{name} is between 1 bit/s and 1000 Gbit/s, not {value} bit/s")
    else:
        _need(0 <= value <= LONGEST, f"{name} is between 0 s and a day ({LONGEST:g} s), not {value} s")
        _need(value > 0 or name in ("rtt", "jitter"), f"{name} is more than 0 s")
    return float(value)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
