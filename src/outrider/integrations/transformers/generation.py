"""`for_transformers`: speculative decoding as the decoding loop of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.api import SpeculativeDecoder, StreamEvent, local
from outrider.config import DEFAULT_K, OnLoop, Scope
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result import Result
from outrider.engines.base import Engine, Prompt
from outrider.errors import ModelError, SettingsError
from outrider.integrations.transformers import settings as call_settings
from outrider.integrations.transformers.engines import EngineView, LoadedEngine, eval_mode, exclusive, get_engine
from outrider.integrations.transformers.inputs import accepts_features, check_inputs, read_prompt
from outrider.numeric import as_integer

_UNSUPPORTED_KWARGS = ("assistant_model", "cache", "past_key_values", "synced_gpus")


def for_transformers(
    draft: PreTrainedModel | Engine,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gate: str = "always",
    k: int | str = DEFAULT_K,
    accept: str = "exact",
    scope: Scope = "block",
    on_loop: OnLoop | None = None,
    seed: int | None = None,
) -> CustomGenerate:
    """Return a decoding loop with a drafter, to be made once and used for any number of calls.

    `loop.generate(model, ...)` takes the arguments of `model.generate(...)`. The loop is also a `custom_generate` of
    `model.generate`, but transformers does not hand all arguments on to it (see `CustomGenerate.generate`).

    With the defaults, greedy output is that of plain `generate`, token for token, in float32. docs/guarantees.md covers
    the short formats. With do_sample=True, tokens are drawn from the target's own distribution, as `generate` does, but
    by Outrider's seeded noise. They differ from those that `generate` draws after the same `torch.manual_seed`.

    Args:
        draft: the drafter: a transformers model, or an engine from `load_engine`. A drafter without an audio encoder
            drafts for an audio target from the ids alone.
        tokenizer: the tokenizer of both models. Ids beyond its vocabulary are padding, and never emitted. It is needed
            if the models differ in padding. The default is the tokenizer of a draft engine, or none: every id of the
            target may be emitted.
        gate, k, accept, scope, on_loop: as in `SpeculativeDecoder`.
        seed: of the draws with do_sample=True, 0 to 2^64 − 1. By default each call takes one from torch's generator, so
            that `torch.manual_seed` governs it.

    Raises:
        ModelError: the drafter is not a loaded model, or cannot draft. When called: the target cannot be driven.
        SettingsError: the settings contradict each other, or the tokenizer is invalid. When called: an argument would
            change the output and is not supported. The message names it, and no model has run.
        PromptError: when called, a batch, padding, or inputs other than ids and one recording.
        VocabularyMismatch: when called, the drafter does not share the target's vocabulary.
    """
    if isinstance(draft, (str, Path)):
        raise ModelError(
            f"draft: expected a loaded transformers model, or an engine as from load_engine({str(draft)!r})"
        )
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise SettingsError(f"tokenizer: expected a loaded one, as from AutoTokenizer, not {type(tokenizer).__name__}")
    with eval_mode(draft):
        engine = draft if hasattr(draft, "forward_many") else get_engine(draft, tokenizer)
    options = DecodingOptions(gate=gate, k=as_integer(k), accept=accept, scope=scope, on_loop=on_loop)
    return CustomGenerate(draft, engine, tokenizer if tokenizer is not None else engine.tokenizer, options, seed)


class CustomGenerate:
    """The decoding loop of `for_transformers`: a function of transformers' `custom_generate` convention."""

    def __init__(
        self,
        draft_model: PreTrainedModel | Engine,
        draft: Engine,
        tokenizer: PreTrainedTokenizerBase | None,
        options: DecodingOptions,
        seed: int | None,
    ) -> None:
        self._draft_model, self._tokenizer, self._options, self._seed = draft_model, tokenizer, options, seed
        self._draft_tokenizer = draft.tokenizer
        # A decoder made now, with the drafter as its target, refuses bad options early. It also keeps the adaptive
        # draft length, which outlives a call.
        self._lookahead = SpeculativeDecoder(draft, local(draft), **options.keywords()).draft_length

    def generate(
        self,
        model: PreTrainedModel,
        *args: Any,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Run `model.generate` with this decoding loop. All arguments are those of `model.generate`.

        This supports arguments that transformers (5.17 to 5.24) does not hand on to a `custom_generate` function:
        `streamer`, and `tokenizer` for `stop_strings`. It refuses those that Outrider does not support, which would be
        dropped silently there: `assistant_model`, `synced_gpus`, and a cache.
        """
        if not hasattr(model, "generate"):
            raise ModelError(f"model: expected a loaded transformers model, not {type(model).__name__}")
        _refuse([name for name in _UNSUPPORTED_KWARGS if kwargs.get(name) not in (None, False)])
        loop = partial(self, streamer=streamer, tokenizer=tokenizer)
        # generate itself needs the streamer too, as it puts the prompt there.
        return model.generate(*args, custom_generate=loop, streamer=streamer, tokenizer=tokenizer, **kwargs)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_strings: str | list[str] | None = None,  # `_sample` has no such parameter, so generate hands it on
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode for `model.generate`, which has put the prompt into the streamer."""
        _refuse(["synced_gpus"] if synced_gpus else [])
        criteria = call_settings.stop_strings(
            stop_strings, self._tokenizer if tokenizer is None else tokenizer, stopping_criteria
        )
        parsed = call_settings.parse(generation_config, logits_processor, criteria, input_ids.shape[1])
        check_inputs(input_ids, model_kwargs)
        with eval_mode(model, self._draft_model):
            target, draft = get_engine(model, self._tokenizer), self._draft_model
            if not hasattr(draft, "forward_many"):  # a model, which may have changed
                draft = get_engine(draft, self._draft_tokenizer)
            prompt = read_prompt(input_ids, model_kwargs, target.audio)
            with exclusive(draft, target):
                call = _Call(self._decoder(draft, target, prompt, parsed), prompt, self._with_seed(parsed.settings))
                call.run(input_ids, parsed.criteria, streamer)
        if not generation_config.return_dict_in_generate:
            return call.ids
        output = GenerateDecoderOnlyOutput(sequences=call.ids)
        output.outrider = call.result
        return output

    def _decoder(
        self, draft: Engine, target: LoadedEngine, prompt: Prompt, parsed: call_settings.ParsedSettings
    ) -> _EncodedDecoder:
        reads_audio = accepts_features(draft, target.audio, prompt)
        drafter = EngineView(draft, parsed.eos_ids, reads_audio=reads_audio)
        decoder = _EncodedDecoder(drafter, local(EngineView(target, parsed.eos_ids)), **self._options.keywords())
        decoder.draft_length = self._lookahead
        return decoder

    def _with_seed(self, settings: call_settings.Settings) -> call_settings.Settings:
        """Return the settings, with a seed added if they sample."""
        if "temperature" not in settings:
            return settings
        return {**settings, "seed": int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed}


def _refuse(names: list[str]) -> None:
    if names:
        raise SettingsError(f"{', '.join(names)}: not supported with Outrider, which has its own drafter and caches")


class _EncodedDecoder(SpeculativeDecoder):
    """A decoder of prompts that are encoded already."""

    def encode(self, prompt: object) -> Prompt:
        """Return the prompt unchanged."""
        assert isinstance(prompt, Prompt)
        return prompt


class _Call:
    """One call of the loop. ids: the sequence so far. result: None if a stopping criterion ended the output."""

    def __init__(self, decoder: _EncodedDecoder, prompt: Prompt, settings: call_settings.Settings) -> None:
        self._events = decoder.stream(prompt, **settings)  # type: ignore[arg-type]
        self.result: Result | None = None

    def run(self, prompt_ids: Tensor, criteria: StoppingCriteriaList, streamer: BaseStreamer | None) -> None:
        """Generate as `generate` does: append a token, evaluate the criteria, stream the token."""
        self.ids = prompt_ids
        with closing(self._tokens()) as tokens:
            for token in tokens:
                new = torch.tensor([token], device=prompt_ids.device)
                self.ids = torch.cat([self.ids, new[:, None]], dim=-1)
                is_done = bool(len(criteria) and criteria(self.ids, None).all())
                if streamer is not None:
                    streamer.put(new.cpu())
                if is_done:
                    break
        if streamer is not None:
            streamer.end()

    def _tokens(self) -> Generator[int, None, None]:
        """Yield the tokens in order, each as soon as it is final."""
        tokens: list[int] = []
        emitted = 0
        with closing(self._events) as events:
            for event in self._confirmed(events):
                del tokens[event.index :]
                tokens.append(event.token_id)
                yield from tokens[emitted : event.settled]
                emitted = max(emitted, event.settled)
        yield from tokens[emitted:]

    def _confirmed(self, events: Generator[StreamEvent, None, Result]) -> Generator[StreamEvent, None, None]:
        """Yield all events but provisional ones, and keep the result at the end."""
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                self.result = end.value
                return
            if event.kind != "provisional":
                yield event
