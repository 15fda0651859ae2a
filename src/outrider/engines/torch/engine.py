"""The transformers engine, on CPU or CUDA: any decoder-only causal LM, Qwen2.5-Omni Thinker, Qwen2-Audio."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.engines.base import Prompt, SequenceInput, check_inputs, plan_kv_budget
from outrider.engines.checkpoint import TASKS, is_captions_only
from outrider.engines.locking import Locked, exclusive, get_lock
from outrider.engines.model_changes import capture_state, find_change, hash_weights
from outrider.engines.prefix_cache import PrefixCache
from outrider.engines.scheduler import PREFILL_CHUNK
from outrider.engines.self_test import SELF_TESTS, check_weights, explain_non_finite, measure_fp8_noise
from outrider.engines.torch.attention import (
    ATTENTION_NAME,
    BY_ROW_TYPES,
    attention_windows,
    batch_audio_windows,
    configure_attention,
    visible_keys,
)
from outrider.engines.torch.fused_model import (
    FUSED_PREFILL_CHUNK,
    OVERLAP_TOKENS,
    FusedModel,
    Media,
    missing_requirement,
    unsupported_reason,
)
from outrider.engines.torch.kv_cache import SlotKVCache
from outrider.engines.torch.model_families import (
    AudioModel,
    MaskedMedia,
    MaskLike,
    TextModel,
    is_audio_model,
    read_max_length,
)
from outrider.engines.torch.model_runner import ModelRunner, PendingSamples, split_prefill
from outrider.engines.torch.quantization import find_quantization
from outrider.engines.vocabulary import Vocabulary, check_eos_ids, read_eos_ids, warn_if_eos_differs
from outrider.errors import ModelError, PromptError, StateError
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledRows

log = logging.getLogger(__name__)


@dataclass
class _SlotAudio:
    """Audio of one slot, encoded once, at the first forward that reaches a placeholder."""

    prompt: Prompt
    embeds: Tensor | None = None


class TorchEngine(Vocabulary, Locked):
    """A loaded transformers model with KV slots. `Engine` in base.py has the contract.

    Calls from several threads take turns. On a GPU, the weights of a model that can be fused become views of merged
    ones (fused_model.py). fp8_cache: keys and values are stored as float8.

    Raises:
        ModelError: the self-test shows that the model's cache cannot be truncated, its logits are not finite, or its
            dtype is not supported. The message names the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        extractor: Any = None,
        name: str | None = None,
        *,
        fp8_cache: bool = False,
    ) -> None:
        self.name, self._is_loaded_model = name or type(model).__name__, name is None
        self.lock, self.fp8_cache = get_lock(model), fp8_cache
        with self.lock:
            self._prepare_model(model, tokenizer, extractor)

    def _prepare_model(self, model: Any, tokenizer: Any, extractor: Any) -> None:
        check_weights(model, self.name)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._family = AudioModel(model, extractor) if is_audio_model(model) else TextModel(model)
        self._text_config = model.config.get_text_config()
        self._attention_windows = attention_windows(self._text_config, self.name)
        self._additive_mask = configure_attention(model, self._family.language, self._text_config)
        if self.audio is not None and model.device.type == "cuda":
            batch_audio_windows(model, self.audio.tower)
        self.device, self.dtype = model.device, model.dtype
        self.quantization = find_quantization(model, fp8_cache=self.fp8_cache)
        self._cache = self._new_cache()
        self._media: dict[int, _SlotAudio] = {}
        self.prefix_cache = PrefixCache()
        self.row_count = int(self._text_config.vocab_size)
        self.eos_ids = check_eos_ids(self.name, read_eos_ids(model), self.row_count, "generation config")
        warn_if_eos_differs(self.name, self.eos_ids, tokenizer, "generation config")
        self.captions_only = is_captions_only(getattr(model.config, TASKS, None))
        self.max_length = read_max_length(self._text_config)
        self._runner = self._make_runner()
        self.prefill_chunk = PREFILL_CHUNK if self._runner is None else FUSED_PREFILL_CHUNK  # see engines/scheduler.py
        self.overlap_tokens = math.inf if self._runner is None else OVERLAP_TOKENS
        self._state = capture_state(model)
        self.noise = self._run_self_test()
        if self.fp8_cache:  # not before: that test compares with transformers, which has no such cache
            self._cache = self._new_cache(fp8=True)
            self.noise += measure_fp8_noise(self, self._cache, type(model).__name__)
        self.position_bytes = sum(b.nbytes // b.shape[1] for b in self._cache.buffers)

    def _new_cache(self, *limits: int, fp8: bool = False) -> SlotKVCache:
        """Return a KV cache. On a CPU, each row of a batch may attend to a view of its own keys (attention.py)."""
        is_grouped = getattr(self._family.language.config, "_attn_implementation", None) == ATTENTION_NAME
        by_row = is_grouped and self.device.type == "cpu" and self._text_config.model_type in BY_ROW_TYPES
        return SlotKVCache(self._text_config.num_hidden_layers, *limits, by_row=by_row, fp8=fp8)

    def changed_part(self) -> str | None:
        """Return the name of a part of the model that changed since the engine was made, or None."""
        return find_change(self._state, capture_state(self.model))

    @property
    def audio(self) -> Any:
        """Audio encoder of the model (`AudioInput`), or None for a text model."""
        return self._family.audio

    @cached_property
    def identity(self) -> str:
        """Return a hash of the model. It is equal wherever the same release of transformers loads the same checkpoint.

        Another dtype, quantisation or format of the KV cache gives another hash.
        """
        return hash_weights(self.model, self.quantization or "")

    # Memory -------------------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Return the bytes that the buffers of keys and values hold now."""
        return sum(buffer.nbytes for buffer in self._cache.buffers)

    @exclusive
    def reserve(self, budget: int, max_length: int) -> int:
        """Limit keys and values to `budget` bytes, for sequences of up to `max_length` positions.

        Returns the number of slots. While a buffer grows, its old copy takes memory beyond the budget. It is freed
        before the next buffer grows.

        Raises:
            ModelError: the budget does not hold one sequence.
            StateError: slots are open.
        """
        self.prefix_cache.clear(self)
        limit = read_max_length(self._text_config) or None
        each = self.position_bytes
        slots, length = plan_kv_budget(self.name, self._cache.in_use, budget, max_length, limit, lambda n: n * each)
        self._cache = self._new_cache(slots, length, budget // each, fp8=self.fp8_cache)
        if self._runner is not None:
            self._runner.release_cache()
        self.max_length = length
        return slots

    # Slots --------------------------------------------------------------------------------------------------

    @exclusive
    def open(self, prompt: Prompt) -> int:
        """Return a free slot for a sequence that will begin with `prompt`.

        Raises:
            PromptError: the prompt's recording does not fit the model or its placeholders.
            StateError: all slots are in use, or the loaded model changed after its engine was made.
        """
        self._check_prompt(prompt)
        slot = self._cache.allocate()
        self._place_prompt(slot, prompt)
        return slot

    @exclusive
    def reopen(self, slot: int, prompt: Prompt) -> None:
        """Let an open slot continue as a sequence that begins with `prompt`. Raises: as `open`."""
        self._check_prompt(prompt)
        self._cache.check(slot)
        self._place_prompt(slot, prompt)

    def _place_prompt(self, slot: int, prompt: Prompt) -> None:
        self._media.pop(slot, None)
        if prompt.has_audio:
            self._media[slot] = _SlotAudio(prompt)

    def _check_prompt(self, prompt: Prompt) -> None:
        if self._is_loaded_model and (changed := self.changed_part()):
            raise StateError(
                f"{self.name}: the model's {changed} changed after its engine was made: make another with load_engine"
            )
        if not prompt.has_audio:
            return
        if self.audio is None:
            raise PromptError(f"{self.name} takes no audio")
        placed, made = prompt.ids.count(self.audio.placeholder), self.audio.prompt_tokens(prompt)
        if placed != made:
            raise PromptError(f"{placed} audio placeholders for {made} audio embeddings")

    @exclusive
    def close(self, slot: int) -> None:
        """Release the slot."""
        self._cache.release(slot)
        self._media.pop(slot, None)

    def kv_len(self, slot: int) -> int:
        """Return how many positions the slot's cache holds."""
        self._cache.check(slot)
        return self._cache.lengths[slot]

    @exclusive
    def truncate(self, slot: int, length: int) -> None:
        """Roll the slot back to its first `length` positions."""
        self._cache.truncate(slot, length)

    # Forward ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], logits_to_keep: int | None = None) -> Tensor:
        """Append `ids` to the slot. Return the logits after the last `logits_to_keep`, float32 [rows, V]."""
        return self.forward_many([SequenceInput(slot, ids, len(ids) if logits_to_keep is None else logits_to_keep)])[0]

    @exclusive
    @torch.inference_mode()
    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        """Run `forward` for several slots at once."""
        counts = [seq_input.logits_to_keep for seq_input in inputs]
        return [rows.float() for rows in torch.split(self._logits(inputs)[: sum(counts)], counts)]

    @property
    def samples_on_device(self) -> bool:
        """Return whether the engine has `sample_many` and `draft`: on a GPU, for models that can be fused."""
        return self._runner is not None

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> Seq[SampledRows]:
        """Run `forward_many`, and sample a token from each kept position by its input's policy."""
        return self.launch(inputs, policies).result()

    @exclusive
    @torch.inference_mode()
    def launch(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> PendingSamples:
        """Start `sample_many`, and return while the GPU computes. An input may be the single id `LAST_SAMPLED`."""
        assert self._runner is not None
        starts = [self.kv_len(seq_input.slot) for seq_input in inputs]
        with self._on_this_device():
            return self._runner.sample(self._logits(inputs), inputs, starts, policies, self._cache)

    @exclusive
    @torch.inference_mode()
    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, with_signals: bool) -> list[Proposal]:
        """Append `ids`, then sample and append a token, `count` times. Return the tokens up to an EOS."""
        assert self._runner is not None
        start, seq_input = self.kv_len(slot), SequenceInput(slot, ids, 1)
        if not self._runner.fits([seq_input]) or self._has_audio([seq_input], [start]):
            start, seq_input = start + len(ids) - 1, SequenceInput(slot, ids[-1:], 1)
            if self._has_audio([seq_input], [start]):
                raise PromptError(f"{self.name}: a prompt that ends within a recording cannot be drafted from")
            self.forward(slot, ids[:-1], 1)
        self._cache.reserve([slot], [len(seq_input.ids) + count - 1])
        with self._on_this_device():
            drafted = self._runner.draft(seq_input, count, policy, self._cache, start, with_signals=with_signals)
        self._cache.commit_append()
        return drafted

    def _logits(self, inputs: Seq[SequenceInput]) -> Tensor:
        """Return the kept logits of all inputs, one after another, [≥ rows, V] in the model's dtype.

        They are valid until the next forward.
        """
        check_inputs(inputs)
        if self._runner is None:
            return torch.cat(self._forward_transformers(inputs))
        self._cache.reserve([each.slot for each in inputs], [len(each.ids) for each in inputs])  # refuses before a part
        for part in split_prefill(inputs):
            logits = self._forward_fused(self._runner, part)
        return logits

    def _forward_fused(self, runner: ModelRunner, inputs: Seq[SequenceInput]) -> Tensor:
        starts = self._cache.reserve([each.slot for each in inputs], [len(each.ids) for each in inputs])
        with self._on_this_device():
            media = self._flat_media(inputs, starts)
            logits = runner.logits(inputs, starts, self._cache, self._cache.span, media)
        self._cache.commit_append()
        return logits

    def _has_audio(self, inputs: Seq[SequenceInput], starts: Seq[int]) -> bool:
        """Return whether an audio placeholder is among the input tokens."""
        return any(
            seq_input.slot in self._media
            and self.audio.placeholder in self._media[seq_input.slot].prompt.ids[start : start + len(seq_input.ids)]
            for seq_input, start in zip(inputs, starts, strict=True)
        )

    def _forward_transformers(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        """Run transformers' own forward. Return the kept logits of each input."""
        ordered = sorted(inputs, key=lambda seq_input: seq_input.slot)  # neighbours of equal length need no copy
        slots, counts = [seq_input.slot for seq_input in ordered], [len(seq_input.ids) for seq_input in ordered]
        starts = [self.kv_len(slot) for slot in slots]
        positions = self._cache.prepare_append(slots, counts, self.device)
        width = positions.shape[1]
        padded = [[*seq_input.ids, *[0] * (width - len(seq_input.ids))] for seq_input in ordered]
        ids = torch.tensor(padded, device=self.device)
        media = self._place_media(ordered, starts, width)
        columns = sorted({column for seq_input in inputs for column in seq_input.kept})
        kept = torch.tensor(columns, device=self.device)
        logits = self._family.logits(ids, positions, self._mask(positions), self._cache, kept, media)
        self._cache.commit_append()
        rows = dict(zip(slots, logits, strict=True))
        return [rows[each.slot].narrow(0, columns.index(each.kept.start), each.logits_to_keep) for each in inputs]

    def _make_runner(self) -> ModelRunner | None:
        """Return the runner of CUDA graphs, or None on a CPU, or, with a warning, for an unsupported model."""
        if self.device.type != "cuda":
            return None
        decoder, head = self._family.decoder, self.model.get_output_embeddings()
        reason = f"it has {self.quantization}" if self.quantization else missing_requirement(self.device)
        reason = reason or unsupported_reason(self.model, decoder, head, self._text_config)
        if reason is not None:
            log.warning("%s runs without CUDA graphs, which is slower: %s", self.name, reason)
            return None
        with self._on_this_device():
            return ModelRunner(FusedModel(decoder, head, self._text_config), self.device)

    def _on_this_device(self) -> AbstractContextManager[object]:
        """Make the engine's device current, as kernels and graphs run on the thread's current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _mask(self, positions: Tensor) -> MaskLike:
        """Return the mask of visible keys, [B, 1, T, span], per kind of attention layer."""
        additive = self.dtype if self._additive_mask else None
        masks = visible_keys(positions, self._cache.span, self._attention_windows, additive)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _place_media(self, inputs: Seq[SequenceInput], starts: Seq[int], width: int) -> MaskedMedia | None:
        """Return the audio embeddings for the placeholders among the padded input tokens, or None."""
        mask = torch.zeros(len(inputs), width, dtype=torch.bool, device=self.device)
        placed = [self._placeholders(seq_input, start) for seq_input, start in zip(inputs, starts, strict=True)]
        for row, (columns, _) in enumerate(placed):
            mask[row, columns] = True
        embeds = [part for columns, part in placed if columns]
        return (mask, torch.cat(embeds)) if embeds else None

    def _flat_media(self, inputs: Seq[SequenceInput], starts: Seq[int]) -> Media | None:
        """Return the audio embeddings for the placeholders in a flat batch, or None."""
        firsts = [0, *accumulate(len(seq_input.ids) for seq_input in inputs)]
        placed = [self._placeholders(seq_input, start) for seq_input, start in zip(inputs, starts, strict=True)]
        indices = [first + column for first, (columns, _) in zip(firsts, placed, strict=False) for column in columns]
        if not indices:
            return None
        embeds = torch.cat([part for columns, part in placed if columns])
        return Media(torch.tensor(indices, device=self.device), embeds)

    def _placeholders(self, seq_input: SequenceInput, start: int) -> tuple[list[int], Tensor]:
        """Return the indices of the audio placeholders among an input's tokens, and the embeddings in their place."""
        media = self._media.get(seq_input.slot)
        if media is None or start >= len(media.prompt.ids):
            return [], torch.empty(0)
        holders = [i for i, token in enumerate(media.prompt.ids) if token == self.audio.placeholder]
        fed = [n for n, i in enumerate(holders) if start <= i < start + len(seq_input.ids)]
        return [holders[n] - start for n in fed], self._embeds(media)[fed[0] : fed[-1] + 1] if fed else torch.empty(0)

    def _embeds(self, media: _SlotAudio) -> Tensor:
        if media.embeds is None:
            prompt = media.prompt
            features = prompt.features if prompt.audio is None else self.audio.features(prompt.audio)
            media.embeds = self.audio.embed_features(features)
            assert len(media.embeds) == self.audio.prompt_tokens(prompt)  # which open() compared with the prompt
        return media.embeds

    # Self-test ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run_self_test(self) -> float:
        """Prove that the cache can be truncated. Return the numeric noise of the logits: 0 in float32.

        Short formats take more tokens, since each forward's rounding errors stay in the cache.
        """
        self_test = SELF_TESTS[self.dtype]
        ids = self_test.ids(self)
        plain = self._family.forward_uncached(torch.tensor([ids], device=self.device))[0].float()
        if not bool(plain.isfinite().all()):
            raise ModelError(f"{self.name}: {explain_non_finite(self.model)}")
        max_difference = self_test.max_difference(self, ids, plain, type(self.model).__name__)
        rounding = torch.finfo(self.dtype).eps * float(plain[-self_test.tail :].abs().max())
        return 0.0 if self.dtype in (torch.float32, torch.float64) else 2 * max(max_difference, rounding)
