"""Loop detection: the tail of the committed output is periodic.

By default a loop of period p needs a periodic tail of two whole periods and four more tokens, and at least eight
tokens: 8 for ABAB, 12 for a 4-token phrase, 68 for a 32-token one. A loop does not end generation. The next block is
verified (without a verifier, one token is drawn at random), and detection starts again behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

from outrider.errors import SettingsError, quote

MAX_PERIOD = 32
MIN_TAIL_TOKENS = 8
EXTRA_TOKENS = 4
MAX_TAIL = 1024  # tokens; a longer tail costs time at every token


@dataclass(frozen=True)
class LoopRule:
    """The definition of a loop, as text `period=32,tail=8,extra=4`.

    period: the longest period. tail: the least length of the periodic tail in tokens. extra: tokens beyond two whole
    periods. `period=1,tail=3,extra=0` is a loop of one token three times in a row.

    Raises:
        SettingsError: a value is out of range.
    """

    period: int = MAX_PERIOD
    tail: int = MIN_TAIL_TOKENS
    extra: int = EXTRA_TOKENS

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("tail", 2), ("extra", 0)):
            if not least <= getattr(self, name) <= MAX_TAIL:
                raise SettingsError(
                    f"loop_rule: {name} is between {least} and {MAX_TAIL}, not {quote(getattr(self, name))}"
                )

    def __str__(self) -> str:
        return ",".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))

    @property
    def window(self) -> int:
        """The longest tail that detection needs, in tokens."""
        return self.tail_needed(self.period)

    def tail_needed(self, period: int) -> int:
        """Return the length of periodic tail that makes a loop of this period, in tokens."""
        return max(self.tail, 2 * period + self.extra)

    def find_period(self, tokens: Seq[int]) -> int | None:
        """Return the smallest period with which the tail of `tokens` loops, or None."""
        tail = list(tokens[-self.window :])
        if tail and tail[-1] not in tail[-1 - self.period : -1]:
            return None  # the common case: a token new to the tail ends every loop
        for period in range(1, self.period + 1):
            need = self.tail_needed(period)
            if len(tail) < need:
                return None
            if tail[-1] == tail[-1 - period] and tail[-need + period :] == tail[-need:-period]:
                return period
        return None


DEFAULT_RULE = LoopRule()
DEFAULT_LOOP_RULE = str(DEFAULT_RULE)


def parse_loop_rule(text: str) -> LoopRule:
    """Parse `period=32,tail=8,extra=4`. Missing parts get their defaults.

    Raises:
        SettingsError: the form is another one, a name occurs twice, or a value is out of range.
    """
    if not isinstance(text, str):
        raise SettingsError(f"loop_rule is a text such as {DEFAULT_LOOP_RULE}, not {quote(text)}")
    names = [each.name for each in fields(LoopRule)]
    found = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,4000})\s*", part, re.ASCII) for part in text.split(",")]
    values = [(part[1], int(part[2])) for part in found if part is not None]
    for number, (name, _) in enumerate(values):
        if name in dict(values[:number]):
            raise SettingsError(f"loop_rule {quote(text)}: {name} is given twice")
    if len(values) < len(found) or not set(dict(values)) <= set(names):
        raise SettingsError(
            f"loop_rule {quote(text)}: expected some of period=N, tail=N and extra=N, with commas between"
        )
    return LoopRule(**dict(values))
