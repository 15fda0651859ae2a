"""Acceptance rules: how many drafts of a block a verdict accepts, and the token that follows them.

p is the target's distribution at a position, q the drafter's, both after logits processors and sampling filters, d the
drafted token, k the block length. Row i of the target's logits follows the prefix and d₁ … dᵢ.

    exact      accept d if the target samples d: its argmax, or its draw with the shared noise. The output equals the
               target's own, token for token (docs/design/maths.md, "Exact verification with token ids").
    residual   rejection sampling: accept d with probability min(1, p(d)/q(d)), else draw from max(0, p − q). The
               output has the target's distribution (Leviathan et al., 2023; Chen et al., 2023).
    rank:N     accept d if it is among the target's N best                          } lossy: guarantee
    margin:D   accept d if log p(best) − log p(d) ≤ D                               } "best-effort"
    typical:E  accept d if p(d) > min(E, √E·exp(−H(p))) (Cai et al., 2024)          }

The lossy rules never accept a token that logits processors or filters exclude. They rank the other tokens by p before
top-k and top-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from outrider.config import format_number
from outrider.errors import SettingsError, quote
from outrider.numeric import is_number
from outrider.sampling.grammar import DeadEnd
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.policy import ForwardOutput, Policy
from outrider.sampling.sampler import Distribution, NoiseStream, SampledRows, SampledToken, Support

REJECTION_SHORTLIST = 32  # tokens of q that the drafter draws from and sends, for rejection sampling

Target = Distribution | SampledToken  # p, or its sampled token alone where a rule has needs_logits False


@dataclass(frozen=True)
class Verdict:
    """The verifier's answer for one block.

    accepted: number of accepted drafts. next_token: the correction, or the bonus after a full acceptance.
    near_ties: offsets from the base (drafts, then next_token) whose choice was within the engine's numeric noise.
    audited, disagreed: number of skipped tokens compared, and of those that the target would have changed.
    queue_s, compute_s: seconds in the service's queue and in its forward pass. cached: in a session's first verdict,
    the tokens whose KV cache was kept from an earlier session. None of the three is part of equality. logprobs: the
    target's for each token of the verdict, if they are requested.
    """

    round: int
    accepted: int
    next_token: int
    near_ties: tuple[int, ...] = ()
    audited: int = 0
    disagreed: int = 0
    queue_s: float = field(default=0.0, compare=False)
    compute_s: float = field(default=0.0, compare=False)
    cached: int = field(default=0, compare=False)
    logprobs: tuple[Logprobs, ...] = ()


class AcceptanceRule(Protocol):
    """An acceptance rule.

    lossless: the output keeps the target's distribution. needs_q: the rule needs the distribution of each draft.
    needs_logits: the rule needs p; otherwise the target's sampled token is enough.
    """

    lossless: bool
    needs_q: bool
    needs_logits: bool

    def accepts(self, p: Target, d: int, q: Support | None) -> bool:
        """Return whether the draft d stands."""
        ...

    def replacement_token(self, p: Target, q: Support | None) -> int:
        """Return the token that replaces a rejected draft."""
        ...


@dataclass(frozen=True)
class Exact:
    """Accept a draft if the target samples the same token."""

    lossless = True
    needs_q = needs_logits = False

    def accepts(self, p: Target, d: int, q: Support | None) -> bool:
        """Return whether the target samples d."""
        return d == p.token

    def replacement_token(self, p: Target, q: Support | None) -> int:
        """Return the token that the target samples."""
        return p.token

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class RejectionSampling:
    """Rejection sampling (speculative sampling), the option value "residual".

    Accept d with probability min(1, p(d)/q(d)). Otherwise draw from max(0, p − q), normalised. The output then has the
    target's distribution, with acceptance probability 1 − TV(p, q), provided that q is the distribution from which d
    was drawn. Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023, algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """

    lossless = True
    needs_q = needs_logits = True

    def accepts(self, p: Target, d: int, q: Support | None) -> bool:
        """Return whether u·q(d) < p(d) for a uniform u."""
        p, q = _require_distribution(p), _require_q(q)
        return p.uniform(NoiseStream.ACCEPT) * q.probability(d) < p.support.probability(d)

    def replacement_token(self, p: Target, q: Support | None) -> int:
        """Draw from max(0, p − q), with noise independent of the draft's."""
        p, q = _require_distribution(p), _require_q(q)
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
    """A rule that accepts acceptable drafts, and replaces others by the token that the target samples."""

    limit: float
    name: ClassVar[str]
    lossless = False
    needs_q = False
    needs_logits = True

    def accepts(self, p: Target, d: int, q: Support | None) -> bool:
        """Return whether the target samples d, or allows it and finds it acceptable."""
        p = _require_distribution(p)
        return d == p.token or (p.allows(d) and self._is_acceptable(p, d))

    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        raise NotImplementedError

    def replacement_token(self, p: Target, q: Support | None) -> int:
        """Return the token that the target samples."""
        return p.token

    def __str__(self) -> str:
        return f"{self.name}:{format_number(self.limit)}"


class Rank(_LossyRule):
    """Accept a draft among the target's `limit` best tokens."""

    name = "rank"

    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        return int((p.logits > p.logits[d]).sum()) < self.limit


class Margin(_LossyRule):
    """Accept a draft whose log-probability is at most `limit` below the best one."""

    name = "margin"

    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        return float(p.logp.max() - p.logp[d]) <= self.limit


class Typical(_LossyRule):
    """Typical acceptance (Cai et al., 2024, Medusa): accept d if p(d) > min(ε, √ε·exp(−H(p))), with ε = `limit`."""

    name = "typical"

    def _is_acceptable(self, p: Distribution, d: int) -> bool:
        probabilities = p.logp.exp()
        entropy = float(torch.special.entr(probabilities).sum())
        return float(probabilities[d]) > min(self.limit, math.sqrt(self.limit) * math.exp(-entropy))


def _require_distribution(p: Target) -> Distribution:
    if isinstance(p, Distribution):
        return p
    raise SettingsError("this acceptance rule needs the target's logits, not only its sampled token")


def _require_q(q: Support | None) -> Support:
    if q is None:
        raise SettingsError("residual acceptance needs the distribution that each draft was drawn from")
    return q


def parse_acceptance_rule(spec: str) -> AcceptanceRule:
    """Return the acceptance rule of a text such as "exact" or "rank:20".

    Raises:
        SettingsError: the name is unknown, or the limit is missing or out of range.
    """
    if not isinstance(spec, str):
        raise SettingsError(f"accept is a text such as exact or rank:20, not {quote(spec)}")
    name, _, limit = spec.partition(":")
    if name in ("exact", "residual"):
        if limit:
            raise SettingsError(f"accept {quote(spec)}: {name} takes no number")
        return Exact() if name == "exact" else RejectionSampling()
    if name not in _LOSSY_RULES:
        raise SettingsError(f"accept {quote(spec)}: expected exact, residual, rank:N, margin:D or typical:E")
    rule, example, minimum = _LOSSY_RULES[name]
    try:
        value = int(limit) if name == "rank" else float(limit)
    except ValueError:
        raise SettingsError(f"accept {quote(spec)}: {name} needs a number, as in {name}:{example}") from None
    if not (is_number(value) and value >= minimum) or (name == "typical" and not 0 < value <= 1):
        raise SettingsError(f"accept {quote(spec)}: {quote(value)} is out of range")
    return rule(value)


# Name → rule, an example of its limit, and the least limit.
_LOSSY_RULES: dict[str, tuple[type[_LossyRule], str, float]] = {
    "rank": (Rank, "20", 1.0),
    "margin": (Margin, "0.5", 0.0),
    "typical": (Typical, "0.09", 0.0),
}


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
    """Return the verdict on the drafts ids[base:], k of them.

    logits: float32 [k+1, V], or sampled tokens if the rule needs no logits. Row i follows ids[:base+i].
    q: for rejection sampling, the distribution from which each draft was drawn.
    noise: margins below this many logits count as near-ties (0 for float32 engines).

    If no token can follow an accepted draft, the verdict ends with that draft, because the output may end there, too.

    Raises:
        SettingsError: the rule needs q or logits that are not given.
        DeadEnd: no token can follow ids[:base].
    """
    k = len(ids) - base
    if accept.needs_q and (q is None or len(q) != k):
        raise SettingsError("residual acceptance needs the distribution that each draft was drawn from")
    noise *= policy.noise_gain
    near_ties: list[int] = []
    for i in range(k + 1):
        try:
            p = policy.distribution_at(logits, i, ids, base + i)
        except DeadEnd:
            if i == 0:
                raise
            return Verdict(round_, i - 1, ids[base + i - 1], tuple(near_ties))
        if noise and p.top2_margin < noise:
            near_ties.append(i)
        if i == k:
            break
        q_i = q[i] if q else None
        if not accept.accepts(p, ids[base + i], q_i):
            return Verdict(round_, i, accept.replacement_token(p, q_i), tuple(near_ties))
    return Verdict(round_, k, p.token, tuple(near_ties))


def verify_sampled(
    round_: int,
    drafts: Seq[int],
    base: int,
    sampled: SampledRows,
    noise: float,
    times: tuple[float, float] = (0.0, 0.0),
) -> Verdict:
    """Return the verdict of the exact rule on drafts after `base` tokens, without an object for each sampled token.

    sampled: a row for each draft, and one more. noise: with the policy's gain. times: queue_s, compute_s. Equal to
    `verify_block`.
    """
    tokens, accepted = sampled.tokens, 0
    for draft in drafts:
        if tokens[accepted] != draft:
            break
        accepted += 1
    sampled.check_scores(accepted + 1, base)
    near_ties = tuple(i for i, margin in enumerate(sampled.margins[: accepted + 1]) if margin < noise) if noise else ()
    return Verdict(round_, accepted, tokens[accepted], near_ties, 0, 0, *times)


def count_disagreements(ids: list[int], start: int, base: int, logits: ForwardOutput, policy: Policy) -> int:
    """Count the skipped tokens ids[start:base] that differ from the target's choice.

    logits: float32 [≥ base−start, V], or sampled tokens. Row j follows ids[:start+j]. They are free: the verifier reads
    the skipped tokens in the same forward pass as the block.
    """
    return sum(policy.distribution_at(logits, n - start, ids, n).token != ids[n] for n in range(start, base))
