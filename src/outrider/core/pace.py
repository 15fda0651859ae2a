"""What drafting on is worth: a model pair's acceptance and times, learnt from its own rounds.

Per second the most tokens come of drafting on while the next token is accepted more often than its time would bring
tokens elsewhere: while S ≥ c·λ (renewal reward; Dinkelbach, 1967), with

    S   the chance that the block is accepted to its end, the next token included
    c   seconds of one more drafted token: of drafting it, and of what it adds to the verdict
    λ   tokens per second: of the rounds so far, and at first of the best constant block length k*

A drafted token's chance is how often tokens of like −log q were accepted; the next one's, which is not there yet, how
often the token after one of like −log q was: m. Where drafting goes on while a verdict is in flight, a right guess
saves the next round h drafts, and a longer block makes it less likely by S·(1 − m): then S·(1 − h·c·λ·(1 − m)) ≥ c·λ.

Nothing here reads a clock: seconds are told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq

EDGES = (0.01, 0.05, 0.15, 0.4, 1.0, 2.5)  # of −log q, between one kind of token and the next
GUESS = 0.7  # acceptance before anything was seen
BELIEF = 4.0  # observations that a guess counts for
CLAIM = 10.0  # … and what the drafter says of its token
AFTER = 20.0  # … and the mean for a next token: few are seen behind one after which drafting stops
MOST_TRUST = 4.0  # power to which what the drafter says is taken at most
MEMORY = 1024.0  # observations that are remembered: texts change
ROUNDS = 64  # so are networks
LAST = 9  # values that say what is usual
OUTLIER = 3.0  # a time longer than so many usual ones counts as that many: a stall is no pace
LONGEST = 64  # block length up to which k* is sought
SLOPE = 0.05  # a drafted token adds about so much of a verdict's time, or less


class Frequency:
    """How often something happened. `now` counts all observations: what is no longer seen is forgotten as well."""

    def __init__(self) -> None:
        self._hits = self._seen = 0.0
        self._at = 0

    def note(self, hit: float, now: int) -> None:
        fade = self._fade(now)
        self._hits, self._seen, self._at = self._hits * fade + hit, self._seen * fade + 1.0, now

    def estimate(self, guess: float, belief: float, now: int) -> float:
        """With a guess that counts for `belief` observations."""
        fade = self._fade(now)
        return (self._hits * fade + belief * guess) / (self._seen * fade + belief)

    def _fade(self, now: int) -> float:
        return math.exp((self._at - now) / MEMORY)


class Acceptance:
    """The chances that drafted tokens are accepted; −log q of each, where it is known."""

    def __init__(self) -> None:
        self._now = 0
        self._all, self._claims = Frequency(), Frequency()
        self._own = [Frequency() for _ in range(len(EDGES) + 1)]
        self._next = [Frequency() for _ in range(len(EDGES) + 1)]

    def note(self, logprobs: Seq[float | None], accepted: int) -> None:
        """A verdict accepted that many; what follows the first rejection says nothing."""
        before: float | None = None
        for n, logprob in enumerate(logprobs[: accepted + 1]):
            self._now += 1
            self._all.note(n < accepted, self._now)
            if logprob is not None:
                self._claims.note(math.exp(-logprob), self._now)
                self._own[_kind(logprob)].note(n < accepted, self._now)
            if before is not None:
                self._next[_kind(before)].note(n < accepted, self._now)
            before = logprob

    @property
    def mean(self) -> float:
        return self._all.estimate(GUESS, BELIEF, self._now)

    def own(self, logprob: float) -> float:
        """As sure as the drafter says, corrected by how right it is on the whole, until it is known better."""
        said, was = self._claims.estimate(GUESS, BELIEF, self._now), self.mean
        trust = math.log(was) / math.log(said)  # the prior keeps both inside (0, 1)
        claim = math.exp(-logprob * min(trust, MOST_TRUST))
        return self._own[_kind(logprob)].estimate(claim, CLAIM, self._now)

    def following(self, logprobs: Seq[float]) -> float:
        """The next token's, after one that is there."""
        return self._next[_kind(logprobs[-1])].estimate(self.mean, AFTER, self._now) if logprobs else self.mean

    def survives(self, drafted: int, logprobs: Seq[float]) -> float:
        """Of `drafted` tokens together; logprobs: of those that told it."""
        return math.prod(map(self.own, logprobs)) * self.mean ** (drafted - len(logprobs))


class Usual:
    """Values as they come; a stall among them counts as a few usual ones."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)

    def __call__(self, value: float) -> float:
        self._last.append(value)
        return min(value, OUTLIER * sorted(self._last)[len(self._last) // 2])


class Line:
    """y over x by least squares, the last ROUNDS of them or so; a slope below 0, or in doubt, is drawn to 0."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def note(self, x: float, y: float) -> None:
        fade = 1.0 - 1.0 / ROUNDS
        self._n, self._x, self._y = self._n * fade + 1.0, self._x * fade + x, self._y * fade + y
        self._xx, self._xy = self._xx * fade + x * x, self._xy * fade + x * y
        self._yy = self._yy * fade + y * y

    @property
    def mean_x(self) -> float:
        return self._x / self._n if self._n else 0.0

    @property
    def mean_y(self) -> float:
        return self._y / self._n if self._n else 0.0

    @property
    def slope(self) -> float:
        sxx = self._xx - self._x * self.mean_x
        sxy = self._xy - self._x * self.mean_y
        if sxx <= 1e-9 * self._xx or self._y <= 0.0:
            return 0.0
        noise = (self._yy - self._y * self.mean_y - sxy * sxy / sxx) / self._n
        return max(sxy / (sxx + max(noise, 0.0) / (SLOPE * self.mean_y) ** 2), 0.0)


class Times:
    """Seconds of drafting a token, and of a verdict: fixed + slope · block length."""

    def __init__(self) -> None:
        self._steps, self._waits, self._computes = Line(), Line(), Line()
        self._usual_step, self._usual_wait, self._usual_compute = Usual(), Usual(), Usual()

    def note_step(self, seconds: float) -> None:
        self._steps.note(1.0, self._usual_step(seconds))

    def note_wait(self, drafts: int, seconds: float, compute: float) -> None:
        """compute: the part of it that grows with the block, where the verifier says so."""
        self._waits.note(drafts, self._usual_wait(seconds))
        self._computes.note(drafts, self._usual_compute(compute or seconds))

    @property
    def known(self) -> bool:
        return self.step > 0.0 and self._waits.mean_y > 0.0

    @property
    def step(self) -> float:
        return self._steps.mean_y

    @property
    def slope(self) -> float:
        return self._computes.slope

    def fixed(self, slope: float) -> float:
        return max(self._waits.mean_y - slope * self._waits.mean_x, 0.0)


class Rounds:
    """What came of rounds, the last ones most."""

    def __init__(self) -> None:
        self.count = self.tokens = self.drafted = self.verified = 0.0

    def fade(self) -> None:
        self.add(self, -1.0 / ROUNDS)

    def add(self, other: Rounds, weight: float = 1.0) -> None:
        self.note(other.tokens, other.drafted, other.verified, other.count, weight)

    def note(self, tokens: float, drafted: float, verified: float, count: float = 1.0, weight: float = 1.0) -> None:
        self.count, self.tokens = self.count + weight * count, self.tokens + weight * tokens
        self.drafted, self.verified = self.drafted + weight * drafted, self.verified + weight * verified

    def seconds(self, times: Times) -> float:
        """What they would take by now."""
        slope = times.slope
        return self.count * times.fixed(slope) + times.step * self.drafted + slope * self.verified


class Pace:
    """`price`: what the time of one more drafted token is worth, in tokens; None until times are known."""

    def __init__(self) -> None:
        self.acceptance, self.times = Acceptance(), Times()
        self.price: float | None = None
        self._hit_worth = 0.0  # tokens
        self._padding = BELIEF
        self._rounds = {
            hit: Rounds() for hit in (True, False)
        }  # by whether drafts were there already, of a right guess

    def pays(self, drafted: int, logprobs: Seq[float]) -> bool:
        """Whether to draft one more token; `price` is known. logprobs: −log q of the tokens drafted so far."""
        following = self.acceptance.following(logprobs)
        gain = self.acceptance.survives(drafted, logprobs) * following
        return self.price is not None and gain * (1.0 - self._hit_worth * (1.0 - following)) >= self.price

    def drafted(self, count: int, seconds: float) -> None:
        """So many seconds went into drafting `count` tokens."""
        if count:
            self.times.note_step(seconds / count)

    def decided(
        self,
        logprobs: Seq[float | None],
        accepted: int,
        *,
        drafted: int,
        seconds: float | None = None,
        compute: float = 0.0,
    ) -> None:
        """A verdict accepted so many drafts with these −log q.

        drafted: tokens that were drafted while no verdict was awaited, since the last one. seconds: how long it took to
        come, where that says something about the next ones; compute: as far as the verifier says what it took.
        """
        self.acceptance.note(logprobs, accepted)
        if seconds is not None:
            self.times.note_wait(len(logprobs), seconds, compute)
        for rounds in self._rounds.values():
            rounds.fade()
        self._padding *= 1.0 - 1.0 / ROUNDS
        self._rounds[drafted < len(logprobs)].note(accepted + 1, drafted, len(logprobs))
        if self.times.known:
            rate = self._rate()
            self.price = rate * (self.times.step + self.times.slope)
            self._hit_worth = self._worth(rate)

    def _rate(self) -> float:
        """λ. The first rounds are padded with what k* would bring."""
        times, rounds, pad = self.times, Rounds(), self._padding
        slope = times.slope
        k, tokens = _best_constant(self.acceptance.mean, times.fixed(slope), times.step + slope)
        rounds.note(tokens, k, k, weight=pad)
        for each in self._rounds.values():
            rounds.add(each)
        return rounds.tokens / rounds.seconds(times)

    def _worth(self, rate: float) -> float:
        """Tokens that a round after a right guess brings more than another, what its time is worth taken off."""
        if any(rounds.count < 1.0 for rounds in self._rounds.values()):
            return 0.0
        hit, other = (
            (self._rounds[hit].tokens - rate * self._rounds[hit].seconds(self.times)) / self._rounds[hit].count
            for hit in (True, False)
        )
        return max(hit - other, 0.0)


def _best_constant(alpha: float, fixed: float, each: float) -> tuple[int, float]:
    """k*, and the tokens of a round with it, where all are as likely accepted, and seconds are fixed + each · k."""
    k, tokens, chance = 1, 1.0 + alpha, alpha * alpha
    while k < LONGEST and chance * (fixed + each * k) > each * tokens:
        k, tokens, chance = k + 1, tokens + chance, chance * alpha
    return k, tokens


def _kind(logprob: float) -> int:
    return bisect_left(EDGES, logprob)
