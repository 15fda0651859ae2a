"""The transformers engine: any decoder-only causal LM, Qwen2.5-Omni Thinker, Qwen2-Audio; CPU or CUDA."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.core.actions import Proposal
from outrider.core.policy import Policy
from outrider.core.sampling import Pick
from outrider.engines import attention
from outrider.engines.base import Feed, Prompt, afford, check_feeds
from outrider.engines.changes import change, state_of
from outrider.engines.checkpoint import TASKS, is_captions_only
from outrider.engines.families import AudioLanguage, MaskLike, Text
from outrider.engines.locking import Locked, exclusive, lock_of
from outrider.engines.ondevice import OnDevice
from outrider.engines.probe import Probe, check_weights, why_not_finite
from outrider.engines.slots import SlotCache
from outrider.engines.stack import Stack, missing, obstacle
from outrider.engines.vocabulary import Vocabulary, check_ends, end_ids
from outrider.errors import ModelError, PromptError, StateError

PROBES = {
    torch.float64: Probe(9, 3, 3, 1e-3),
    torch.float32: Probe(9, 3, 3, 1e-3),
    torch.bfloat16: Probe(64, 12, 3, 0.5),
    torch.float16: Probe(64, 12, 3, 0.2),
}
log = logging.getLogger(__name__)


@dataclass
class _Media:
    """The audio of one slot: encoded once, at the first forward that reaches a placeholder."""

    prompt: Prompt
    embeds: Tensor | None = None


@dataclass(frozen=True)
class _Placed:
    """Where in a batch audio embeddings go: at bool [B, T], embeds [at.sum(), hidden]."""

    at: Tensor
    embeds: Tensor


class TorchEngine(Vocabulary, Locked):
    """A loaded transformers model with KV slots (`Engine` in base.py says what the methods promise).

    Calls from several threads take turns. On a GPU, weights of a model that can be fused become views of merged ones
    (stack.py).

    Raises:
        ModelError: the model's cache cannot be truncated, proved by a short probe, or its logits are not finite, or its
            number format is not supported; the message names the model.
    """

    def __init__(self, model: Any, tokenizer: Any = None, extractor: Any = None, name: str | None = None) -> None:
        self.name, self._given = name or type(model).__name__, name is None
        self.lock = lock_of(model)
        with self.lock:
            self._adopt(model, tokenizer, extractor)

    def _adopt(self, model: Any, tokenizer: Any, extractor: Any) -> None:
        check_weights(model, self.name, tuple(PROBES))
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._family = AudioLanguage(model, extractor) if _is_audio(model) else Text(model)
        self._text_config = model.config.get_text_config()
        self._windows = _windows(self._text_config, self.name)
        self._additive_mask = _settle_attention(model, self._family.language, self._text_config)
        self._cache = SlotCache(self._text_config.num_hidden_layers)
        self._media: dict[int, _Media] = {}
        self.device, self.dtype = model.device, model.dtype
        self.row_count = int(self._text_config.vocab_size)
        self.eos_ids = end_ids(self.name, _eos_ids(model), self.row_count, "generation config")
        check_ends(self.name, self.eos_ids, tokenizer, "generation config")
        self.captions_only = is_captions_only(getattr(model.config, TASKS, None))
        self.max_length = _max_length(self._text_config)
        self._on_device = self._fuse()
        self._state = state_of(model)
        self.noise = self._probe()
        self.position_bytes = sum(b.nbytes // (b.shape[0] * b.shape[2]) for b in self._cache.buffers)

    def changed(self) -> str | None:
        """Return the name of a part of the model that changed since the engine was made, or None."""
        return change(self._state, state_of(self.model))

    @property
    def audio(self) -> Any:
        """How recordings enter (`AudioInput`), or None for a text model."""
        return self._family.audio

    @cached_property
    def identity(self) -> str:
        """A hash that tells checkpoints apart: the class, the parameters' names and shapes, some values of each.

        Equal wherever the same checkpoint is loaded in the same dtype by the same release of transformers.
        """
        digest = hashlib.sha256(type(self.model).__name__.encode())
        for name, weight in sorted(self.model.named_parameters()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(_sample(weight).numpy().tobytes())
        return digest.hexdigest()[:16]

    # Memory -------------------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """What the buffers of keys and values hold now."""
        return sum(buffer.nbytes for buffer in self._cache.buffers)

    @exclusive
    def reserve(self, budget: int, max_length: int) -> int:
        """Never hold more than `budget` bytes of keys and values, for sequences of up to `max_length` positions.

        Returns how many slots that allows. While one buffer grows, its old copy comes on top: it is freed before the
        next one grows.

        Raises:
            ModelError: not one sequence fits.
            StateError: slots are open.
        """
        limit = _max_length(self._text_config) or None
        each = self.position_bytes
        slots, length = afford(self.name, self._cache.in_use, budget, max_length, limit, lambda n: n * each)
        self._cache = SlotCache(len(self._cache.layers), slots, length)
        if self._on_device is not None:
            self._on_device.forget()
        self.max_length = length
        return slots

    # Slots --------------------------------------------------------------------------------------------------

    @exclusive
    def open(self, prompt: Prompt) -> int:
        if self._given and (changed := self.changed()):
            raise StateError(
                f"{self.name}: the model's {changed} changed after its engine was made: make another with load_engine"
            )
        if prompt.heard:
            self._check_media(prompt)
        slot = self._cache.allocate()
        if prompt.heard:
            self._media[slot] = _Media(prompt)
        return slot

    def _check_media(self, prompt: Prompt) -> None:
        if self.audio is None:
            raise PromptError(f"{self.name} takes no audio")
        placed, made = prompt.ids.count(self.audio.placeholder), self.audio.prompt_tokens(prompt)
        if placed != made:
            raise PromptError(f"{placed} audio placeholders for {made} audio embeddings")

    @exclusive
    def close(self, slot: int) -> None:
        self._cache.release(slot)
        self._media.pop(slot, None)

    def kv_len(self, slot: int) -> int:
        self._cache.check(slot)
        return self._cache.lengths[slot]

    @exclusive
    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    # Forward ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        return self.forward_many([Feed(slot, ids, len(ids) if rows is None else rows)])[0]

    @exclusive
    @torch.inference_mode()
    def forward_many(self, feeds: Seq[Feed]) -> list[Tensor]:
        wanted = [feed.rows for feed in feeds]
        return [rows.float() for rows in torch.split(self._logits(feeds)[: sum(wanted)], wanted)]

    @property
    def chooses(self) -> bool:
        """Whether `choose_many` and `draft` are there: on a GPU, for models that can be fused."""
        return self._on_device is not None

    @exclusive
    @torch.inference_mode()
    def choose_many(self, feeds: Seq[Feed], policies: Seq[Policy]) -> list[list[Pick]]:
        assert self._on_device is not None
        starts = [self.kv_len(feed.slot) for feed in feeds]
        with self._here():
            return self._on_device.choose(self._logits(feeds), feeds, starts, policies, self._cache)

    @exclusive
    @torch.inference_mode()
    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, sure: bool) -> list[Proposal]:
        assert self._on_device is not None
        start = self.kv_len(slot)
        feeds = [Feed(slot, ids, 1)]
        if not self._on_device.fits(feeds) or self._hears(feeds, [start]):
            if self._hears([Feed(slot, ids[-1:], 1)], [start + len(ids) - 1]):
                raise PromptError(f"{self.name}: a prompt that ends within a recording cannot be drafted from")
            self.forward(slot, ids[:-1], 1)
            start, ids = self.kv_len(slot), ids[-1:]
        self._cache.claim([slot], [len(ids) + count - 1])
        with self._here():
            drafted = self._on_device.draft(slot, ids, count, policy, self._cache, start, sure=sure)
        self._cache.advance()
        return drafted

    def _logits(self, feeds: Seq[Feed]) -> Tensor:
        """The wanted rows of all feeds, one after another, [≥ rows, V] in the model's dtype.

        Valid until the next forward.
        """
        check_feeds(feeds)
        starts = [self.kv_len(feed.slot) for feed in feeds]
        if self._on_device is None or not self._on_device.fits(feeds) or self._hears(feeds, starts):
            return torch.cat(self._plain_rows(feeds))
        self._cache.claim([feed.slot for feed in feeds], [len(feed.ids) for feed in feeds])
        with self._here():
            logits = self._on_device.logits(feeds, starts, self._cache, self._cache.span)
        self._cache.advance()
        return logits

    def _hears(self, feeds: Seq[Feed], starts: Seq[int]) -> bool:
        """Whether audio is among what is fed."""
        return any(
            feed.slot in self._media
            and self.audio.placeholder in self._media[feed.slot].prompt.ids[start : start + len(feed.ids)]
            for feed, start in zip(feeds, starts, strict=True)
        )

    def _plain_rows(self, feeds: Seq[Feed]) -> list[Tensor]:
        """Through transformers' own forward."""
        starts = {feed.slot: self.kv_len(feed.slot) for feed in feeds}
        ordered = sorted(feeds, key=lambda feed: feed.slot)  # neighbouring slots are read without a copy
        positions = self._cache.begin([feed.slot for feed in ordered], [len(feed.ids) for feed in ordered], self.device)
        width = positions.shape[1]
        ids = torch.tensor([[*feed.ids, *[0] * (width - len(feed.ids))] for feed in ordered], device=self.device)
        if self._on_device is not None:
            self._on_device.prepare(self._cache)
            self._cache.remember(ids)
        media = self._place_media(ordered, [starts[feed.slot] for feed in ordered], width)
        columns = _wanted_columns(feeds)
        wanted = torch.tensor(columns, device=self.device)
        logits = self._family.logits(ids, positions, self._mask(positions), self._cache, wanted, media)
        self._cache.advance()
        rows = {feed.slot: _rows_of(feed, logits[i], columns) for i, feed in enumerate(ordered)}
        return [rows[feed.slot] for feed in feeds]

    def _fuse(self) -> OnDevice | None:
        """The fast path of a GPU; None on a CPU, or, which is said, for a model that it cannot run."""
        if self.device.type != "cuda":
            return None
        decoder, head = self._family.decoder, self.model.get_output_embeddings()
        reason = missing(self.device) or obstacle(self.model, decoder, head, self._text_config)
        if reason is not None:
            log.warning("%s runs without CUDA graphs, which is slower: %s", self.name, reason)
            return None
        with self._here():
            return OnDevice(Stack(decoder, head, self._text_config), self.device)

    def _here(self) -> AbstractContextManager[object]:
        """Kernels and graphs go to the device that is current, in each thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _mask(self, positions: Tensor) -> MaskLike:
        """Which keys each query may see: [B, 1, T, span] per kind of attention layer."""
        keys = torch.arange(self._cache.span, device=self.device)
        queries = positions[:, None, :, None]
        masks = {}
        for kind, window in self._windows.items():
            visible = keys <= queries
            if window is not None:
                visible = visible & (keys > queries - window)
            masks[kind] = self._as_additive(visible) if self._additive_mask else visible
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_additive(self, visible: Tensor) -> Tensor:
        zeros = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~visible, torch.finfo(self.dtype).min)

    def _place_media(self, feeds: Seq[Feed], starts: Seq[int], width: int) -> _Placed | None:
        """Audio embeddings for the placeholders among the fed tokens; None where there are none."""
        at = torch.zeros(len(feeds), width, dtype=torch.bool, device=self.device)
        embeds = []
        for row, (feed, start) in enumerate(zip(feeds, starts, strict=True)):
            media = self._media.get(feed.slot)
            if media is None or start >= len(media.prompt.ids):
                continue
            holders = [i for i, token in enumerate(media.prompt.ids) if token == self.audio.placeholder]
            fed = [n for n, i in enumerate(holders) if start <= i < start + len(feed.ids)]
            at[row, [holders[n] - start for n in fed]] = True
            if fed:
                embeds.append(self._embeds(media)[fed[0] : fed[-1] + 1])
        return _Placed(at, torch.cat(embeds)) if embeds else None

    def _embeds(self, media: _Media) -> Tensor:
        if media.embeds is None:
            prompt = media.prompt
            features = prompt.features if prompt.audio is None else self.audio.features(prompt.audio)
            media.embeds = self.audio.embed_features(features)
            assert len(media.embeds) == self.audio.prompt_tokens(prompt)  # which open() compared with the prompt
        return media.embeds

    # Proof --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _probe(self) -> float:
        """Prove that truncating works, and measure the noise: 0 in float32.

        In short formats the reading is longer, since each forward's rounding lives on in the cache.
        """
        probe = PROBES[self.dtype]
        ids = probe.ids(self)
        plain = self._family.reference(torch.tensor([ids], device=self.device))[0].float()
        if not bool(plain.isfinite().all()):
            raise ModelError(f"{self.name}: {why_not_finite(self.model)}")
        worst = probe.worst(self, ids, plain, type(self.model).__name__)
        rounding = torch.finfo(self.dtype).eps * float(plain[-probe.tail :].abs().max())
        return 0.0 if self.dtype in (torch.float32, torch.float64) else 2 * max(worst, rounding)


def _max_length(config: Any) -> int | None:
    """Positions that the model was made for.

    LongRoPE changes its factors past the original length, for what is cached already and for every slot in a batch:
    such a model is used up to there.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", limit
        )
    return limit


def _wanted_columns(feeds: Seq[Feed]) -> list[int]:
    """Columns of a batch from which any feed wants a row, in order: a long prefill wants but its last."""
    return sorted({column for feed in feeds for column in range(len(feed.ids) - feed.rows, len(feed.ids))})


def _rows_of(feed: Feed, logits: Tensor, columns: Seq[int]) -> Tensor:
    """A feed's rows [rows, V] among the wanted columns' logits [columns, V]."""
    first = columns.index(len(feed.ids) - feed.rows)
    return logits[first : first + feed.rows]


def _is_audio(model: Any) -> bool:
    return type(model).__name__ in ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2AudioForConditionalGeneration")


def _windows(config: Any, name: str) -> dict[str, int | None]:
    """Attention kinds of the layers, with their sliding windows. Any other kind keeps a state that has no length."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    kinds |= set(getattr(config, "attention_layers", ())) & {"local"}  # GPT-Neo masks by buffer offset, not by slot
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange:
        raise ModelError(f"{name}: layers of kind {', '.join(sorted(strange))} cannot be rolled back slot by slot")
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def _settle_attention(model: Any, language: Any, config: Any) -> bool:
    """Make the model read our 4-D masks, and grouped heads without a copy; True if it wants masks additive."""
    current = getattr(model.config, "_attn_implementation", "eager")
    if current == "eager":
        return True
    if current != "sdpa":
        model.set_attn_implementation("sdpa")
    grouped = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) < config.num_attention_heads
    if grouped:
        language.set_attn_implementation(attention.NAME)
    return grouped


def _sample(weight: Tensor) -> Tensor:
    """Up to 64 values, spread over a parameter: float32, on the CPU."""
    flat = weight.detach().flatten()
    return flat[:: -(-flat.numel() // 64) or 1].float().cpu()


def _eos_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
