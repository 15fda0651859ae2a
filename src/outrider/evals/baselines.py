"""Baselines: transformers' own `generate` on the same weights and settings, plain and assisted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from outrider.config import GenerationSettings
from outrider.decoding.detokenizer import get_detokenizer
from outrider.decoding.stopping import FinishReason, StopRules, find_finish_reason
from outrider.engines.base import Engine, Prompt
from outrider.engines.torch.engine import TorchEngine
from outrider.errors import ContextError, DecodingError, PromptError, SettingsError, quote
from outrider.evals.manifest import Item
from outrider.evals.modes import Encoder, Inapplicable, ItemResult, gaps
from outrider.evals.store import Row

FRAMES_PER_SECOND = 100
GUARANTEE = "reference"  # a baseline has no guarantee of its own
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")
_TRANSFORMERS_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class Assistance:
    """Settings of transformers' assisted generation, with its own defaults.

    Raises:
        SettingsError: a value that transformers would reject.
    """

    tokens: int = 20
    schedule: str = "constant"
    confidence: float = 0.4

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SettingsError(f"assistant tokens are 1 or more, not {quote(self.tokens)}")
        if self.schedule not in _SCHEDULES:
            raise SettingsError(f"assistant schedule {quote(self.schedule)}: expected one of {', '.join(_SCHEDULES)}")
        if not 0 <= self.confidence < 1:
            raise SettingsError(f"assistant confidence is 0 (off) or more and below 1, not {quote(self.confidence)}")

    def config(self) -> GenerationConfig:
        """Return the assistant's generation settings."""
        return GenerationConfig(
            num_assistant_tokens=self.tokens,
            num_assistant_tokens_schedule=self.schedule,
            assistant_confidence_threshold=self.confidence,
        )


def unsupported_reason(mode: str, draft: Engine | None, target: Engine | None) -> str | None:
    """Return why transformers cannot run a mode with these engines, or None if it can."""
    for engine in [target] if mode == "plain" else [target, draft]:
        if engine is not None and not isinstance(engine, TorchEngine):
            return f"{engine.name} is not a transformers model here"
        if engine is not None and engine.fp8_cache:
            return f"transformers has no fp8 KV cache, as {engine.name} has here"
    if mode == "plain" or not (isinstance(draft, TorchEngine) and isinstance(target, TorchEngine)):
        return None
    if draft.fingerprint != target.fingerprint:
        return f"{draft.name} and {target.name} differ in vocabulary"
    if target.audio is not None and draft.audio is None:
        return f"transformers hands the target's inputs on to its assistant, and {draft.name} takes no audio"
    return None


class TransformersBaseline:
    """A mode that runs transformers' generate on an engine's weights. assistant: the drafter of assisted generation."""

    def __init__(
        self,
        target: TorchEngine,
        encoder: Encoder,
        settings: GenerationSettings,
        assistant: TorchEngine | None = None,
        assistance: Assistance | None = None,
    ) -> None:
        self.name = "plain" if assistant is None else "assisted"
        self._target, self._encoder, self._settings = target, encoder, settings
        self._assistant, self._assistance = assistant, assistance or Assistance()
        eos, limit = () if settings.ignore_eos else target.eos_ids, settings.max_new_tokens
        self._rules = StopRules(limit, eos, settings.stop, settings.sentences, settings.min_new_tokens)
        self._config = _config(settings, eos)

    def run(self, item: Item) -> ItemResult:
        """Generate for an item. Errors of transformers become DecodingErrors."""
        prompt = self._encoder(item)
        self._check(prompt)
        try:
            # Replace the checkpoints' generation settings, and restore torch's random state afterwards.
            device = self._target.model.device
            with ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
                stack.enter_context(_with_config(self._target.model, GenerationConfig()))
                if self._assistant is not None:  # a new one each time, because a schedule changes it
                    stack.enter_context(_with_config(self._assistant.model, self._assistance.config()))
                return self._generate(prompt)
        except _TRANSFORMERS_ERRORS as error:
            raise DecodingError(f"transformers {transformers.__version__}: {type(error).__name__}: {error}") from error

    def _check(self, prompt: Prompt) -> None:
        """Raise ContextError if the prompt does not fit, Inapplicable if the assistant cannot take it."""
        total, limit = len(prompt.ids) + self._settings.max_new_tokens, self._target.max_length
        if limit is not None and total > limit:
            raise ContextError(f"prompt and max_new_tokens make {total} tokens: {self._target.name} holds {limit}")
        if not prompt.has_audio:
            return
        if self._target.audio is None:
            raise PromptError(f"{self._target.name} takes no audio")
        if self._assistant is not None and not _shares_audio_encoding(self._assistant, self._target, prompt):
            raise Inapplicable(
                f"transformers hands the recording on to the assistant, and {self._assistant.name} cannot take it"
            )

    def _generate(self, prompt: Prompt) -> ItemResult:
        torch.manual_seed(self._settings.seed)
        more = {} if self._assistant is None else {"assistant_model": self._assistant.model}
        decode = get_detokenizer(self._target.tokenizer) if self._rules.needs_text else None
        criteria = _StopCriteria(self._rules, len(prompt.ids), decode)
        arrival_times = _ArrivalTimes()
        arrival_times.started = started = time.perf_counter()
        out = self._target.model.generate(
            **self._inputs(prompt),
            generation_config=self._config,
            stopping_criteria=StoppingCriteriaList([criteria]),
            streamer=arrival_times,
            **more,
        )
        total = time.perf_counter() - started
        ids, reason = criteria.end(out[0, len(prompt.ids) :].tolist())
        tokenizer, arrivals = self._target.tokenizer, arrival_times.arrivals[: len(ids)]
        result: Row = {
            "text": None if tokenizer is None else get_detokenizer(tokenizer)(ids, skip_special=True),
            "token_ids": ids,
            "guarantee": GUARANTEE,
            "finish_reason": reason,
            "prompt_tokens": len(prompt.ids),
            "stats": {},
        }
        first = arrivals[0] if arrivals else total
        timing = {"ttft_s": round(first, 6), "total_s": round(total, 6), "itl_s": gaps(arrivals)}
        return ItemResult(result, timing)

    def _inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        model, audio_encoder = self._target.model, self._target.audio
        ids = torch.tensor([prompt.ids], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.audio is None:
            return inputs
        features = torch.from_numpy(audio_encoder.features(prompt.audio))
        padding = _padding_frames(audio_encoder)
        valid = features.shape[1] - padding
        if padding:  # an encoder with a window: the frames beyond it are masked
            window = audio_encoder.max_frames - padding
            rest = features[:, -1:].expand(-1, max(0, window - features.shape[1]))
            features = torch.cat([features, rest], dim=1)[:, :window]
        mask = (torch.arange(features.shape[1]) < valid).long()
        inputs["input_features"] = features[None].to(model.device, model.dtype)
        inputs["feature_attention_mask"] = mask[None].to(model.device)
        return inputs


def _config(settings: GenerationSettings, eos: tuple[int, ...]) -> GenerationConfig:
    """Translate the settings for transformers."""
    for name in ("repetition_window", "frequency_penalty", "presence_penalty", "grammar"):
        if getattr(settings, name):
            raise SettingsError(f"{name}: transformers' generate has no such setting, so it cannot be a baseline")
    drawn = settings.temperature > 0
    warped = {
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p or None,
    }
    return GenerationConfig(
        do_sample=drawn,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens or None,
        repetition_penalty=settings.repetition_penalty,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        suppress_tokens=list(settings.suppress_tokens) or None,
        sequence_bias=[[[token], float(bias)] for token, bias in settings.logit_bias] or None,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
        **(warped if drawn else {}),
    )


@contextmanager
def _with_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    kept, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = kept


class _StopCriteria(StoppingCriteria):
    """The stop rules, applied to each token. Assisted generation appends several tokens before it calls this."""

    def __init__(self, rules: StopRules, prompt_length: int, decode: Callable[[list[int]], str] | None) -> None:
        self._rules, self._start, self._decode = rules, prompt_length, decode
        self._seen = 0
        self._reason: FinishReason | None = None

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        self._check_stop(input_ids[0, self._start :].tolist())
        return torch.full((input_ids.shape[0],), self._reason is not None, device=input_ids.device)

    def _check_stop(self, ids: list[int]) -> None:
        while self._reason is None and self._seen < len(ids):
            self._seen += 1
            self._reason = find_finish_reason(self._rules, ids[: self._seen], self._decode)

    def end(self, ids: list[int]) -> tuple[list[int], FinishReason]:
        """Return the output up to the token at which a rule ended it, and the reason."""
        self._check_stop(ids)
        if self._reason is None:
            raise DecodingError(f"transformers stopped after {len(ids)} tokens without a stop rule")
        return ids[: self._seen], self._reason


class _ArrivalTimes(BaseStreamer):
    """A streamer that records the arrival of each token in seconds since `started`. The first value is the prompt."""

    def __init__(self) -> None:
        self.started = 0.0
        self.arrivals: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Record the arrival of tokens."""
        if self._prompt_seen:
            self.arrivals += [time.perf_counter() - self.started] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing at the end of the output."""


def _padding_frames(audio_encoder: Any) -> int:
    """Return the number of padding frames that the model's encoder attends to."""
    return int(audio_encoder.max_frames) - round(audio_encoder.max_seconds * FRAMES_PER_SECOND)


def _shares_audio_encoding(assistant: TorchEngine, target: TorchEngine, prompt: Prompt) -> bool:
    """Return whether the assistant takes the target's features and encodes them as the same number of tokens."""
    own, other = assistant.audio, target.audio
    formats = [(each.placeholder, each.mels, _padding_frames(each)) for each in (own, other) if each is not None]
    if own is None or formats[0] != formats[-1]:
        return False
    return bool(own.prompt_tokens(prompt) == prompt.ids.count(own.placeholder))
