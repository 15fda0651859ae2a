"""The choice between two sources of the next draft: prompt lookup and the draft model, by measured acceptance.

The acceptance probability of a looked-up token is the acceptance rate of tokens with a similar match length, that of a
model's token the rate of all of them. Rates decay towards their priors, so a source that was worse is tried again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq

from outrider.decoding.adaptive_draft_length import PRIOR_ACCEPTANCE, PRIOR_WEIGHT, DecayedRate

MATCH_BUCKETS = (2, 3, 5, 9)  # least match lengths of all buckets but the first
PRIOR_BY_BUCKET = (0.1, 0.4, 0.6, 0.8, 0.9)  # acceptance rate before the first observation


class DraftSourceController:
    """The acceptance rates of both sources, which the rounds of a model pair update."""

    def __init__(self) -> None:
        self._tokens_seen = 0
        self._model = DecayedRate()
        self._lookup = [DecayedRate() for _ in PRIOR_BY_BUCKET]

    def prefers_lookup(self, match_length: int) -> bool:
        """Return whether a token behind a match of this length is at least as likely to be accepted as a model's."""
        bucket = bisect_right(MATCH_BUCKETS, match_length)
        lookup = self._lookup[bucket].estimate(PRIOR_BY_BUCKET[bucket], PRIOR_WEIGHT, self._tokens_seen)
        return lookup >= self._model.estimate(PRIOR_ACCEPTANCE, PRIOR_WEIGHT, self._tokens_seen)

    def update(self, match_lengths: Seq[int], accepted: int) -> None:
        """Count a verdict. Drafts behind the first rejection are no observations.

        match_lengths: one for each draft, 0 for a model's.
        """
        for n, length in enumerate(match_lengths[: accepted + 1]):
            self._tokens_seen += 1
            rate = self._lookup[bisect_right(MATCH_BUCKETS, length)] if length else self._model
            rate.update(n < accepted, self._tokens_seen)
