"""Modes of an evaluation: decoders that answer the same items with the same weights and settings.

edge-only    the drafter alone
cloud-only   the verifier alone, in Outrider's loop
exact        speculation with every block verified
gated        speculation with the given gate and acceptance rule
plain        transformers' generate on the target's weights
assisted     transformers' assisted generation with the drafter as its assistant
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from outrider.api import SpeculativeDecoder
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result import TIME_FIELDS, GuaranteeTracker, Result
from outrider.engines.base import Engine, Prompt
from outrider.engines.prefix_cache import unique_salt
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import OutriderError, SettingsError, quote
from outrider.evals.manifest import Item
from outrider.evals.store import Row
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike, encode
from outrider.verifiers.base import ModelInfo, Verifier

NAMES: Final = ("edge-only", "cloud-only", "exact", "gated", "plain", "assisted")
OURS: Final = NAMES[:4]
_NO_COUNTERS: Final = (*TIME_FIELDS, "bytes_up", "bytes_down", "media_bytes_up")


class Inapplicable(OutriderError):
    """A mode cannot answer this item. The message names the reason."""


@dataclass(frozen=True)
class ItemResult:
    """Result of one item. result: repeatable fields. timing: seconds, and bytes on the network."""

    result: Row
    timing: Row


class Mode(Protocol):
    """A decoder under evaluation."""

    name: str

    def run(self, item: Item) -> ItemResult:
        """Answer an item. Raises Inapplicable if the mode cannot take it, another OutriderError if it failed."""
        ...


@dataclass(frozen=True)
class Setup:
    """Decoding settings of all modes. generation: fields of GenerationSettings. Only gated uses gate, accept, scope."""

    generation: Row = field(default_factory=dict)
    options: DecodingOptions = DecodingOptions()

    @property
    def repeatable(self) -> bool:
        """Return whether the sources of tokens are independent of the machine's speed."""
        return self.options.k != "auto" and self.options.driver == "sequential"


# Selection ------------------------------------------------------------------------------------------------


def unsupported_reason(
    mode: str, options: DecodingOptions, *, edge: bool, cloud: str, limited: bool = False, lookup: bool = False
) -> str | None:
    """Return why a mode cannot run with these options, or None if it can.

    edge: there is a draft model. cloud: "none", "local", or a kind of remote verifier. limited: the edge is pinned to
    threads of its own. lookup: prompt lookup drafts, alone or together with a draft model.
    """
    if mode in ("edge-only", "assisted") and lookup and not edge:
        return "prompt lookup has no model of its own: give --edge MODEL+lookup"
    if mode in ("edge-only", "exact", "gated", "assisted") and not (edge or lookup):
        return "there is no edge model"
    if mode != "edge-only" and cloud == "none":
        return "there is no cloud model"
    if mode == "gated" and (str(options.gate), options.accept) == ("always", "exact"):
        return "without a --gate or --accept it equals the exact mode"
    if mode in ("plain", "assisted") and cloud != "local":
        return "transformers needs the target in this process: --cloud local:MODEL"
    if mode == "assisted" and limited:
        return "transformers' assistant cannot be limited by --edge-threads"
    return None


def select_modes(requested: Sequence[str], reason_for: Callable[[str], str | None]) -> tuple[list[str], dict[str, str]]:
    """Return the modes to run, in canonical order, and the reasons of the modes that cannot run.

    requested: names of modes, or none for all that can run.

    Raises:
        SettingsError: a requested mode is unknown or cannot run.
    """
    for name in requested:
        if name not in NAMES:
            raise SettingsError(f"mode {quote(name)}: expected any of {', '.join(NAMES)}")
    reasons = {name: reason for name in NAMES if (reason := reason_for(name)) is not None}
    for name in requested:
        if name in reasons:
            raise SettingsError(f"mode {name}: {reasons[name]}")
    return [name for name in NAMES if name not in reasons and (name in requested or not requested)], reasons


# Items ------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes the prompts of items for all models, with the first engine or prompt lookup that has a tokenizer."""

    def __init__(self, *engines: Engine | PromptLookup | None) -> None:
        self._engines = [engine for engine in engines if engine is not None]

    @property
    def reader(self) -> Engine | PromptLookup:
        """Return the engine or prompt lookup that provides the tokenizer."""
        return self._engines[0]

    def __call__(self, item: Item) -> Prompt:
        """Return the encoded prompt of an item.

        Raises:
            InputError: an unusable recording, or a prompt that none of the models can read.
        """
        engines = [e for e in self._engines if item.audio is None or getattr(e, "audio", None) is not None]
        return encode((engines or self._engines)[0], item_prompt(item))


def item_prompt(item: Item) -> PromptLike:
    """Return the prompt of an item: audio, messages or text."""
    if item.audio is not None:
        return Audio(item.audio, task=item.task, lang=item.lang)
    return list(item.messages) if item.messages is not None else item.prompt or ""


# Outrider's modes --------------------------------------------------------------------------------------------------


class EncodedDecoder(SpeculativeDecoder):
    """A decoder that takes encoded prompts."""

    def encode(self, prompt: object) -> Prompt:
        """Return the prompt unchanged."""
        assert isinstance(prompt, Prompt)
        return prompt

    @property
    def target(self) -> ModelInfo:
        """Return the description of the target model."""
        return self._target

    def generate_timed(self, prompt: Prompt, settings: Row) -> tuple[Result, list[float]]:
        """Generate. Returns the result, and the seconds until each token was final."""
        # Count the audits of this result alone, because a resumed run lacks those of earlier results.
        self._guarantees = GuaranteeTracker(self.options.gate)
        started = time.perf_counter()
        arrivals: list[float] = []
        run = self._start(prompt, settings, cache_salt=unique_salt())  # type: ignore[arg-type]
        for event in run.events():
            if event.kind != "provisional":
                del arrivals[event.index :]
                arrivals.append(time.perf_counter() - started)
        result = run.result()
        return result, arrivals[: len(result.token_ids)]


class DecoderMode:
    """A mode of Outrider's own decoder."""

    def __init__(self, name: str, decoder: EncodedDecoder, encoder: Encoder, settings: Row) -> None:
        self.name, self.decoder = name, decoder
        self._encoder, self._settings = encoder, settings

    def run(self, item: Item) -> ItemResult:
        """Answer an item."""
        result, arrivals = self.decoder.generate_timed(self._encoder(item), self._settings)
        stats = {name: value for name, value in asdict(result.stats).items() if name not in _NO_COUNTERS}
        seconds = {name: round(getattr(result.stats, name), 6) for name in TIME_FIELDS}
        timing = {**seconds, "itl_s": gaps(arrivals), "bytes": result.ledger or {"up": {}, "down": {}}}
        facts = {
            "text": result.text,
            "token_ids": result.token_ids,
            "guarantee": result.guarantee,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "stats": stats,
            "sources": [source.value for source in result.sources],
            "pieces": result.pieces,
            "warnings": result.warnings,
            "risk": None if result.risk is None else asdict(result.risk),
        }
        return ItemResult(facts, timing)


def build(
    name: str,
    draft: Engine | None,
    verifier: Verifier | None,
    setup: Setup,
    encoder: Encoder,
    lookup: PromptLookup | None = None,
) -> DecoderMode:
    """Build one of Outrider's modes on loaded models. lookup: drafts in exact and gated, alone or with `draft`."""
    options = setup.options
    if name == "edge-only":
        options, verifier, lookup = options.for_mode("edge-only"), None, None
    elif name == "cloud-only":
        options, draft, lookup = options.for_mode("cloud-only"), None, None
    elif name == "exact":
        options = replace(options, gate="always", accept="exact", scope="block")
    sources: tuple[Any, Any] = (lookup, None) if draft is None else (draft, lookup)
    decoder = EncodedDecoder(sources[0], verifier, lookup=sources[1], reader=encoder.reader, **options.keywords())
    return DecoderMode(name, decoder, encoder, setup.generation)


def gaps(arrivals: list[float]) -> list[float]:
    """Return the seconds between successive tokens."""
    return [round(later - earlier, 6) for earlier, later in pairwise(arrivals)]
