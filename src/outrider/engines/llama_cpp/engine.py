"""The GGUF engine: llama.cpp in this process, on CPUs, with the weights quantised as they are.

A slot is a sequence of a llama.cpp context. Sequences of one context are read in one batch. Contexts do not grow. For
more slots, a further context doubles their number. For longer sequences, a longer context replaces an old one and
copies its cache, bit for bit.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engines.base import Prompt, SequenceInput, check_inputs, check_truncation, grow_to_fit, plan_kv_budget
from outrider.engines.llama_cpp.context import (
    CELL_PADDING,
    N_BATCH,
    N_OUTPUTS,
    BatchToken,
    LlamaContext,
    LlamaModel,
    max_sequences,
    pad_length,
)
from outrider.engines.locking import Locked, check_process, exclusive
from outrider.engines.prefix_cache import PrefixCache
from outrider.engines.self_test import SelfTest
from outrider.engines.vocabulary import Vocabulary, check_eos_ids, warn_if_eos_differs
from outrider.errors import ModelError, OutriderError, PromptError, StateError

SELF_TEST = SelfTest(head=32, tail=6, step=3, tolerance=0.5)
IDENTITY_SAMPLES, IDENTITY_SAMPLE_BYTES = 4096, 256  # of a file, for its identity
IDENTITY_HEAD_BYTES = 2**23  # names, shapes, vocabulary: most files' metadata


class GgufEngine(Vocabulary, Locked):
    """A GGUF file in llama.cpp, on the CPU, with KV slots. `Engine` in base.py has the contract.

    Logits are copies and stay valid. Calls from several threads take turns. threads: of one call, torch's by default.

    Raises:
        ModelError: the file is unreadable, is not a decoder-only language model, or fails the self-test as its cache
            cannot be truncated. The message names the file.
    """

    audio = None
    device = "cpu"

    def __init__(self, path: str, tokenizer: Any = None, name: str | None = None, threads: int | None = None) -> None:
        check_process()
        self.name = name or path
        self.lock = threading.RLock()
        self._path, self._threads = Path(path), threads or torch.get_num_threads()
        self._model = LlamaModel(path)
        self.tokenizer = tokenizer if tokenizer is not None else self._read_tokenizer()
        self.dtype = self._model.quantisation
        self.row_count = self._model.n_vocab
        self.eos_ids = check_eos_ids(self.name, self._model.eos_ids, self.row_count, "GGUF metadata")
        warn_if_eos_differs(self.name, self.eos_ids, self.tokenizer, "GGUF metadata")
        self.max_length: int | None = self._model.n_ctx_train
        self._max_slots: int | None = None
        self._lengths: dict[int, int] = {}  # of the open slots
        self.prefix_cache = PrefixCache()
        self._contexts = [self._new_context(2, SELF_TEST.head + SELF_TEST.tail)]
        self.noise = self._run_self_test()
        self._contexts = [self._new_context(1, CELL_PADDING)]

    def _read_tokenizer(self) -> Any:
        """Return the tokenizer that transformers reads from the file, or None without a vocabulary."""
        if not self._model.has_vocabulary:
            return None
        from transformers import AutoTokenizer
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

        kind = self._model.architecture
        # Without its type, transformers first reads the whole file for a configuration: 10 s instead of 1.
        hint = {"tokenizer_type": kind} if kind in TOKENIZER_MAPPING_NAMES else {}
        try:
            return AutoTokenizer.from_pretrained(
                str(self._path.parent), gguf_file=self._path.name, trust_remote_code=False, **hint
            )
        except Exception as error:  # for a broken vocabulary the tokenizers library raises nothing narrower
            raise ModelError(f"{self.name}: cannot make a tokenizer of its vocabulary: {error}") from error

    @cached_property
    def identity(self) -> str:
        """Return a hash of the file's size, its metadata, and samples of its weights."""
        size = self._path.stat().st_size
        digest = hashlib.sha256(f"llama.cpp {size}".encode())
        with self._path.open("rb") as file:
            digest.update(file.read(IDENTITY_HEAD_BYTES))
            for start in range(IDENTITY_HEAD_BYTES, size, max(1, size // IDENTITY_SAMPLES)):
                file.seek(start)
                digest.update(file.read(IDENTITY_SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    # Memory -------------------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV caches hold now."""
        return self.position_bytes * sum(context.sequences * context.length for context in self._contexts)

    @exclusive
    def reserve(self, budget: int, max_length: int) -> int:
        """Limit keys and values to `budget` bytes, for sequences of up to `max_length` positions.

        Returns the number of slots. All are allocated at once.

        Raises:
            ModelError: the budget does not hold one sequence.
            StateError: slots are open.
        """
        self.prefix_cache.clear(self)
        limit = self._model.n_ctx_train
        found, length = plan_kv_budget(
            self.name, len(self._lengths), budget, max_length, limit, lambda n: self.position_bytes * pad_length(n)
        )
        slots = min(found, max_sequences())
        self._contexts = [self._new_context(slots, length)]
        self._max_slots, self.max_length = slots, length
        return slots

    def _new_context(self, sequences: int, length: int) -> LlamaContext:
        return LlamaContext(self._model, sequences, length, self._threads)

    def _locate(self, slot: int) -> tuple[int, int]:
        """Return the index of a slot's context, and of its sequence there."""
        for number, context in enumerate(self._contexts):
            if slot < context.sequences:
                return number, slot
            slot -= context.sequences
        raise AssertionError("slots are opened in contexts")

    def _ensure_slots(self, slots: int) -> None:
        """Add contexts until there are `slots` sequences.

        A context is never replaced by one of more sequences, since states fit only a context with equally many.
        """
        while (total := sum(context.sequences for context in self._contexts)) < slots:
            self._contexts.append(self._new_context(min(total, max_sequences()), CELL_PADDING))

    def _ensure_length(self, number: int, length: int) -> None:
        """Replace a context by a longer one, doubled until its sequences hold `length` positions.

        Both contexts are in memory while the cache is copied.
        """
        old = self._contexts[number]
        if length <= old.length:
            return
        longer = self._new_context(old.sequences, grow_to_fit(old.length, length))
        for slot, cached_len in self._lengths.items():
            at, sequence = self._locate(slot)
            if cached_len and at == number:
                longer.restore(sequence, old.state(sequence))
        self._contexts[number] = longer

    # Slots --------------------------------------------------------------------------------------------------

    @exclusive
    def open(self, prompt: Prompt) -> int:
        """Return a free slot for a sequence that will begin with `prompt`.

        Raises:
            PromptError: the prompt has a recording.
            StateError: all slots are in use.
        """
        self._check_prompt(prompt)
        slot = next(n for n in count() if n not in self._lengths)
        if slot == self._max_slots:
            raise StateError(f"all {self._max_slots} slots of the cache are in use")
        self._ensure_slots(slot + 1)
        self._lengths[slot] = 0
        return slot

    def reopen(self, slot: int, prompt: Prompt) -> None:
        """Let an open slot continue as a sequence that begins with `prompt`. Raises: as `open`."""
        self._check_prompt(prompt)
        self.kv_len(slot)

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.has_audio:
            raise PromptError(f"{self.name} takes no audio")

    @exclusive
    def close(self, slot: int) -> None:
        """Release the slot."""
        self.kv_len(slot)
        try:
            self.truncate(slot, 0)
        finally:
            del self._lengths[slot]

    def kv_len(self, slot: int) -> int:
        """Return how many positions the slot's cache holds."""
        if slot not in self._lengths:
            raise StateError(f"slot {slot} is not open")
        return self._lengths[slot]

    @exclusive
    def truncate(self, slot: int, length: int) -> None:
        """Roll the slot back to its first `length` positions."""
        cached_len = self.kv_len(slot)
        check_truncation(slot, length, cached_len)
        if length < cached_len:
            self._truncate_context(slot, length)

    def _truncate_context(self, slot: int, length: int) -> None:
        number, sequence = self._locate(slot)
        if not self._contexts[number].truncate(sequence, length):
            raise ModelError(f"{self.name} ({self._model.architecture}): its cache cannot be truncated")
        self._lengths[slot] = length

    # Forward ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], logits_to_keep: int | None = None) -> Tensor:
        """Append `ids` to the slot. Return the logits after the last `logits_to_keep`, float32 [rows, V]."""
        return self.forward_many([SequenceInput(slot, ids, len(ids) if logits_to_keep is None else logits_to_keep)])[0]

    @exclusive
    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        """Run `forward` for several slots at once. If it fails, all slots are as before.

        Raises:
            PromptError: a slot would pass `max_length`.
        """
        check_inputs(inputs)
        longest = max(self.kv_len(seq_input.slot) + len(seq_input.ids) for seq_input in inputs)
        if self.max_length is not None and longest > self.max_length:
            raise PromptError(f"a sequence of {longest} positions: {self.name} holds at most {self.max_length} of each")
        outputs = [torch.empty(seq_input.logits_to_keep, self.row_count, dtype=torch.float32) for seq_input in inputs]
        for seq_input in inputs:  # before anything is read
            self._ensure_length(self._locate(seq_input.slot)[0], self._lengths[seq_input.slot] + len(seq_input.ids))
        try:
            for number in range(len(self._contexts)):
                group = [pair for pair in zip(inputs, outputs, strict=True) if self._locate(pair[0].slot)[0] == number]
                if group:
                    self._decode_inputs(number, group)
        except OutriderError:
            for seq_input in inputs:  # some of its tokens may be in the cache
                self._truncate_context(seq_input.slot, self._lengths[seq_input.slot])
            raise
        for seq_input in inputs:
            self._lengths[seq_input.slot] += len(seq_input.ids)
        return outputs

    def _decode_inputs(self, number: int, group: Seq[tuple[SequenceInput, Tensor]]) -> None:
        """Feed the inputs of one context, in as few calls as possible, and copy their logits out."""
        targets = (target for _, out in group for target in out.numpy())
        for part in _split_batches(self._batch_tokens(seq_input for seq_input, _ in group)):
            for row, target in zip(self._contexts[number].decode(part), targets, strict=False):
                target[:] = row

    def _batch_tokens(self, inputs: Iterable[SequenceInput]) -> Iterator[BatchToken]:
        for seq_input in inputs:
            sequence, start = self._locate(seq_input.slot)[1], self._lengths[seq_input.slot]
            for n, token in enumerate(seq_input.ids):
                yield BatchToken(sequence, start + n, token, n in seq_input.kept)

    # Self-test ----------------------------------------------------------------------------------------------

    def _run_self_test(self) -> float:
        """Prove that the cache can be truncated. Return the numeric noise of the logits.

        Noise arises as llama.cpp rounds activations to 8 bits and the cache to 16.
        """
        ids = SELF_TEST.ids(self)
        slot = self.open(Prompt(tuple(ids)))
        plain = self.forward(slot, ids)
        self.position_bytes = self._measure_position_bytes(slot)
        self.close(slot)
        max_difference = SELF_TEST.max_difference(self, ids, plain, self._model.architecture)
        return 2 * max(max_difference, torch.finfo(torch.float16).eps * float(plain.abs().max()))

    def _measure_position_bytes(self, slot: int) -> int:
        """Return the bytes per position, bookkeeping included, from the growth of a state. Roll the slot back."""
        context = self._contexts[0]
        cached_len, whole = self.kv_len(slot), context.state_bytes(slot)
        self.truncate(slot, SELF_TEST.step)
        return (whole - context.state_bytes(slot)) // (cached_len - SELF_TEST.step)


def _split_batches(tokens: Iterator[BatchToken]) -> Iterator[list[BatchToken]]:
    """Split tokens, in their order, into calls that are full of tokens or of logits."""
    part: list[BatchToken] = []
    output_count = 0
    for token in tokens:
        part.append(token)
        output_count += token.needs_logits
        if len(part) == N_BATCH or output_count == N_OUTPUTS:
            yield part
            part, output_count = [], 0
    if part:
        yield part
