"""Decoders by their options, and verifiers by their emulated network."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from outrider.api import SpeculativeDecoder
from outrider.config import DecodingMode, check_choice
from outrider.decoding.options import UNUSED, DecodingOptions
from outrider.edge.prompt_reader import needs_translation
from outrider.engines.base import Engine
from outrider.engines.prompt_lookup import PromptLookup
from outrider.engines.shared_engine import share
from outrider.errors import CloudError, SettingsError, quote
from outrider.netem.conditions import parse_conditions
from outrider.verifiers.base import Connectable, Verifier, disconnect
from outrider.verifiers.local import LocalVerifier, describe

Settings = Mapping[str, Any]  # fields of GenerationSettings
CUT = "cut"
MAX_DECODERS = 64
MAX_VERIFIERS = 8


@dataclass(frozen=True)
class RequestOptions(DecodingOptions):
    """The decoding options of one request.

    way: the mode. net: an emulated network ("none", "rtt=50ms,bw=2Mbit", or "cut": no cloud can be reached). watch:
    report the drafter's confidence in each token.
    """

    way: DecodingMode = "speculative"
    gate: str = field(default="always", kw_only=True)
    net: str = "none"
    watch: bool = False

    def normalized(self) -> RequestOptions:
        """Return the options, with those that the mode does not use at their defaults.

        Raises:
            SettingsError: an unknown way or network.
        """
        check_choice("way", self.way, DecodingMode)
        used = self.for_mode(self.way)
        if self.way == "edge-only":
            return replace(used, net="none")
        net = self.net if self.net == CUT else str(parse_conditions(self.net))
        return replace(used, net=net, watch=self.watch and self.way == "speculative")

    def applicable(self) -> dict[str, Any]:
        """Return the options that the mode uses, by name."""
        unused = (*UNUSED[self.way], *(("net",) if self.way == "edge-only" else ()))
        return {name: value for name, value in asdict(self).items() if name not in unused}


@runtime_checkable
class Cuttable(Connectable, Protocol):
    """A verifier that can be disconnected on purpose, to demonstrate a lost cloud."""

    def cut(self) -> None:
        """Stop all traffic from now on. Requests fail soon."""
        ...


@dataclass
class _PooledVerifier:
    """A verifier. users: the number of generations that use it."""

    verifier: Verifier
    users: int = 0


class DecoderPool:
    """Decoders on one engine, with their verifiers. The most recently used ones are kept.

    engine: drafts, and tokenises all prompts. It may be a prompt lookup with a tokenizer. cloud: returns a verifier for
    the text of an emulated network ("none" for none), or None without a cloud. lookup: drafts together with an engine.
    target_tokenizer: the cloud's. It encodes the prompts if the engine's differs. drafts: False if the engine is only
    the cloud's tokenizer, so that the cloud decodes alone.
    """

    def __init__(
        self,
        engine: Engine | PromptLookup,
        cloud: Callable[[str], Verifier] | None,
        *,
        lookup: PromptLookup | None = None,
        target_tokenizer: PromptLookup | None = None,
        drafts: bool = True,
    ) -> None:
        self._drafts = drafts
        self._model = None if isinstance(engine, PromptLookup) else share(engine)
        self._lookup = engine if isinstance(engine, PromptLookup) else lookup
        self.engine: Engine | PromptLookup = engine if self._model is None else self._model
        translates = target_tokenizer is not None and needs_translation(engine, target_tokenizer)
        self.target_tokenizer = target_tokenizer if translates else None
        self._cloud = cloud
        self._lock = threading.RLock()
        self._decoders: OrderedDict[RequestOptions, SpeculativeDecoder] = OrderedDict()
        self._verifiers: OrderedDict[str, _PooledVerifier] = OrderedDict()
        self._pinned: set[RequestOptions] = set()  # unwatched

    def decoder(self, options: RequestOptions) -> SpeculativeDecoder:
        """Return the decoder for these options. A new one connects to the cloud on its first use.

        Raises:
            SettingsError: the options contradict each other, or need a cloud that this gateway does not have.
        """
        with self._lock:
            options = options.normalized()
            found = self._decoders.get(options)
            if found is None:
                found = self._decoders[options] = self._build(options)
                # The decoder that differs in `watch` alone has the same audits and draft lengths.
                counterpart = self._decoders.get(replace(options, watch=not options.watch))
                if counterpart is not None:
                    found.share_state_with(counterpart)
            self._decoders.move_to_end(options)
            if options.way != "edge-only":
                self._verifiers.move_to_end(options.net)
            others = [each for each in self._decoders if replace(each, watch=False) not in self._pinned]
            for old in others[: max(0, len(self._decoders) - MAX_DECODERS)]:
                del self._decoders[old]
            return found

    @property
    def reader(self) -> Engine | PromptLookup:
        """The engine or tokenizer that encodes prompts for the cloud."""
        return self.target_tokenizer or self.engine

    @property
    def drafter(self) -> str:
        """The source of drafts: "model", "lookup", "model+lookup" or "none"."""
        if not self._drafts:
            return "none"
        names = ["model"] * (self._model is not None) + ["lookup"] * (self._lookup is not None)
        return "+".join(names)

    @property
    def name(self) -> str:
        """The name of the drafter, or "none"."""
        return describe(self.engine).label if self._drafts else "none"

    def pin(self, options: RequestOptions) -> SpeculativeDecoder:
        """Return `decoder(options)`, and never evict it or its verifier."""
        with self._lock:
            self._pinned.add(replace(options.normalized(), watch=False))
            return self.decoder(options)

    @property
    def cuttable(self) -> bool:
        """Return whether a verifier opened so far supports net "cut"."""
        with self._lock:
            return any(isinstance(pooled.verifier, Cuttable) for pooled in self._verifiers.values())

    @contextmanager
    def checkout(self, options: RequestOptions) -> Iterator[SpeculativeDecoder]:
        """Yield `decoder(options)`. Its verifier stays connected until the end of the block."""
        pooled = None
        try:
            with self._lock:
                decoder, pooled = self.decoder(options), self._verifiers.get(options.normalized().net)
                if pooled is not None:
                    pooled.users += 1
            yield decoder
        finally:
            with self._lock:
                if pooled is not None:
                    pooled.users -= 1
                evicted = self._evict_idle()
            _disconnect(evicted)

    def close(self) -> None:
        """Disconnect all verifiers. No generation may be running."""
        with self._lock:
            evicted = [pooled.verifier for pooled in self._verifiers.values()]
            self._verifiers.clear()
            self._decoders.clear()
        _disconnect(evicted)

    # Building -----------------------------------------------------------------------------------------------

    def _build(self, options: RequestOptions) -> SpeculativeDecoder:
        draft = None if options.way == "cloud-only" else self.engine
        verifier = lookup = None
        if draft is not None and not self._drafts:
            raise SettingsError(f"way {options.way!r} needs a drafter, and this gateway has none: use cloud-only")
        if options.way == "edge-only" and self._model is None:
            raise SettingsError(f"way 'edge-only' needs a draft model, and this gateway drafts with {self.engine.name}")
        if options.way != "edge-only":
            self._check_options(options)
            verifier = self._verifier(options.net)
        if options.way == "speculative" and self._model is not None:
            lookup = self._lookup
        kept = options.keywords()
        return SpeculativeDecoder(
            draft, verifier, lookup=lookup, **kept, watch=options.watch, reader=self.reader, lazy=True
        )

    def _check_options(self, options: RequestOptions) -> None:
        """Check all that does not depend on the kind of cloud, before a connection is made."""
        if self._cloud is None:
            raise SettingsError(f"way {options.way!r} needs a cloud, and this gateway has none: use edge-only")
        if options.net == CUT and options.on_cloud_loss == "wait":
            raise SettingsError("net 'cut' with on_cloud_loss 'wait' would wait forever: choose another on_cloud_loss")
        drafts = options.way == "speculative"
        options.resolve(
            has_drafter=drafts and self._model is not None,
            has_verifier=True,
            remote=True,
            uses_lookup=drafts and self._lookup is not None,
        )

    def _verifier(self, net: str) -> Verifier:
        assert self._cloud is not None  # by _check_options
        if net not in self._verifiers:
            self._verifiers[net] = _PooledVerifier(self._open_verifier(net, self._cloud))
        return self._verifiers[net].verifier

    def _open_verifier(self, net: str, cloud: Callable[[str], Verifier]) -> Verifier:
        verifier = cloud("none" if net == CUT else net)
        if isinstance(verifier, LocalVerifier) and net != "none":
            raise SettingsError(f"net {quote(net)}: the cloud runs in this process, without a network to emulate")
        if isinstance(verifier, LocalVerifier):
            return LocalVerifier(share(verifier.engine))
        if net == CUT:
            if not isinstance(verifier, Cuttable):
                _disconnect([verifier])
                raise SettingsError("net 'cut' is not supported by this verifier")
            verifier.cut()
        return verifier

    def _evict_idle(self) -> list[Verifier]:
        """Remove and return the least recently used verifiers beyond `MAX_VERIFIERS`, except those in use."""
        kept = {options.net for options in self._pinned}
        idle = [net for net, pooled in self._verifiers.items() if not pooled.users and net not in kept]
        evicted = idle[: max(0, len(self._verifiers) - MAX_VERIFIERS)]
        for options in [options for options in self._decoders if options.way != "edge-only" and options.net in evicted]:
            del self._decoders[options]
        return [self._verifiers.pop(net).verifier for net in evicted]


def _disconnect(verifiers: list[Verifier]) -> None:
    for verifier in verifiers:
        with suppress(CloudError):  # the cloud may be unreachable
            disconnect(verifier)
