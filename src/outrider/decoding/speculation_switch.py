"""Switch between speculative and plain decoding: draft only while speculation is faster than the target alone.

Plain decoding takes t_p seconds per token. A speculative round that commits E tokens in t seconds gains E·t_p − t
seconds. The switch keeps a budget of seconds that exploration may lose:

    a plain token          adds EXPLORATION·t_p
    a speculative round    adds its gain, which may be negative, up to a budget of MAX_CREDIT·t_p

While speculation is estimated to gain, it continues as long as the budget is above −MAX_CREDIT·t_p. Otherwise, a round
is drafted only if the budget covers its price: the expected loss of the round, and the time in which the drafter reads
the tokens that were decoded without it. The loss against plain decoding is thus at most EXPLORATION of the time plus a
constant, whatever the estimates are. A round that gains pays for the next ones, so that speculation returns within a
few rounds when the text becomes predictable.

Prompt lookup and a draft model have one account each, and share EXPLORATION. The time of one source is plain decoding
to the other. With the throughput λ of all rounds, a drafted token is worth 1/λ ≤ t_p, and a round gains
(E − 1)/λ + t_p − t, since one of its tokens is a plain one. A source thus drafts only if that increases λ.
docs/design/maths.md derives this in its section on plain decoding.

While speculation is faster, a few plain tokens are decoded now and then to keep t_p current.

This module reads no clock. Its callers pass the seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from outrider.decoding.draft_source import DraftSource

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


class Share(NamedTuple):
    """The share of one source in a speculative round. seconds: with drafting, None if they are not typical."""

    tokens: int
    seconds: float | None


class Estimate(NamedTuple):
    """Estimated tokens per second of a source's rounds, and tokens of one of them."""

    throughput: float
    round_tokens: float


class Account:
    """The budget of one source of drafts, in seconds, and the estimates about it.

    pays: whether speculation with this source is estimated to be faster than plain decoding.
    """

    def __init__(self) -> None:
        self.budget = 0.0
        self.pays = True
        self.token_gain = self.round_loss = 0.0  # expected, in seconds
        self.generated = PRIOR_TOKENS  # tokens that the source drafted or could have drafted, over generations
        self._read_tokens = self._read_seconds = 0.0

    @property
    def needs_credit(self) -> bool:
        """True if the source does not draft freely."""
        return not self.pays or self.budget < 0.0

    def add(self, seconds: float, limit: float) -> None:
        """Add the gain of a round, up to a budget of `limit`."""
        self.budget = min(min(self.budget, limit) + seconds, limit)

    def read(self, tokens: int, seconds: float) -> None:
        """Count tokens that the drafter has read. They are an investment while speculation pays."""
        fade = 1.0 - 1.0 / MEMORY
        self._read_tokens = self._read_tokens * fade + tokens
        self._read_seconds = self._read_seconds * fade + seconds
        if self.needs_credit:
            self.budget -= seconds

    def reading_seconds(self, tokens: int) -> float:
        """Return the expected time to read tokens."""
        return tokens * self._read_seconds / self._read_tokens if self._read_tokens else 0.0


class SpeculationSwitch:
    """The decision for each source of drafts whether it drafts in the next round.

    plain_seconds: t_p, 0 until it has been measured.
    """

    def __init__(self, sources: Iterable[DraftSource] = (DraftSource.MODEL,)) -> None:
        self.plain_seconds = 0.0
        self.accounts = {source: Account() for source in sources}
        self._clip, self._samples, self._samples_due = MedianClip(), 0, 0
        self._unsampled_seconds = 0.0  # seconds of speculation since the last timed plain token
        self._generations = 1.0
        self._token_seconds = 0.0  # 1/λ, the worth of a drafted token

    @property
    def needs_sample(self) -> bool:
        """True if the time of a plain token must be measured next."""
        return self._samples_due > 0

    def should_speculate(self, unread: int, source: DraftSource = DraftSource.MODEL) -> bool:
        """Return whether to draft with this source.

        unread: tokens that a draft model must read before, without the last one. Prompt lookup reads in no time.
        """
        if self.needs_sample:
            return False
        if not self.plain_seconds:
            return True
        account = self.accounts[source]
        reading = account.reading_seconds(unread) if source is DraftSource.MODEL else 0.0
        if account.pays:
            gain = account.token_gain * account.generated / self._generations
            credit = gain if account.budget >= 0.0 else account.budget + MAX_CREDIT * self.plain_seconds
            return reading <= credit
        return account.budget >= 2.0 * reading + account.round_loss  # twice: reading is worth it for a few rounds only

    def is_overdrawn(self, source: DraftSource = DraftSource.MODEL) -> bool:
        """Return whether the budget of this source is used up, even if it seems to pay."""
        return self.accounts[source].budget < -MAX_CREDIT * self.plain_seconds < 0.0

    def begin_generation(self) -> None:
        """Observe the beginning of a generation."""
        fade = 1.0 - 1.0 / MEMORY
        self._generations = self._generations * fade + 1.0
        for account in self.accounts.values():
            account.generated *= fade

    def decoded_plain(self, seconds: float | None) -> None:
        """Observe a token of plain decoding. seconds: None if they are not typical."""
        for account in self.accounts.values():
            account.generated += 1
        if seconds is None:
            return
        self._unsampled_seconds = 0.0
        self._samples += 1
        weight = 1.0 / min(self._samples, MEMORY)
        self.plain_seconds += weight * (self._clip(seconds) - self.plain_seconds)
        self._allow_exploration(seconds, self.accounts.values())
        self._samples_due = max(self._samples_due - 1, 0)

    def speculated(self, shares: Mapping[DraftSource, Share]) -> None:
        """Observe a speculative round, with the source of its first token first."""
        first = next(iter(shares))
        for source, (tokens, seconds) in shares.items():
            account = self.accounts[source]
            account.generated += tokens
            if seconds is None:
                continue
            self._unsampled_seconds += seconds
            if self.plain_seconds:
                gain = self._gain(tokens, seconds, has_bonus=source is first)
                account.add(gain, MAX_CREDIT * self.plain_seconds)
        waiting = [account for source, account in self.accounts.items() if source not in shares]
        self._allow_exploration(sum(seconds or 0.0 for _, seconds in shares.values()), waiting)

    def _allow_exploration(self, seconds: float, accounts: Collection[Account]) -> None:
        """Add to these accounts their parts of the time that exploration may lose."""
        for account in accounts:
            account.budget += EXPLORATION * seconds / len(self.accounts)

    def read(self, tokens: int, seconds: float, source: DraftSource = DraftSource.MODEL) -> None:
        """Observe that the drafter read `tokens` that were decoded without it, such as a prompt."""
        self.accounts[source].read(tokens, seconds)

    def drafted_in_vain(self, seconds: float, source: DraftSource = DraftSource.MODEL) -> None:
        """Observe a draft of `seconds` without proposals."""
        self.accounts[source].budget -= seconds

    def update_estimates(
        self, estimates: Mapping[DraftSource, Estimate], throughput: float, verdict_seconds: float
    ) -> None:
        """Compare plain decoding with the estimates of speculation. throughput: λ, tokens per second of all rounds.

        verdict_seconds: the verifier's time for an empty block, an estimate of t_p until it has been measured. t_p is
        measured at once unless speculation with every source is CLEAR_GAIN times as fast as this estimate.
        """
        plain_s = self.plain_seconds or verdict_seconds
        self._token_seconds = min(1.0 / throughput, plain_s) if len(self.accounts) > 1 else plain_s
        if self.plain_seconds:
            for source, (rate, round_tokens) in estimates.items():
                account, gain = self.accounts[source], self._gain(round_tokens, round_tokens / rate)
                account.pays, account.token_gain, account.round_loss = gain >= 0.0, gain / round_tokens, max(-gain, 0.0)
        rates = [estimate.throughput for estimate in estimates.values()]
        is_unclear = not self.plain_seconds and verdict_seconds * min(rates) < CLEAR_GAIN
        price = (1 + PLAIN_SAMPLES) * max(plain_s - 1.0 / max(rates), MIN_SAMPLE_LOSS * plain_s)
        if is_unclear or SAMPLING * self._unsampled_seconds >= price:
            self._samples_due = PLAIN_SAMPLES

    def _gain(self, tokens: float, seconds: float, *, has_bonus: bool = True) -> float:
        """Return the gain of a round over plain decoding. has_bonus: one of its tokens would be a plain one."""
        return (tokens - has_bonus) * self._token_seconds + has_bonus * self.plain_seconds - seconds
