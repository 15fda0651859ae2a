"""The transformers engine: any decoder-only causal LM, Qwen2.5-Omni Thinker, Qwen2-Audio; CPU or CUDA."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.engines import attention
from outrider.engines.base import Feed, Prompt
from outrider.engines.families import AudioLanguage, MaskLike, Text
from outrider.engines.slots import SlotCache
from outrider.errors import ModelError, PromptError, StateError

PROBE_HEAD, PROBE_STEP = 9, 3  # tokens read before a roll-back, and in one block after it
NOISE_HEAD, NOISE_TAIL = 64, 12  # the same where rounding is to be measured as well
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.2}  # of the spread of the logits


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


class TorchEngine:
    """A loaded transformers model with KV slots (`Engine` in base.py says what the methods promise).

    Raises:
        ModelError: the model's cache cannot be truncated, proved by a short probe; the message names the model.
    """

    def __init__(self, model: Any, tokenizer: Any = None, extractor: Any = None, name: str | None = None) -> None:
        self.name = name or type(model).__name__
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
        self.vocab_size = _named(tokenizer, self.row_count)
        self.eos_ids = _eos_ids(model)
        self.max_length = _max_length(self._text_config)
        self.noise = self._probe()
        self.position_bytes = sum(b.nbytes // (b.shape[0] * b.shape[2]) for b in self._cache.buffers)

    @property
    def audio(self) -> Any:
        """How recordings enter (`AudioInput`), or None for a text model."""
        return self._family.audio

    @cached_property
    def fingerprint(self) -> str:
        tokens = self.vocabulary or [str(self.vocab_size)]
        return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:16]

    @cached_property
    def vocabulary(self) -> list[str]:
        """The token strings by id; empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))]

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

    def reserve(self, budget: int, max_length: int) -> int:
        """Never hold more than `budget` bytes of keys and values, for sequences of up to `max_length` positions.

        Returns how many slots that allows. While one buffer grows, its old copy comes on top: it is freed before the
        next one grows.

        Raises:
            ModelError: not one sequence fits.
            StateError: slots are open.
        """
        if self._cache.in_use:
            raise StateError(f"{self.name}: memory is reserved before slots are opened; {self._cache.in_use} are open")
        if max_length < 1:
            raise ModelError(f"{self.name}: a sequence of at most {max_length} positions holds nothing")
        length = min(max_length, _max_length(self._text_config) or max_length)
        smallest = self.position_bytes * length
        if budget < smallest:
            raise ModelError(
                f"{self.name}: a sequence of {length} positions needs {smallest} bytes of cache; the budget is {budget}"
            )
        slots = budget // smallest
        self._cache = SlotCache(len(self._cache.layers), slots, length)
        self.max_length = length
        return slots

    # Slots --------------------------------------------------------------------------------------------------

    def open(self, prompt: Prompt) -> int:
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

    def close(self, slot: int) -> None:
        self._cache.release(slot)
        self._media.pop(slot, None)

    def kv_len(self, slot: int) -> int:
        self._cache.check(slot)
        return self._cache.lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    # Forward ------------------------------------------------------------------------------------------------

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        return self.forward_many([Feed(slot, ids, len(ids) if rows is None else rows)])[0]

    @torch.inference_mode()
    def forward_many(self, feeds: Seq[Feed]) -> list[Tensor]:
        _check_feeds(feeds)
        starts = {feed.slot: self.kv_len(feed.slot) for feed in feeds}
        ordered = sorted(feeds, key=lambda feed: feed.slot)  # neighbouring slots are read without a copy
        positions = self._cache.begin([feed.slot for feed in ordered], [len(feed.ids) for feed in ordered], self.device)
        width = positions.shape[1]
        ids = torch.tensor([[*feed.ids, *[0] * (width - len(feed.ids))] for feed in ordered], device=self.device)
        media = self._place_media(ordered, [starts[feed.slot] for feed in ordered], width)
        columns = _wanted_columns(feeds)
        wanted = torch.tensor(columns, device=self.device)
        logits = self._family.logits(ids, positions, self._mask(positions), self._cache, wanted, media)
        self._cache.advance()
        rows = {feed.slot: _rows_of(feed, logits[i], columns) for i, feed in enumerate(ordered)}
        return [rows[feed.slot] for feed in feeds]

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
        """Prove on a few tokens that truncating works with this model, and measure its numeric noise.

        The same tokens are read without a cache, in blocks after a roll-back, and one by one; all must agree, but for
        rounding. In short formats the reading is longer, since each forward's rounding lives on in the cache.
        """
        exact = self.dtype == torch.float32
        head, tail = (PROBE_HEAD, PROBE_STEP) if exact else (NOISE_HEAD, NOISE_TAIL)
        head = min(head, (self.max_length or head + tail) - tail)
        if head < PROBE_STEP:
            raise ModelError(f"{self.name} holds {self.max_length} positions: too few to work with")
        ids = [7 * i % max(self.vocab_size - 1, 1) for i in range(1, head + tail + 1)]
        whole = self._family.reference(torch.tensor([ids], device=self.device))[0].float()
        plain = whole[head:]
        slot = self.open(Prompt(tuple(ids)))
        self.forward(slot, [*ids[:head], *reversed(ids[head:])], 1)
        blocks = self._read_in_steps(slot, ids, head, PROBE_STEP)
        self.truncate(slot, 0)
        for part in (ids[: head // 3], ids[head // 3 : head]):
            self.forward(slot, part, 1)
        single = self._read_in_steps(slot, ids, head, 1)
        batched = self._read_beside_another(slot, ids, head)
        self.close(slot)
        beside = torch.cat([plain, whole[PROBE_STEP : PROBE_STEP + 1]])
        pairs = ((blocks, plain), (single, plain), (batched, beside), (blocks, single))
        worst = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())
        if not worst <= PROBE_TOLERANCE[self.dtype] * (float(plain.std()) + 1e-6):
            raise ModelError(
                f"{self.name} ({type(self.model).__name__}): its cache cannot be truncated: after a roll-back, or "
                f"beside another slot, its logits differ by {worst:.3g} from a plain forward's"
            )
        return 0.0 if exact else 2 * max(worst, torch.finfo(self.dtype).eps * float(plain.abs().max()))

    def _read_beside_another(self, slot: int, ids: Seq[int], head: int) -> Tensor:
        """Roll back to the probe's head and read the rest in one batch with a shorter sequence; rows of both."""
        self.truncate(slot, head)
        other = self.open(Prompt(tuple(ids)))
        self.forward(other, ids[:2], 1)
        tail = ids[head:]
        rows = self.forward_many([Feed(slot, tail, len(tail)), Feed(other, ids[2 : PROBE_STEP + 1], 1)])
        self.close(other)
        return torch.cat(rows)

    def _read_in_steps(self, slot: int, ids: Seq[int], head: int, step: int) -> Tensor:
        """Roll back to the first `head` tokens and read the rest, `step` at a time."""
        self.truncate(slot, head)
        return torch.cat([self.forward(slot, ids[i : i + step]) for i in range(head, len(ids), step)])


def _check_feeds(feeds: Seq[Feed]) -> None:
    slots = [feed.slot for feed in feeds]
    if len(set(slots)) < len(slots):
        raise StateError(f"one slot stands twice in a batch: {slots}")
    for feed in feeds:
        if not 0 < feed.rows <= len(feed.ids):
            raise StateError(f"slot {feed.slot}: {feed.rows} rows wanted of {len(feed.ids)} fed tokens")


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
    """A feed's rows, float32 [rows, V], among the wanted columns' logits [columns, V]."""
    first = columns.index(len(feed.ids) - feed.rows)
    return logits[first : first + feed.rows].float()


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


def _named(tokenizer: Any, rows: int) -> int:
    """How many ids the tokenizer can name; what lies beyond is padding."""
    return rows if tokenizer is None else min(rows, max(tokenizer.get_vocab().values()) + 1)


def _eos_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(int(token) for token in (eos if isinstance(eos, (list, tuple)) else [eos]))
