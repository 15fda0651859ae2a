"""Batched sampling on the device of the logits, without host synchronisation.

Each row gets the token of `Policy.distribution(…).token`. The logits processors are stateless here: they read the
prefix from `history`, the ids in the KV slot up to the row's length. A roll-back of the slot is therefore enough.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.policy import BatchKey, Policy
from outrider.sampling.sampler import (
    GOLDEN_GAMMA,
    MIN_TEMPERATURE,
    SampledToken,
    SamplingParams,
    Signals,
    position_key,
    position_keys,
)


@dataclass(frozen=True)
class RowContext:
    """The contexts of R rows.

    lengths: int64 [R], tokens of the prefix. generated: int64 [R], those after the prompt. keys: int64 [R], of the
    noise. history: integers [R, ≥ lengths], the prefix's ids, or None if the batch key does not need them.
    """

    lengths: Tensor
    generated: Tensor
    keys: Tensor
    history: Tensor | None


_NOTHING = torch.zeros(0, dtype=torch.int64)
NO_CONTEXT = RowContext(_NOTHING, _NOTHING, _NOTHING, None)  # of greedy rows without logits processors


def row_context(policy: Policy, length: int) -> tuple[int, int, int]:
    """Return length, generated and key for the row that follows a prefix of `length` tokens."""
    sampling = policy.sampling
    key = 0 if sampling.greedy else int(np.uint64(position_key(sampling.seed, length)).astype(np.int64))
    return length, length - policy.processors.prompt_length, key


def row_contexts(policies: Seq[Policy], lengths: Seq[range]) -> np.ndarray:
    """Return `row_context` for each policy at each of its lengths, int64 [R, 3]."""
    counts = [len(each) for each in lengths]
    positions = np.concatenate([np.arange(each.start, each.stop) for each in lengths])
    prompts = np.repeat([policy.processors.prompt_length for policy in policies], counts)
    keys = np.zeros_like(positions)
    if not policies[0].sampling.greedy:
        seeds = np.repeat(np.array([policy.sampling.seed for policy in policies], dtype=np.uint64), counts)
        keys = position_keys(seeds, positions.astype(np.uint64)).astype(np.int64)
    return np.stack([positions, positions - prompts, keys], -1)


Top2 = Callable[[Tensor], Tensor]


def torch_top2(logits: Tensor) -> Tensor:
    """Return float64 [R, 3] for rows [R, V]: index of the first maximum, the maximum, its margin to the runner-up.

    NaN counts as the maximum.
    """
    best = logits.argmax(-1, keepdim=True)
    top, others = logits.gather(-1, best), logits.scatter(-1, best, -torch.inf).amax(-1, keepdim=True)
    return torch.cat([best.double(), top.double(), top.double() - others.double()], -1)


def sample_batch(logits: Tensor, batch_key: BatchKey, context: RowContext, top2: Top2 = torch_top2) -> Tensor:
    """Return float64 [R, 3]: token, score (not finite if no token can be chosen), margin to the runner-up.

    logits: [R, ≥ vocab_size] in any floating format. top2: `torch_top2` or a faster equivalent.
    """
    scores = process_logits(logits, batch_key, context)
    if batch_key.sampling.greedy:
        return top2(scores)
    drawn = torch_top2(_add_gumbel_noise(filter_logprobs(scores.float(), batch_key.sampling), context.keys))
    best = scores.amax(-1, keepdim=True).double()  # NaN if the row has one
    return torch.cat([drawn[:, :1], best, batch_key.sampling.temperature * drawn[:, 2:]], -1)


def to_sampled_tokens(sampled: Seq[Seq[float]]) -> list[SampledToken]:
    """Convert rows of `sample_batch` on the host. Callers validate the tokens that they use."""
    return [SampledToken(int(token), top2, score) for token, score, top2 in sampled]


def process_logits(logits: Tensor, batch_key: BatchKey, context: RowContext) -> Tensor:
    """Apply the logits processors to logits [R, ≥ vocab_size]. Return [R, vocab_size], −inf where banned.

    The result is a view of `logits` if no processor is active, otherwise a float32 copy.
    """
    processors = batch_key.processors
    if not batch_key.has_processors:
        return logits[:, : batch_key.vocab_size]
    out = logits = logits.float()
    if processors.logit_bias:
        biases = _column_values(processors.logit_bias, logits.shape[1], logits.device)
        out = logits = _add_to_columns(logits, _biased_ids(processors), biases)
    if batch_key.needs_history:
        assert context.history is not None
        out = logits.clone()
        history, lengths = context.history.long(), context.lengths[:, None]
        if processors.repetition_penalty != 1.0:
            _apply_repetition_penalty(out, logits, history, lengths, processors)
        if processors.counts_output:
            out = _subtract_penalties(out, history, lengths, context.generated[:, None], processors)
        if processors.no_repeat_ngram:
            _ban_repeated_ngrams(out, history, lengths, processors.no_repeat_ngram)
    if processors.eos_ids and processors.min_new_tokens:
        early = torch.where(context.generated < processors.min_new_tokens, -torch.inf, 0.0).to(logits.dtype)[:, None]
        out = _add_to_columns(out, processors.eos_ids, early)
    if processors.banned_ids:
        out = _add_to_columns(out, processors.banned_ids, torch.full_like(out[:, :1], -torch.inf))
    return out[:, : batch_key.vocab_size]


def _apply_repetition_penalty(
    out: Tensor, logits: Tensor, history: Tensor, lengths: Tensor, processors: LogitsProcessors
) -> None:
    """Multiply negative scores by the penalty and divide others by it, for the ids of the prefix or of its window.

    Repeated ids are harmless: each writes the same score, computed from the raw one.
    """
    penalty, index = processors.repetition_penalty, torch.arange(history.shape[1], device=logits.device)
    if processors.repetition_window:  # positions before the window repeat its first id
        index = torch.maximum(index, lengths - processors.repetition_window)
    seen = history.gather(1, torch.minimum(index, lengths - 1))  # positions after the prefix repeat its last id
    scores = logits.gather(1, seen)
    out.scatter_(1, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def _subtract_penalties(
    scores: Tensor, history: Tensor, lengths: Tensor, generated: Tensor, processors: LogitsProcessors
) -> Tensor:
    """Apply frequency and presence penalty for the last `generated` ids of the prefix."""
    index = torch.arange(history.shape[1], device=scores.device)
    is_output = ((index >= lengths - generated) & (index < lengths)).to(scores.dtype)
    counts = torch.zeros_like(scores).scatter_add_(1, history, is_output)
    scores = scores - counts * processors.frequency_penalty
    return scores - (counts > 0).to(scores.dtype) * processors.presence_penalty


def _ban_repeated_ngrams(out: Tensor, history: Tensor, lengths: Tensor, ngram: int) -> None:
    """Ban every token that followed an earlier occurrence of the prefix's last ngram − 1 tokens."""
    starts = history.shape[1] - ngram + 1
    if starts < 1:
        return
    repeats = torch.arange(starts, device=out.device) <= lengths - ngram
    for n in range(ngram - 1):
        tail = history.gather(1, torch.clamp(lengths - ngram + 1 + n, min=0))
        repeats = repeats & (history[:, n : n + starts] == tail)
    bans = torch.where(repeats, -torch.inf, torch.inf).to(out.dtype)
    out.scatter_reduce_(1, history[:, ngram - 1 :], bans, "amin")


def _add_to_columns(logits: Tensor, ids: tuple[int, ...], offset: Tensor) -> Tensor:
    """Return a copy with `offset`, [R, 1] or [columns], added to the columns `ids` below the width."""
    index = _column_index(ids, logits.shape[1], logits.device)
    return logits.index_copy(1, index, logits.index_select(1, index) + offset)


def tensors_to_keep(batch_key: BatchKey, width: int, device: torch.device) -> list[Tensor]:
    """Return the tensors that `sample_batch` reads for rows [R, width] and that a captured CUDA graph must keep."""
    processors = batch_key.processors
    columns = processors.eos_ids, processors.banned_ids, _biased_ids(processors)
    values = _column_values(processors.logit_bias, width, device)
    return [*(_column_index(ids, width, device) for ids in columns), values]


def _biased_ids(processors: LogitsProcessors) -> tuple[int, ...]:
    return tuple(token for token, _ in processors.logit_bias)


@lru_cache(maxsize=64)  # a copy from the host cannot be captured in a CUDA graph
def _column_index(ids: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    return torch.tensor([token for token in ids if token < width], dtype=torch.long, device=device)


@lru_cache(maxsize=64)
def _column_values(logit_bias: tuple[tuple[int, float], ...], width: int, device: torch.device) -> Tensor:
    """Return the biases of `_column_index`, float32 [columns]."""
    return torch.tensor([bias for token, bias in logit_bias if token < width], dtype=torch.float32, device=device)


def filter_logprobs(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Return log-probabilities float32 [R, V] after temperature, top-k, top-p and min-p, −inf for excluded tokens."""
    scores = apply_temperature(scores, sampling.temperature)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = torch.topk(scores, sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1.0:
        best = scores.sort(-1, descending=True)
        mass = torch.softmax(best.values, -1)
        excluded = mass.cumsum(-1) - mass >= sampling.top_p
        excluded[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(excluded).scatter(1, best.indices, excluded), -torch.inf)
    if sampling.min_p > 0.0:
        mass = torch.softmax(scores, -1)
        scores = scores.masked_fill(mass < sampling.min_p * mass.amax(-1, keepdim=True), -torch.inf)
    return torch.log_softmax(scores, -1)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Apply the temperature to each row as `sampler.apply_temperature` does."""
    divisor = max(temperature, MIN_TEMPERATURE) if temperature else 1.0
    scores, best = logits / divisor, logits.amax(-1, keepdim=True)
    return torch.where(torch.isfinite(scores.amax(-1, keepdim=True)), scores, (logits - best) / divisor)


def batched_signals(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return float64 [R, 4], the fields of `Signals` for `tokens` int64 [R, 1], from raw logits.

    The definitions are those of `decoding.gate.compute_signals`.
    """
    logq = torch.log_softmax(apply_temperature(logits.float(), temperature), -1)
    best = torch.topk(logq, 2).values.exp()
    entropy = torch.special.entr(logq.exp()).sum(-1, keepdim=True)
    columns = [entropy, best[:, :1] - best[:, 1:], 1.0 - best[:, :1], -logq.gather(-1, tokens)]
    return torch.cat(columns, -1).double()


def to_signals(row: Seq[float]) -> Signals:
    """Convert a row of `batched_signals` on the host."""
    return Signals(*row)


def _add_gumbel_noise(logp: Tensor, keys: Tensor) -> Tensor:
    """Return float64 [R, V]: log-probabilities plus the Gumbel noise of each row's key, as in `sampler.uniforms`."""
    tokens = torch.arange(1, logp.shape[-1] + 1, device=logp.device)
    x = keys[:, None] + tokens * _as_int64(int(GOLDEN_GAMMA))
    x = (x ^ _shift_right(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _as_int64(0x94D049BB133111EB)
    u = _shift_right(x ^ _shift_right(x, 31), 11).double() * 2.0**-53 + 2.0**-54
    return logp.double() - torch.log(-torch.log(torch.clamp(u, max=1.0 - 2.0**-53)))


def _shift_right(x: Tensor, offset: int) -> Tensor:
    """Shift right logically: the int64 holds the bits of a uint64."""
    return (x >> offset) & ((1 << (64 - offset)) - 1)


def _as_int64(bits: int) -> int:
    """Return the int64 with the given 64-bit pattern."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits
