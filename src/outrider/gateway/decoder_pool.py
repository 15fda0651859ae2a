"""Decoders by what requests choose, and verifiers by the network that lies between."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from outrider.api import SpeculativeDecoder
from outrider.config import DecodingMode, check_choice
from outrider.decoding.options import DecodingOptions
from outrider.engines.base import Engine
from outrider.errors import CloudError, SettingsError
from outrider.gateway.shared_engine import SharedEngine
from outrider.netem.conditions import parse_conditions
from outrider.verifiers.base import Connectable, Verifier, disconnect
from outrider.verifiers.local import LocalVerifier

CUT = "cut"
MAX_DECODERS = 64
MAX_VERIFIERS = 8


@dataclass(frozen=True)
class RequestOptions(DecodingOptions):
    """The decoding options of one request.

    net: an emulated network ("none", "rtt=50ms,bw=2Mbit", or "cut": no cloud can be reached). watch: report the
    drafter's confidence in each token.
    """

    way: DecodingMode = "speculative"
    gate: str = field(default="always", kw_only=True)
    net: str = "none"
    watch: bool = False

    def normalized(self) -> RequestOptions:
        """Return the options with those that the way does not use at their defaults.

        Raises:
            SettingsError: an unknown way or network.
        """
        check_choice("way", self.way, DecodingMode)
        used = self.for_mode(self.way)
        if self.way == "edge-only":
            return replace(used, net="none")
        net = self.net if self.net == CUT else str(parse_conditions(self.net))
        return replace(used, net=net, watch=self.watch and self.way == "speculative")


@runtime_checkable
class Cuttable(Connectable, Protocol):
    """A verifier that can be cut off, to see what comes of that."""

    def cut(self) -> None:
        """From now on nothing gets through, and nobody waits long for it."""
        ...


@dataclass
class _PooledVerifier:
    """A verifier, and how many generations are with it."""

    verifier: Verifier
    users: int = 0


class DecoderPool:
    """Decoders on one engine, kept for as long as they are among the last ones used; the same for verifiers.

    engine: drafts, and writes all prompts. cloud: a verifier behind the emulated network that the text names ("none"
    for none); None where there is no cloud.
    """

    def __init__(self, engine: Engine, cloud: Callable[[str], Verifier] | None) -> None:
        self.engine = engine if isinstance(engine, SharedEngine) else SharedEngine(engine)
        self._cloud = cloud
        self._lock = threading.RLock()
        self._decoders: OrderedDict[RequestOptions, SpeculativeDecoder] = OrderedDict()
        self._verifiers: OrderedDict[str, _PooledVerifier] = OrderedDict()
        self._pinned: set[RequestOptions] = set()  # unwatched

    def decoder(self, options: RequestOptions) -> SpeculativeDecoder:
        """The decoder. It has not spoken to a cloud yet, if nobody has used it.

        Raises:
            SettingsError: what is chosen contradicts itself, or cannot be had here.
        """
        with self._lock:
            options = options.normalized()
            found = self._decoders.get(options)
            if found is None:
                found = self._decoders[options] = self._build(options)
                self._share_learning(options, found)
            self._decoders.move_to_end(options)
            if options.way != "edge-only":
                self._verifiers.move_to_end(options.net)
            others = [each for each in self._decoders if not self._is_pinned(each)]
            for old in others[: max(0, len(self._decoders) - MAX_DECODERS)]:
                del self._decoders[old]
            return found

    def pin(self, options: RequestOptions) -> SpeculativeDecoder:
        """`decoder`, which then stays, and its verifier with it, whatever others ask for."""
        with self._lock:
            self._pinned.add(replace(options.normalized(), watch=False))
            return self.decoder(options)

    @property
    def cuttable(self) -> bool:
        """Whether net "cut" can be had, as far as can be told by the verifiers that there are."""
        with self._lock:
            return any(isinstance(pooled.verifier, Cuttable) for pooled in self._verifiers.values())

    @contextmanager
    def checkout(self, options: RequestOptions) -> Iterator[SpeculativeDecoder]:
        """`decoder`, and until the end its verifier stays connected."""
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
        """Disconnect all verifiers. Nothing may be running."""
        with self._lock:
            evicted = [pooled.verifier for pooled in self._verifiers.values()]
            self._verifiers.clear()
            self._decoders.clear()
        _disconnect(evicted)

    # Building -----------------------------------------------------------------------------------------------

    def _build(self, options: RequestOptions) -> SpeculativeDecoder:
        draft = None if options.way == "cloud-only" else self.engine
        verifier = None
        if options.way != "edge-only":
            self._check_options(options)
            verifier = self._verifier(options.net)
        kept = options.keywords()
        return SpeculativeDecoder(draft, verifier, **kept, watch=options.watch, reader=self.engine, lazy=True)

    def _check_options(self, options: RequestOptions) -> None:
        """Refuse, before a connection is made, what does not depend on the kind of cloud."""
        if self._cloud is None:
            raise SettingsError("there is no cloud here: the only way is edge-only")
        if options.net == CUT and options.on_cloud_loss == "wait":
            raise SettingsError("net 'cut' with on_cloud_loss 'wait' would wait for ever")
        options.resolve(has_drafter=options.way == "speculative", has_verifier=True, remote=True)

    def _share_learning(self, options: RequestOptions, built: SpeculativeDecoder) -> None:
        """Audits, and what k auto has learnt, are a choice's, watched or not."""
        counterpart = self._decoders.get(replace(options, watch=not options.watch))
        if counterpart is not None:
            built.share_state_with(counterpart)

    def _is_pinned(self, options: RequestOptions) -> bool:
        return replace(options, watch=False) in self._pinned

    def _verifier(self, net: str) -> Verifier:
        assert self._cloud is not None  # it was checked
        if net not in self._verifiers:
            self._verifiers[net] = _PooledVerifier(self._open_verifier(net, self._cloud))
        return self._verifiers[net].verifier

    def _open_verifier(self, net: str, cloud: Callable[[str], Verifier]) -> Verifier:
        verifier = cloud("none" if net == CUT else net)
        if isinstance(verifier, LocalVerifier) and net != "none":
            raise SettingsError(f"net {net!r}: the cloud is in this process, and there is no network in between")
        if isinstance(verifier, LocalVerifier) and not isinstance(verifier.engine, SharedEngine):
            return LocalVerifier(SharedEngine(verifier.engine))
        if net == CUT:
            if not isinstance(verifier, Cuttable):
                _disconnect([verifier])
                raise SettingsError("net 'cut': this verifier cannot be cut off")
            verifier.cut()
        return verifier

    def _evict_idle(self) -> list[Verifier]:
        """Take out the verifiers that have not been used for longest, as far as there are too many, and nobody uses
        them now."""
        kept = {options.net for options in self._pinned}
        idle = [net for net, pooled in self._verifiers.items() if not pooled.users and net not in kept]
        evicted = idle[: max(0, len(self._verifiers) - MAX_VERIFIERS)]
        for options in [options for options in self._decoders if options.way != "edge-only" and options.net in evicted]:
            del self._decoders[options]
        return [self._verifiers.pop(net).verifier for net in evicted]


def _disconnect(verifiers: list[Verifier]) -> None:
    for verifier in verifiers:
        with suppress(CloudError):  # it may be gone already
            disconnect(verifier)
