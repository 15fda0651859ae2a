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
from outrider.core.options import DecodingOptions
from outrider.core.outcome import Result
from outrider.engines.base import Prompt
from outrider.errors import ModelError, SettingsError
from outrider.inside import settings as asked
from outrider.inside.call import withheld
from outrider.inside.engines import View, alone_with, engine_of, evaluating
from outrider.inside.inputs import can_hear, check_inputs, read_prompt

_NOT_OURS = ("assistant_model", "cache", "past_key_values")


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
) -> Inside:
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
    with evaluating(draft):
        engine = draft if hasattr(draft, "forward_many") else engine_of(draft, tokenizer)
    options = DecodingOptions(gate=gate, k=k, accept=accept, scope=scope, on_loop=on_loop)
    return Inside(draft, engine, tokenizer if tokenizer is not None else engine.tokenizer, options, seed)


class Inside:
    """What `for_transformers` makes: a function with the signature that `generate` calls."""

    def __init__(self, given: Any, draft: Any, tokenizer: Any, options: DecodingOptions, seed: int | None) -> None:
        self._given, self._tokenizer, self._options, self._seed = given, tokenizer, options, seed
        # Bad options are refused now, with the drafter in the target's place; what k="auto" learns outlives a call.
        self._draft_tokenizer = draft.tokenizer
        self._lookahead = SpeculativeDecoder(draft, local(draft), **options.keywords()).lookahead

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
        lost = withheld("streamer", "tokenizer", "synced_gpus", *_NOT_OURS)
        _refuse([name for name in _NOT_OURS if name in lost])
        _refuse(["synced_gpus"] if synced_gpus or lost.get("synced_gpus") else [])
        tokenizer = lost.get("tokenizer", self._tokenizer)
        criteria = asked.stop_strings(stop_strings, tokenizer, stopping_criteria)
        wanted = asked.read(generation_config, logits_processor, criteria, input_ids.shape[1])
        check_inputs(input_ids, model_kwargs)
        with evaluating(model, self._given):
            target, draft = engine_of(model, self._tokenizer), self._draft()
            prompt = read_prompt(input_ids, model_kwargs, target.audio)
            with alone_with(draft, target):
                call = _Call(self._decoder(draft, target, prompt, wanted), prompt, self._settled(wanted.settings))
                call.run(input_ids, wanted.criteria, streamer if streamer is not None else lost.get("streamer"))
        if not generation_config.return_dict_in_generate:
            return call.ids
        output = GenerateDecoderOnlyOutput(sequences=call.ids)
        output.outrider = call.result
        return output

    def _draft(self) -> Any:
        """Return the drafter's engine, made again if its model has changed."""
        return self._given if hasattr(self._given, "forward_many") else engine_of(self._given, self._draft_tokenizer)

    def _decoder(self, draft: Any, target: Any, prompt: Prompt, wanted: asked.Wanted) -> _Ready:
        hears = can_hear(draft, target.audio, prompt)
        drafter = View(draft, wanted.eos_ids, hears=hears)
        decoder = _Ready(drafter, local(View(target, wanted.eos_ids)), **self._options.keywords())
        decoder.lookahead = self._lookahead
        return decoder

    def _settled(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, with a seed where one is needed."""
        if "temperature" not in settings:
            return settings
        return {**settings, "seed": int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed}


def _refuse(names: list[str]) -> None:
    if names:
        raise SettingsError(f"{', '.join(names)}: not together with Outrider, which brings its own drafter and caches")


class _Ready(SpeculativeDecoder):
    """A decoder whose prompts are encoded already."""

    def encode(self, prompt: Any) -> Prompt:
        assert isinstance(prompt, Prompt)
        return prompt


class _Call:
    """One call: the sequence so far, for criteria and streamer. result: None where a criterion ended the output."""

    def __init__(self, decoder: _Ready, prompt: Prompt, settings: dict[str, Any]) -> None:
        self._events = decoder.stream(prompt, **settings)  # type: ignore[arg-type]
        self.result: Result | None = None

    def run(self, prompt_ids: Tensor, criteria: Any, streamer: Any) -> None:
        """Generate, in the order of `generate`: append a token, ask the criteria, stream it. The prompt is streamed."""
        self.ids = prompt_ids
        with closing(self._tokens()) as tokens:
            for token in tokens:
                new = torch.tensor([token], device=prompt_ids.device)
                self.ids = torch.cat([self.ids, new[:, None]], dim=-1)
                ends = bool(len(criteria) and criteria(self.ids, None).all())
                if streamer is not None:
                    streamer.put(new.cpu())
                if ends:
                    break
        if streamer is not None:
            streamer.end()

    def _tokens(self) -> Generator[int, None, None]:
        """The tokens in order, each one as soon as nothing can revise it any more."""
        tokens: list[int] = []
        told = 0
        with closing(self._events) as events:
            for event in self._confirmed(events):
                del tokens[event.index :]
                tokens.append(event.token_id)
                yield from tokens[told : event.settled]
                told = max(told, event.settled)
        yield from tokens[told:]

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
