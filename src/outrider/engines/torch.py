"""The transformers engine: any decoder-only causal LM, Qwen2.5-Omni Thinker, Qwen2-Audio; CPU or CUDA."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
        self._additive_mask = _settle_attention(model)
        self._cache = SlotCache(self._text_config.num_hidden_layers)
        self._media: dict[int, _Media] = {}
        self.device, self.dtype = model.device, model.dtype
        self.row_count = int(self._text_config.vocab_size)
        self.vocab_size = _named(tokenizer, self.row_count)
        self.eos_ids = _eos_ids(model)
        self.max_length = _max_length(self._text_config)
        self.noise = self._probe()

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

    # Slots --------------------------------------------------------------------------------------------------

    def open(self, prompt: Prompt) -> int:
        if prompt.audio is not None and self.audio is None:
            raise PromptError(f"{self.name} takes no audio")
        slot = self._cache.allocate()
        if prompt.audio is not None:
            self._media[slot] = _Media(prompt)
        return slot

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
        width = max(len(feed.ids) for feed in feeds)
        starts = [self.kv_len(feed.slot) for feed in feeds]
        # Shorter feeds are padded at the end; what the padding writes lies beyond the slot's length: never seen.
        ids = torch.tensor([[*feed.ids, *[0] * (width - len(feed.ids))] for feed in feeds], device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        media = self._place_media(feeds, starts, width)
        keep = max(width - len(feed.ids) + feed.rows for feed in feeds)
        self._cache.begin([feed.slot for feed in feeds], positions)
        # Padding takes its row's last real position: a table of positions may end there.
        ends = torch.tensor([start + len(feed.ids) - 1 for feed, start in zip(feeds, starts, strict=True)])
        read_at = torch.minimum(positions, ends.to(self.device)[:, None])
        logits = self._family.logits(ids, read_at, self._mask(positions), self._cache, keep, media)
        for feed, start in zip(feeds, starts, strict=True):
            self._cache.lengths[feed.slot] = start + len(feed.ids)
        return [_last_rows(logits[i], width - len(feed.ids), feed.rows) for i, feed in enumerate(feeds)]

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
                embeds.append(self._embeds(media, len(holders))[fed[0] : fed[-1] + 1])
        return _Placed(at, torch.cat(embeds)) if embeds else None

    def _embeds(self, media: _Media, placeholders: int) -> Tensor:
        if media.embeds is None:
            assert media.prompt.audio is not None  # open() makes _Media for audio prompts only
            media.embeds = self.audio.embed(media.prompt.audio)
            if len(media.embeds) != placeholders:
                raise PromptError(f"{placeholders} audio placeholders for {len(media.embeds)} audio embeddings")
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


def _last_rows(logits: Tensor, padding: int, rows: int) -> Tensor:
    end = logits.shape[0] - padding
    return logits[end - rows : end].float()


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


def _settle_attention(model: Any) -> bool:
    """Make the model read our 4-D masks; True if it wants them additive."""
    current = getattr(model.config, "_attn_implementation", "eager")
    if current not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
    return current == "eager"


def _named(tokenizer: Any, rows: int) -> int:
    """How many ids the tokenizer can name; what lies beyond is padding."""
    return rows if tokenizer is None else min(rows, max(tokenizer.get_vocab().values()) + 1)


def _eos_ids(model: Any) -> tuple[int, ...]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(int(token) for token in (eos if isinstance(eos, (list, tuple)) else [eos]))
