"""Forwards of the fused model as captured CUDA graphs, and on-device sampling.

Results stay on the device until they are complete. The host reads sampled tokens back once per verification batch, and
once per drafted block. A verification batch is launched without waiting for its results, and a later batch may take its
sampled tokens from the device, before the host knows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.engines.base import LAST_SAMPLED, SequenceInput
from outrider.engines.torch.cuda_graphs import CudaGraphCache, Run
from outrider.engines.torch.fused_model import (
    MAX_CAPTURED_TOKENS,
    MAX_TOKENS,
    Batch,
    BatchShape,
    FusedModel,
    Media,
    pack_batch,
)
from outrider.engines.torch.kv_cache import SlotKVCache
from outrider.sampling.batched_sampler import (
    NO_CONTEXT,
    RowContext,
    batched_signals,
    row_context,
    row_contexts,
    sample_batch,
    tensors_to_keep,
    to_sampled_tokens,
    to_signals,
)
from outrider.sampling.policy import BatchKey, Policy
from outrider.sampling.sampler import SampledRows

MAX_ROWS = 64  # rows that processors or sampling take at once: each needs several copies of itself


@dataclass(frozen=True)
class _DecodeStep:
    """A forward that samples a token from its only row. with_signals: with the token's gate signals."""

    shape: BatchShape
    batch_key: BatchKey
    with_signals: bool


class ModelRunner:
    """Runner of a fused model over a KV cache. The caller moves the cache's lengths."""

    def __init__(self, model: FusedModel, device: torch.device, graphs: CudaGraphCache | None = None) -> None:
        self._model, self._device = model, device
        self._graphs = graphs or CudaGraphCache(device)
        self._batches: dict[BatchShape, Batch] = {}
        self._row_context = torch.zeros(1, 3, dtype=torch.int64, device=device)  # of a decode step's row
        self._last_sampled = torch.zeros(0, dtype=torch.int32, device=device)  # [slots]
        self._tensors: tuple[Tensor | None, ...] = (None,) * 4  # those of `FusedModel.prepare` in the captured graphs

    @staticmethod
    def fits(inputs: Seq[SequenceInput]) -> bool:
        """Return whether a batch is short enough for a captured graph."""
        return sum(len(seq_input.ids) for seq_input in inputs) <= MAX_CAPTURED_TOKENS

    def prepare(self, cache: SlotKVCache) -> None:
        """Adapt to the cache's present layout. Graphs are dropped if tensors that they read were replaced."""
        tensors = self._model.prepare(cache)
        if any(now is not before for now, before in zip(tensors, self._tensors, strict=True)):
            self._graphs.clear()
            self._tensors = tensors

    def release_cache(self) -> None:
        """Release all references to a cache that was replaced."""
        self._graphs.clear()
        self._batches.clear()
        self._tensors = (None,) * 4

    def logits(
        self,
        inputs: Seq[SequenceInput],
        starts: Seq[int],
        cache: SlotKVCache,
        span: int,
        media: Media | None = None,
    ) -> Tensor:
        """Return the logits of all inputs, [≥ rows, V] in the model's dtype, valid until the next call.

        starts: cached length of each input's slot. span: positions that the longest cache holds afterwards.
        """
        self.prepare(cache)
        shape = BatchShape.of(
            [len(seq_input.ids) for seq_input in inputs], sum(seq_input.logits_to_keep for seq_input in inputs), span
        )
        is_captured = media is None and self.fits(inputs)
        batch = self._batch(shape) if is_captured else Batch.allocate(self._device, shape)

        def execute() -> Tensor:
            return self._model.forward(batch, cache, media)

        def forward() -> Run:
            self._pad(batch)
            return execute

        run = self._graphs.get_or_capture(shape, forward) if is_captured else execute
        _copy_into(batch.all, pack_batch(shape, inputs, starts, [cache.base(each.slot) for each in inputs]))
        self.fill_last_sampled(batch.ids, inputs, accumulate((len(each.ids) for each in inputs[:-1]), initial=0))
        return run()

    # Drafting -----------------------------------------------------------------------------------------------

    def draft(
        self,
        seq_input: SequenceInput,
        count: int,
        policy: Policy,
        cache: SlotKVCache,
        start: int,
        *,
        with_signals: bool,
    ) -> list[Proposal]:
        """Feed the input from position `start`, then sample and feed a token, `count` times, with one read-back.

        Returns the tokens up to an EOS. with_signals: with the gate signals of each.
        """
        self.prepare(cache)
        base, ids = cache.base(seq_input.slot), seq_input.ids
        first, span = start + len(ids), start + len(ids) + count - 1
        head, step = (_DecodeStep(BatchShape.of([n], 1, span), policy.batch_key, with_signals) for n in (len(ids), 1))
        run, run_step = self._get_step(head, cache), self._get_step(step, cache)
        _copy_into(self._batch(head.shape).all, pack_batch(head.shape, [seq_input], [start], [base]))
        _copy_into(self._row_context, torch.tensor([row_context(policy, first)]))
        found = [run().clone()]
        if count > 1:  # while the device is busy
            self._prepare_next_token(head, step, base, first)
        for n in range(1, count):
            if not policy.sampling.greedy:
                _copy_into(self._row_context, torch.tensor([row_context(policy, first + n)]))
            found.append(run_step().clone())
        return _proposals(torch.cat(found).tolist(), first, policy.processors.eos_ids, with_signals=with_signals)

    def _prepare_next_token(self, head: _DecodeStep, step: _DecodeStep, base: int, first: int) -> None:
        """Let the single-token batch continue after the head, unless both share one batch."""
        if head.shape != step.shape:
            batch = self._batch(step.shape)
            sampled = self._batch(head.shape).ids[:1].clone()
            _copy_into(batch.all, pack_batch(step.shape, [SequenceInput(0, [0], 1)], [first], [base]))
            batch.ids[:1].copy_(sampled)

    def _get_step(self, step: _DecodeStep, cache: SlotKVCache) -> Run:
        batch = self._batch(step.shape)

        def forward() -> Run:
            self._pad(batch)
            self._row_context.fill_(1)
            kept = tensors_to_keep(step.batch_key, self._model.row_count, self._device)
            return lambda: (self._sample_step(step, batch, cache), kept)[0]

        return self._graphs.get_or_capture(step, forward)

    def _sample_step(self, step: _DecodeStep, batch: Batch, cache: SlotKVCache) -> Tensor:
        """Return a row of `sample_batch`, followed by one of `batched_signals` if requested: float64 [1, 3 or 7]."""
        rows, batch_key = self._model.forward(batch, cache)[:1], step.batch_key
        history = None
        if batch_key.needs_history:
            history = cache.token_ids(batch.bases[:1], step.shape.span)
        context = RowContext(self._row_context[:, 0], self._row_context[:, 1], self._row_context[:, 2], history)
        sampled = sample_batch(rows, batch_key, context, self._model.top2)
        if step.with_signals:
            cut = rows[:, : batch_key.vocab_size]
            signals = batched_signals(cut, sampled[:, :1].long(), batch_key.sampling.temperature)
            sampled = torch.cat([sampled, signals], -1)
        self._advance_batch(batch, sampled)
        return sampled

    def _advance_batch(self, batch: Batch, sampled: Tensor) -> None:
        """Replace the batch's token by the sampled one, one position further."""
        batch.ids[:1].copy_(sampled[0, :1])
        batch.positions[:1].add_(1)
        batch.starts.add_(1)
        self._row_context[:, :2].add_(1)

    # Verification -------------------------------------------------------------------------------------------

    def sample(
        self, logits: Tensor, inputs: Seq[SequenceInput], starts: Seq[int], policies: Seq[Policy], cache: SlotKVCache
    ) -> PendingSamples:
        """Start to sample a token from each row. logits: rows of all inputs, in their order."""
        firsts = [0, *accumulate(each.logits_to_keep for each in inputs)][:-1]
        sampled_inputs = [_SampledInput(*parts) for parts in zip(inputs, starts, policies, firsts, strict=True)]
        groups: dict[BatchKey, list[_SampledInput]] = {}
        for member in sampled_inputs:
            groups.setdefault(member.policy.batch_key, []).append(member)
        parts = [self._sample_group(logits, members, cache) for members in groups.values()]
        sampled = parts[0] if len(parts) == 1 else torch.cat(parts)
        ordered = [member for members in groups.values() for member in members]
        ends = list(accumulate(member.seq_input.logits_to_keep for member in ordered))
        self._store_last(sampled, [end - 1 for end in ends], [member.seq_input.slot for member in ordered])
        rows = {member.first: slice(end - len(member.rows), end) for member, end in zip(ordered, ends, strict=True)}
        return PendingSamples(sampled, [rows[first] for first in firsts])

    def _store_last(self, sampled: Tensor, rows: Seq[int], slots: Seq[int]) -> None:
        """Keep the last token that was sampled for each slot, for inputs of `LAST_SAMPLED`."""
        if (missing := max(slots) + 1 - len(self._last_sampled)) > 0:
            self._last_sampled = torch.cat([self._last_sampled, self._last_sampled.new_zeros(missing)])
        index = self._upload([rows, slots])
        self._last_sampled.index_copy_(0, index[1], sampled[:, 0].index_select(0, index[0]).int())

    def fill_last_sampled(self, ids: Tensor, inputs: Seq[SequenceInput], offsets: Iterable[int]) -> None:
        """Replace each `LAST_SAMPLED` in ids (contiguous integers), in which input n begins at offsets[n]."""
        places = [(at, each.slot) for at, each in zip(offsets, inputs, strict=True) if each.ids[0] == LAST_SAMPLED]
        if places:
            index = self._upload([list(column) for column in zip(*places, strict=True)])
            ids.view(-1).index_copy_(0, index[0], self._last_sampled.index_select(0, index[1]).to(ids.dtype))

    def _sample_group(self, logits: Tensor, members: Seq[_SampledInput], cache: SlotKVCache) -> Tensor:
        """Run `sample_batch` for inputs with equal batch keys. Return float64 [rows, 3]."""
        batch_key, rows = members[0].policy.batch_key, [row for member in members for row in member.rows]
        part = logits[: len(rows)] if rows == list(range(len(rows))) else logits[self._upload(rows)]
        if batch_key.sampling.greedy and not batch_key.has_processors:
            return sample_batch(part, batch_key, NO_CONTEXT, self._model.top2)
        contexts = row_contexts([member.policy for member in members], [member.lengths for member in members])
        entries, history = self._upload(contexts), None
        if batch_key.needs_history:
            bases = [cache.base(member.seq_input.slot) for member in members for _ in member.lengths]
            history = cache.token_ids(self._upload(bases), max(member.lengths[-1] for member in members))
        sampled = []
        for cut in (slice(n, n + MAX_ROWS) for n in range(0, len(rows), MAX_ROWS)):
            at = entries[cut]
            context = RowContext(at[:, 0], at[:, 1], at[:, 2], None if history is None else history[cut])
            sampled.append(sample_batch(part[cut], batch_key, context, self._model.top2))
        return torch.cat(sampled)

    def _upload(self, numbers: Seq[int] | Seq[Seq[int]] | np.ndarray) -> Tensor:
        """Return integers as an int64 tensor on the device."""
        return _pin_if_cuda(torch.as_tensor(numbers), self._device).to(self._device, non_blocking=True)

    def _batch(self, shape: BatchShape) -> Batch:
        if shape not in self._batches:
            self._batches[shape] = Batch.allocate(self._device, shape)
        return self._batches[shape]

    @staticmethod
    def _pad(batch: Batch) -> None:
        """Fill the batch with padding, so that a forward over it writes nothing."""
        _copy_into(batch.all, pack_batch(batch.shape, [], [], []))


class PendingSamples:
    """Sampled tokens on their way to the host. rows: of each input, in `sampled`, float64 [R, 3] of `sample_batch`."""

    def __init__(self, sampled: Tensor, rows: Seq[slice]) -> None:
        self._rows = rows
        self._copied: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._sampled = torch.empty_like(sampled, device="cpu", pin_memory=True)
            self._sampled.copy_(sampled, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._sampled = sampled

    def ready(self) -> bool:
        """Return whether the tokens have arrived."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def result(self) -> list[SampledRows]:
        """Wait for the tokens, and return those of each input."""
        if self._copied is not None:
            self._copied.synchronize()
        sampled = self._sampled.numpy()
        tokens, scores, margins = (
            sampled[:, 0].astype(np.int64).tolist(),
            sampled[:, 1].tolist(),
            sampled[:, 2].tolist(),
        )
        return [SampledRows(tokens[rows], margins[rows], scores[rows]) for rows in self._rows]


def split_prefill(inputs: Seq[SequenceInput]) -> Iterator[list[SequenceInput]]:
    """Yield the forwards that compute a batch: parts of long prefills while it exceeds `MAX_TOKENS`, then the rest.

    The rest has all positions with logits to keep, even if they are more.
    """
    rest = list(inputs)
    while (total := sum(len(each.ids) for each in rest)) > MAX_TOKENS:
        n = max(range(len(rest)), key=lambda i: len(rest[i].ids) - rest[i].logits_to_keep)
        longest = rest[n]
        count = min(total // -(-total // MAX_TOKENS), len(longest.ids) - longest.logits_to_keep)
        if not count:
            break
        yield [SequenceInput(longest.slot, longest.ids[:count], 1)]
        rest[n] = SequenceInput(longest.slot, longest.ids[count:], longest.logits_to_keep)
    yield rest


@dataclass(frozen=True)
class _SampledInput:
    """One input of a batch to sample from. first: index of its first row among the rows of all inputs."""

    seq_input: SequenceInput
    start: int
    policy: Policy
    first: int

    @property
    def rows(self) -> range:
        """Indices of the input's rows."""
        return range(self.first, self.first + self.seq_input.logits_to_keep)

    @property
    def lengths(self) -> range:
        """Length of the sequence that each row continues."""
        end = self.start + len(self.seq_input.ids) + 1
        return range(end - self.seq_input.logits_to_keep, end)


def _copy_into(target: Tensor, numbers: Tensor) -> None:
    target.copy_(_pin_if_cuda(numbers, target.device), non_blocking=True)


def _pin_if_cuda(numbers: Tensor, device: torch.device) -> Tensor:
    """Pin the tensor's memory for a GPU, which then copies without synchronisation."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def _proposals(found: list[list[float]], first: int, eos_ids: tuple[int, ...], *, with_signals: bool) -> list[Proposal]:
    """Return the proposals up to an EOS. Tokens behind it are dropped."""
    out: list[Proposal] = []
    for n, (sampled, row) in enumerate(zip(to_sampled_tokens([row[:3] for row in found]), found, strict=True)):
        out.append(Proposal(sampled.validated(first + n).token, to_signals(row[3:]) if with_signals else None))
        if sampled.token in eos_ids:
            break
    return out
