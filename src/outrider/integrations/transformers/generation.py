"""`for_transformers`: speculative decoding for whoever calls `generate`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.api import SpeculativeDecoder, StreamEvent, local
from outrider.config import DEFAULT_K, OnLoop, Scope
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result import Result
from outrider.engines.base import Prompt
from outrider.errors import ModelError, SettingsError
from outrider.integrations.transformers import settings as call_settings
from outrider.integrations.transformers.call import recover_generate_kwargs
from outrider.integrations.transformers.engines import EngineView, eval_mode, exclusive, get_engine
from outrider.integrations.transformers.inputs import accepts_features, check_inputs, read_prompt

_UNSUPPORTED_KWARGS = ("assistant_model", "cache", "past_key_values")


def for_transformers(
    draft: Any,
    *,
    tokenizer: Any = None,
    gate: str = "always",
    k: int | str = DEFAULT_K,
    accept: str = "exact",
    scope: Scope = "block",
    on_loop: OnLoop | None = None,
    seed: int | None = None,
) -> CustomGenerate:
    """A decoding loop for `model.generate(..., custom_generate=for_transformers(draft_model))`. Make it once.

    With the defaults, greedy output is that of plain `generate`, token for token (in float32; docs/guarantees.md has
    the short formats). With do_sample=True tokens are drawn from the target's own distribution, as `generate` does, but
    by Outrider's seeded noise: they are not the tokens that `generate` would draw after the same `torch.manual_seed`.

    Args:
        draft: the drafter: a transformers model, or an engine from `load_engine`. One without audio drafts for a
            target that hears from the ids alone.
        tokenizer: what both models' ids mean. Ids beyond it are padding, and never emitted. Needed where the models
            differ in padding; by default the tokenizer of a draft engine, or none: every id of the target may come.
        gate, k, accept, scope, on_loop: as in `SpeculativeDecoder`.
        seed: of the draws with do_sample=True, 0 to 2^64 − 1; by default one from torch's generator for each call, so
            that `torch.manual_seed` governs it.

    Raises:
        ModelError: a drafter that is no loaded model, or cannot draft; when called, a target that cannot be driven.
        SettingsError: settings that contradict each other, or a tokenizer that is none; when called, anything in the
            call that would change the output and is not Outrider's, by name, before any model work.
        PromptError: when called, a batch, padding, or inputs other than ids and one recording.
        VocabularyMismatch: when called, the drafter does not share the target's vocabulary.
    """
    if isinstance(draft, (str, Path)):
        raise ModelError(f"draft is a loaded transformers model or an engine, as from load_engine({str(draft)!r})")
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise SettingsError(f"tokenizer is a loaded one, as from AutoTokenizer, not {type(tokenizer).__name__}")
    with eval_mode(draft):
        engine = draft if hasattr(draft, "forward_many") else get_engine(draft, tokenizer)
    options = DecodingOptions(gate=gate, k=k, accept=accept, scope=scope, on_loop=on_loop)
    return CustomGenerate(draft, engine, tokenizer if tokenizer is not None else engine.tokenizer, options, seed)


class CustomGenerate:
    """What `for_transformers` makes: a function with the signature that `generate` calls."""

    def __init__(
        self, draft_model: Any, draft: Any, tokenizer: Any, options: DecodingOptions, seed: int | None
    ) -> None:
        self._draft_model, self._tokenizer, self._options, self._seed = draft_model, tokenizer, options, seed
        # Bad options are refused now, with the drafter in the target's place; what k="auto" learns outlives a call.
        self._draft_tokenizer = draft.tokenizer
        self._lookahead = SpeculativeDecoder(draft, local(draft), **options.keywords()).draft_length

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        stop_strings: Any = None,  # not among _sample's: generate leaves it to us, and needs no tokenizer for it
        **model_kwargs: Any,
    ) -> Any:
        recovered = recover_generate_kwargs("streamer", "tokenizer", "synced_gpus", *_UNSUPPORTED_KWARGS)
        _refuse([name for name in _UNSUPPORTED_KWARGS if name in recovered])
        _refuse(["synced_gpus"] if synced_gpus or recovered.get("synced_gpus") else [])
        tokenizer = recovered.get("tokenizer", self._tokenizer)
        criteria = call_settings.stop_strings(stop_strings, tokenizer, stopping_criteria)
        parsed = call_settings.parse(generation_config, logits_processor, criteria, input_ids.shape[1])
        check_inputs(input_ids, model_kwargs)
        with eval_mode(model, self._draft_model):
            target, draft = get_engine(model, self._tokenizer), self._draft_engine()
            prompt = read_prompt(input_ids, model_kwargs, target.audio)
            with exclusive(draft, target):
                call = _Call(self._decoder(draft, target, prompt, parsed), prompt, self._with_seed(parsed.settings))
                call.run(input_ids, parsed.criteria, streamer if streamer is not None else recovered.get("streamer"))
        if not generation_config.return_dict_in_generate:
            return call.ids
        output = GenerateDecoderOnlyOutput(sequences=call.ids)
        output.outrider = call.result
        return output

    def _draft_engine(self) -> Any:
        """Return the drafter's engine, made again if its model has changed."""
        return (
            self._draft_model
            if hasattr(self._draft_model, "forward_many")
            else get_engine(self._draft_model, self._draft_tokenizer)
        )

    def _decoder(
        self, draft: Any, target: Any, prompt: Prompt, parsed: call_settings.ParsedSettings
    ) -> _EncodedDecoder:
        reads_audio = accepts_features(draft, target.audio, prompt)
        drafter = EngineView(draft, parsed.eos_ids, reads_audio=reads_audio)
        decoder = _EncodedDecoder(drafter, local(EngineView(target, parsed.eos_ids)), **self._options.keywords())
        decoder.draft_length = self._lookahead
        return decoder

    def _with_seed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, with a seed where one is needed."""
        if "temperature" not in settings:
            return settings
        return {**settings, "seed": int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed}


def _refuse(names: list[str]) -> None:
    if names:
        raise SettingsError(f"{', '.join(names)}: not together with Outrider, which brings its own drafter and caches")


class _EncodedDecoder(SpeculativeDecoder):
    """A decoder whose prompts are encoded already."""

    def encode(self, prompt: Any) -> Prompt:
        assert isinstance(prompt, Prompt)
        return prompt


class _Call:
    """One call: the sequence so far, for criteria and streamer. result: None where a criterion ended the output."""

    def __init__(self, decoder: _EncodedDecoder, prompt: Prompt, settings: dict[str, Any]) -> None:
        self._events = decoder.stream(prompt, **settings)  # type: ignore[arg-type]
        self.result: Result | None = None

    def run(self, prompt_ids: Tensor, criteria: Any, streamer: Any) -> None:
        """Generate, in the order of `generate`: append a token, ask the criteria, stream it. The prompt is streamed."""
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
        """The tokens in order, each one as soon as nothing can revise it any more."""
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
        """The events that stand for more than a draft; at the end, the result is kept."""
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                self.result = end.value
                return
            if event.kind != "provisional":
                yield event
