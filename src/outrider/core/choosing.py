"""From many rows of logits to their tokens at once, on whatever device the rows are: nothing is read back in between.

The same choices as `Policy.distribution(…).choice`, row by row. Constraints need no state of their own here: what a
row's prefix holds is `history`, the ids that the KV slot has cached, cut at the row's length; a token that was seen
twice is penalised twice from the *raw* score, which gives the same score twice. So a roll-back is the slot's own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.core.constraints import Constraints
from outrider.core.gate import Signals
from outrider.core.policy import Kind, Policy
from outrider.core.sampling import COLDEST, GOLDEN_GAMMA, Pick, Sampling, position_key


@dataclass(frozen=True)
class Places:
    """Where rows stand. int64 [R] each: tokens of the prefix, those of them generated, the noise's key.

    history: integers [R, ≥ lengths], the prefix's ids; None where the kind does not read it.
    """

    lengths: Tensor
    generated: Tensor
    keys: Tensor
    history: Tensor | None


def place(policy: Policy, length: int) -> tuple[int, int, int]:
    """The entries of `Places` for the row that follows a prefix of `length` tokens."""
    sampling = policy.sampling
    key = 0 if sampling.greedy else int(np.uint64(position_key(sampling.seed, length)).astype(np.int64))
    return length, length - policy.constraints.prompt_length, key


Lead = Callable[[Tensor], Tensor]


def plain_lead(rows: Tensor) -> Tensor:
    """float64 [R, 3] for rows [R, V]: the first of the largest entries, the entry, and its lead over the next.

    NaN counts as the largest, and is the entry then.
    """
    best = rows.argmax(-1, keepdim=True)
    found, others = rows.gather(-1, best), rows.scatter(-1, best, -torch.inf).amax(-1, keepdim=True)
    return torch.cat([best.double(), found.double(), found.double() - others.double()], -1)


def choose(rows: Tensor, kind: Kind, places: Places, lead: Lead = plain_lead) -> Tensor:
    """float64 [R, 3]: token, its score (not finite: none can be chosen), lead over the runner-up in logits.

    rows: logits [R, ≥ vocab_size] in any floating format. lead: `plain_lead`, or what does the same faster.
    """
    scores = constrained(rows, kind, places)
    if kind.sampling.greedy:
        return lead(scores)
    drawn = plain_lead(_noisy(filtered(scores.float(), kind.sampling), places.keys))
    best = scores.amax(-1, keepdim=True).double()  # NaN wherever one is
    return torch.cat([drawn[:, :1], best, kind.sampling.temperature * drawn[:, 2:]], -1)


def picks(chosen: Seq[Seq[float]]) -> list[Pick]:
    """Rows of `choose`, read back. Whoever uses one checks it: it may be a row that nobody asks about."""
    return [Pick(int(token), lead, score) for token, score, lead in chosen]


def constrained(rows: Tensor, kind: Kind, places: Places) -> Tensor:
    """[R, vocab_size]: float32, −inf where banned, or a part of `rows` [R, ≥ vocab_size], which stay as they were."""
    chain = kind.constraints
    if not kind.constrains:
        return rows[:, : kind.vocab_size]
    out = rows = rows.float()
    if kind.reads_history:
        assert places.history is not None
        out = rows.clone()
        history, lengths = places.history.long(), places.lengths[:, None]
        if chain.repetition_penalty != 1.0:
            _penalise(out, rows, history, lengths, chain)
        if chain.no_repeat_ngram:
            _ban_repeats(out, history, lengths, chain.no_repeat_ngram)
    if chain.eos_ids and chain.min_new_tokens:
        early = torch.where(places.generated < chain.min_new_tokens, -torch.inf, 0.0).to(rows.dtype)[:, None]
        out = _shifted(out, chain.eos_ids, early)
    if chain.banned_ids:
        out = _shifted(out, chain.banned_ids, torch.full_like(out[:, :1], -torch.inf))
    return out[:, : kind.vocab_size]


def _penalise(out: Tensor, rows: Tensor, history: Tensor, lengths: Tensor, chain: Constraints) -> None:
    """Negative scores × penalty, others ÷ penalty, for all ids of the prefix, or of the window at its end."""
    penalty, at = chain.repetition_penalty, torch.arange(history.shape[1], device=rows.device)
    if chain.repetition_window:  # what lies before repeats its first one
        at = torch.maximum(at, lengths - chain.repetition_window)
    seen = history.gather(1, torch.minimum(at, lengths - 1))  # what lies beyond repeats the last one
    scores = rows.gather(1, seen)
    out.scatter_(1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _ban_repeats(out: Tensor, history: Tensor, lengths: Tensor, ngram: int) -> None:
    """−inf for every token that followed an earlier occurrence of the prefix's last ngram − 1 tokens."""
    starts = history.shape[1] - ngram + 1
    if starts < 1:
        return
    repeats = torch.arange(starts, device=out.device) <= lengths - ngram
    for n in range(ngram - 1):
        tail = history.gather(1, torch.clamp(lengths - ngram + 1 + n, min=0))
        repeats = repeats & (history[:, n : n + starts] == tail)
    bans = torch.where(repeats, -torch.inf, torch.inf).to(out.dtype)
    out.scatter_reduce_(1, history[:, ngram - 1 :], bans, "amin")


def _shifted(rows: Tensor, ids: tuple[int, ...], by: Tensor) -> Tensor:
    """A copy with `by` [R, 1], 0 or −inf, added to the columns `ids`."""
    at = _columns(ids, rows.shape[1], rows.device)
    return rows.index_copy(1, at, rows.index_select(1, at) + by)


def held_columns(kind: Kind, width: int, device: torch.device) -> list[Tensor]:
    """What `choose` reads for rows [R, width] of a kind, and a captured graph must keep."""
    return [_columns(ids, width, device) for ids in (kind.constraints.eos_ids, kind.constraints.banned_ids)]


@lru_cache(maxsize=64)  # a copy from the host cannot be captured in a CUDA graph
def _columns(ids: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    return torch.tensor([token for token in ids if token < width], dtype=torch.long, device=device)


def filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities float32 [R, V] after temperature, top-k, top-p and min-p; −inf for what is left out."""
    scores = tempered(scores, sampling.temperature)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = torch.topk(scores, sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1.0:
        best = scores.sort(-1, descending=True)
        mass = torch.softmax(best.values, -1)
        left_out = mass.cumsum(-1) - mass >= sampling.top_p
        left_out[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(left_out).scatter(1, best.indices, left_out), -torch.inf)
    if sampling.min_p > 0.0:
        mass = torch.softmax(scores, -1)
        scores = scores.masked_fill(mass < sampling.min_p * mass.amax(-1, keepdim=True), -torch.inf)
    return torch.log_softmax(scores, -1)


def tempered(rows: Tensor, temperature: float) -> Tensor:
    """As sampling.tempered, row by row."""
    divisor = max(temperature, COLDEST) if temperature else 1.0
    scores, best = rows / divisor, rows.amax(-1, keepdim=True)
    return torch.where(torch.isfinite(scores.amax(-1, keepdim=True)), scores, (rows - best) / divisor)


def measured(rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """float64 [R, 4]: the fields of `Signals` for `tokens` int64 [R, 1], from raw rows (gate.measure)."""
    logq = torch.log_softmax(tempered(rows.float(), temperature), -1)
    best = torch.topk(logq, 2).values.exp()
    entropy = torch.special.entr(logq.exp()).sum(-1, keepdim=True)
    columns = [entropy, best[:, :1] - best[:, 1:], 1.0 - best[:, :1], -logq.gather(-1, tokens)]
    return torch.cat(columns, -1).double()


def signals(row: Seq[float]) -> Signals:
    """A row of `measured`, read back."""
    entropy, margin, maxprob, logprob = row
    return Signals(entropy, margin, maxprob, logprob)


def _noisy(logp: Tensor, keys: Tensor) -> Tensor:
    """float64 [R, V]: log-probabilities and the Gumbel noise of each row's key (sampling.uniforms says how)."""
    tokens = torch.arange(1, logp.shape[-1] + 1, device=logp.device)
    x = keys[:, None] + tokens * _signed(int(GOLDEN_GAMMA))
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    u = _shift(x ^ _shift(x, 31), 11).double() * 2.0**-53 + 2.0**-54
    return logp.double() - torch.log(-torch.log(torch.clamp(u, max=1.0 - 2.0**-53)))


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: int64 has the bits of uint64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits
