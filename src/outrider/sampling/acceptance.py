"""Verification is arithmetic: from (drafts, the target's rows) to a verdict.

Letters as in the papers: p the target's distribution at a position and q the drafter's, both after constraints and
filters; d the drafted token; k the block length. Row i of the target is what follows prefix + d₁…dᵢ.

    exact      accept d while it is the token that the target itself would choose (argmax, or its draw with the
               shared noise); the output is the target's own, token for token (MATHS: ids only)
    residual   accept d with probability min(1, p(d)/q(d)), else draw from max(0, p−q): the target's distribution,
               more acceptances, needs the very q that was drawn from (Leviathan et al., 2023; Chen et al., 2023)
    rank:N     accept d if it is among the target's N best                          } lossy: guarantee
    margin:D   accept d if log p(best) − log p(d) ≤ D                               } "best-effort"
    typical:E  accept d if p(d) > min(E, √E·exp(−H(p))) (Cai et al., 2024)          }

The lossy rules never accept what constraints or filters exclude; they rank what is left by p before top-k and top-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from outrider.config import format_number
from outrider.errors import SettingsError
from outrider.sampling.policy import ForwardOutput, Policy
from outrider.sampling.sampler import Distribution, NoiseStream, Support

REJECTION_SHORTLIST = 32  # tokens of q that the drafter draws from, and sends, in residual mode


@dataclass(frozen=True)
class Verdict:
    """The verifier's answer for one block.

    accepted: how many drafts stand. next_token: the correction, or the bonus after a full acceptance.
    near_ties: offsets from the base (drafts, then next_token) whose choice was within the engine's numeric noise.
    audited, disagreed: skipped tokens seen in passing, and how many of them the target would have changed.
    queue_s, compute_s: seconds that a service took over it; no part of what it says.
    """

    round: int
    accepted: int
    next_token: int
    near_ties: tuple[int, ...] = ()
    audited: int = 0
    disagreed: int = 0
    queue_s: float = field(default=0.0, compare=False)
    compute_s: float = field(default=0.0, compare=False)


class AcceptanceRule(Protocol):
    """An acceptance rule. `lossless` means that the output keeps the target's distribution.

    needs_logits: False where what the target would choose is enough, so that `p` may be a mere `Pick`.
    """

    lossless: bool
    needs_q: bool
    needs_logits: bool

    def accepts(self, p: Distribution, d: int, q: Support | None) -> bool: ...

    def replacement_token(self, p: Distribution, q: Support | None) -> int:
        """The token to emit where `accepts` said no."""
        ...


@dataclass(frozen=True)
class Exact:
    lossless = True
    needs_q = needs_logits = False

    def accepts(self, p: Distribution, d: int, q: Support | None) -> bool:
        return d == p.token

    def replacement_token(self, p: Distribution, q: Support | None) -> int:
        return p.token

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class RejectionSampling:
    lossless = True
    needs_q = needs_logits = True

    def accepts(self, p: Distribution, d: int, q: Support | None) -> bool:
        assert q is not None  # guaranteed by `verify_block`
        return p.uniform(NoiseStream.ACCEPT) * q.probability(d) < p.support.probability(d)

    def replacement_token(self, p: Distribution, q: Support | None) -> int:
        """A draw from max(0, p − q), with noise of its own: the drafter has used the shared noise up."""
        assert q is not None
        probabilities = p.support.logp.exp()
        overlap = (p.support.ids[:, None] == q.ids[None, :].to(p.support.ids.device)).float()
        residual = torch.clamp(probabilities - overlap @ q.logp.exp().to(probabilities.device), min=0.0)
        if not residual.any():  # p and q equal but for rounding
            residual = probabilities
        rest = Support(p.support.ids, torch.log(residual / residual.sum()))
        return rest.draw(p.sampling.seed, p.position, NoiseStream.RESIDUAL)

    def __str__(self) -> str:
        return "residual"


@dataclass(frozen=True)
class _LossyRule:
    """Accepts what the target finds good enough; where it does not, the target's own choice is emitted."""

    limit: float
    lossless = False
    needs_q = False
    needs_logits = True

    def accepts(self, p: Distribution, d: int, q: Support | None) -> bool:
        return d == p.token or (p.allows(d) and self._is_acceptable(p, d))

    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        raise NotImplementedError

    def replacement_token(self, p: Distribution, q: Support | None) -> int:
        return p.token


class Rank(_LossyRule):
    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        return int((p.logits > p.logits[d]).sum()) < self.limit

    def __str__(self) -> str:
        return f"rank:{format_number(self.limit)}"


class Margin(_LossyRule):
    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        return float(p.logp.max() - p.logp[d]) <= self.limit

    def __str__(self) -> str:
        return f"margin:{format_number(self.limit)}"


class Typical(_LossyRule):
    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        probabilities = p.logp.exp()
        entropy = float(torch.special.entr(probabilities).sum())
        return float(probabilities[d]) > min(self.limit, math.sqrt(self.limit) * math.exp(-entropy))

    def __str__(self) -> str:
        return f"typical:{format_number(self.limit)}"


def parse_acceptance_rule(spec: str) -> AcceptanceRule:
    """The acceptance rule that a text such as "exact" or "rank:20" names.

    Raises:
        SettingsError: an unknown name, or a limit that is missing or out of range.
    """
    if not isinstance(spec, str):
        raise SettingsError(f"accept is a text such as exact or rank:20, not {spec!r}")
    name, _, limit = spec.partition(":")
    if name in ("exact", "residual"):
        if limit:
            raise SettingsError(f"accept {spec!r}: {name} takes no number")
        return Exact() if name == "exact" else RejectionSampling()
    if name not in ("rank", "margin", "typical"):
        raise SettingsError(f"accept {spec!r}: expected exact, residual, rank:N, margin:D or typical:E")
    return _parse_lossy_rule(name, limit, spec)


def _parse_lossy_rule(name: str, limit: str, spec: str) -> AcceptanceRule:
    try:
        value = int(limit) if name == "rank" else float(limit)
    except ValueError:
        raise SettingsError(f"accept {spec!r}: {name} needs a number, as in {name}:{_EXAMPLE_LIMITS[name]}") from None
    if not (math.isfinite(value) and value >= _MIN_LIMITS[name]) or (name == "typical" and not 0 < value <= 1):
        raise SettingsError(f"accept {spec!r}: {value:g} is out of range")
    return {"rank": Rank, "margin": Margin, "typical": Typical}[name](value)


_EXAMPLE_LIMITS = {"rank": "20", "margin": "0.5", "typical": "0.09"}
_MIN_LIMITS = {"rank": 1.0, "margin": 0.0, "typical": 0.0}


def verify_block(
    round_: int,
    ids: list[int],
    base: int,
    logits: ForwardOutput,
    policy: Policy,
    accept: AcceptanceRule,
    q: Seq[Support] | None = None,
    noise: float = 0.0,
) -> Verdict:
    """The verdict on the drafts ids[base:], k of them.

    logits: float32 [k+1, V], or for `exact` the picks; row i follows ids[:base+i].
    q: for `residual`, what each draft was drawn from.
    noise: a lead below this many logits counts as a near-tie (0 for float32 engines).
    """
    if accept.needs_q and (q is None or len(q) != len(ids) - base):
        raise SettingsError("residual acceptance needs the distribution that each draft was drawn from")
    noise *= policy.noise_gain
    near_ties: list[int] = []
    for i, d in enumerate(ids[base:]):
        p = cast(
            Distribution, policy.distribution_at(logits, i, ids, base + i)
        )  # a Pick will do where no rows are needed
        if noise and p.top2_margin < noise:
            near_ties.append(i)
        if not accept.accepts(p, d, q[i] if q else None):
            return Verdict(round_, i, accept.replacement_token(p, q[i] if q else None), tuple(near_ties))
    k = len(ids) - base
    last = policy.distribution_at(logits, k, ids, base + k)
    if noise and last.top2_margin < noise:
        near_ties.append(k)
    return Verdict(round_, k, last.token, tuple(near_ties))


def count_disagreements(ids: list[int], start: int, base: int, logits: ForwardOutput, policy: Policy) -> int:
    """How many of the skipped tokens ids[start:base] the target would have chosen differently.

    logits: float32 [≥ base−start, V], or picks; row j follows ids[:start+j]. They come free with the catch-up prefill.
    """
    return sum(policy.distribution_at(logits, n - start, ids, n).token != ids[n] for n in range(start, base))
