"""Switch between speculative and plain decoding: draft only while speculation is faster than the target alone.

Plain decoding takes t_p seconds per token. A speculative round that commits E tokens in t seconds gains E·t_p − t
seconds. The switch keeps a budget of seconds that exploration may lose:

    a plain token          adds EXPLORATION·t_p
    a speculative round    adds its gain, which may be negative, up to a budget of MAX_CREDIT·t_p

While speculation is estimated to be faster (λ·t_p ≥ 1), it continues as long as the budget is above −MAX_CREDIT·t_p.
Otherwise, a round is drafted only if the budget covers its price: the expected loss of the round, and the time in which
the drafter reads the tokens that were decoded without it. The loss against plain decoding is thus at most EXPLORATION
of the time plus a constant, whatever the estimates are. A round that gains pays for the next ones, so that speculation
returns within a few rounds when the text becomes predictable.

While speculation is faster, a few plain tokens are decoded now and then to keep t_p current.

This module reads no clock. Its callers pass the seconds.
"""

from __future__ import annotations

from collections import deque

EXPLORATION = 0.02  # share of the time of plain decoding that speculative rounds may lose
SAMPLING = 0.01  # share of the time of speculation that plain tokens may lose
PLAIN_SAMPLES = 2  # timed plain tokens in a row. The one before them is not timed: it may wait for a round trip
MEMORY = 8  # time constant of t_p, in tokens, and of the times and lengths of generations, in generations
PRIOR_TOKENS = 128.0  # length of a generation before the first one
MAX_CREDIT = 8.0  # plain tokens: the largest budget from gains, and the largest debt while speculation seems to pay
CLEAR_GAIN = 3.0  # throughput of speculation, in tokens of plain decoding, at which the first samples can wait
MIN_SAMPLE_LOSS = 0.25  # plain tokens: lower bound of the loss of a plain sample, so that samples stay rare
MEDIAN_WINDOW = 9  # values in the running median
OUTLIER_FACTOR = 3.0  # longer times, in medians, are clipped: they are stalls


class MedianClip:
    """Clips values at `OUTLIER_FACTOR` times their running median."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEDIAN_WINDOW)

    def __call__(self, value: float) -> float:
        self._recent.append(value)
        return min(value, OUTLIER_FACTOR * sorted(self._recent)[len(self._recent) // 2])


class SpeculationSwitch:
    """The decision whether the next round is speculative.

    plain_seconds: t_p, 0 until it has been measured. budget: seconds. pays: the estimate whether speculation is faster.
    """

    def __init__(self) -> None:
        self.plain_seconds = self.budget = 0.0
        self.pays = True
        self._clip, self._samples, self._samples_due = MedianClip(), 0, 0
        self._unsampled_seconds = 0.0  # seconds of speculation since the last timed plain token
        self._token_gain = self._round_loss = 0.0  # expected, in seconds
        self._read_tokens = self._read_seconds = 0.0
        self._generations, self._generated = 1.0, PRIOR_TOKENS

    @property
    def needs_sample(self) -> bool:
        """True if the time of a plain token must be measured next."""
        return self._samples_due > 0

    def should_speculate(self, unread: int) -> bool:
        """Return whether to draft. unread: tokens that a draft model must read before, without the last one."""
        if self.needs_sample:
            return False
        if not self.plain_seconds:
            return True
        reading = unread * self._read_seconds / self._read_tokens if self._read_tokens else 0.0
        if self.pays:
            gain = self._token_gain * self._generated / self._generations
            credit = gain if self.budget >= 0.0 else self.budget + MAX_CREDIT * self.plain_seconds
            return reading <= credit
        return self.budget >= 2.0 * reading + self._round_loss  # twice: reading is worth it for a few rounds only

    @property
    def is_overdrawn(self) -> bool:
        """True if the budget is used up, even if speculation seems to pay."""
        return self.budget < -MAX_CREDIT * self.plain_seconds < 0.0

    def begin_generation(self) -> None:
        """Observe the beginning of a generation."""
        fade = 1.0 - 1.0 / MEMORY
        self._generations = self._generations * fade + 1.0
        self._generated *= fade

    def decoded_plain(self, seconds: float | None) -> None:
        """Observe a token of plain decoding. seconds: None if they are not typical."""
        self._generated += 1
        if seconds is None:
            return
        self._unsampled_seconds = 0.0
        self._samples += 1
        weight = 1.0 / min(self._samples, MEMORY)
        self.plain_seconds += weight * (self._clip(seconds) - self.plain_seconds)
        self.budget += EXPLORATION * seconds
        self._samples_due = max(self._samples_due - 1, 0)

    def speculated(self, tokens: int, seconds: float | None) -> None:
        """Observe a speculative round that committed `tokens`.

        seconds: with drafting, None if they are not typical.
        """
        self._generated += tokens
        if seconds is None:
            return
        self._unsampled_seconds += seconds
        if self.plain_seconds:
            limit = MAX_CREDIT * self.plain_seconds
            self.budget = min(min(self.budget, limit) + tokens * self.plain_seconds - seconds, limit)

    def read(self, tokens: int, seconds: float) -> None:
        """Observe that the drafter read `tokens` that were decoded without it, such as a prompt."""
        fade = 1.0 - 1.0 / MEMORY
        self._read_tokens = self._read_tokens * fade + tokens
        self._read_seconds = self._read_seconds * fade + seconds
        if not self.pays or self.budget < 0.0:
            self.budget -= seconds

    def drafted_in_vain(self, seconds: float) -> None:
        """Observe a draft of `seconds` without proposals."""
        self.budget -= seconds

    def update_estimate(self, throughput: float, round_tokens: float, verdict_seconds: float) -> None:
        """Compare plain decoding with the estimated tokens per second of speculation, and the tokens of its rounds.

        verdict_seconds: the verifier's time for an empty block, an estimate of t_p until it has been measured. t_p is
        measured at once unless speculation is CLEAR_GAIN times as fast as this estimate.
        """
        token_s, plain_s = 1.0 / throughput, self.plain_seconds or verdict_seconds
        gain = plain_s - token_s
        if self.plain_seconds:
            self.pays, self._token_gain = gain >= 0.0, gain
            self._round_loss = max(-gain, 0.0) * round_tokens
        is_unclear = not self.plain_seconds and CLEAR_GAIN * token_s > verdict_seconds
        price = (1 + PLAIN_SAMPLES) * max(gain, MIN_SAMPLE_LOSS * plain_s)
        if is_unclear or SAMPLING * self._unsampled_seconds >= price:
            self._samples_due = PLAIN_SAMPLES
