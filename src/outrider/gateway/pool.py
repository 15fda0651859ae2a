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
from outrider.core.options import DecodingOptions
from outrider.engines.base import Engine
from outrider.errors import CloudError, SettingsError
from outrider.gateway.sharing import SharedEngine
from outrider.netem.conditions import conditions
from outrider.verifiers.base import Distant, Verifier, disconnect
from outrider.verifiers.local import LocalVerifier

CUT = "cut"
MOST_DECODERS = 64
MOST_NETWORKS = 8


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

    def settled(self) -> RequestOptions:
        """Return the options with those that the way does not use at their defaults.

        Raises:
            SettingsError: an unknown way or network.
        """
        check_choice("way", self.way, DecodingMode)
        used = self.for_mode(self.way)
        if self.way == "edge-only":
            return replace(used, net="none")
        net = self.net if self.net == CUT else str(conditions(self.net))
        return replace(used, net=net, watch=self.watch and self.way == "speculative")


@runtime_checkable
class Cuttable(Distant, Protocol):
    """A verifier that can be cut off, to see what comes of that."""

    def cut(self) -> None:
        """From now on nothing gets through, and nobody waits long for it."""
        ...


@dataclass
class _Network:
    """A verifier, and how many generations are with it."""

    verifier: Verifier
    users: int = 0


class Pool:
    """Decoders on one engine, kept for as long as they are among the last ones used; the same for verifiers.

    engine: drafts, and writes all prompts. cloud: a verifier behind the emulated network that the text names ("none"
    for none); None where there is no cloud.
    """

    def __init__(self, engine: Engine, cloud: Callable[[str], Verifier] | None) -> None:
        self.engine = engine if isinstance(engine, SharedEngine) else SharedEngine(engine)
        self._cloud = cloud
        self._lock = threading.RLock()
        self._decoders: OrderedDict[RequestOptions, SpeculativeDecoder] = OrderedDict()
        self._networks: OrderedDict[str, _Network] = OrderedDict()
        self._kept: set[RequestOptions] = set()  # unwatched

    def decoder(self, choice: RequestOptions) -> SpeculativeDecoder:
        """The decoder. It has not spoken to a cloud yet, if nobody has used it.

        Raises:
            SettingsError: what is chosen contradicts itself, or cannot be had here.
        """
        with self._lock:
            choice = choice.settled()
            found = self._decoders.get(choice)
            if found is None:
                found = self._decoders[choice] = self._build(choice)
                self._share(choice, found)
            self._decoders.move_to_end(choice)
            if choice.way != "edge-only":
                self._networks.move_to_end(choice.net)
            others = [each for each in self._decoders if not self._keeps(each)]
            for old in others[: max(0, len(self._decoders) - MOST_DECODERS)]:
                del self._decoders[old]
            return found

    def keep(self, choice: RequestOptions) -> SpeculativeDecoder:
        """`decoder`, which then stays, and its verifier with it, whatever others ask for."""
        with self._lock:
            self._kept.add(replace(choice.settled(), watch=False))
            return self.decoder(choice)

    @property
    def cuttable(self) -> bool:
        """Whether net "cut" can be had, as far as can be told by the verifiers that there are."""
        with self._lock:
            return any(isinstance(network.verifier, Cuttable) for network in self._networks.values())

    @contextmanager
    def lent(self, choice: RequestOptions) -> Iterator[SpeculativeDecoder]:
        """`decoder`, and until the end its verifier stays connected."""
        network = None
        try:
            with self._lock:
                decoder, network = self.decoder(choice), self._networks.get(choice.settled().net)
                if network is not None:
                    network.users += 1
            yield decoder
        finally:
            with self._lock:
                if network is not None:
                    network.users -= 1
                left = self._spare()
            _disconnect(left)

    def close(self) -> None:
        """Disconnect all verifiers. Nothing may be running."""
        with self._lock:
            left = [network.verifier for network in self._networks.values()]
            self._networks.clear()
            self._decoders.clear()
        _disconnect(left)

    # Building -----------------------------------------------------------------------------------------------

    def _build(self, choice: RequestOptions) -> SpeculativeDecoder:
        draft = None if choice.way == "cloud-only" else self.engine
        verifier = None
        if choice.way != "edge-only":
            self._check(choice)
            verifier = self._verifier(choice.net)
        kept = choice.keywords()
        return SpeculativeDecoder(draft, verifier, **kept, watch=choice.watch, reader=self.engine, lazy=True)

    def _check(self, choice: RequestOptions) -> None:
        """Refuse, before a connection is made, what does not depend on the kind of cloud."""
        if self._cloud is None:
            raise SettingsError("there is no cloud here: the only way is edge-only")
        if choice.net == CUT and choice.on_cloud_loss == "wait":
            raise SettingsError("net 'cut' with on_cloud_loss 'wait' would wait for ever")
        choice.resolve(has_drafter=choice.way == "speculative", has_verifier=True, remote=True)

    def _share(self, choice: RequestOptions, built: SpeculativeDecoder) -> None:
        """Audits, and what k auto has learnt, are a choice's, watched or not."""
        twin = self._decoders.get(replace(choice, watch=not choice.watch))
        if twin is not None:
            built.learn_with(twin)

    def _keeps(self, choice: RequestOptions) -> bool:
        return replace(choice, watch=False) in self._kept

    def _verifier(self, net: str) -> Verifier:
        assert self._cloud is not None  # it was checked
        if net not in self._networks:
            self._networks[net] = _Network(self._reach(net, self._cloud))
        return self._networks[net].verifier

    def _reach(self, net: str, cloud: Callable[[str], Verifier]) -> Verifier:
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

    def _spare(self) -> list[Verifier]:
        """Take out the verifiers that have not been used for longest, as far as there are too many, and nobody uses
        them now."""
        kept = {choice.net for choice in self._kept}
        idle = [net for net, network in self._networks.items() if not network.users and net not in kept]
        spare = idle[: max(0, len(self._networks) - MOST_NETWORKS)]
        for choice in [choice for choice in self._decoders if choice.way != "edge-only" and choice.net in spare]:
            del self._decoders[choice]
        return [self._networks.pop(net).verifier for net in spare]


def _disconnect(verifiers: list[Verifier]) -> None:
    for verifier in verifiers:
        with suppress(CloudError):  # it may be gone already
            disconnect(verifier)
